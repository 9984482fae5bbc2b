"""`train.remat` under TensorFlow: what a block computes is forgotten, and computed again on the way back.

`tf.recompute_grad` does it; here a block that is called again draws the random numbers that it drew the first time.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from pipeline.private import SeedGenerator
from pipeline.worker import compiling
from pipeline.worker.tensorflow.patched import patched


def forget(model: keras.Model) -> None:
    """Makes the blocks of a built model compute again. Raises `ModelError` where that would save nothing."""
    compiling.forget(model, _forgetful, stateful=False)


def _forgetful(block: keras.layers.Layer, call_inside: compiling.BlockCall) -> compiling.BlockCall:
    @functools.wraps(call_inside)
    def call(*args: Any, **named: Any) -> Any:
        leaves = tf.nest.flatten((args, named))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
        # The seeds that the first call has drawn.
        drawn: list[tf.Tensor] | None = None

        def called(*tensors: tf.Tensor) -> Any:
            nonlocal drawn
            own_leaves = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                own_leaves[place] = tensor
            own_args, own_given = tf.nest.pack_sequence_as((args, named), own_leaves)
            if drawn is not None:
                with _drawing(drawn):
                    return call_inside(*own_args, **own_given)
            with _noting() as drawn:
                return call_inside(*own_args, **own_given)

        return tf.recompute_grad(called)(*(leaves[place] for place in places))

    return call


@contextlib.contextmanager
def _noting() -> Iterator[list[tf.Tensor]]:
    """Inside, the seeds that are drawn are added to a list."""
    draw, drawn = SeedGenerator.next, list[tf.Tensor]()

    def noted(generator: SeedGenerator, ordered: bool = True) -> tf.Tensor:
        drawn.append(draw(generator, ordered))
        return drawn[-1]

    with patched(SeedGenerator, {"next": noted}):
        yield drawn


@contextlib.contextmanager
def _drawing(drawn: list[tf.Tensor]) -> Iterator[None]:
    """Inside, these seeds are drawn once more, in their order."""
    again = iter(drawn)
    with patched(SeedGenerator, {"next": lambda generator, ordered=True: next(again)}):
        yield
