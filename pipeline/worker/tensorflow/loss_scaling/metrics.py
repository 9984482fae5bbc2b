"""Metrics whose state is no sum over examples, such as a maximum: updated on the whole global batch, and counted once.

Replicas each keep a state, and Keras adds these up. Where that is wrong the metric sees the examples of all replicas,
which costs an exchange; which metrics those are is found out before training, on made-up examples.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.nested import Nested
from pipeline.private import maybe_merge_call
from pipeline.worker import labels
from pipeline.worker.held import kept_by_metrics
from pipeline.worker.input.part import Batch
from pipeline.worker.tensorflow.loss_scaling import loss as losses
from pipeline.worker.tensorflow.loss_scaling import reduction
from pipeline.worker.tensorflow.loss_scaling.global_batch import GlobalBatch, current
from pipeline.worker.tensorflow.loss_scaling.reduction import PARTS, SEEDS, TOLERANCE, Rule, Values

# The values of a metric's variables.
State: TypeAlias = list[np.ndarray]


def of_model(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that a person sees: those compiled, each by itself, the model's own, and its layers'."""
    compiled = model._compile_metrics
    inner = [] if compiled is None else compiled.metrics
    left_out = [compiled, model._loss_tracker, *(model._compile_loss.metrics if model._compile_loss else [])]
    others = [metric for metric in model.metrics if not any(metric is other for other in left_out)]
    return list({id(metric): metric for metric in [*inner, *others]}.values())


