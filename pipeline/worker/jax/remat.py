"""`train.remat` under JAX: `jax.checkpoint` forgets what a block computes, and computes it again on the way back."""

import functools
from typing import Any

import jax
import keras

from pipeline.worker import blocks
from pipeline.worker.held import held


def forget(model: keras.Model) -> None:
    """Has all blocks of a built model compute again. Raises `ModelError` where that would save nothing."""
    blocks.forget(model, _forgetful, stateful=True)


def _forgetful(block: keras.layers.Layer, kept: blocks.Call) -> blocks.Call:
    listed = [*block.non_trainable_variables, *block.metrics_variables]
    changed = [*listed, *held([block], [*listed, *block.trainable_variables])]

    @functools.wraps(kept)
    def call(*args: Any, **given: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, given))
        traced = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def called(*arrays: Any) -> tuple[Any, list[Any]]:
            own_args, own_given = structure.unflatten(_with(leaves, traced, arrays))
            made = kept(*own_args, **own_given)
            return made, [variable.value for variable in changed]

        made, values = jax.checkpoint(called)(*(leaves[place] for place in traced))
        # What a block has changed, as the state of its random numbers, is to be known outside of what is forgotten.
        for variable, value in zip(changed, values, strict=True):
            variable.assign(value)
        return made

    return call


def _with(leaves: list[Any], places: list[int], arrays: tuple[Any, ...]) -> list[Any]:
    made = list(leaves)
    for place, array in zip(places, arrays, strict=True):
        made[place] = array
    return made
