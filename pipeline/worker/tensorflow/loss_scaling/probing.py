"""Finds out, before training, how the losses of a model that are not Keras's own scale with the batch.

Compiled losses are computed on made-up labels and outputs, without the model. A model that adds to the loss in its
layers, or computes it by itself, is called on made-up examples; nothing of its state changes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from pipeline.worker import labels
from pipeline.worker.data.reading import Batch
from pipeline.worker.patched import all_patched, patched
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow.loss_scaling import reduction
from pipeline.worker.tensorflow.loss_scaling.reduction import (
    SEEDS,
    Reduction,
    made_up,
    of_doubled,
    on_pieces,
    reduction_of,
    total,
)  # fmt: skip


def find(model: keras.Model, batch: Batch, gather: bool) -> list[str]:
    """Tells the losses of an exact model how they scale; returns notes of those that do not add up."""
    with losses.without_keras_scaling():
        unfit = [] if gather else _compiled(model, batch)
        own = not gather and reduction.is_own(model, "compute_loss")
        if own or any(
            getattr(layer, "activity_regularizer", None) is not None or reduction.mentions(type(layer), "add_loss")
            for layer in model._flatten_layers()
        ):
            # Whatever a model of a person's own raises on made-up examples.
            with contextlib.suppress(Exception):
                for name in _of_model(model, batch, own, quiet=bool(unfit)):
                    unfit.append(name)
    instead = (
        "that loss in compile or compute_loss, from the model's outputs"
        if gather
        else "train.gather=true, or gather=True in pipeline.fit"
    )
    return [
        f"Expected losses that are means or sums over examples, received {name}, which depends on the batch as a "
        f"whole: over several replicas it is the mean of each replica's, not one device's. Try {instead}."
        for name in unfit
    ]


def depends_on_batch(model: keras.Model) -> bool:
    """True if a loss of the model has been found to depend on the batch as a whole."""
    of_layers = [losses.rules_of(layer) for layer in model._flatten_layers()]
    added = [one for rules in of_layers for reductions in rules.added.values() for one in reductions]
    compiled = [loss.rule for loss in losses.compiled_of(model)]
    return Reduction.NEITHER in [*compiled, *added, *(rules.whole for rules in of_layers)]


def _compiled(model: keras.Model, batch: Batch) -> list[str]:
    """Tries compiled losses, each on its part of labels and outputs; returns the names of those that do not add up."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    compiled = losses.compiled_of(model)
    for loss in compiled:
        loss.rule = None
    if not compiled or y is None:
        return []

    def samples(piece: Batch, share: float) -> list[list[Any]]:
        of_all: list[list[Any]] = [[] for _ in compiled]

        def tried(loss: keras.losses.Loss, of_loss: list[Any], *values: tf.Tensor) -> tf.Tensor:
            try:
                of_loss.append(losses.sample(loss, *values))
            except Exception:  # whatever a loss of a person's own raises on made-up labels
                of_loss.append(None)
            return tf.zeros(())

        pairs = zip(compiled, of_all, strict=True)
        with all_patched((one, {"loss": partial(tried, one.loss, own)}) for one, own in pairs), reduction.scope(model):
            model._compile_loss(*piece)
        return of_all

    with contextlib.suppress(Exception):  # what does not fit together is told of when it is trained
        predicted = labels.predicted(model, x)
        # Keras's own take means over the last axis, which is the batch's where outputs have no other.
        if all(len(output.shape) > 1 for output in keras.tree.flatten(predicted)):
            compiled = [loss for loss in compiled if not reduction.is_known(loss.loss)]
        for seed in SEEDS:
            if not all(loss.rule for loss in compiled):
                pieces = on_pieces(samples, made_up((y, predicted, weights), seed))
                for loss, *of_loss in zip(compiled, *pieces[:3], strict=True):
                    different = {loss.rule, *map(_reduction_of_samples, *of_loss)} - {None}
                    loss.rule = Reduction.NEITHER if len(different) > 1 else next(iter(different), None)
    return [f"the loss {loss.name}" for loss in compiled if loss.rule is Reduction.NEITHER]


