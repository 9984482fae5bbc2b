"""Finds out, before training, how each loss of a model scales with the batch, so that replicas add up to one device's.

Compiled losses are tried on made-up labels and outputs, without the model. A model that adds to the loss in its layers,
or computes it by itself, is called on made-up examples; nothing of its state changes.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from pipeline.worker import labels
from pipeline.worker.input.part import Batch
from pipeline.worker.tensorflow.loss_scaling import loss as losses
from pipeline.worker.tensorflow.loss_scaling import reduction
from pipeline.worker.tensorflow.loss_scaling.reduction import (
    EXAMPLES,
    FIRST,
    NARROW_TOLERANCE,
    PARTS,
    SEEDS,
    TOLERANCE,
    Rule,
    Values,
)


def find(model: keras.Model, batch: Batch, gather: bool) -> list[str]:
    """Has the losses of a model that is made exact know how they scale; returns what to say of those that no rule fits.

    `batch` is an example batch in shape and type. With `gather` what is compiled is computed on the global batch.
    """
    with losses.without_keras_scaling(), reduction.trying():
        unfit = _find(model, batch, gather)
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


def fits_no_rule(model: keras.Model) -> bool:
    """Has a loss of the model been found to depend on the batch as a whole?"""
    rules = [losses.rules_of(layer) for layer in model._flatten_layers()]
    added = [rule for of_layer in rules for found in of_layer.added.values() for rule in found]
    return Rule.NEITHER in [
        *(entry.loss.rule for entry in _flat_losses(model)), *added, *(of_layer.whole for of_layer in rules)
    ]  # fmt: skip


def _find(model: keras.Model, batch: Batch, gather: bool) -> list[str]:
    """The names of losses that no rule fits."""
    unfit = [] if gather else _compiled(model, batch)
    own = not gather and reduction.is_own(model, "compute_loss")
    if own or any(map(_may_add, model._flatten_layers())):
        unfit += _of_model(model, batch, own, quiet=bool(unfit))
    return unfit


def _compiled(model: keras.Model, batch: Batch) -> list[str]:
    """Tries the compiled losses, each on its part of labels and outputs."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    entries = list(dict.fromkeys(entry.loss for entry in _flat_losses(model)))
    if not entries or y is None:
        return []
    try:
        for loss in entries:
            loss.found = []
        predicted = labels.predicted(model, x)
        for seed in SEEDS:
            if all(any(loss.found) for loss in entries):
                break
            made = reduction.made_up((y, predicted, weights), seed)
            with _scope(model):
                model._compile_loss(*made)
    except Exception:  # what does not fit together is told of when it is trained
        pass
    for loss in entries:
        loss.rule, loss.found = reduction.agreed(loss.found), None
    return [f"the loss {loss.name}" for loss in entries if loss.rule is Rule.NEITHER]


def _flat_losses(model: keras.Model) -> list[keras.losses.Loss]:
    compiled = model._compile_loss
    return [] if compiled is None else compiled._flat_losses or []


def _may_add(layer: keras.layers.Layer) -> bool:
    return getattr(layer, "activity_regularizer", None) is not None or reduction.mentions(type(layer), "add_loss")