def _own(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model and its layers that it is not compiled with."""
    compiled = model._compile_metrics
    inner = [] if compiled is None else compiled.metrics
    return [metric for metric in of_model(model) if not any(metric is other for other in inner)]


def count_on_whole(model: keras.Model, batch: Batch) -> None:
    """Has metrics of a built model whose states replicas cannot add see the whole global batch."""
    given_back(model)
    inner = [] if model._compile_metrics is None else model._compile_metrics.metrics
    # What layers update where all replicas share a variable, also by an example that only stands for none.
    shared = [
        metric
        for metric in of_model(model)
        if not any(metric is other for other in inner)
        and not all(hasattr(variable.value, "values") for variable in metric.variables)
    ]
    found = [*not_added(model, batch, over_examples=True), *shared]
    found = list({id(metric): metric for metric in found}.values())
    rules = _rules_of_numbers(model, batch, found)
    for metric in found:
        # Past Keras's own setter, which would track it.
        vars(metric)["update_state"] = _OnWhole(metric, _fresh(metric), rules.get(id(metric), []))


def on_whole(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that see the whole global batch."""
    return [metric for metric in of_model(model) if isinstance(vars(metric).get("update_state"), _OnWhole)]


def given_back(model: keras.Model) -> None:
    """Gives metrics back to Keras."""
    for metric in on_whole(model):
        vars(metric).pop("update_state")


def reset(model: keras.Model, chief: bool) -> None:
    """Begins the metrics anew; the first replica of the first process, `chief`, has what others add nothing to."""
    model.reset_metrics()
    for metric in on_whole(model):
        for variable, value in zip(metric.variables, vars(metric)["update_state"].fresh, strict=True):
            if np.any(value):
                put(variable, value, chief)


def put(variable: keras.Variable, value: np.ndarray, chief: bool) -> None:
    """Gives a metric's variable a value over all replicas: if they add, the first of all has it, the others nothing."""
    for place, copy in enumerate(getattr(variable.value, "values", (variable.value,))):
        mine = variable.aggregation != "sum" or (chief and not place)
        copy.assign(value if mine else np.zeros_like(value))


@contextlib.contextmanager
def here(variables: Sequence[keras.Variable], values: list[np.ndarray]) -> Iterator[None]:
    """Inside, metrics' variables have these values in this process alone; `values` gets what they come to."""
    kept = [variable.value for variable in variables]
    own = [tf.Variable(value, dtype=one.dtype, trainable=False) for one, value in zip(variables, values, strict=True)]
    try:
        for variable, value in zip(variables, own, strict=True):
            # Past Keras's own setter, which would track it.
            vars(variable)["_value"] = value
        yield
    finally:
        for variable, value in zip(variables, kept, strict=True):
            vars(variable)["_value"] = value
        for place, made in enumerate(variable.numpy() for variable in own):
            # What was kept in more digits stays as it was.
            if not np.array_equal(made, values[place].astype(made.dtype)):
                values[place] = made.astype(values[place].dtype)


def counted(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model's metrics that begin anew with each epoch."""
    kept = {id(variable) for variable in kept_by_metrics(model.metrics)}
    return [variable for variable in model.metrics_variables if id(variable) not in kept]


class CountedApart:
    """The values of the variables that a model's metrics count in, while the variables stay as they are."""

    def __init__(self, model: keras.Model, variables: Sequence[keras.Variable], state: Sequence[tf.Tensor]) -> None:
        self._model, self._variables = model, variables
        self._values = {id(variable): value for variable, value in zip(variables, state, strict=True)}

    @property
    def state(self) -> list[tf.Tensor]:
        """The values now, in the order of the variables."""
        return [self._values[id(variable)] for variable in self._variables]

    @contextlib.contextmanager
    def updated(self) -> Iterator[None]:
        """Inside, metrics that layers update, or a loss of the model's own, count here."""
        metrics = [metric for metric in _own(self._model) if "update_state" not in vars(metric)]
        for metric in metrics:
            # Past Keras's own setter, which would track it.
            vars(metric)["update_state"] = partial(self._update, metric)
        try:
            yield
        finally:
            for metric in metrics:
                vars(metric).pop("update_state")

    def count(self, x: Batch, y: Batch, y_pred: Batch, weights: Batch | None) -> None:
        """Counts a batch by the metrics that the model is compiled with, and whatever else its step counts by."""
        with self._scope():
            self._model.compute_metrics(x, y, y_pred, sample_weight=weights)

    def _update(self, metric: keras.metrics.Metric, *given: Nested[tf.Tensor], **named: Nested[tf.Tensor]) -> None:
        with self._scope():
            type(metric).update_state(metric, *given, **named)

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        with keras.StatelessScope(zip(self._variables, self.state, strict=True)) as scope:
            yield
        self._values = {id(variable): scope.get_current_value(variable) for variable in self._variables}


class _OnWhole:
    """A metric's `update_state`, with the examples of all replicas."""

    def __init__(self, metric: keras.metrics.Metric, fresh: State, rules: Sequence[Rule]) -> None:
        """`rules` say how the numbers for the batch scale that it is given in a step, in their order."""
        self._metric, self.fresh, self._rules = metric, fresh, rules

    def __call__(self, *given: Nested[tf.Tensor], **named: Nested[tf.Tensor]) -> None:
        update, whole = type(self._metric).update_state, current()
        if whole is None:
            update(self._metric, *given, **named)
            return
        variables = self._metric.variables
        before = [tf.convert_to_tensor(variable.value) for variable in variables]
        given, named = keras.tree.map_structure(partial(self._whole_of, whole), (given, named))
        with keras.StatelessScope(zip(variables, before, strict=True)) as scope:
            update(self._metric, *given, **named)
        for variable, old in zip(variables, before, strict=True):
            new = scope.get_current_value(variable)
            if not hasattr(variable.value, "values"):
                maybe_merge_call(_assign, tf.distribute.get_strategy(), variable.value, new)
            else:
                # All replicas know the new state: of copies that are added one has it, of others all.
                variable.assign(tf.where(whole.first, new, old) if variable.aggregation == "sum" else new)

    def _whole_of(self, whole: GlobalBatch, value: tf.Tensor | None) -> tf.Tensor | None:
        """What it is given, of all replicas: of examples those of all, of one number for the batch the sum or mean."""
        if value is None or not tf.is_tensor(value):
            return value
        if whole.has(value):
            return whole.of(value)
        if not tf.as_dtype(value.dtype).is_floating:
            return value
        place = whole.given[id(self)]
        whole.given[id(self)] += 1
        is_sum = place < len(self._rules) and self._rules[place] is Rule.SUM
        # A loss of the whole is the same on all replicas, whose shares add up to one.
        return whole.summed(value, is_sum and not losses.is_on_whole())


def _assign(strategy: tf.distribute.Strategy, variable: tf.Variable, value: tf.Tensor) -> None:
    """Gives a variable that all replicas share the value that all of them know."""
    strategy.extended.update(variable, lambda shared, new: shared.assign(new), args=(value,), group=False)


def _rules_of_numbers(model: keras.Model, batch: Batch, found: Sequence[keras.metrics.Metric]) -> dict[int, list[Rule]]:
    """How the numbers for a batch scale that metrics are given in a step, by the metric's identity."""
    of_its_own = _own(model)
    own = [metric for metric in found if any(metric is other for other in of_its_own)]
    if not own:
        return {}
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    made = reduction.made_up((x, y, weights), SEEDS[0])
    pieces = [made, *(reduction.rows(made, part) for part in PARTS)]
    with losses.without_keras_scaling(), reduction.trying():
        given = [_numbers(model, own, piece) for piece in pieces]
    rules: dict[int, list[Rule]] = {}
    for metric in own:
        calls = zip(*(numbers[id(metric)] for numbers in given), strict=False)
        values = [Values(whole, (first, second)) for whole, first, second in calls]
        rules[id(metric)] = [value.rule() for value in values]
    return rules


def _numbers(model: keras.Model, own: Sequence[keras.metrics.Metric], examples: Batch) -> dict[int, list[float]]:
    """The numbers that metrics are given in a step."""
    seen: dict[int, list[float]] = {id(metric): [] for metric in own}

    def note(metric: keras.metrics.Metric, *given: Nested[tf.Tensor], **named: Nested[tf.Tensor]) -> None:
        for value in keras.tree.flatten((given, named)):
            if tf.is_tensor(value) and not len(value.shape) and tf.as_dtype(value.dtype).is_floating:
                seen[id(metric)].append(float(value))

    try:
        for metric in own:
            vars(metric)["update_state"] = partial(note, metric)
        state = [*_zeros(model.metrics_variables), *_as_they_are(model.trainable_variables)]
        with keras.StatelessScope(state, collect_losses=True):
            _step(model, examples)
    finally:
        for metric in own:
            vars(metric).pop("update_state")
    return seen


def not_added(model: keras.Model, batch: Batch, over_examples: bool) -> list[keras.metrics.Metric]:
    """The metrics whose state after two updates is not the sum of the states after each; `over_examples`: or whose
    state after one update with both batches is not.

    What cannot be tried is taken for a sum, as Keras does.
    """
    with losses.without_keras_scaling(), reduction.trying():
        found = [
            metric
            for seed in SEEDS
            for tried in _tries(model, batch, seed)
            for metric in _differing(tried, over_examples)
        ]
    return list({id(metric): metric for metric in found}.values())


@dataclass(frozen=True)
class _Try:
    """Metrics, what updates them with some examples, and the examples."""

    metrics: Sequence[keras.metrics.Metric]
    update: Callable[[Batch], object]
    examples: Batch
    # Which it reads: a scope without state knows of those alone that it is given, for penalties on weights.
    weights: Sequence[keras.Variable] = ()


def _tries(model: keras.Model, batch: Batch, seed: int) -> Iterator[_Try]:
    """Those compiled, each by itself on made-up outputs; the model's own and its layers' in a call of the model."""
    compiled = model._compile_metrics
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    inner = [] if compiled is None else compiled.metrics
    if y is not None and not all(map(_is_known, inner)):
        made = reduction.made_up((y, labels.predicted(model, x), weights), seed)
        for metric, given in _given(compiled, *made):
            if not _is_known(metric):
                yield _Try([metric], partial(_update, metric), given)
    if own := _own(model):
        yield _Try(own, partial(_step, model), reduction.made_up((x, y, weights), seed), model.trainable_variables)


def _is_known(metric: keras.metrics.Metric) -> bool:
    """Is it Keras's own, all of which add up, on a function of Keras's where it has one?"""
    parts = [type(metric)]
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        parts.append(metric._fn if hasattr(metric._fn, "__module__") else type(metric._fn))
    return all(part.__module__.partition(".")[0] == "keras" for part in parts)


def _given(
    compiled: keras.metrics.Metric, y: Batch, y_pred: Batch, weights: Batch | None
) -> Iterator[tuple[keras.metrics.Metric, tuple[tf.Tensor, ...]]]:
    """(metric, what it is given) for each compiled one, as Keras gives it."""
    of_y, of_y_pred = compiled._flatten_y(y), compiled._flatten_y(y_pred)
    of_weights = [] if weights is None else compiled._flatten_y(weights)
    of_weights = of_weights if len(of_weights) == len(of_y) else (of_weights or [None])[:1] * len(of_y)
    for together, *given in zip(compiled._flat_metrics, of_y, of_y_pred, strict=False):
        yield from ((metric, tuple(given)) for metric in (together.metrics if together else ()))
    for together, *given in zip(compiled._flat_weighted_metrics, of_y, of_y_pred, of_weights, strict=False):
        yield from ((metric, tuple(given)) for metric in (together.metrics if together else ()))


def _update(metric: keras.metrics.Metric, given: tuple[tf.Tensor, ...]) -> None:
    type(metric).update_state(metric, *given)


def _step(model: keras.Model, examples: Batch) -> None:
    """What a step of training updates metrics with."""
    x, y, weights = examples
    y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
    with losses.traced(tf.constant(1.0), training=True, alone=True):
        model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=True)
    model.compute_metrics(x, y, y_pred, sample_weight=weights)


def _differing(tried: _Try, over_examples: bool) -> list[keras.metrics.Metric]:
    """The metrics among these whose states do not add."""
    first, second = (reduction.rows(tried.examples, part) for part in PARTS)
    try:
        fresh = [_fresh(metric) for metric in tried.metrics]
        after = partial(_after, tried, fresh)
        parts, wholes = (after(first), after(second)), [after(first, second)]
        if over_examples:
            wholes.append(after(tried.examples))
    except Exception:  # whatever a metric of a person's own raises on made-up examples
        return []
    return [
        metric
        for number, metric in enumerate(tried.metrics)
        if not all(_adds(fresh[number], [part[number] for part in parts], whole[number]) for whole in wholes)
    ]


def _adds(fresh: State, parts: Sequence[State], whole: State) -> bool:
    """Is what a state has gained, from fresh, what two others have together?"""
    for began, first, second, both in zip(fresh, *parts, whole, strict=True):
        if not all(np.isfinite(value).all() for value in (first, second, both)):
            return True
        if not np.isfinite(began).all():
            # What begins with infinity is no sum.
            return False
        gained, expected = both - began, (first - began) + (second - began)
        most = max(np.abs(expected).max(initial=0.0), np.abs(both).max(initial=0.0))
        if not (np.abs(gained - expected) <= TOLERANCE * most).all():
            return False
    return True


def _fresh(metric: keras.metrics.Metric) -> State:
    """The values that a metric begins with."""
    with keras.StatelessScope(_zeros(metric.variables)) as scope:
        metric.reset_state()
    return [np.array(scope.get_current_value(variable), np.float64) for variable in metric.variables]


def _as_they_are(variables: Sequence[keras.Variable]) -> list[tuple[keras.Variable, keras.Variable]]:
    return [(variable, variable) for variable in variables]


def _zeros(variables: Sequence[keras.Variable]) -> list[tuple[keras.Variable, tf.Tensor]]:
    return [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in variables]


def _after(tried: _Try, fresh: Sequence[State], *batches: Batch) -> list[State]:
    """The metrics' states after updates with these batches; all else begins each as it is."""
    variables = [variable for metric in tried.metrics for variable in metric.variables]
    values = [value for state in fresh for value in state]
    for batch in batches:
        state = [(variable, tf.cast(value, variable.dtype)) for variable, value in zip(variables, values, strict=True)]
        with keras.StatelessScope([*state, *_as_they_are(tried.weights)], collect_losses=True) as scope:
            tried.update(batch)
        values = [np.array(scope.get_current_value(variable), np.float64) for variable in variables]
    counts = np.cumsum([len(state) for state in fresh])[:-1]
    return [values[start:end] for start, end in pairwise([0, *counts, len(values)])]
