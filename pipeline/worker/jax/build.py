"""Makes the plan's model under JAX, compiled with what the plan chooses, and refuses what its steps cannot do."""

from collections.abc import Callable

import keras
import numpy as np

from pipeline.config import targets
from pipeline.plan.plan import Plan
from pipeline.worker import building, labels, rates
from pipeline.worker.compiling import check_batches, check_made, compile_chosen
from pipeline.worker.jax.data import PARTS, OwnData
from pipeline.worker.model_error import ModelError


def model(plan: Plan, data: OwnData, note: Callable[[str], object] = str) -> keras.Model:
    """The plan's model, compiled and built, with its weights on this process's first device.

    What it was compiled with and means nothing here goes to `note`. Raises `ModelError`, or `DataError` for labels
    unlike its loss.
    """
    shape = keras.tree.map_structure(lambda leaf: tuple(leaf.shape[1:]), data.train[0])
    if targets.asks_for(plan.model.build, "model.build", "num_classes") and data.num_classes is None:
        raise ModelError(
            "the number of classes, which model.build asks for",
            "data whose labels do not tell",
            "data.num_classes=10, or whatever it is, or a model.build that predicts a quantity",
        )
    made = targets.call(plan.model.build, "model.build", input_shape=shape, num_classes=data.num_classes)
    check_made(made)
    _check(made, note)
    check_batches(made)
    compile_chosen(
        made,
        targets.value(plan.training.optimizer, "train.optimizer"),
        plan.training.learning_rate,
        targets.value(plan.training.loss, "train.loss"),
        targets.value(plan.training.metrics, "train.metrics"),
    )
    sample = keras.tree.map_structure(
        lambda leaf: None if leaf is None else np.zeros((2, *leaf.shape[1:]), leaf.dtype), data.train
    )
    with building.in_words(made, sample):
        labels.check(made, sample)
        made._symbolic_build(data_batch=sample)
    _expect_loss(made)
    if not made.trainable_variables:
        raise ModelError("Expected a model with weights to train, received one without.")
    if plan.training.rate_scale != 1.0:
        rates.scale(made.optimizer, plan.training.rate_scale)
    if not made.optimizer.built:
        made.optimizer.build(made.trainable_variables)
    found = labels.outputs(made, sample)
    for name, part in data.parts.items():
        if part is not None and len(part) > 1:
            labels.check_values(found, part[1], PARTS[name])
    return made


def _check(made: keras.Model, note: Callable[[str], object]) -> None:
    base = keras.Model
    for name in ("train_step", "test_step", "compute_loss_and_updates"):
        if getattr(type(made), name) is not getattr(base, name):
            raise ModelError(
                f"a model with Keras's own {name} under backend=jax",
                f"{type(made).__name__}, which has one of its own",
                "backend=tensorflow",
            )
    if made.compiled and made.jit_compile is False:
        note("The model was compiled with jit_compile=False, which is left out: under backend=jax XLA compiles steps.")


def _expect_loss(made: keras.Model) -> None:
    """Refuses a model whose loss would be nothing, which Keras trains in silence under JAX."""
    if made._compile_loss is None and not made.losses and type(made).compute_loss is keras.Model.compute_loss:
        raise ModelError(
            "a model that is compiled with a loss, or whose layers add one",
            "one of neither",
            "train.loss=sparse_categorical_crossentropy, or whatever fits its labels",
        )
