"""Looks at data before they are trained on: what is broken among them, and what they are as a whole."""

import re

import tensorflow as tf

from pipeline.data.examples import Broken
from pipeline.worker.input import batches
from pipeline.worker.input.part import Batch, Part
from pipeline.worker.input.reading import NOT_FINITE, conditions
from pipeline.worker.loop import TrainingError

# Examples that fail one after the other before a data set is taken to fail for ever.
ENDLESS = 10_000
# What an operation raises that meets a file or an example that it cannot read; the last where its message quotes that.
UNREADABLE = (
    tf.errors.InvalidArgumentError,
    tf.errors.DataLossError,
    tf.errors.NotFoundError,
    UnicodeDecodeError,
)


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
        "a data set that goes on after an example that cannot be made",
        f"one that failed {ENDLESS:,} times in a row",
        "putting it right, or data.on_error=stop, which says what is wrong",
    )
