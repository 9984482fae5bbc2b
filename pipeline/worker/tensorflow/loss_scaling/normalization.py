"""Batch normalization over the global batch: its statistics are those that one device would have."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import keras
import tensorflow as tf

from pipeline.worker.collective import Collective
from pipeline.worker.patched import all_patched
from pipeline.worker.tensorflow.collective import Addend, of_no_variables
from pipeline.worker.tensorflow.loss_scaling.global_batch import current


def synchronize(model: keras.Model, collective: Collective[Addend], everywhere: bool = True) -> None:
    """Statistics over the replicas that add up by the collective, which are all where that is `everywhere`."""
    for layer in layers(model):
        layer.synchronized = everywhere
        if collective.replicas > 1 and type(layer)._moments is keras.layers.BatchNormalization._moments:
            # Past Keras's own setter, which would track it.
            vars(layer)["_moments"] = partial(_moments, layer, collective)


def _moments(
    layer: keras.layers.BatchNormalization, collective: Collective[Addend], inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """(mean, variance) of each channel over the global batch: [channels] each, of what no `mask` leaves out."""
    # Exchanged once, forward and back. Keras exchanges sums, sums of squares and counts one after the other, which
    # takes three times as long where they are small, and those of a masked input not at all.
    if tf.distribute.in_cross_replica_context():
        return type(layer)._moments(layer, inputs, mask)  # type: ignore[no-any-return]
    axes, whole = layer._reduction_axes, current.value
    present = None if whole is None else whole.present
    (channels,) = layer.moving_mean.shape
    shape = [1 if axis in axes else channels for axis in range(1 + len(axes))]
    within = None if mask is None else tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))

    def along(vector: tf.Tensor) -> tf.Tensor:
        return vector if shape[-1] == channels else tf.reshape(vector, shape)

    def summed(*values: tf.Tensor) -> list[tf.Tensor]:
        part = tf.stack(values)
        (sums,) = collective.sum([part if present is None else tf.where(present, part, tf.zeros((), part.dtype))])
        return tf.unstack(sums)  # type: ignore[no-any-return]

    def only(values: tf.Tensor) -> tf.Tensor:
        return values if within is None else tf.where(within, values, tf.zeros((), values.dtype))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def moments(values: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
        counts = (
            tf.fill([channels], tf.size(values) // channels) if within is None else tf.math.count_nonzero(within, axes)
        )
        near = tf.math.divide_no_nan(tf.reduce_sum(only(values), axes), tf.cast(counts, values.dtype))
        away = only(values - along(near))
        sums, squares = tf.reduce_sum(away, axes), tf.reduce_sum(tf.square(away), axes)
        epsilon = 0.0 if within is None else keras.config.epsilon()
        divisor, mean, variance, centre = _combined(summed, epsilon, counts, near, sums, squares)
        # The centre as it is in these values' type may be a digit off; how far it is from `near` is not.
        further = tf.cast(centre - tf.cast(near, centre.dtype), values.dtype)

        def back(of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
            sums, counted = summed(of_mean, of_variance), tf.cast(divisor, values.dtype)
            of_mean, of_variance = (tf.math.divide_no_nan(total, counted) for total in sums)
            slope = 2 * of_variance
            return only((values - along(near)) * along(slope) + along(of_mean - slope * further))

        return (tf.cast(mean, values.dtype), tf.cast(variance, values.dtype)), back

    with of_no_variables().held(True):
        return moments(inputs)  # type: ignore[no-any-return]


def _combined(summed: Callable[..., list[tf.Tensor]], epsilon: float, *values: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """(divisors, means, variances, centres) over all replicas, of here (counts, values near the mean, sums and sums of
    squares about these): [channels] each. A variance's gradient is proportional to the distance from the centre.

    A divisor is the count and `epsilon`, rounded to the values' type: so Keras divides what a mask leaves, which a
    layer behind may amplify. Sums about a value near the mean lose no digits (Chan, Golub and LeVeque, 1983), nor do
    they as sums about 0 in twice the width. A TPU adds nothing of that width: it is asked for the mean first.
    """
    narrow = isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
    rounded, kind = values[1].dtype, tf.float32 if narrow else tf.float64
    counts, near, away, squares = (tf.cast(value, kind) for value in values)
    about = tf.math.divide_no_nan(*summed(counts * near + away, counts)) if narrow else tf.zeros((), kind)
    near -= about
    sums, squares, counts = summed(counts * near + away, squares + near * (2 * away + counts * near), counts)
    divisor = tf.cast(tf.cast(counts, rounded) + epsilon, kind)
    further = tf.math.divide_no_nan(sums - about * (divisor - counts), divisor)
    mean = about + further
    squares -= further * (2 * sums - counts * further)
    centre = mean + tf.math.divide_no_nan(mean * (divisor - counts), divisor)
    return divisor, mean, tf.maximum(tf.math.divide_no_nan(squares, divisor), 0.0), centre


def apart(model: keras.Model) -> list[keras.Variable]:
    """The moving statistics that replicas change each by another batch: those of layers that are not synchronized."""
    own = [one for layer in layers(model) if not layer.synchronized for one in layer.non_trainable_variables]
    return [variable for variable in own if variable.dtype.startswith("float")]


def changes(variables: Sequence[keras.Variable], before: Sequence[tf.Tensor], share: tf.Tensor) -> list[tf.Tensor]:
    """Returns this replica's part of the mean change of `variables` over replicas."""
    return [
        tf.where(share > 0, (tf.convert_to_tensor(variable.value) - value) * tf.cast(share, value.dtype), 0)
        for variable, value in zip(variables, before, strict=True)
    ]


def with_own_statistics(model: keras.Model) -> AbstractContextManager[None]:
    """Inside, a step that is compiled normalizes with the statistics of each replica's own batch."""
    return all_patched(
        (layer, {"synchronized": False, "_moments": partial(type(layer)._moments, layer)}) for layer in layers(model)
    )


def layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The layers whose statistics are those of the global batch."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
