"""The compiled loops: K steps in one call, of all replicas together.

Gradients are summed over replicas here, before the optimizer clips them or averages weights, so that every setting
of the optimizer means what it means on one device.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import keras
import tensorflow as tf

from pipeline.private import SeedGenerator, is_op_determinism_enabled, pywrap_xla_ops
from pipeline.worker.collective import Collective
from pipeline.worker.data.reading import Batch, Batches
from pipeline.worker.patched import patched
from pipeline.worker.tensorflow import feed
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow.collective import Addend, Gradients, by_replica
from pipeline.worker.tensorflow.loss_scaling import metrics, normalization
from pipeline.worker.tensorflow.loss_scaling.global_batch import GlobalBatch, of_step
from pipeline.worker.variables import within

# How far apart the seeds of replicas are, so that no replica of one layer draws what another layer does: layers have
# seeds up to 1e9 (`make_default_seed` of Keras), and this is 2^32 over the golden ratio (Knuth, TAOCP 3, 6.4).
SEED_STRIDE = 2_654_435_769

# What other processes take part in, and what has as many results as its values say.
NEVER_BY_XLA = ("Collective", "Nccl", "Horovod", "PyFunc", "EagerPyFunc", "Where", "Unique")

# (iterator over (examples, a batch for each local replica), steps) -> (loss vectors [steps, 1 + outputs], and of each
#     step [steps] examples, and seconds it waited for its batch, or when that came if it is laid on devices ahead)
Steps: TypeAlias = Callable[[Batches, tf.Tensor], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]
# (examples of the global batch, this replica's batch) -> the loss vector [1 + outputs], summed over replicas
ReplicaStep: TypeAlias = Callable[[tf.Tensor, Batch], tf.Tensor]
# Attributes under which a model keeps where it is if it is laid over several devices (`placement`), what calls it in
# training if not as a whole, what is known of its own steps (`custom_steps`), and whether a note tells of a loss.
PLACED_AS, CALLED_AS, CUSTOM_AS = "_placement_of_pipeline", "_called_by_pipeline", "_own_steps_of_pipeline"
NOTED_AS = "_noted_by_pipeline"
# A model called on x, with training=True or False.
Forward: TypeAlias = Callable[..., Batch]
Element = TypeVar("Element")
# What a loop over steps carries from one to the next.
Carried: TypeAlias = tf.Tensor | tf.TensorArray | Sequence[tf.Tensor]


@dataclass(frozen=True)
class Replicas:
    """The way in which replicas of a strategy make steps together, which add up by the `collective`.

    `always_fed`: no replica is ever without examples; `static`: batches have one shape; `padded`: each has one example,
    which in the last replicas may only pad. With `gather` losses are of all, at most `largest`, examples.
    """

    strategy: tf.distribute.Strategy
    collective: Collective[Addend]
    gradient_bits: int = 32
    always_fed: bool = False
    static: bool = False
    padded: bool = False
    gather: bool = False
    largest: int | None = None

    def whole(self, batch: Batch, examples: tf.Tensor) -> tuple[GlobalBatch, Batch]:
        """(the global batch of so many examples, of which a replica has this batch, that with at least one example)."""
        if self.padded:
            # The first replicas have the examples that count.
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            share = tf.where(tf.cast(number, tf.float32) < examples, 1.0 / examples, 0.0)
        else:
            share = tf.cast(size_of(batch), tf.float32) / examples
        fed = self.always_fed and not self.padded
        whole = GlobalBatch(self.collective, batch, share, fed, self.static, self.largest)
        return whole, batch if self.always_fed else never_empty(batch)


def replica_step(model: keras.Model, replicas: Replicas, training: bool, xla: set[str] | None = None) -> ReplicaStep:
    """One step of one replica, which trains the model, or evaluates it, and updates its metrics."""
    call, collective = caller(model), replicas.collective
    together = {id(variable) for metric in metrics.on_global_batch(model) for variable in metric.variables}
    counted = [variable for variable in model.metrics_variables if id(variable) not in together]
    # The others are shared by replicas, and cannot be put back.
    apart = [variable for variable in counted if hasattr(variable.value, "values")]
    moving = normalization.apart(model) if training and collective.replicas > 1 else []
    if training:
        all_reduce_once(model.optimizer)

    def step(examples: tf.Tensor, batch: Batch) -> tf.Tensor:
        # A callback may have changed what is trained, and by what, before the step is traced.
        variables, optimizer = model.trainable_variables, model.optimizer
        whole, batch = replicas.whole(batch, examples)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        begun = [] if whole.present is None else [tf.convert_to_tensor(variable.value) for variable in apart]
        before = [tf.convert_to_tensor(variable.value) for variable in moving]
        with of_step(whole):
            with marked(xla):
                with tf.GradientTape() as tape, contextlib.nullcontext() if training else tape.stop_recording():
                    y_pred = call(x, training=training)
                    gathered = whole if replicas.gather else None
                    values = losses.weighted(model, x, y, y_pred, weights, whole.share, training, gathered)
                    scaled = optimizer.scale_loss(values[0]) if training else values
                gradients = tape.gradient(scaled, variables) if training else []
            if training:
                changes = normalization.changes(moving, before, whole.share)
                summed, (values, *changes) = sum_of(whole, gradients, replicas.gradient_bits, [values, *changes])
                optimizer.apply(summed, variables)
                for variable, value, change in zip(moving, before, changes, strict=True):
                    variable.assign(value + change)
            if len(apart) < len(counted) and whole.present is not None:
                x, y, y_pred, weights = whole.here((x, y, y_pred, weights))
            model.compute_metrics(x, y, y_pred, sample_weight=weights)
            # What this replica counted holds only where it has examples, without a branch.
            for variable, value in zip(apart, begun, strict=False):
                variable.assign(tf.where(whole.present, tf.convert_to_tensor(variable.value), value))
        return values if training else collective.sum([values])[0]

    return step


@contextlib.contextmanager
def marked(xla: set[str] | None) -> Iterator[None]:
    """Inside, XLA compiles what is traced, but for variables, exchanges and open shapes; `xla` gets what is left."""
    graph = tf.compat.v1.get_default_graph()
    if xla is None or tf.executing_eagerly():
        yield
        return
    before = len(graph.get_operations())
    yield
    on_gpu = tf.config.list_logical_devices("GPU")
    compilers = set(pywrap_xla_ops.get_gpu_kernel_names() if on_gpu else pywrap_xla_ops.get_cpu_kernel_names())
    # Replicas of a process are traced in turns, in one graph: what another has added is to be compiled too.
    for operation in graph.get_operations()[before:]:
        tensors = [*operation.inputs, *operation.outputs]
        never = operation.type.startswith(NEVER_BY_XLA) or any(
            one.dtype in (tf.resource, tf.variant) for one in tensors
        )
        if not never and operation.type in compilers:
            operation._set_attr("_XlaCompile", tf.compat.v1.AttrValue(b=True))
        elif not never and tensors:
            xla.add(operation.type)


def optimizers(model: keras.Model) -> tuple[keras.optimizers.Optimizer, ...]:
    """The optimizers that train a built model."""
    custom = vars(model).get(CUSTOM_AS)
    return (model.optimizer,) if custom is None else custom.optimizers


def all_reduce_once(optimizer: keras.optimizers.Optimizer) -> None:
    """Keeps Keras from summing gradients over replicas a second time."""
    for one in within(optimizer):
        one._all_reduce_sum_gradients = list


def many(
    strategy: tf.distribute.Strategy, replica_step: ReplicaStep, around: Callable[[], Any] = contextlib.nullcontext
) -> Steps:
    """A compiled loop over steps, which are traced inside what `around` gives."""
    # What is not handed out to asynchronous workers this process computes by itself.
    alone = isinstance(strategy, tf.distribute.ParameterServerStrategy)

    def steps(iterator: Batches, count: tf.Tensor) -> tuple[tf.Tensor, ...]:
        ahead = feed.is_ahead(iterator)

        def one(
            index: tf.Tensor, values: tf.TensorArray, sizes: tf.TensorArray, times: tf.TensorArray
        ) -> tuple[Carried, ...]:
            if ahead:
                element: Any = next(iterator)
                time, examples, own = element
            else:
                (examples, batches), time = awaited(lambda: next(iterator), after=values)
                own = batches[0] if alone else by_replica(strategy, batches)
            with losses.without_keras_scaling(), _drawn_apart(strategy.num_replicas_in_sync), around():
                summed = replica_step(examples, own) if alone else strategy.run(replica_step, args=(examples, own))
            first, size, time = (strategy.experimental_local_results(value)[0] for value in (summed, examples, time))
            return index + 1, values.write(index, first), sizes.write(index, size), times.write(index, time)

        with feed.without_host(strategy) if ahead else contextlib.nullcontext():
            arrays = [tf.TensorArray(tf.float32, size=count) for _ in range(2)]
            arrays.append(tf.TensorArray(tf.float64 if ahead else tf.float32, size=count))
            last = tf.identity(count) if ahead else count
            _, *arrays = tf.while_loop(lambda index, *_: index < last, one, (0, *arrays))
            return tuple(array.stack() for array in arrays)

    # Keras's own fit converts nothing with AutoGraph either, which would take as long as all the rest of tracing.
    return tf.function(steps, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]


def _drawn_apart(replicas: int) -> contextlib.AbstractContextManager[None]:
    """Inside, each replica draws random numbers of its own from generators of one state; the first as one device."""
    usual = SeedGenerator.next

    def drawn(generator: SeedGenerator, ordered: bool = True) -> tf.Tensor:
        seed = usual(generator, ordered)
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, seed.dtype)
        # The first half is the generator's own seed and stays as it is; the second counts its draws.
        return seed + tf.stack([number * SEED_STRIDE, tf.zeros_like(number)])

    return patched(SeedGenerator, {"next": drawn} if replicas > 1 else {})


def awaited(batch: Callable[[], Element], after: tf.TensorArray) -> tuple[Element, tf.Tensor]:
    """(a step's batch, seconds until it was there: float32), from when the step before has written into `after`."""
    # An iteration of the loop begins with all that the one before has changed, so that nothing else is in the time.
    # Where TensorFlow's operations are to be deterministic it has no time, and the seconds are NaN.
    if is_op_determinism_enabled():
        return batch(), tf.constant(math.nan)
    with tf.control_dependencies([after.flow]), tf.device("CPU:0"):
        start = tf.timestamp()
    with tf.control_dependencies([start]):
        received = batch()
    with tf.control_dependencies(tf.nest.flatten(received, expand_composites=True)), tf.device("CPU:0"):
        end = tf.timestamp()
    # What computes on the batch would otherwise take the threads before the time is noted.
    with tf.control_dependencies([end]), tf.device("CPU:0"):
        received = tf.nest.map_structure(tf.identity, received, expand_composites=True)
    return received, tf.cast(end - start, tf.float32)


def sum_of(
    whole: GlobalBatch, gradients: Gradients, bits: int, others: Sequence[tf.Tensor] = (), by_share: bool = False
) -> tuple[list[Addend | None], list[tf.Tensor]]:
    """The sums over replicas of gradients, which may travel as bfloat16, then of `others`, which travel as they are."""

    def counted(gradient: Addend) -> Addend:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(counted(gradient.values), gradient.indices, gradient.dense_shape)
        values = gradient * tf.cast(whole.share, gradient.dtype) if by_share else gradient
        # Nothing from a replica without examples may reach the sum: what it divides by is 0.
        return values if whole.present is None else tf.where(whole.present, values, tf.zeros((), values.dtype))

    present = [gradient for gradient in gradients if gradient is not None]
    # An optimizer joins the rows of a sparse gradient, of which there are as many as categories in a batch.
    local = [counted(tf.convert_to_tensor(one) if whole.static else one) for one in present]
    narrow = bits == 16 and whole.collective.replicas > 1
    sums = whole.collective.sum([*(map(narrowed, local) if narrow else local), *others])
    wide = [widened(total, addend.dtype) for total, addend in zip(sums, [*local, *others], strict=True)]
    totals = iter(wide)
    return [None if gradient is None else next(totals) for gradient in gradients], wide[len(local) :]


def narrowed(gradient: Addend) -> Addend:
    """A gradient in bfloat16, where it is a dense one in float32."""
    wide = isinstance(gradient, tf.Tensor) and gradient.dtype == tf.float32
    return tf.cast(gradient, tf.bfloat16) if wide else gradient


def widened(gradient: Addend, dtype: tf.DType) -> Addend:
    """A gradient in the type that it had."""
    return tf.cast(gradient, dtype) if gradient.dtype != dtype else gradient


def size_of(batch: Batch) -> tf.Tensor:
    """Examples of this replica, int32."""
    return tf.shape(tf.nest.flatten(batch)[0])[0]


def never_empty(batch: Batch) -> Batch:
    """Returns a batch, or one example of zeros for none: convolutions on CPUs give an empty one another shape."""

    def fed(leaf: tf.Tensor | None) -> tf.Tensor | None:
        if leaf is None:
            return None
        missing = tf.maximum(1 - tf.shape(leaf)[0], 0)
        return tf.concat([leaf, tf.zeros([missing, *tf.unstack(tf.shape(leaf)[1:])], leaf.dtype)], 0)

    return tf.nest.map_structure(fed, batch)


def caller(model: keras.Model) -> Forward:
    """Returns what calls the model, with `training` where its `call` takes that; on micro-batches if it has such."""
    return vars(model).get(CALLED_AS, partial(losses.call, model))  # type: ignore[no-any-return]
