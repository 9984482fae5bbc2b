"""Calls a model that is laid over devices on micro-batches, so that one device computes on the next of them meanwhile.

All of them go forward, the loss is that of the whole batch, and all go back, as in GPipe (Huang et al. 2019). So
losses, metrics and gradients are those of the whole batch, and only what a layer computes over a batch is not.
"""

from itertools import pairwise

import keras
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.private import get_keras_mask, set_keras_mask
from pipeline.worker.data.reading import Batch
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow.loss_scaling import reduction
from pipeline.worker.tensorflow.loss_scaling.global_batch import first_of
from pipeline.worker.tensorflow.step import CALLED_AS, Forward, caller, never_empty, size_of

KEY = "strategy.build.micro_batches"


def use(model: keras.Model, sample: Batch, count: int) -> None:
    """Makes steps that train a built model call it on so many micro-batches of each batch, which is as `sample` is.

    Raises `ModelError` for one that they would train otherwise, or not at all.
    """
    call = caller(model)
    if reduction.is_own(model, "train_step"):
        raise ModelError(
            f"a model that Keras's own train_step trains for {KEY}={count}",
            f"{type(model).__name__}, which calls itself on whole batches",
            f"{KEY}=1",
        )
    x, _, _ = keras.utils.unpack_x_y_sample_weight(sample)
    with keras.StatelessScope() as scope:
        tf.function(lambda x: call(x, training=True), autograph=False).get_concrete_function(x)
    changed = [one for one in model.non_trainable_weights if scope.get_current_value(one) is not None]
    if changed:
        raise ModelError(
            f"layers that compute each example by itself for {KEY}={count}",
            f"one that keeps {changed[0].path} of each batch",
            f"{KEY}=1, or another normalization",
        )
    vars(model)[CALLED_AS] = _in_pieces(model, call, count)


def _in_pieces(model: keras.Model, call: Forward, count: int) -> Forward:
    """Returns what calls the model in training on so many micro-batches, with the outputs of the whole batch."""

    def one(x: Batch, first: tf.Tensor, last: tf.Tensor) -> Batch:
        piece = never_empty(tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[first:last], x))
        outputs = call(piece, training=True)
        _expect_no_losses(model, count)
        # What is more only stood for none.
        return keras.tree.map_structure(lambda leaf: first_of(leaf, last - first), outputs)

    def called(x: Batch, training: bool) -> Batch:
        if not training:
            return call(x, training=training)
        size = size_of(x)
        bounds = [size * number // count for number in range(count + 1)]
        pieces = [one(x, first, last) for first, last in pairwise(bounds)]
        return keras.tree.map_structure(lambda *leaves: _joined(leaves), *pieces)

    return called


def _joined(leaves: tuple[tf.Tensor, ...]) -> Nested[tf.Tensor]:
    joined, masks = tf.concat(leaves, 0), [get_keras_mask(leaf) for leaf in leaves]
    if masks[0] is not None:
        set_keras_mask(joined, tf.concat(masks, 0))
    return joined


def _expect_no_losses(model: keras.Model, count: int) -> None:
    """Raises `ModelError` where a layer has added a loss: Keras forgets it with the next call."""
    adding = [layer.name for layer in model._flatten_layers() if len(layer._losses)]
    if adding:
        raise ModelError(
            f"layers that add no loss for {KEY}={count}",
            f"{adding[0]}, whose loss is that of a whole batch",
            f"{KEY}=1",
        )
