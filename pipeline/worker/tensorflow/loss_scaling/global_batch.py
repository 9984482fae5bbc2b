"""The whole global batch on every replica, put together of what each of them has, for what depends on all of it.

A person's loss may ask other replicas by itself, in TensorFlow's own ways: it is answered by the global batch of the
step, and where no step is made by replicas that are pretended.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.private import get_keras_mask, set_keras_mask
from pipeline.worker.collective import Collective
from pipeline.worker.data.reading import Batch
from pipeline.worker.patched import OfThread, patched
from pipeline.worker.tensorflow.collective import Addend

# What a loss may ask other replicas for in turn, each after the answer to the one before.
MOST_EXCHANGES = 8
# The attribute under which a model keeps that a loss of it does so.
ASKS_AS = "_asks_others_of_pipeline"
Part = TypeVar("Part")
Result = TypeVar("Result")


class GlobalBatch:
    """The global batch of a step, seen from one replica. It is exchanged when it is first read."""

    def __init__(
        self,
        collective: Collective[Addend],
        batch: Batch,
        share: tf.Tensor,
        always_fed: bool = False,
        static: bool = False,
        most: int | None = None,
    ) -> None:
        """This replica has a `batch`, a `share` of the global batch's examples; one without a share only pads.

        `always_fed`: no replica is ever without examples; `static`: all always have as many. There are `most` examples;
        None leaves it open, which processes can exchange in calls of one step alone: TensorFlow keeps the shape.
        """
        leaf = tf.nest.flatten(batch)[0]
        # None where batches differ in size.
        self._rows: int | None = leaf.shape[0]
        self._size = tf.shape(leaf)[0]
        self.share, self.collective, self.static, self._most = share, collective, static, most
        # True where this replica has examples; None where all always have.
        self.present = None if always_fed else share > 0
        # How many numbers for the batch each metric has been given so far in the step.
        self.numbers: Counter[int] = Counter()
        self._sizes: tf.Tensor | None = None
        # By the identity of what it was made of, which is kept so that it stays one.
        self._known: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    @property
    def _here(self) -> tf.Tensor:
        # Examples of this replica that count, int32. Most steps need none, and are not to have an operation for it.
        return tf.where(self.share > 0, self._size, 0)

    def of(self, values: Nested[tf.Tensor]) -> Nested[tf.Tensor]:
        """Values of this replica's examples [here, ...] as those of all replicas' [global batch, ...], masks too."""

        def whole_of(value: tf.Tensor | None) -> tf.Tensor | None:
            if value is None:
                return None
            value = tf.convert_to_tensor(value)
            if id(value) not in self._known:
                mask, whole = get_keras_mask(value), self._gathered(value)
                if mask is not None:
                    set_keras_mask(whole, self._gathered(mask))
                self._known[id(value)] = (value, whole)
            return self._known[id(value)][1]

        return keras.tree.map_structure(whole_of, values)

    def here(self, values: Nested[tf.Tensor]) -> Nested[tf.Tensor]:
        """Values of this replica's examples, masks too, without one that only stands for none."""
        return keras.tree.map_structure(lambda value: None if value is None else first_of(value, self._here), values)

    def has(self, value: tf.Tensor) -> bool:
        """True if the value's first axis is as long as this replica has examples."""
        return len(value.shape) > 0 and value.shape[0] == self._rows

    def summed(self, value: tf.Tensor, is_sum: bool) -> tf.Tensor:
        """A sum over this replica's examples, or a mean over them, as that over all replicas'."""
        weighted = value if is_sum else value * tf.cast(self.share, value.dtype)
        return self.collective.sum([tf.where(self.share > 0, weighted, tf.zeros((), value.dtype))])[0]

    def _gathered(self, value: tf.Tensor) -> tf.Tensor:
        if value.dtype.is_floating:
            return self._placed(value)
        if value.dtype.is_complex:
            parts = self._placed(tf.stack([tf.math.real(value), tf.math.imag(value)], axis=-1))
            return tf.complex(parts[..., 0], parts[..., 1])
        # float64 is a type that everything adds; it is exact up to 2^53, so that 64 bits travel in two halves.
        halves = tf.bitcast(value, tf.int32) if value.dtype.size == 8 else value
        whole = tf.cast(self._placed(tf.cast(halves, tf.float64)), halves.dtype)
        return tf.bitcast(whole, value.dtype) if value.dtype.size == 8 else whole

    def _placed(self, value: tf.Tensor) -> tf.Tensor:
        """Each replica adds its examples to zeros in the place of the others'."""
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        replicas = self.collective.replicas
        if self.static:
            apart = tf.tensordot(tf.one_hot(number, replicas, dtype=value.dtype), value, axes=0)
            return tf.reshape(self.collective.sum([apart])[0], [replicas * value.shape[0], *value.shape[1:]])
        if self._sizes is None:
            marked = tf.one_hot(number, replicas, dtype=tf.float32) * tf.cast(self._here, tf.float32)
            self._sizes = tf.cast(self.collective.sum([marked])[0], tf.int32)
        before = tf.reduce_sum(tf.where(tf.range(replicas) < number, self._sizes, 0))
        examples = tf.reduce_sum(self._sizes)
        after = (examples if self._most is None else self._most) - before - self._here
        edges = tf.concat([[[before, after]], tf.zeros([len(value.shape) - 1, 2], tf.int32)], 0)
        # What only pads a static batch comes after its examples.
        whole = self.collective.sum([tf.pad(value[: self._here], edges)])[0][:examples]
        return tf.ensure_shape(whole, [None, *value.shape[1:]])


