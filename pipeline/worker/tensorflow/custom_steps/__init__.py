"""Traces steps that a model makes itself, so that all replicas together compute what one device computes.

While a model's own `train_step` or `test_step` is traced on a replica, gradients of variables are weighed by the
replica's share of the examples and added over replicas where a tape gives them, before anyone clips or applies them.
A metric that is given a number of the batch counts it by that share; one that is given examples adds up as it is.
The step, a person's code for one device, is left as it is: what it calls is answered in its owner's place.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.private import ag_ctx, autograph_util
from pipeline.worker.data.reading import Batch
from pipeline.worker.model_error import ModelError
from pipeline.worker.patched import OfThread, all_patched, patched
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow import step as steps
from pipeline.worker.tensorflow.collective import Addend, Gradients
from pipeline.worker.tensorflow.loss_scaling import normalization
from pipeline.worker.tensorflow.loss_scaling.global_batch import GlobalBatch, of_step
from pipeline.worker.tensorflow.loss_scaling.reduction import is_own
from pipeline.worker.tensorflow.loss_scaling.updates import updating
from pipeline.worker.tensorflow.step import Replicas

# A metric, and the name of its result's part where that is a dictionary.
Result: TypeAlias = tuple[keras.metrics.Metric, str | None]
# What `GradientTape.gradient` takes them of.
Sources: TypeAlias = Sequence[tf.Tensor | tf.Variable | keras.Variable]
VARIABLES = (keras.Variable, tf.Variable)
# A gradient is followed back through so many operations to the sums over replicas that it is made of.
FOLLOWED = 1_000


@dataclass(frozen=True)
class Returned:
    """Names that a step returns: metrics, whose results run on, and sizes of `values` of the step alone."""

    metrics: Mapping[str, Result]
    values: Mapping[str, tuple[int, ...]]
    # Names what is taken for the step's loss; and the metrics of whose results the step makes something else.
    loss: str
    used: Sequence[keras.metrics.Metric] = ()


@dataclass(frozen=True)
class CustomSteps:
    """A model's own steps: the optimizers that they apply, and what they return; `arrays`: the data are arrays."""

    optimizers: tuple[keras.optimizers.Optimizer, ...]
    arrays: bool
    train: Returned
    # None where nothing evaluates the model, for the reason `untested`.
    test: Returned | None
    untested: str = ""

    def returned(self, training: bool) -> Returned:
        """Returns what a step of training, or of validation, gives back."""
        returned = self.train if training else self.test
        assert returned is not None, "what cannot be evaluated is not validated"
        return returned


def given(batch: Batch, arrays: bool) -> Batch:
    """A batch as Keras hands it to a step: of arrays without y, x alone."""
    if not arrays or not isinstance(batch, tuple) or len(batch) != 1 or isinstance(batch[0], tuple | list):
        return batch
    return batch[0]


def flattened(logs: Mapping[str, object]) -> dict[str, tf.Tensor]:
    """Returns a step's logs with those of dictionaries within it, by their own names."""
    flat: dict[str, tf.Tensor] = {}
    for name, value in logs.items():
        flat |= flattened(value) if isinstance(value, Mapping) else {name: value}
    return flat


def has_own(model: keras.Model) -> bool:
    """True if a step of the model is its own."""
    return any(is_own(model, name) for name in ("train_step", "test_step"))


def of(model: keras.Model) -> CustomSteps | None:
    """Returns a built model's own steps; None where they are Keras's."""
    return vars(model).get(steps.CUSTOM_AS)  # type: ignore[no-any-return]


def compiled_steps(
    model: keras.Model, replicas: Replicas, training: bool = True, xla: set[str] | None = None
) -> steps.Steps:
    """Compiles a number of steps that train `model`, or evaluate it, and update its metrics."""
    step, placement = replica_step(model, replicas, training, xla), vars(model).get(steps.PLACED_AS)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with updating(*steps.optimizers(model)), contextlib.nullcontext() if of(model) is None else watched():
            yield

    # All runs where the layers of a model are that is laid over several devices; see `placement`.
    return steps.many(replicas.strategy, step if placement is None else placement.followed(step), around)


