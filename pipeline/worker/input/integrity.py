"""Looks at data before they are trained on: what is broken among them, and what they are as a whole."""

import re
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import numpy as np
import tensorflow as tf

from pipeline.data.errors import first_of
from pipeline.data.examples import Broken, Examples, rows, whole_rows
from pipeline.data.nested import Nested
from pipeline.worker.input import batches
from pipeline.worker.input.part import Batch, Part
from pipeline.worker.input.reading import NOT_FINITE, conditions
from pipeline.worker.tensorflow.loop import TrainingError

# Examples that fail one after the other before a data set is taken to fail for ever.
ENDLESS = 10_000
# What an operation raises that meets a file or an example that it cannot read; the last where its message quotes that.
UNREADABLE = (
    tf.errors.InvalidArgumentError,
    tf.errors.DataLossError,
    tf.errors.NotFoundError,
    UnicodeDecodeError,
)


def broken(part: Part | None, classes: int | None, number: int, of: int, thorough: bool) -> list[Broken]:
    """What is broken in share `number` of `of` of a part: arrays are looked through, and `Examples` look by themselves.

    What is broken in a `tf.data.Dataset` is seen when it is trained on.
    """
    if isinstance(part, Examples):
        return part.look(part, number, of, thorough) if part.look else []
    if not _is_arrays(part):
        return []
    count = _rows(part)
    return list(_broken_rows(part, classes, number * count // of, (number + 1) * count // of))


def first_broken(part: Part | None, classes: int | None) -> list[Broken]:
    """The first example of a data set that cannot be made or trained on, found by making one after the other."""
    if not isinstance(part, tf.data.Dataset):
        return []
    place, iterator = 0, iter(part)
    while True:
        name = f"example {place} of the data set"
        try:
            example = next(iterator)
        except StopIteration:
            return []
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            reason = error.message if isinstance(error, tf.errors.OpError) else str(error)
            return [Broken(None, place, 1, name, f"cannot be made ({_reason(reason)})")]
        batch = tf.nest.map_structure(lambda leaf: leaf[tf.newaxis], example)
        wrong = [words for right, words in conditions(batch, classes) if not right]
        if wrong:
            why = "has NaN or infinity" if wrong[0] == NOT_FINITE else f"has label {int(batch[1][0])}"
            return [Broken(None, place, 1, name, why)]
        place += 1


def _reason(message: str) -> str:
    """What TensorFlow says went wrong, without where in its graph.

    >>> _reason("{{function_node f}} Error in user-defined function passed to Map:1 transformation with iterator: \\
    ... Iterator::Root::Map: assertion failed: [bad] [Op:IteratorGetNext]")
    'assertion failed: [bad]'
    """
    first = message.splitlines()[0] if message else ""
    first = re.sub(r"^.*transformation with iterator: \S+: ", "", first)
    return re.sub(r"\{\{.*?\}\}|\[Op:\w+\].*|name: *$", "", first).strip()


def flaws(part: Part | None, classes: int | None) -> tuple[str, ...]:
    """What is wrong with a training part as a whole, in words that follow "There are"."""
    if isinstance(part, Examples):
        return part.flaws
    if classes is None or not _is_arrays(part) or not _are_labels(part[1]):
        return ()
    there = set(np.unique(np.asarray(part[1])).tolist())
    empty = [label for label in range(classes) if label not in there]
    named = first_of([str(label) for label in empty], between=", ", last=" and")
    return (f"no training examples of class {named}",) if empty else ()


def sifted(part: tf.data.Dataset, classes: int | None) -> tuple[tf.data.Dataset, int]:
    """(a data set without the examples that cannot be made or trained on, how many these are); reads it twice."""

    def is_whole(*example: Batch) -> tf.Tensor:
        batch = tf.nest.map_structure(lambda leaf: leaf[tf.newaxis], example if len(example) > 1 else example[0])
        return tf.reduce_all([True, *(condition for condition, _ in conditions(batch, classes))])

    kept = part.ignore_errors().filter(tf.autograph.experimental.do_not_convert(is_whole))
    whole = batches.count(kept)
    made = kept.apply(tf.data.experimental.assert_cardinality(whole)).with_options(part.options())
    return made, _made_or_not(part) - whole


def _made_or_not(part: tf.data.Dataset) -> int:
    """Examples of a data set, those counted that cannot be made."""
    count = in_a_row = 0
    iterator = iter(part)
    while in_a_row < ENDLESS:
        try:
            next(iterator)
            in_a_row = 0
        except StopIteration:
            return count
        except (tf.errors.OpError, UnicodeDecodeError):
            in_a_row += 1
        count += 1
    raise TrainingError(
        f"Expected a data set that goes on after an example that cannot be made, received one that failed {ENDLESS:,} "
        f"times in a row. Try putting it right, or data.on_error=stop, which says what is wrong."
    )


def refuse(found: Sequence[Broken], complaints: Sequence[str], also: str = "") -> None:
    """Raises what is broken, if anything is, naming the first; `also` is typed beside data.on_error=skip."""
    if found:
        lost = sum(flaw.examples for flaw in found)
        named = first_of([f"{flaw.name} {flaw.why}" for flaw in found])
        raise TrainingError(
            f"Expected examples that can be trained on, received {lost} that cannot: {named}. "
            f"Try {also}data.on_error=skip, which trains on the others, or putting the data right."
        )
    if complaints:
        raise TrainingError(
            f"Expected data that lack nothing, received {complaints[0]}. "
            f"Try data.on_error=skip, which trains nevertheless, or putting the data right."
        )


def without(part: Part | None, lost: Sequence[Broken]) -> Part | None:
    """The part without what is broken."""
    if not lost:
        return part
    if isinstance(part, Examples):
        return part.without(lost)
    return rows(tf.nest.map_structure(np.asarray, part), whole_rows(_rows(part), lost))


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


def num_classes(part: Part | None, y: Batch) -> int | None:
    """How many classes a part knows of, or integer labels name; None where labels are something else, or not at hand.

    `y` is the labels of an example batch.
    """
    if isinstance(part, Examples):
        return part.num_classes
    if not _is_arrays(part) or not isinstance(y, tf.Tensor) or not y.dtype.is_integer or y.shape.rank != 1:
        return None
    if not len(part[1]):
        return None
    return int(np.asarray(part[1]).max()) + 1


def _is_arrays(part: Part | None) -> TypeGuard[tuple[Nested[np.ndarray], ...]]:
    return isinstance(part, tuple) and len(part) > 1


def _rows(part: Part) -> int:
    return len(tf.nest.flatten(part)[0])


def _broken_rows(part: tuple[Nested[np.ndarray], ...], classes: int | None, start: int, stop: int) -> Iterator[Broken]:
    whole = np.ones(stop - start, bool)
    for leaf in tf.nest.flatten(part):
        values = np.asarray(leaf)[start:stop]
        if values.dtype.kind == "f":
            whole &= np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    inside = np.ones(stop - start, bool)
    if classes is not None and _are_labels(part[1]):
        labels = np.asarray(part[1])[start:stop]
        inside = (labels >= 0) & (labels < classes)
    for row in np.flatnonzero(~(whole & inside)):
        why = (
            f"has label {labels[row]}, 0 to {(classes or 0) - 1} were expected" if whole[row] else "has NaN or infinity"
        )
        yield Broken(None, int(start + row), 1, f"example {start + row}", why)


def _are_labels(y: Nested[np.ndarray]) -> TypeGuard[np.ndarray]:
    """Are they integers, one for each example?"""
    return not tf.nest.is_nested(y) and (array := np.asarray(y)).dtype.kind in "iu" and array.ndim == 1