def _reduction_of_samples(*samples: tuple[float, float | None, float, bool] | None) -> Reduction | None:
    """Returns a loss's reduction from its values on a batch and its parts; None where they do not tell."""
    if None in samples:
        return None
    values, counts, (tolerance, *_), (is_masked, *_) = zip(*filter(None, samples), strict=True)
    rule = reduction_of(values, tolerance, None if None in counts else counts[1:])
    # What is left where some labels count for nothing is a mean or a sum by its reduction, unless it is of the batch as
    # a whole, as one over pairs that masks examples without any.
    return None if is_masked and rule is not Reduction.NEITHER else rule


def _of_model(model: keras.Model, batch: Batch, own: bool, quiet: bool) -> Iterator[str]:
    """Tries what the model adds to or computes as its loss; gives what does not add up, unless `quiet`."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    examples, layers = made_up((x, y), SEEDS[0]), list(model._flatten_layers())
    # With the statistics of a batch, what the model makes of an example depends on the others in training.
    exact = not any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)
    tolerance = max(reduction.tolerance_of(layer.compute_dtype or "float32") for layer in layers)

    def added(training: bool, piece: Batch, share: float) -> list[list[float]]:
        with reduction.scope(model):
            losses.call(model, keras.utils.unpack_x_y_sample_weight(piece)[0], training)
            return [[total(loss) for loss in layer._get_own_losses()] for layer in layers]

    calls = {training: on_pieces(partial(added, training), examples) for training in (True, False)}
    for place, layer in enumerate(layers):
        pieces = {training: [of_layers[place] for of_layers in calls[training]] for training in calls}
        losses.rules_of(layer).added = rules = {
            training: _rules(pieces[training], pieces[False], exact, tolerance) for training in pieces
        }
        if any(Reduction.NEITHER in of_calls for of_calls in rules.values()):
            yield f"what {layer.name} adds to the loss"
            quiet = True
    if own:
        # MEAN is a loss that is one once sums in it are brought to that, SUM one that is a sum.
        scaled, as_it_is = (on_pieces(partial(_whole, model, as_is), examples) for as_is in (False, True))
        if reduction_of(scaled[:3], tolerance) in (None, Reduction.MEAN):
            rule = Reduction.MEAN
        elif (rule := reduction_of(as_it_is[:3], tolerance) or Reduction.NEITHER) is not Reduction.SUM:
            rule = (None if exact else of_doubled(as_it_is, tolerance)) or Reduction.NEITHER
        losses.rules_of(model).whole = rule
        if rule is Reduction.NEITHER and not quiet:
            yield f"compute_loss of {type(model).__name__}"


def _rules(
    pieces: Sequence[list[float]], in_validation: Sequence[list[float]], exact: bool, tolerance: float
) -> tuple[Reduction, ...]:
    """The reduction of each loss that a layer has added, from its calls on all pieces, and those in validation."""
    if len({len(piece) for piece in pieces}) != 1:
        return ()
    trained, validated = list(zip(*pieces, strict=True)), list(zip(*in_validation, strict=False))
    rules = []
    for place, values in enumerate(trained):
        rule = reduction_of(values[:3], tolerance)
        if not exact and rule is Reduction.NEITHER:
            # In validation layers know of no statistics of the batch; in training those of the same examples are alike.
            again = reduction_of(validated[place][:3], tolerance) if len(validated) == len(trained) else None
            rule = again or of_doubled(values, tolerance)
        rules.append(rule or Reduction.MEAN)
    return tuple(rules)


def _whole(model: keras.Model, as_is: bool, piece: Batch, share: float) -> float:
    x, y = keras.utils.unpack_x_y_sample_weight(piece)[:2]
    with reduction.scope(model), contextlib.ExitStack() as stack:
        y_pred = losses.call(model, x, training=True)
        if not as_is:
            # The losses of all layers, as a step has them.
            override = [
                loss
                for layer in model._flatten_layers()
                for loss in losses.added(layer._get_own_losses(), losses.rules_of(layer), tf.constant(share), True)
            ] + model._get_regularization_losses()
            stack.enter_context(patched(model, {"_losses_override": override}))
        stack.enter_context(losses.traced(tf.constant(share), training=True, as_is=as_is, alone=True))
        return total(model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=None, training=True))