def replica_step(
    model: keras.Model, replicas: Replicas, training: bool = True, xla: set[str] | None = None
) -> steps.ReplicaStep:
    """One step of one replica; of a model's own the loss vector is [the step's loss, then its values]."""
    if (own := of(model)) is None:
        return steps.replica_step(model, replicas, training, xla)
    returned, call = own.returned(training), model.train_step if training else model.test_step
    for optimizer in own.optimizers if training else ():
        steps.all_reduce_once(optimizer)
    moving = normalization.apart(model) if training and replicas.collective.replicas > 1 else []

    def step(examples: tf.Tensor, batch: Batch) -> tf.Tensor:
        whole, fed = replicas.whole(batch, examples)
        with of_step(whole), steps.marked(xla):
            replica = _Replica(whole, fed, replicas.gradient_bits if training else 32)
            return replica.values_of(call, given(fed, own.arrays), returned, moving)

    return step


class Watcher:
    """Answers what a step calls, given that `call`: its subclasses have `gradient`, `apply`, `update` and `loss`."""

    def __init__(self) -> None:
        self.results: list[tuple[tf.Tensor, Result]] = []

    def result(self, metric: keras.metrics.Metric, call: Callable[[], Nested[tf.Tensor]]) -> Nested[tf.Tensor]:
        """`Metric.result`."""
        return call()

    def metric_of(self, value: tf.Tensor) -> Result | None:
        """The metric that has given a value; None where none has."""
        return next((result for tensor, result in self.results if tensor is value), None)


# Answers, in a thread, what a step calls; None: it is answered as ever.
replica_watcher: OfThread[Any] = OfThread(None)


def watched() -> contextlib.AbstractContextManager[None]:
    """Inside, steps can be watched. Entered around all replicas, since what is changed is the same for all of them."""
    # A `tf.function` that a step calls becomes a part of the step: replicas cannot add up inside a function of its own.
    owners = ((kind, name, answer) for owner, name, answer in _ANSWERS for kind in kinds(owner) if name in vars(kind))
    return all_patched((kind, {name: _answered(vars(kind)[name], answer)}) for kind, name, answer in owners)


def _answered(call: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:

    def instead(owner: object, *values: object, **named: object) -> object:
        watcher = replica_watcher.value
        return (call if watcher is None else partial(answer, watcher, call))(owner, *values, **named)

    # Not even where AutoGraph converts what calls it.
    return tf.autograph.experimental.do_not_convert(instead)  # type: ignore[no-any-return]


def kinds(owner: type) -> set[type]:
    """A class, those that it is made of, and all that are made of it."""
    family, below = set(owner.__mro__) - {object}, [owner]
    while below:
        kind = below.pop()
        family.add(kind)
        below += set[type](kind.__subclasses__()) - family
    return family


def _gradient(watcher: Any, call: Any, tape: object, target: object, sources: Any, *rest: Any, **named: Any) -> Any:
    # Inside a gradient, one of variables is a part of it, as of a layer that is computed twice.
    with replica_watcher.held(None):
        flat = watcher.gradient(lambda some: call(tape, target, some, *rest, **named), target, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, flat)


def _apply(watcher: Any, call: Any, optimizer: object, grads: Gradients, trainable_variables: object = None) -> None:
    with replica_watcher.held(None):
        watcher.apply(optimizer, lambda sums: call(optimizer, sums, trainable_variables), grads, trainable_variables)


def _update(watcher: Any, call: Any, metric: keras.metrics.Metric, *values: Any, **named: Any) -> Any:
    # One made of others leaves it to them; one whose state is no sum sees the whole global batch, see `metrics.py`.
    if not getattr(metric, "_variables", None) or "update_state" in vars(metric):
        return call(metric, *values, **named)
    # Of one number for each update, the second argument are weights, as of `Mean` and `Sum`.
    alone = isinstance(metric, keras.metrics.Mean | keras.metrics.Sum) and len(values) == 2
    weights = values[1] if alone else named.get("sample_weight")
    others = [*values[: 1 if alone else None], *(named[name] for name in named if name != "sample_weight")]
    with replica_watcher.held(None):
        return watcher.update(metric, lambda: call(metric, *values, **named), others, weights)


def _result(watcher: Watcher, call: Any, metric: keras.metrics.Metric) -> Nested[tf.Tensor]:
    value = watcher.result(metric, lambda: call(metric))
    parts = value.items() if isinstance(value, dict) else [(None, value)]
    # Of one within another, the inner one comes first.
    watcher.results += [(tensor, (metric, name)) for name, tensor in parts if watcher.metric_of(tensor) is None]
    return value


def _loss(watcher: Any, call: Any, loss: keras.losses.Loss, *values: Any, **named: Any) -> Any:
    both = [*values, *(named[name] for name in ("y_true", "y_pred", "sample_weight") if name in named)]
    with replica_watcher.held(None):
        return watcher.loss(loss, *both)


def _function(watcher: Any, call: Any, function: Any, *values: Any, **named: Any) -> Any:
    if not function._autograph:
        return function.python_function(*values, **named)
    with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):
        options = function._experimental_autograph_options
        return autograph_util.py_func_from_autograph(function.python_function, options)(*values, **named)


