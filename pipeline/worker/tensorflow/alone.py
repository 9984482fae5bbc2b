"""Answers callbacks that evaluate and predict: with a copy of the model, outside the strategy, on the first process.

Keras's own `evaluate` would have all replicas compute, of which those of other processes know nothing. The copy has
the weights of the moment, computes what one device computes, and leaves the metrics of training as they are.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import keras

from pipeline.private import keras_variables
from pipeline.worker.input.part import Batch
from pipeline.worker.tensorflow.loop import TrainingError
from pipeline.worker.tensorflow.state import of_random_state, put_back_random_state
from pipeline.worker.tensorflow.tables import grouped, joined

ANSWERED = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
REFUSED = ("fit", "train_on_batch")


class Alone:
    """What callbacks ask of a model, answered by a copy that `make` makes when it is asked for first."""

    def __init__(self, model: keras.Model, make: Callable[[], keras.Model]) -> None:
        self._model, self._make = model, make
        self._copy: keras.Model | None = None

    @contextlib.contextmanager
    def answers(self) -> Iterator[None]:
        """Inside, the model's methods are answered here, and `int` and `float` of a variable are those of its value."""
        base = keras_variables.Variable
        kept = {name: getattr(base, name) for name in ("__int__", "__float__")}
        answered: dict[str, Callable[..., object]] = {name: partial(self._answer, name) for name in ANSWERED}
        answered |= {name: partial(self._refuse, name) for name in REFUSED}
        # Past Keras's own setter, which looks for weights in everything.
        vars(self._model).update(answered)
        for name, kind in (("__int__", int), ("__float__", float)):
            # TensorFlow's variable of several copies is no number to Python.
            setattr(base, name, lambda variable, kind=kind: kind(keras.ops.convert_to_numpy(variable)))
        try:
            yield
        finally:
            for name, method in kept.items():
                setattr(base, name, method)
            for name in answered:
                vars(self._model).pop(name, None)

    def _answer(self, name: str, *arguments: object, **named: object) -> object:
        return getattr(self._up_to_date(), name)(*arguments, **named)

    def _refuse(self, name: str, *arguments: object, **named: object) -> None:
        raise TrainingError(
            f"Expected callbacks to leave training to the run, received a call of model.{name} in one. "
            f"Try a training of its own, or model.evaluate and model.predict, which are answered."
        )

    def _up_to_date(self) -> keras.Model:
        if self._copy is None:
            # A model that is made draws from the random state that training goes on with.
            state = of_random_state()
            try:
                self._copy = self._make()
            finally:
                put_back_random_state(state)
        for shards, variable in zip(grouped(self._model.weights), self._copy.weights, strict=True):
            variable.assign(joined(shards))
        return self._copy


def copied(model: keras.Model, batch: Batch) -> keras.Model:
    """A compiled model made once more, outside its strategy, and built for such a batch. Raises `TrainingError`."""
    made = _made_again(model)
    given = model._compile_config.config
    made.compile(
        optimizer="sgd",
        loss=given["loss"],
        loss_weights=given["loss_weights"],
        metrics=keras.tree.map_structure(_fresh, given["metrics"]),
        weighted_metrics=keras.tree.map_structure(_fresh, given["weighted_metrics"]),
    )
    made._symbolic_build(data_batch=batch)
    return made


def _made_again(model: keras.Model) -> keras.Model:
    """The model, not compiled, in the first of Keras's ways that takes it: layer by layer, as its class says, or from
    what it was made of.
    """
    ways: tuple[Callable[[], keras.Model], ...] = (
        lambda: keras.models.clone_model(model, clone_function=_layer_again, recursive=True),
        lambda: type(model).from_config(model.get_config()),
        lambda: type(model)(**model._auto_config.config),  # where all of that is plain values
    )
    said = []
    for way in ways:
        try:
            return way()
        except Exception as error:  # whatever a class of a person's own raises
            said.append(str(error))
    raise TrainingError(
        f"Expected a model that Keras can copy, for callbacks that evaluate or predict, received "
        f"{type(model).__name__}, which it cannot ({said[1].splitlines()[0]}). Try get_config and from_config in its "
        f"class, or to evaluate after fit."
    )


def _layer_again(layer: keras.layers.Layer) -> keras.layers.Layer:
    """A layer as its config says, or from what it was made of; one that has no state may be the same."""
    try:
        return type(layer).from_config(layer.get_config())
    except Exception:  # whatever a class of a person's own raises
        if layer._auto_config is not None:
            return type(layer)(**layer._auto_config.config)
        if not layer.variables:
            return layer
        raise


def _fresh(metric: object) -> object:
    """A metric without what it has counted."""
    return type(metric).from_config(metric.get_config()) if isinstance(metric, keras.metrics.Metric) else metric