def _of_model(model: keras.Model, batch: Batch, own: bool, quiet: bool) -> list[str]:
    """Tries what layers add, and a loss that the model computes by itself; `quiet` if a part of it fits no rule."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    pieces = _pieces(reduction.made_up((x, y), SEEDS[0]))
    layers, unfit = list(model._flatten_layers()), []
    exact, narrow = _is_exact(model), _is_narrow(model)
    try:
        calls = {training: [_added(model, layers, x, training) for x, _ in pieces] for training in (True, False)}
        for place, layer in enumerate(layers):
            losses.rules_of(layer).added = found = {
                training: _rules([call[place] for call in made], [call[place] for call in calls[False]], exact, narrow)
                for training, made in calls.items()
            }
            if any(Rule.NEITHER in rules for rules in found.values()):
                unfit.append(f"what {layer.name} adds to the loss")
        if own:
            rules = losses.rules_of(model)
            rules.whole = _rule_of_whole(model, pieces, exact, narrow)
            if rules.whole is Rule.NEITHER and not (unfit or quiet):
                unfit.append(f"compute_loss of {type(model).__name__}")
    except Exception:  # whatever a model of a person's own raises on made-up examples
        return unfit
    return unfit


def _pieces(made: Batch) -> tuple[Batch, ...]:
    """The examples, the first part of them, the second, and the first twice over."""
    first, second = PARTS
    return made, reduction.rows(made, first), reduction.rows(made, second), reduction.twice(made, first)


# Of the pieces.
SHARES = (1.0, FIRST / EXAMPLES, 1 - FIRST / EXAMPLES, 1.0)


def _is_exact(model: keras.Model) -> bool:
    """Is what the model makes of an example the same whatever else is in the batch, in training too?"""
    return not any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers())


def _is_narrow(model: keras.Model) -> bool:
    """Is anything computed in half width?"""
    return any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())


def _scope(model: keras.Model) -> keras.StatelessScope:
    """Inside, no state changes. Metrics have a value of their own: reading theirs would ask the other replicas."""
    metrics = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in model.metrics_variables]
    return keras.StatelessScope(metrics, collect_losses=True)


def _added(model: keras.Model, layers: Sequence[keras.layers.Layer], x: Batch, training: bool) -> list[list[tf.Tensor]]:
    """What each layer adds to the loss in a call."""
    with _scope(model):
        _call(model, x, training)
        return [layer._get_own_losses() for layer in layers]


def _call(model: keras.Model, x: Batch, training: bool) -> Batch:
    return model(x, training=training) if model._call_has_training_arg else model(x)


def _rules(
    calls: Sequence[Sequence[tf.Tensor]], validation: Sequence[Sequence[tf.Tensor]], exact: bool, narrow: bool
) -> tuple[Rule, ...]:
    """The rule of each loss that a layer has added, from its calls on all pieces, and those in validation."""
    if len({len(call) for call in calls}) != 1:
        return ()
    tried = [_values(losses, narrow) for losses in zip(*calls, strict=True)]
    plain = [_values(losses, narrow) for losses in zip(*validation, strict=False)]
    same = plain if len(plain) == len(tried) else [None] * len(tried)
    return tuple(_rule(values, again, exact) for values, again in zip(tried, same, strict=True))


def _values(found: Sequence[tf.Tensor], narrow: bool) -> Values:
    """The values of a loss on all pieces."""
    whole, first, second, doubled = map(reduction.total, found)
    return Values(whole, (first, second), doubled, tolerance=NARROW_TOLERANCE if narrow else TOLERANCE)


def _rule(values: Values, in_validation: Values | None, exact: bool) -> Rule:
    if not values.tell:
        return Rule.MEAN
    rule = values.rule()
    if exact or rule is not Rule.NEITHER:
        return rule
    # In validation layers know of no statistics of the batch; in training those of the same examples are the same.
    return in_validation.rule() if in_validation is not None and in_validation.tell else values.of_doubled()


def _rule_of_whole(model: keras.Model, pieces: Sequence[Batch], exact: bool, narrow: bool) -> Rule:
    """Whether the loss that a model computes by itself is a mean, once sums in it are brought to that, or a sum."""
    scaled = _values(_on_pieces(lambda place: _whole(model, pieces[place], SHARES[place])), narrow)
    if not scaled.tell or scaled.rule() is Rule.MEAN:
        return Rule.MEAN
    as_is = _values(_on_pieces(lambda place: _whole(model, pieces[place], SHARES[place], as_is=True)), narrow)
    if as_is.rule() is Rule.SUM:
        return Rule.SUM
    return Rule.NEITHER if exact else as_is.of_doubled()


def _on_pieces(made: Callable[[int], tf.Tensor]) -> list[tf.Tensor]:
    """What comes of each piece by its place, of the two parts of the examples as replicas have them."""
    return [loss for places in ((0,), (1, 2), (3,)) for loss in reduction.together(made, places)]


def _whole(model: keras.Model, piece: Batch, share: float, as_is: bool = False) -> tf.Tensor:
    x, y = piece
    with _scope(model):
        y_pred = _call(model, x, training=True)
        if not as_is:
            vars(model)["_losses_override"] = _brought(model, tf.constant(share))
        try:
            with losses.traced(tf.constant(share), training=True, as_is=as_is, alone=True):
                return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=None, training=True)
        finally:
            vars(model)["_losses_override"] = []


def _brought(model: keras.Model, share: tf.Tensor) -> list[tf.Tensor]:
    """The losses of all layers, as a step has them."""
    found = [
        loss
        for layer in model._flatten_layers()
        for loss in losses.added(layer._get_own_losses(), losses.rules_of(layer), share, training=True)
    ]
    return found + model._get_regularization_losses()  # type: ignore[no-any-return]
