"""Answers what a model's own step calls of Keras and TensorFlow, in their place, while that step is traced.

A step of a model's own is a person's code, written for one device. It is left as it is: what is to be otherwise on
several replicas is done where the step gives its gradients, updates its metrics and asks for their results.
"""

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from pipeline.data.nested import Nested
from pipeline.private import ag_ctx, autograph_util
from pipeline.worker.tensorflow.collective import Addend

# A metric, and the name of its result's part where that is a dictionary.
Result: TypeAlias = tuple[keras.metrics.Metric, str | None]
# What `GradientTape.gradient` gives, and what it takes them of.
Gradients: TypeAlias = Nested[Addend | None]
Sources: TypeAlias = Nested[tf.Tensor | tf.Variable | keras.Variable]


class Watcher(abc.ABC):
    """What is done in place of what a step calls; `kept` is what was called, with other arguments if need be."""

    def __init__(self) -> None:
        self._results: list[tuple[tf.Tensor, Result]] = []

    @abc.abstractmethod
    def gradient(self, kept: Callable[[Sources], Gradients], target: Nested[tf.Tensor], sources: Sources) -> Gradients:
        """`GradientTape.gradient` of a target, a loss as a rule."""

    @abc.abstractmethod
    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        kept: Callable[[Sequence[Addend | None]], None],
        gradients: Sequence[Addend | None],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        """`Optimizer.apply`."""

    @abc.abstractmethod
    def update(
        self,
        metric: keras.metrics.Metric,
        kept: Callable[[], None],
        given: Sequence[Nested[tf.Tensor]],
        weights: tf.Tensor | float | None,
    ) -> None:
        """`Metric.update_state`; `weights` are the sample's, whatever else is `given`."""

    @abc.abstractmethod
    def loss(self, loss: keras.losses.Loss, *given: tf.Tensor) -> tf.Tensor:
        """A loss that is called on labels, predictions and weights."""

    def result(self, metric: keras.metrics.Metric, kept: Callable[[], Nested[tf.Tensor]]) -> Nested[tf.Tensor]:
        """`Metric.result`: as it is."""
        return kept()

    def noted(self, metric: keras.metrics.Metric, value: Nested[tf.Tensor]) -> None:
        """Remembers what a metric has given; of one within another, the inner one comes first."""
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        self._results += [(tensor, (metric, name)) for name, tensor in parts if self.metric_of(tensor) is None]

    def metric_of(self, value: tf.Tensor) -> Result | None:
        """The metric that has given a value; None where none has."""
        return next((result for tensor, result in self._results if tensor is value), None)

    def made_into_others(self) -> list[keras.metrics.Metric]:
        """The metrics of whose results something else has been made."""
        found = [
            metric for tensor, (metric, _) in self._results if tf.is_symbolic_tensor(tensor) and tensor.consumers()
        ]
        return list({id(metric): metric for metric in found}.values())


class _Thread(threading.local):
    """The watcher of the step that this thread traces; each replica is traced in a thread of its own."""

    watcher: Watcher | None = None


_thread = _Thread()


@contextlib.contextmanager
def watching(watcher: Watcher | None) -> Iterator[None]:
    """Inside, in this thread, what a step calls is answered by the watcher, or as ever."""
    kept, _thread.watcher = _thread.watcher, watcher
    try:
        yield
    finally:
        _thread.watcher = kept


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, steps can be watched. Entered around all replicas, since what is changed is the same for all of them.

    A `tf.function` that a step calls becomes a part of the step: replicas cannot add up inside a function of its own.
    """
    changed = (
        (tf.GradientTape, "gradient", _gradient),
        (keras.optimizers.Optimizer, "apply", _apply),
        (keras.metrics.Metric, "update_state", _update),
        (keras.metrics.Metric, "result", _result),
        (keras.losses.Loss, "__call__", _loss),
        (tf.types.experimental.PolymorphicFunction, "__call__", _function),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, instead in changed:
            for kind in kinds(owner):
                if name in vars(kind):
                    stack.callback(setattr, kind, name, vars(kind)[name])
                    # Not even where AutoGraph converts what calls it.
                    setattr(kind, name, tf.autograph.experimental.do_not_convert(instead(vars(kind)[name])))
        yield


def kinds(owner: type) -> set[type]:
    """A class, those that it is made of, and all that are made of it."""
    found, below = set(owner.__mro__) - {object}, [owner]
    while below:
        kind = below.pop()
        found.add(kind)
        below += set[type](kind.__subclasses__()) - found
    return found


def _gradient(kept: Callable[..., Gradients]) -> Callable[..., Gradients]:
    def gradient(
        tape: tf.GradientTape, target: tf.Tensor, sources: Sources, *rest: object, **named: object
    ) -> Gradients:
        if (watcher := _thread.watcher) is None:
            return kept(tape, target, sources, *rest, **named)
        # Inside a gradient, one of variables is a part of it, as of a layer that is computed twice.
        with watching(None):
            return watcher.gradient(lambda wanted: kept(tape, target, wanted, *rest, **named), target, sources)

    return gradient


def _apply(kept: Callable[..., None]) -> Callable[..., None]:
    def apply(
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Addend | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        if (watcher := _thread.watcher) is None:
            return kept(optimizer, grads, trainable_variables)
        with watching(None):
            return watcher.apply(
                optimizer, lambda summed: kept(optimizer, summed, trainable_variables), grads, trainable_variables
            )

    return apply


def _update(kept: Callable[..., None]) -> Callable[..., None]:
    def update_state(metric: keras.metrics.Metric, *given: object, **named: object) -> None:
        # One that is made of others leaves it to them; one whose state is no sum sees the whole global batch, see
        # `metrics.py`.
        left = not getattr(metric, "_variables", None) or "update_state" in vars(metric)
        if (watcher := _thread.watcher) is None or left:
            return kept(metric, *given, **named)
        # Of one number for each update, the second argument are weights, as of `Mean` and `Sum`.
        alone = isinstance(metric, keras.metrics.Mean | keras.metrics.Sum) and len(given) == 2
        weights = given[1] if alone else named.get("sample_weight")
        values = [*given[: 1 if alone else None], *(named[name] for name in named if name != "sample_weight")]
        with watching(None):
            return watcher.update(metric, lambda: kept(metric, *given, **named), values, weights)

    return update_state


def _loss(kept: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    def call(loss: keras.losses.Loss, *given: object, **named: object) -> tf.Tensor:
        if (watcher := _thread.watcher) is None:
            return kept(loss, *given, **named)
        both = [*given, *(named[name] for name in ("y_true", "y_pred", "sample_weight") if name in named)]
        with watching(None):
            return watcher.loss(loss, *both)

    return call


def _result(kept: Callable[..., Nested[tf.Tensor]]) -> Callable[..., Nested[tf.Tensor]]:
    def result(metric: keras.metrics.Metric) -> Nested[tf.Tensor]:
        if (watcher := _thread.watcher) is None:
            return kept(metric)
        value = watcher.result(metric, lambda: kept(metric))
        watcher.noted(metric, value)
        return value

    return result


def _function(kept: Callable[..., object]) -> Callable[..., object]:
    def call(function: tf.types.experimental.PolymorphicFunction, *given: object, **named: object) -> object:
        if _thread.watcher is None:
            return kept(function, *given, **named)
        inner = function.python_function
        if not function._autograph:
            return inner(*given, **named)
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):
            converted = autograph_util.py_func_from_autograph(inner, function._experimental_autograph_options)
            return converted(*given, **named)

    return call
