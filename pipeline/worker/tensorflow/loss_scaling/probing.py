"""Finds out, before training, how the losses of a model that are not Keras's own scale with the batch.

Compiled losses are computed on made-up labels and outputs, without the model. A model that adds to the loss in its
layers, or computes it by itself, is called on made-up examples; nothing of its state changes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

import keras
import tensorflow as tf

from pipeline.worker import labels
from pipeline.worker.data.reading import Batch
from pipeline.worker.patched import all_patched, patched
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow.loss_scaling import reduction
from pipeline.worker.tensorflow.loss_scaling.reduction import SEEDS, Reduction, made_up, on_pieces, reduction_of, total

# What a loss comes to on the made-up batch, its first part, its second, and the first twice over.
Values: TypeAlias = Sequence[float]


def find(model: keras.Model, batch: Batch, gather: bool) -> list[str]:
    """Tells the losses of a model that is made exact how they scale; returns notes of those that do not add up.

    `batch` is an example batch in shape and type. With `gather` what is compiled is computed on the global batch.
    """
    with losses.without_keras_scaling():
        unfit = [] if gather else _compiled(model, batch)
        own = not gather and reduction.is_own(model, "compute_loss")
        if own or any(map(_may_add, model._flatten_layers())):
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
    if not compiled or y is None:
        return []
    tries: dict[int, list[Reduction | None]] = {id(loss): [] for loss in compiled}
    with contextlib.suppress(Exception):  # what does not fit together is told of when it is trained
        predicted = labels.predicted(model, x)
        # Keras's own take means over the last axis, which is the batch's where outputs have no other.
        if all(len(output.shape) > 1 for output in keras.tree.flatten(predicted)):
            compiled = [loss for loss in compiled if not reduction.is_known(loss.loss)]
        for seed in SEEDS:
            if not all(any(tries[id(loss)]) for loss in compiled):
                pieces = on_pieces(partial(_samples, model, compiled), made_up((y, predicted, weights), seed))
                for loss, *samples in zip(compiled, *pieces[:3], strict=True):
                    tries[id(loss)] += map(losses.reduction_of_samples, *samples)
    for loss in compiled:
        loss.rule = reduction.agreed(tries[id(loss)])
    return [f"the loss {loss.name}" for loss in compiled if loss.rule is Reduction.NEITHER]


def _samples(
    model: keras.Model, compiled: Sequence[losses.ExactLoss], piece: Batch, share: float
) -> list[list[losses.Sample | None]]:
    with all_patched((loss, {"samples": []}) for loss in compiled), reduction.scope(model):
        model._compile_loss(*piece)
        return [loss.samples or [] for loss in compiled]


def _may_add(layer: keras.layers.Layer) -> bool:
    return getattr(layer, "activity_regularizer", None) is not None or reduction.mentions(type(layer), "add_loss")


def _of_model(model: keras.Model, batch: Batch, own: bool, quiet: bool) -> Iterator[str]:
    """Tries what layers add, and a loss that the model computes by itself; gives the names of what does not add up.

    `quiet`: a part of the model's loss is known not to.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    examples, layers = made_up((x, y), SEEDS[0]), list(model._flatten_layers())
    # With the statistics of a batch, what the model makes of an example depends on the others in training.
    exact = not any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)
    tolerance = max(reduction.tolerance_of(layer.compute_dtype or "float32") for layer in layers)
    calls = {training: on_pieces(partial(_added, model, training), examples) for training in (True, False)}
    for place, layer in enumerate(layers):
        pieces = {training: [of_layers[place] for of_layers in calls[training]] for training in calls}
        losses.rules_of(layer).added = rules = {
            training: _rules(pieces[training], pieces[False], exact, tolerance) for training in pieces
        }
        if any(Reduction.NEITHER in of_calls for of_calls in rules.values()):
            yield f"what {layer.name} adds to the loss"
            quiet = True
    if own:
        losses.rules_of(model).whole = rule = _rule_of_whole(model, examples, exact, tolerance)
        if rule is Reduction.NEITHER and not quiet:
            yield f"compute_loss of {type(model).__name__}"


def _added(model: keras.Model, training: bool, piece: Batch, share: float) -> list[list[float]]:
    with reduction.scope(model):
        losses.call(model, keras.utils.unpack_x_y_sample_weight(piece)[0], training)
        return [[total(loss) for loss in layer._get_own_losses()] for layer in model._flatten_layers()]


def _rules(
    pieces: Sequence[list[float]], in_validation: Sequence[list[float]], exact: bool, tolerance: float
) -> tuple[Reduction, ...]:
    """The reduction of each loss that a layer has added, from its calls on all pieces, and those in validation."""
    if len({len(piece) for piece in pieces}) != 1:
        return ()
    trained, validated = list(zip(*pieces, strict=True)), list(zip(*in_validation, strict=False))
    alike = validated if len(validated) == len(trained) else [None] * len(trained)
    rules = []
    for values, again in zip(trained, alike, strict=True):
        rule = _of_parts(values, tolerance)
        if not exact and rule is Reduction.NEITHER:
            # In validation layers know of no statistics of the batch; in training those of the same examples are alike.
            rule = (None if again is None else _of_parts(again, tolerance)) or _of_doubled(values, tolerance)
        rules.append(rule or Reduction.MEAN)
    return tuple(rules)


def _of_parts(values: Values, tolerance: float) -> Reduction | None:
    whole, first, second, _ = values
    return reduction_of(whole, first, second, tolerance)


def _of_doubled(values: Values, tolerance: float) -> Reduction | None:
    """The reduction that the same examples twice over follow, whatever layers make of a batch's statistics."""
    _, first, _, doubled = values
    return reduction_of(doubled, first, first, tolerance)


def _rule_of_whole(model: keras.Model, examples: Batch, exact: bool, tolerance: float) -> Reduction:
    """MEAN for a loss of the model's own that is one once sums in it are brought to that, SUM for one that is a sum."""
    scaled, as_it_is = (on_pieces(partial(_whole, model, as_is), examples) for as_is in (False, True))
    if _of_parts(scaled, tolerance) in (None, Reduction.MEAN):
        return Reduction.MEAN
    if _of_parts(as_it_is, tolerance) is Reduction.SUM:
        return Reduction.SUM
    return Reduction.NEITHER if exact else _of_doubled(as_it_is, tolerance) or Reduction.NEITHER


def _whole(model: keras.Model, as_is: bool, piece: Batch, share: float) -> float:
    x, y = keras.utils.unpack_x_y_sample_weight(piece)[:2]
    with reduction.scope(model), contextlib.ExitStack() as stack:
        y_pred = losses.call(model, x, training=True)
        if not as_is:
            # The losses of all layers, as a step has them.
            brought = [
                loss
                for layer in model._flatten_layers()
                for loss in losses.added(layer._get_own_losses(), losses.rules_of(layer), tf.constant(share), True)
            ]
            override = brought + model._get_regularization_losses()
            stack.enter_context(patched(model, {"_losses_override": override}))
        stack.enter_context(losses.traced(tf.constant(share), training=True, as_is=as_is, alone=True))
        return total(model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=None, training=True))
