"""Copies a model outside its strategy, for callbacks that evaluate and predict."""

from collections.abc import Callable

import keras

from pipeline.worker.input.part import Batch
from pipeline.worker.loop import TrainingError


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
        "a model that Keras can copy, for callbacks that evaluate or predict",
        f"{type(model).__name__}, which it cannot ({said[1].splitlines()[0]})",
        "get_config and from_config in its class, or to evaluate after fit",
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
