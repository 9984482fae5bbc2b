"""Metrics whose state is no sum over examples, such as a maximum: updated on the whole global batch, and counted once.

Replicas each keep a state, and Keras adds these up. Where that is wrong the metric sees the examples of all replicas,
which costs an exchange; which metrics those are is found out before training, on made-up examples.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.private import maybe_merge_call
from pipeline.worker import labels
from pipeline.worker.data.reading import Batch
from pipeline.worker.patched import all_patched
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow.loss_scaling import reduction
from pipeline.worker.tensorflow.loss_scaling.global_batch import GlobalBatch, as_one_device, current
from pipeline.worker.tensorflow.loss_scaling.reduction import Reduction
from pipeline.worker.variables import kept_by_metrics

# The values of a metric's variables.
State: TypeAlias = list[np.ndarray]
# (by place, by name) arguments of a metric's updates for the made-up batch, and for its two parts.
Updates: TypeAlias = Sequence[list[Any]]
Tried: TypeAlias = tuple[keras.metrics.Metric, Updates]


def _own(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model and its layers that a person sees, and that it is not compiled with."""
    of_losses = model._compile_loss.metrics if model._compile_loss else []
    left_out = [model._compile_metrics, model._loss_tracker, *of_losses, *_compiled(model)]
    return _distinct(metric for metric in model.metrics if not any(metric is other for other in left_out))


def _compiled(model: keras.Model) -> list[keras.metrics.Metric]:
    return [] if model._compile_metrics is None else model._compile_metrics.metrics


def count_on_global_batch(model: keras.Model, batch: Batch) -> None:
    """Shows the global batch to those metrics of a built model whose states replicas cannot add."""
    given_back(model)
    tries = _tries(model, batch)
    # What layers update where all replicas share a variable, also by an example that only stands for none.
    shared = [metric for metric in _own(model) if not all(hasattr(one.value, "values") for one in metric.variables)]
    # Those of the first seed that tells.
    calls = {id(metric): updates for metric, updates in reversed(tries)}
    unlike_sums = [metric for metric, updates in tries if not _add_up(metric, updates, True)]
    for metric in _distinct([*unlike_sums, *shared]):
        # Past Keras's own setter, which would track it.
        vars(metric)["update_state"] = _OnGlobalBatch(metric, calls.get(id(metric), ()))


def not_added(model: keras.Model, batch: Batch) -> list[keras.metrics.Metric]:
    """The metrics of a built model whose state is no sum over batches."""
    return _distinct(metric for metric, updates in _tries(model, batch) if not _add_up(metric, updates, False))


