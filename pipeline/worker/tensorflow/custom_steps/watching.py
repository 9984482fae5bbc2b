"""Answers what a model's own step calls of Keras and TensorFlow, in their place, while that step is traced.

A step of a model's own is a person's code, written for one device. It is left as it is: what is to be otherwise on
several replicas is done where the step gives its gradients, updates its metrics and asks for their results.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.private import ag_ctx, autograph_util
from pipeline.worker.patched import OfThread, all_patched
from pipeline.worker.tensorflow.collective import Addend

# A metric, and the name of its result's part where that is a dictionary.
Result: TypeAlias = tuple[keras.metrics.Metric, str | None]
# What `Optimizer.apply` is given.
Flat: TypeAlias = Sequence[Addend | None]
# What `GradientTape.gradient` gives, and what it takes them of.
Gradients: TypeAlias = Nested[Addend | None]
Sources: TypeAlias = Nested[tf.Tensor | tf.Variable | keras.Variable]


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


_watcher: OfThread[Any] = OfThread(None)


def watching(watcher: Watcher | None) -> contextlib.AbstractContextManager[None]:
    """Inside, in this thread, what a step calls is answered by the watcher, or as ever."""
    return _watcher.held(watcher)


def watched() -> contextlib.AbstractContextManager[None]:
    """Inside, steps can be watched. Entered around all replicas, since what is changed is the same for all of them."""
    # A `tf.function` that a step calls becomes a part of the step: replicas cannot add up inside a function of its own.
    return all_patched(
        (kind, {name: _answered(vars(kind)[name], answer)})
        for owner, name, answer in _ANSWERS
        for kind in kinds(owner)
        if name in vars(kind)
    )


def _answered(call: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:

    def instead(owner: object, *values: object, **named: object) -> object:
        watcher = _watcher.value
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


def _gradient(watcher: Any, call: Any, tape: object, target: object, sources: Sources, *rest: Any, **named: Any) -> Any:
    # Inside a gradient, one of variables is a part of it, as of a layer that is computed twice.
    with watching(None):
        return watcher.gradient(lambda variables: call(tape, target, variables, *rest, **named), target, sources)


def _apply(watcher: Any, call: Any, optimizer: object, grads: Flat, trainable_variables: object = None) -> None:
    with watching(None):
        watcher.apply(optimizer, lambda sums: call(optimizer, sums, trainable_variables), grads, trainable_variables)


def _update(watcher: Any, call: Any, metric: keras.metrics.Metric, *values: Any, **named: Any) -> Any:
    # One made of others leaves it to them; one whose state is no sum sees the whole global batch, see `metrics.py`.
    if not getattr(metric, "_variables", None) or "update_state" in vars(metric):
        return call(metric, *values, **named)
    # Of one number for each update, the second argument are weights, as of `Mean` and `Sum`.
    alone = isinstance(metric, keras.metrics.Mean | keras.metrics.Sum) and len(values) == 2
    weights = values[1] if alone else named.get("sample_weight")
    others = [*values[: 1 if alone else None], *(named[name] for name in named if name != "sample_weight")]
    with watching(None):
        return watcher.update(metric, lambda: call(metric, *values, **named), others, weights)


def _result(watcher: Watcher, call: Any, metric: keras.metrics.Metric) -> Nested[tf.Tensor]:
    value = watcher.result(metric, lambda: call(metric))
    parts = value.items() if isinstance(value, dict) else [(None, value)]
    # Of one within another, the inner one comes first.
    watcher.results += [(tensor, (metric, name)) for name, tensor in parts if watcher.metric_of(tensor) is None]
    return value


def _loss(watcher: Any, call: Any, loss: keras.losses.Loss, *values: Any, **named: Any) -> Any:
    both = [*values, *(named[name] for name in ("y_true", "y_pred", "sample_weight") if name in named)]
    with watching(None):
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
