"""Makes the sum of every replica's loss equal to one device's loss on the whole global batch.

Keras takes the mean over a replica's own examples and then over replicas, which weighs an example of a short batch
more than another. Here a replica's loss is weighted by its share of the global batch's examples, which is exact for
every mean over examples and for penalties on weights alike, the shares adding up to one. Losses that are no such mean
(sums, means by sample weight, masked means) are brought to that rule one by one.
"""

import contextlib
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf

from pipeline.private import get_keras_mask, keras_loss
from pipeline.worker.collective import Collective
from pipeline.worker.input.part import Batch
from pipeline.worker.tensorflow.collective import Addend


@contextlib.contextmanager
def without_keras_scaling() -> Iterator[None]:
    """Inside, Keras does not divide a loss by the number of replicas: its share of the examples is used instead."""
    names = ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    kept = {name: getattr(keras_loss, name) for name in names}
    try:
        for name in names:
            setattr(keras_loss, name, lambda value: value)
        yield
    finally:
        for name, function in kept.items():
            setattr(keras_loss, name, function)


def make_exact(model: keras.Model, collective: Collective[Addend]) -> list[str]:
    """Wraps the compiled losses of a built model; returns the names of its losses per output.

    There are none for a model with a single loss, as in Keras.
    """
    for layer in model._flatten_layers():
        layer._losses = _LossesOfThread()
    compiled = model._compile_loss
    if compiled is None or not compiled._flat_losses:
        return []
    compiled._flat_losses = [
        entry if isinstance(entry.loss, _ExactLoss) else entry._replace(loss=_ExactLoss(entry.loss, collective))
        for entry in compiled._flat_losses
    ]
    many = len(compiled._flat_losses) > 1
    return [f"{entry.name}_loss" for entry in compiled._flat_losses] if many else []


def weighted(
    model: keras.Model, x: Batch, y: Batch, y_pred: Batch, weights: Batch | None, share: tf.Tensor, training: bool
) -> tf.Tensor:
    """This replica's part of the loss, for a replica that holds `share` (0 to 1) of the global batch's examples.

    Returns a float32 vector, [the total, then the loss of each output where there are several]. Summed over
    replicas it is the loss of the global batch.
    """
    _tracing.share, _tracing.values = share, []
    try:
        total = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=training)
        values = _tracing.values if len(_tracing.values) > 1 else []
    finally:
        _tracing.values = None
    parts = [tf.reduce_sum(tf.cast(value, tf.float32)) * share for value in [total, *values]]
    # The mean over an empty share is not a number, and none of the examples is in it.
    return tf.where(share > 0, tf.stack(parts), 0.0)


class _Tracing(threading.local):
    """What the losses of the step being traced need to know; each replica is traced in a thread of its own."""

    # Set before a loss is traced; `values` is None where no step is.
    share: tf.Tensor
    values: list[tf.Tensor] | None = None


_tracing = _Tracing()


class _LossesOfThread(threading.local):
    """What a layer's `add_loss` collects, for each replica apart.

    Replicas are traced in turns, changing at every sum over replicas. Keras keeps one list a layer, in which one
    replica would find what another added, or nothing.
    """

    def __init__(self) -> None:
        self._losses: list[tf.Tensor] = []

    def extend(self, losses: list[tf.Tensor]) -> None:
        self._losses.extend(losses)

    def clear(self) -> None:
        self._losses.clear()

    def __getitem__(self, index: slice) -> list[tf.Tensor]:
        return self._losses[index]


class _ExactLoss:
    """A Keras loss brought to the rule that its value times the replica's share adds up to the global value."""

    def __init__(self, loss: keras.losses.Loss, collective: Collective[Addend]) -> None:
        self.loss, self.name, self._collective = loss, loss.name, collective

    def __call__(self, y_true: tf.Tensor, y_pred: Batch, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
        value = self.loss(y_true, y_pred, sample_weight)
        if _tracing.values is None:
            # No step of ours: a callback evaluates a copy of the model.
            return value
        part = self._part(y_pred, sample_weight)
        if part is not None:
            value = value * tf.cast(tf.math.divide_no_nan(part, _tracing.share), value.dtype)
        _tracing.values.append(value)
        return value

    def _part(self, y_pred: Batch, sample_weight: tf.Tensor | None) -> tf.Tensor | None:
        """What this replica's value counts for in the global one; None where that is its share of the examples."""
        reduction = getattr(self.loss, "reduction", "sum_over_batch_size")
        if reduction in ("sum", "none", None):
            return tf.constant(1.0)
        mask = get_keras_mask(y_pred)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            here = tf.cast(sample_weight, tf.float32)
            here = tf.reduce_sum(here if mask is None else here * tf.cast(mask, tf.float32))
        elif mask is not None:
            here = tf.reduce_sum(tf.cast(mask, tf.float32))
        else:
            return None
        here *= tf.cast(_tracing.share > 0, tf.float32)  # An example that only pads a static batch is none.
        return tf.math.divide_no_nan(here, *self._collective.sum([here]))
