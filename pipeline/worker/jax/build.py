"""Makes the plan's model under JAX, compiled with what the plan chooses, and refuses what its steps cannot do.

For `train.remat`, `jax.checkpoint` forgets what a block computes, and computes it again on the way back.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from pipeline.config import targets
from pipeline.plan.plan import Plan
from pipeline.worker import compiling, labels, rates, remat
from pipeline.worker.compiling import check_batches, check_made, compile_chosen
from pipeline.worker.jax.data import PARTS, ProcessData
from pipeline.worker.model_error import ModelError
from pipeline.worker.variables import held


def model(plan: Plan, data: ProcessData, note: Callable[[str], object] = str) -> keras.Model:
    """Returns the plan's model, compiled and built; what means nothing here goes to `note`. Raises `UserError`."""
    shape = keras.tree.map_structure(lambda leaf: tuple(leaf.shape[1:]), data.train[0])
    if targets.asks_for(plan.model.build, "model.build", "num_classes") and data.num_classes is None:
        raise ModelError(
            "the number of classes, which model.build asks for",
            "data whose labels do not tell",
            "data.num_classes=10, or whatever it is, or a model.build that predicts a quantity",
        )
    model_built = targets.call(plan.model.build, "model.build", input_shape=shape, num_classes=data.num_classes)
    check_made(model_built)
    _check(model_built, note)
    check_batches(model_built)
    compile_chosen(
        model_built,
        targets.value(plan.training.optimizer, "train.optimizer"),
        plan.training.learning_rate,
        targets.value(plan.training.loss, "train.loss"),
        targets.value(plan.training.metrics, "train.metrics"),
    )
    sample = keras.tree.map_structure(lambda leaf: np.zeros((2, *leaf.shape[1:]), leaf.dtype), data.train)
    with compiling.in_words(model_built, sample):
        labels.check(model_built, sample)
        model_built._symbolic_build(data_batch=sample)
    _expect_loss(model_built)
    if not model_built.trainable_variables:
        raise ModelError("Expected a model with weights to train, received one without.")
    if plan.training.rate_scale != 1.0:
        rates.scale(model_built.optimizer, plan.training.rate_scale)
    if not model_built.optimizer.built:
        model_built.optimizer.build(model_built.trainable_variables)
    outputs = labels.outputs(model_built, sample)
    for name, part in data.parts.items():
        if part is not None and len(part) > 1:
            labels.check_values(outputs, part[1], PARTS[name])
    return model_built


def _check(model: keras.Model, note: Callable[[str], object]) -> None:
    base = keras.Model
    for name in ("train_step", "test_step", "compute_loss_and_updates"):
        if getattr(type(model), name) is not getattr(base, name):
            raise ModelError(
                f"a model with Keras's own {name} under backend=jax",
                f"{type(model).__name__}, which has one of its own",
                "backend=tensorflow",
            )
    if model.compiled and model.jit_compile is False:
        note("The model was compiled with jit_compile=False, which is left out: under backend=jax XLA compiles steps.")


def _expect_loss(model: keras.Model) -> None:
    """Refuses a model whose loss would be nothing, which Keras trains in silence under JAX."""
    if model._compile_loss is None and not model.losses and type(model).compute_loss is keras.Model.compute_loss:
        raise ModelError(
            "a model that is compiled with a loss, or whose layers add one",
            "one of neither",
            "train.loss=sparse_categorical_crossentropy, or whatever fits its labels",
        )


def forget(model: keras.Model) -> None:
    """Makes all blocks of a built model compute again. Raises `ModelError` where that would save nothing."""
    remat.forget(model, _forgetful, stateful=True)


def _forgetful(block: keras.layers.Layer, call_of_block: remat.BlockCall) -> remat.BlockCall:
    listed = [*block.non_trainable_variables, *block.metrics_variables]
    changed = [*listed, *held([block], [*listed, *block.trainable_variables])]

    @functools.wraps(call_of_block)
    def call(*args: Any, **named: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, named))
        traced = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def called(*arrays: Any) -> tuple[Any, list[Any]]:
            own_args, own_given = structure.unflatten(_with(leaves, traced, arrays))
            result = call_of_block(*own_args, **own_given)
            return result, [variable.value for variable in changed]

        outputs, values = jax.checkpoint(called)(*(leaves[place] for place in traced))
        # What a block has changed, as the state of its random numbers, is to be known outside of what is forgotten.
        for variable, value in zip(changed, values, strict=True):
            variable.assign(value)
        return outputs

    return call


def _with(leaves: list[Any], places: list[int], arrays: tuple[Any, ...]) -> list[Any]:
    replaced = list(leaves)
    for place, array in zip(places, arrays, strict=True):
        replaced[place] = array
    return replaced
