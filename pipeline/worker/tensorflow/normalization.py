"""Batch normalization over the global batch: its statistics are those that one device would have."""

import contextlib
from collections.abc import Iterator
from functools import partial

import keras
import tensorflow as tf

from pipeline.worker.collective import Collective
from pipeline.worker.tensorflow.collective import Addend


def synchronize(made: keras.Model, collective: Collective[Addend]) -> None:
    """Statistics over the global batch, as on one device: otherwise each replica's moving averages drift apart."""
    for layer in layers(made):
        layer.synchronized = True
        if type(layer)._moments is keras.layers.BatchNormalization._moments:
            # Past Keras's own setter, which would track it.
            vars(layer)["_moments"] = partial(_moments, layer, collective)


def _moments(
    layer: keras.layers.BatchNormalization,
    collective: Collective[Addend],
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """(mean, variance) of each channel over the global batch: [channels] each, of what no `mask` leaves out.

    Exchanged once. Keras exchanges sums, sums of squares and counts one after the other, which takes three times as
    long where they are small, and those of a masked input not at all.
    """
    if tf.distribute.in_cross_replica_context():
        return type(layer)._moments(layer, inputs, mask)  # type: ignore[no-any-return]
    axes, padding = layer._reduction_axes, 0.0
    if mask is None:
        counts = tf.fill([inputs.shape[layer.axis]], tf.size(inputs) // inputs.shape[layer.axis])
    else:
        within = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        inputs, padding = tf.where(within, inputs, tf.zeros((), inputs.dtype)), keras.config.epsilon()
        counts = tf.math.count_nonzero(within, axes)
    here = tf.stack(
        [tf.reduce_sum(inputs, axes), tf.reduce_sum(tf.square(inputs), axes), tf.cast(counts, inputs.dtype)]
    )
    sums, squares, counts = tf.unstack(*collective.sum([here]))
    mean = tf.math.divide_no_nan(sums, counts + padding)
    # The sum of (x - mean)^2, without a second exchange.
    spread = squares - 2 * mean * sums + counts * tf.square(mean)
    return mean, tf.maximum(tf.math.divide_no_nan(spread, counts + padding), 0.0)


@contextlib.contextmanager
def with_own_statistics(made: keras.Model) -> Iterator[None]:
    """Inside, a step that is compiled normalizes with the statistics of each replica's own batch."""
    kept = [(layer, layer.synchronized, vars(layer).pop("_moments", None)) for layer in layers(made)]
    for layer, _, _ in kept:
        layer.synchronized = False
    try:
        yield
    finally:
        for layer, synchronized, moments in kept:
            layer.synchronized = synchronized
            if moments is not None:
                vars(layer)["_moments"] = moments


def layers(made: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The layers whose statistics are those of the global batch."""
    return [layer for layer in made._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