# What is called of which class, and what answers it.
_ANSWERS: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (tf.GradientTape, "gradient", _gradient),
    (keras.optimizers.Optimizer, "apply", _apply),
    (keras.metrics.Metric, "update_state", _update),
    (keras.metrics.Metric, "result", _result),
    (keras.losses.Loss, "__call__", _loss),
    (tf.types.experimental.PolymorphicFunction, "__call__", _function),
)


class _Replica(Watcher):
    """Watches a step of a replica that has a part of the `whole` global batch, and is fed with a `batch`."""

    def __init__(self, whole: GlobalBatch, batch: Batch, gradient_bits: int) -> None:
        super().__init__()
        self._whole, self._collective, self._share = whole, whole.collective, whole.share
        self._gradient_bits = gradient_bits
        # Examples here where that is known beforehand, as where batches are of one size.
        self._examples, self._alone = tf.nest.flatten(batch)[0].shape[0], whole.collective.replicas == 1
        # Sums over replicas, and the number that each metric was given last.
        self._summed, self._numbers = list[tf.Tensor](), dict[int, tf.Tensor]()
        # The metrics whose results are to be those over all replicas; none while such a result is made.
        self._used: list[keras.metrics.Metric] = []

    def values_of(
        self, step: Callable[[Batch], Any], batch: Batch, returned: Returned, moving: Sequence[keras.Variable]
    ) -> tf.Tensor:
        """[the step's loss, then its values], float32, of the global batch; `moving` get the mean over replicas."""
        before = [tf.convert_to_tensor(variable.value) for variable in moving]
        self._used = [] if self._alone else list(returned.used)
        try:
            with losses.traced(self._share, training=True), replica_watcher.held(self):
                logs = flattened(step(batch))
        except RuntimeError as error:
            # What TensorFlow says of sums over replicas where there can be none.
            if "merge_call" not in str(error):
                raise
            does = (
                "that computes and applies gradients, and uses results of metrics, outside of tf.cond and tf.while_loop"
            )
            expected = f"a {getattr(step, '__name__', 'step')} {does}, inside of which replicas cannot add them up"
            instead = "Python's if and for, gradients times 0 or 1, or strategy=one_device"
            raise ModelError(expected, "one that does so inside", instead) from error
        loss, counted = logs[returned.loss], self.metric_of(logs[returned.loss])
        loss = tf.reduce_mean(_mean(loss if counted is None else self._numbers.get(id(counted[0]), loss)))
        values = [_mean(logs[name], sizes) for name, sizes in returned.values.items()]
        flat = tf.concat([tf.reshape(value, [-1]) for value in [loss, *values]], 0)
        if not self._alone:
            flat = tf.where(self._share > 0, flat * self._share, 0.0)
        summed, *changes = self._collective.sum([flat, *normalization.changes(moving, before, self._share)])
        for variable, value, change in zip(moving, before, changes, strict=True):
            variable.assign(value + change)
        assert isinstance(summed, tf.Tensor), "numbers are no rows of a table"
        return summed

    def gradient(self, call: Callable[[Sources], Gradients], target: Nested[tf.Tensor], sources: Sources) -> Gradients:
        # Those of variables are of the global batch; of all else, of what is here.
        return self._totals(call(sources), [isinstance(source, VARIABLES) for source in sources])

    def apply(self, optimizer: object, call: Callable[..., None], gradients: Gradients, variables: object) -> None:
        # What is not made of sums over replicas alone is added up.
        gradients = list(gradients)
        call(self._totals(gradients, [one is not None and not self._is_total(one) for one in gradients]))

    def update(self, metric: keras.metrics.Metric, call: Callable[[], None], values: Any, weights: Any) -> None:
        if values and not tf.nest.is_nested(values[0]):
            self._numbers[id(metric)] = values[0]
        # A number weighed by a count of what is here, as Keras's own loss is, adds up as it is.
        counted = weights is not None and tf.get_static_value(tf.convert_to_tensor(weights)) is None
        adds_up = counted or any(self._of_examples(leaf) for leaf in tf.nest.flatten(values) if leaf is not None)
        if self._alone or (adds_up and self._whole.present is None):
            return call()
        before = [tf.convert_to_tensor(variable.value) for variable in metric.variables]
        with keras.StatelessScope(zip(metric.variables, before, strict=True)) as scope:
            call()
        for variable, value in zip(metric.variables, before, strict=True):
            change = scope.get_current_value(variable) - value
            if not adds_up and change.dtype.is_floating:
                change *= tf.cast(self._share, change.dtype)
            elif not adds_up:
                # Integers count on the first replica alone.
                number = tf.distribute.get_replica_context().replica_id_in_sync_group
                change = tf.where(tf.equal(number, 0), change, tf.zeros((), change.dtype))
            variable.assign_add(tf.where(self._share > 0, change, tf.zeros((), change.dtype)))
        return None

    def result(self, metric: keras.metrics.Metric, call: Callable[[], Nested[tf.Tensor]]) -> Nested[tf.Tensor]:
        # Where the step makes something of it, that of the sums of all replicas' states.
        if not any(metric is one for one in self._used):
            return call()
        summed = [variable for variable in metric.variables if variable.aggregation == "sum"]
        states = [tf.convert_to_tensor(variable.value) for variable in summed]
        # Counts are exact up to 2^53, in a type that everything adds.
        wide = [value if value.dtype.is_floating else tf.cast(value, tf.float64) for value in states]
        totals = [tf.cast(total, value.dtype) for total, value in zip(self._collective.sum(wide), states, strict=True)]
        with patched(self, {"_used": []}), keras.StatelessScope(zip(summed, totals, strict=True)):
            return call()

    def loss(self, loss: keras.losses.Loss, *values: tf.Tensor) -> tf.Tensor:
        if self._alone or getattr(loss, "reduction", None) in ("none", None):
            return loss(*values)
        return losses.ExactLoss(loss, self._collective)(*values)

    def _totals(self, gradients: Gradients, here: Sequence[bool]) -> list[Addend | None]:
        """Gradients, of which those of what is `here` have become those of the global batch."""
        parts = [gradient if is_here else None for gradient, is_here in zip(gradients, here, strict=True)]
        if any(part is not None for part in parts):
            parts, _ = steps.sum_of(self._whole, parts, self._gradient_bits, by_share=not self._alone)
        # Kept, so that no other tensor is taken for one of them.
        self._summed += [_values(part) for part in parts if part is not None]
        return [gradient if part is None else part for gradient, part in zip(gradients, parts, strict=True)]

    def _is_total(self, gradient: Addend) -> bool:
        """True if it is made of sums over replicas, variables and constants alone, and so the same on all replicas."""
        if self._alone:
            return True
        sums = {id(total) for total in self._summed}
        ahead, followed = [_values(gradient)], set[int]()
        while ahead and len(followed) < FOLLOWED:
            tensor = ahead.pop()
            if id(tensor) in sums or id(tensor) in followed or tensor.dtype == tf.resource:
                continue
            followed.add(id(tensor))
            kind, is_stateful = tensor.op.type, tensor.op.op_def.is_stateful and tensor.op.type != "ReadVariableOp"
            if is_stateful or kind.startswith(("Placeholder", "StatelessRandom")):
                return False
            ahead += tensor.op.inputs
        return not ahead

    def _of_examples(self, leaf: tf.Tensor) -> bool:
        """True if a tensor holds this replica's examples, or several values of each, along its first axis."""
        shape = tf.TensorShape(getattr(leaf, "shape", ()))
        if not shape.rank:
            return shape.rank is None
        return shape[0] is None or (self._examples is not None and shape[0] % max(1, self._examples) == 0)


def _mean(value: tf.Tensor, sizes: Sequence[int] | None = None) -> tf.Tensor:
    """A value of the step, float32, of such sizes: of several examples, the mean over them."""
    number = tf.cast(tf.convert_to_tensor(value), tf.float32)
    return number if sizes is None or number.shape.rank == len(sizes) else tf.reduce_mean(number, 0)


def _values(gradient: Addend) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