def first_of(value: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """The first so many examples, with their mask."""
    examples, mask = value[:count], get_keras_mask(value)
    if mask is not None:
        set_keras_mask(examples, mask[:count])
    return examples


# The global batch of the step that is traced now.
current: OfThread[GlobalBatch | None] = OfThread(None)
# Is what is computed of the whole global batch, so that whoever asks for it has it already?
as_one_device = OfThread(False)


def of_step(whole: GlobalBatch) -> contextlib.AbstractContextManager[None]:
    """Inside, this replica makes a step on its part of such a global batch, of which a loss may ask for the whole."""
    _answer()
    return current.held(whole)


def _answer() -> None:
    """Makes TensorFlow's own ways of asking other replicas, which a user's loss may use, know the step's batch."""
    # Its `all_gather` fails between processes where batches in one compiled loop are of several sizes.
    context = tf.distribute.ReplicaContext
    if hasattr(context.all_gather, "answers_for"):
        return
    gather, reduce = context.all_gather, context.all_reduce

    def all_gather(self: Any, value: Nested[tf.Tensor], axis: int, options: object = None) -> Nested[tf.Tensor]:
        if as_one_device.value:
            return value
        if (whole := current.value) is None or axis != 0 or not all(map(whole.has, tf.nest.flatten(value))):
            return gather(self, value, axis, options)
        # Nothing flows back from a replica without examples.
        counts = whole.share > 0
        return tf.nest.map_structure(lambda leaf: tf.where(counts, leaf, tf.stop_gradient(leaf)), whole.of(value))

    def all_reduce(self: Any, reduce_op: object, value: Nested[tf.Tensor], options: object = None) -> Nested[tf.Tensor]:
        if as_one_device.value:
            return value
        if (whole := current.value) is not None and _name_of(reduce_op) == "SUM":
            # 0 where it has no examples; rows, which are none of `tf.Tensor`, stay rows.
            counts = whole.share > 0
            value = tf.nest.map_structure(
                lambda leaf: tf.where(counts, leaf, tf.zeros_like(leaf)) if isinstance(leaf, tf.Tensor) else leaf, value
            )
        return reduce(self, reduce_op, value, options)

    # What the sums of a step are made by, which are of what counts alone.
    all_gather.answers_for, all_reduce.answers_for = gather, reduce  # type: ignore[attr-defined]
    context.all_gather, context.all_reduce = all_gather, all_reduce


def _name_of(reduce_op: object) -> str:
    return str(getattr(reduce_op, "value", reduce_op)).upper()


def together(step: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Returns a step's results for parts that replicas have at the same time, and may ask each other for."""
    # It is made again until each has got what the others give; once where none asks.
    answers: list[list[tf.Tensor]] = [[] for _ in parts]
    contents: list[list[bytes]] = [[] for _ in parts]
    for _ in range(MOST_EXCHANGES):
        results, requests = list[Result](), list[list[tf.Tensor]]()
        for number, part in enumerate(parts):
            context = _Pretended(number, answers)
            with patched(tf.distribute, {"get_replica_context": lambda context=context: context}):
                results.append(step(part))
            requests.append(context.requests)
        before, contents = contents, [[one.numpy().tobytes() for one in of_part] for of_part in requests]
        if before == contents:
            break
        answers = requests
    return results


@contextlib.contextmanager
def asking_nobody(model: keras.Model | None = None) -> Iterator[None]:
    """Inside, a loss that asks other replicas is alone where no step is made; the `model` is remembered to have it."""
    context_of, requests = tf.distribute.get_replica_context, list[tf.Tensor]()
    try:
        with patched(tf.distribute, {"get_replica_context": lambda: context_of() or _Pretended(0, [[]], requests)}):
            yield
    finally:
        if requests and model is not None:
            # Past Keras's own setter, which would track it.
            vars(model)[ASKS_AS] = True


class _Pretended:
    """A replica's context, to whom others answer what they have given before: nothing at first."""

    # It makes no step, so that a variable is assigned as outside of all replicas.
    strategy = None

    def __init__(self, number: int, answers: Sequence[Sequence[tf.Tensor]], requests: Any = None) -> None:
        self.replica_id_in_sync_group, self.num_replicas_in_sync = number, len(answers)
        self._answers, self.requests = answers, list[tf.Tensor]() if requests is None else requests

    def all_gather(self, value: Nested[tf.Tensor], axis: int, options: object = None) -> Nested[tf.Tensor]:
        return tf.nest.map_structure(lambda leaf: tf.concat(self._of_all(leaf), axis), value)

    def all_reduce(self, reduce_op: object, value: Nested[tf.Tensor], options: object = None) -> Nested[tf.Tensor]:
        def reduced(leaf: tf.Tensor) -> tf.Tensor:
            total = tf.add_n(values := self._of_all(leaf))
            return total / tf.cast(len(values), total.dtype) if _name_of(reduce_op) == "MEAN" else total

        return tf.nest.map_structure(reduced, value)

    def _of_all(self, leaf: tf.Tensor) -> list[tf.Tensor]:
        others = [list(answers[len(self.requests) :][:1]) for answers in self._answers]
        self.requests.append(tf.convert_to_tensor(leaf))
        others[self.replica_id_in_sync_group] = [self.requests[-1]]
        return [value for values in others for value in values]