def on_global_batch(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that see the whole global batch."""
    every = _distinct([*_compiled(model), *_own(model)])
    return [metric for metric in every if isinstance(vars(metric).get("update_state"), _OnGlobalBatch)]


def given_back(model: keras.Model) -> None:
    """Gives metrics back to Keras."""
    for metric in on_global_batch(model):
        vars(metric).pop("update_state")


def reset(model: keras.Model, chief: bool) -> None:
    """Begins the metrics anew; the first replica of the first process, `chief`, has what others add nothing to."""
    model.reset_metrics()
    for metric in on_global_batch(model):
        for variable, value in zip(metric.variables, vars(metric)["update_state"].fresh, strict=True):
            if np.any(value):
                put(variable, value, chief)


def put(variable: keras.Variable, value: np.ndarray, chief: bool) -> None:
    """Gives a metric's variable a value over all replicas: if they add, the first of all has it, the others nothing."""
    for place, copy in enumerate(getattr(variable.value, "values", (variable.value,))):
        has_it = variable.aggregation != "sum" or (chief and not place)
        copy.assign(value if has_it else np.zeros_like(value))


@contextlib.contextmanager
def held_here(variables: Sequence[keras.Variable], values: Sequence[Any]) -> Iterator[list[tf.Variable]]:
    """Inside, variables are of this process alone, with these values; gives what holds them."""
    pairs = zip(variables, values, strict=True)
    own = [tf.Variable(value, dtype=one.dtype, trainable=one.trainable) for one, value in pairs]
    with all_patched((variable, {"_value": one}) for variable, one in zip(variables, own, strict=True)):
        yield own


def counted(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model's metrics that begin anew with each epoch."""
    lasting = {id(variable) for variable in kept_by_metrics(model.metrics)}
    return [variable for variable in model.metrics_variables if id(variable) not in lasting]


@contextlib.contextmanager
def counted_apart(
    model: keras.Model, variables: Sequence[keras.Variable], state: list[tf.Tensor]
) -> Iterator[Callable[..., None]]:
    """Inside, metrics that layers or a loss update count in `state`, not in variables; gives what calls others so."""

    def counting(update: Callable[..., object], *values: object, **named: object) -> None:
        with keras.StatelessScope(zip(variables, state, strict=True)) as scope:
            update(*values, **named)
        state[:] = [scope.get_current_value(variable) for variable in variables]

    own = [metric for metric in _own(model) if "update_state" not in vars(metric)]
    with all_patched((one, {"update_state": partial(counting, type(one).update_state, one)}) for one in own):
        yield counting


class _OnGlobalBatch:
    """A metric's `update_state`, with the examples of all replicas."""

    def __init__(self, metric: keras.metrics.Metric, updates: Updates) -> None:
        self._metric, self.fresh = metric, _fresh(metric)
        # The numbers for the batch that it is given in a step scale so, in their order.
        leaves = (filter(_is_number, keras.tree.flatten(calls)) for calls in updates)
        numbers = ([float(leaf) for leaf in of_calls if not len(leaf.shape)] for of_calls in leaves)
        self._numbers = [reduction.reduction_of(values) for values in zip(*numbers, strict=False)]

    def __call__(self, *values: Nested[tf.Tensor], **named: Nested[tf.Tensor]) -> None:
        update, whole = type(self._metric).update_state, current.value
        if whole is None:
            update(self._metric, *values, **named)
            return
        variables = self._metric.variables
        is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        before = [tf.convert_to_tensor(variable.value) for variable in variables]
        values, named = keras.tree.map_structure(partial(self._whole_of, whole), (values, named))
        with keras.StatelessScope(zip(variables, before, strict=True)) as scope:
            update(self._metric, *values, **named)
        for variable, old in zip(variables, before, strict=True):
            new = scope.get_current_value(variable)
            if not hasattr(variable.value, "values"):
                maybe_merge_call(_assign, tf.distribute.get_strategy(), variable.value, new)
            else:
                # All replicas know the new state: of copies that are added one has it, of others all.
                variable.assign(tf.where(is_first, new, old) if variable.aggregation == "sum" else new)

    def _whole_of(self, whole: GlobalBatch, value: tf.Tensor | None) -> tf.Tensor | None:
        """Returns the examples of all replicas, or the sum or mean of their numbers for the batch."""
        if tf.is_tensor(value) and whole.has(value):
            return whole.of(value)
        if not _is_number(value):
            return value
        place = whole.numbers[id(self)]
        whole.numbers[id(self)] += 1
        is_sum = place < len(self._numbers) and self._numbers[place] is Reduction.SUM
        # A loss of the whole is the same on all replicas, whose shares add up to one.
        return whole.summed(value, is_sum and not as_one_device.value)


def _is_number(value: Any) -> bool:
    return bool(tf.is_tensor(value) and tf.as_dtype(value.dtype).is_floating)


def _assign(strategy: tf.distribute.Strategy, variable: tf.Variable, value: tf.Tensor) -> None:
    strategy.extended.update(variable, lambda shared, new: shared.assign(new), args=(value,), group=False)


def _add_up(metric: keras.metrics.Metric, updates: Updates, over_examples: bool) -> bool:
    """True if the metric's state adds up over updates, and with `over_examples` over examples, or cannot be tried."""
    whole, first, second = updates
    every = (first, second, [*first, *second], whole)[: 3 + over_examples]
    try:
        fresh = _fresh(metric)
        states = [_after(metric, fresh, calls) for calls in every]
    except Exception:  # whatever a metric of a person's own raises on made-up examples
        return True
    return all(_adds(fresh, states[:2], one) for one in states[2:])


def _distinct(metrics: Iterable[keras.metrics.Metric]) -> list[keras.metrics.Metric]:
    return list({id(metric): metric for metric in metrics}.values())


def _tries(model: keras.Model, batch: Batch) -> list[Tried]:
    """Returns updates of metrics that are not Keras's: compiled ones on made-up outputs, others in the model's call."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    compiled, updates = model._compile_metrics, list[Tried]()

    def step(examples: Batch, share: float) -> None:
        x, y, weights = examples
        y_pred = losses.call(model, x, training=True)
        with losses.traced(tf.constant(share), training=True, alone=True):
            model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=True)
        model.compute_metrics(x, y, y_pred, sample_weight=weights)

    unknown = [metric for metric in _compiled(model) if not reduction.is_known(metric)]
    for seed in reduction.SEEDS:
        if unknown and y is not None:
            examples = reduction.made_up((y, labels.predicted(model, x), weights), seed)
            updates += _recorded(model, unknown, lambda piece, share: compiled.update_state(*piece), examples)
        if own := _own(model):
            updates += _recorded(model, own, step, reduction.made_up((x, y, weights), seed))
    return updates


def _recorded(model: keras.Model, metrics: Sequence[keras.metrics.Metric], step: Any, examples: Batch) -> list[Tried]:
    def record(piece: Batch, share: float) -> list[list[Any]]:
        calls: list[list[Any]] = [[] for _ in metrics]
        notes = [partial(lambda calls, *values, **named: calls.append((values, named)), one) for one in calls]
        instead = [(metric, {"update_state": note}) for metric, note in zip(metrics, notes, strict=True)]
        with all_patched(instead), reduction.scope(model):
            step(piece, share)
        return calls

    try:
        with losses.without_keras_scaling():
            *pieces, _ = reduction.on_pieces(record, examples)
    except Exception:  # whatever a model of a person's own raises on made-up examples
        return []
    return [(metric, calls) for metric, *calls in zip(metrics, *pieces, strict=True)]


def _adds(fresh: State, parts: Sequence[State], whole: State) -> bool:
    for began, first, second, both in zip(fresh, *parts, whole, strict=True):
        if not all(np.isfinite(value).all() for value in (first, second, both)):
            return True
        if not np.isfinite(began).all():
            # What begins with infinity is no sum.
            return False
        gained, expected = both - began, (first - began) + (second - began)
        size = max(np.abs(expected).max(initial=0.0), np.abs(both).max(initial=0.0))
        if not (np.abs(gained - expected) <= reduction.TOLERANCE * size).all():
            return False
    return True


def _fresh(metric: keras.metrics.Metric) -> State:
    zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metric.variables]
    with keras.StatelessScope(zeros) as state:
        metric.reset_state()
    return [np.array(state.get_current_value(variable), np.float64) for variable in metric.variables]


def _after(metric: keras.metrics.Metric, fresh: State, calls: Sequence[Any]) -> State:
    begin = [(one, tf.cast(value, one.dtype)) for one, value in zip(metric.variables, fresh, strict=True)]
    with reduction.trying(), keras.StatelessScope(begin) as state:
        for values, named in calls:
            type(metric).update_state(metric, *values, **named)
    return [np.array(state.get_current_value(variable), np.float64) for variable in metric.variables]
