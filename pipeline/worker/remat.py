"""The blocks of a model, layers made of layers, each of which `train.remat` computes again on the way back."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import keras

from pipeline.worker.model_error import ModelError

# A block's own call, and that with what it computes forgotten until the backward pass asks for it.
BlockCall: TypeAlias = Callable[..., Any]


def forget(model: keras.Model, forgetful: Callable[[keras.layers.Layer, BlockCall], BlockCall], stateful: bool) -> None:
    """Calls the blocks of a built model through `forgetful`; raises `ModelError` where that would save nothing.

    Without `stateful`, blocks stay as they are whose call changes more than their random numbers' state, such as the
    averages of a normalization, which calling them twice would change twice.
    """
    blocks = [block for block in _blocks(model) if stateful or not _changes(block)]
    if len(blocks) < 2:
        without = "" if stateful else " without batch statistics"
        why = "which keeps what goes into a block and computes the rest again"
        expected = f"a model of several blocks, layers made of layers{without}, for train.remat=true, {why}"
        received = f"{model.name} with {len(blocks)}: it would keep as much as without"
        raise ModelError(expected, received, "train.remat=false, or a smaller train.replica_batch")
    for block in blocks:
        # Past Keras's own setter: what is saved of a layer does not know of it.
        vars(block)["call"] = forgetful(block, block.call)
        for layer in block._flatten_layers():
            vars(layer)["add_loss"] = partial(_refuse_loss, block.name)


def _refuse_loss(block: str, loss: Any) -> None:
    expected = "blocks that add no loss as they are called for train.remat=true, which calls them again"
    raise ModelError(expected, f"{block}, which does", "train.remat=false")


def _blocks(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """Those of a model and of the models in it, outermost only."""
    for inner in layer._flatten_layers(include_self=False, recursive=False):
        if isinstance(inner, keras.Model):
            yield from _blocks(inner)
        # A recurrent layer is a loop, whose steps are not to be forgotten as one.
        elif not isinstance(inner, keras.layers.RNN | keras.layers.Bidirectional) and any(
            part.trainable_variables for part in inner._flatten_layers(include_self=False)
        ):
            yield inner


def _changes(layer: keras.layers.Layer) -> bool:
    """True if a call changes variables of floating point."""
    return any("float" in keras.backend.standardize_dtype(one.dtype) for one in layer.non_trainable_variables)
