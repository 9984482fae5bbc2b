"""Looks at data before they are trained on: what is broken among them, and what they are as a whole."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.data.examples import Broken, Examples, leaves, rows
from pipeline.train.loop import TrainingError

# How many of those that are broken an error names.
NAMED = 5
# What an operation raises that meets a file or an example that it cannot read; the last where its message quotes that.
UNREADABLE = (
    tf.errors.InvalidArgumentError,
    tf.errors.DataLossError,
    tf.errors.NotFoundError,
    UnicodeDecodeError,
)


def broken(part: Any, classes: int | None, number: int, of: int, thorough: bool) -> list[Broken]:
    """What is broken in share `number` of `of` of a part: arrays are looked through, and `Examples` look by themselves.

    What is broken in a `tf.data.Dataset` is seen when it is trained on.
    """
    if isinstance(part, Examples):
        return part.look(part, number, of, thorough) if part.look else []
    if not _is_arrays(part):
        return []
    count = len(leaves(part)[0])
    return list(_broken_rows(part, classes, number * count // of, (number + 1) * count // of))


def flaws(part: Any) -> tuple[str, ...]:
    """What is wrong with a part as a whole, in words that follow "There are"."""
    return part.flaws if isinstance(part, Examples) else ()


def refuse(found: Sequence[Broken], complaints: Sequence[str]) -> None:
    """Raises what is broken, if anything is, naming the first."""
    if found:
        lost = sum(each.examples for each in found)
        named = "; ".join(f"{each.name} {each.why}" for each in found[:NAMED])
        more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
        raise TrainingError(
            f"Expected examples that can be trained on, received {lost} that cannot: {named}{more}. "
            f"Try data.on_error=skip, which trains on the others, or putting the data right."
        )
    if complaints:
        raise TrainingError(
            f"Expected data that lack nothing, received {complaints[0]}. "
            f"Try data.on_error=skip, which trains nevertheless, or putting the data right."
        )


def without(part: Any, lost: Sequence[Broken]) -> Any:
    """The part without what is broken."""
    if not lost:
        return part
    if isinstance(part, Examples):
        return part.without(lost)
    kept = np.ones(len(leaves(part)[0]), bool)
    for each in lost:
        kept[each.first : each.first + each.examples] = False
    return rows(tf.nest.map_structure(np.asarray, part), kept)


def expect_batch(examples: int, global_batch: int, workers: int, skip: bool) -> None:
    """Refuses training data that have nothing, or not enough for one step."""
    if examples == 0:
        raise TrainingError("Expected training data with examples, received none.")
    if examples < global_batch and not skip:
        fitting = f"train.replica_batch={examples // workers}" if examples >= workers else "more data"
        raise TrainingError(
            f"Expected training data for at least one global batch of {global_batch}, received {examples} examples. "
            f"Try {fitting}, or data.on_error=skip, which trains on a smaller one."
        )


def num_classes(part: Any, y: Any) -> int | None:
    """How many classes a part knows of, or integer labels name; None where labels are something else, or not at hand.

    `y` is the labels of an example batch.
    """
    if isinstance(part, Examples):
        return part.num_classes
    if isinstance(part, tf.data.Dataset) or tf.nest.is_nested(y) or not y.dtype.is_integer or y.shape.rank != 1:
        return None
    return int(np.asarray(part[1]).max()) + 1


def _is_arrays(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) > 1


def _broken_rows(part: Any, classes: int | None, start: int, stop: int) -> Iterator[Broken]:
    whole = np.ones(stop - start, bool)
    for leaf in tf.nest.flatten(part):
        values = np.asarray(leaf)[start:stop]
        if values.dtype.kind == "f":
            whole &= np.isfinite(values).reshape(len(values), -1).all(axis=1)
    labels = np.zeros(0) if tf.nest.is_nested(part[1]) else np.asarray(part[1])[start:stop]
    inside = np.ones(stop - start, bool)
    if classes is not None and labels.dtype.kind in "iu" and labels.ndim == 1:
        inside = (labels >= 0) & (labels < classes)
    for row in np.flatnonzero(~(whole & inside)):
        why = (
            f"has label {labels[row]}, 0 to {(classes or 0) - 1} were expected" if whole[row] else "has NaN or infinity"
        )
        yield Broken(None, int(start + row), 1, f"example {start + row}", why)
