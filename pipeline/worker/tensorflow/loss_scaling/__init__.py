"""Makes the sum of every replica's loss equal to one device's loss on the whole global batch.

Keras takes the mean over a replica's own examples and then over replicas, which weighs an example of a short batch
more than another. Here a replica's loss is weighted by its share of the global batch's examples, which is exact for
every mean over examples and for penalties on weights alike, the shares adding up to one. Losses that are no such mean
(sums, means by sample weight, masked means) are brought to that rule one by one. Which they are of those that are not
Keras's own is found out before training: compiled ones are computed on made-up labels and outputs, without the model;
a model that adds to the loss in its layers, or computes it by itself, is called on made-up examples.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from pipeline.private import get_keras_mask, keras_loss
from pipeline.worker import labels
from pipeline.worker.collective import Collective
from pipeline.worker.data.reading import Batch
from pipeline.worker.patched import all_patched, patched
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.loss_scaling import reduction
from pipeline.worker.tensorflow.loss_scaling.global_batch import GlobalBatch, as_one_device
from pipeline.worker.tensorflow.loss_scaling.reduction import SEEDS, Reduction, made_up, on_pieces, reduction_of, total


def without_keras_scaling() -> contextlib.AbstractContextManager[None]:
    """Inside, Keras does not divide a loss by the number of replicas: its share of the examples is used instead."""

    def reduced(values: tf.Tensor, sample_weight: tf.Tensor | None = None, **how: object) -> tf.Tensor:
        _tracing.rank, _tracing.mask = len(values.shape), how.get("mask")
        if len(values.shape) or sample_weight is None or _tracing.weighed is None:
            return reduce(values, sample_weight, **how)
        return values * _tracing.weighed(reduce(tf.ones((), values.dtype), sample_weight, **how))

    reduce = keras_loss.reduce_weighted_values
    as_it_is = dict.fromkeys(("scale_loss_for_distribution", "unscale_loss_for_distribution"), lambda value: value)
    return patched(keras_loss, as_it_is | {"reduce_weighted_values": reduced})


def make_exact(model: keras.Model, collective: Collective[Addend]) -> None:
    """Wraps the compiled losses of a built model."""
    apart(model)
    if entries := getattr(model._compile_loss, "_flat_losses", None):
        model._compile_loss._flat_losses = [
            entry if isinstance(entry.loss, ExactLoss) else entry._replace(loss=ExactLoss(entry.loss, collective))
            for entry in entries
        ]


def apart(model: keras.Model) -> None:
    """Makes each replica collect by itself what is added to the loss."""
    for layer in model._flatten_layers():
        layer._losses = _LossesOfThread(Rules())


def weighted(
    model: keras.Model,
    x: Batch,
    y: Batch,
    y_pred: Batch,
    weights: Batch | None,
    share: tf.Tensor,
    training: bool,
    whole: GlobalBatch | None = None,
) -> tf.Tensor:
    """Returns float32 [total, then each output's loss where there are several], which add up to one device's.

    This replica holds `share` (0 to 1) of the global batch; with `whole` every replica computes it on all of that.
    """
    is_sum = whole is None and rules_of(model).whole is Reduction.SUM
    if whole is not None:
        x = whole.of(x) if reduction.is_own(model, "compute_loss") else x
        y, y_pred, weights = whole.of(y), whole.of(y_pred), whole.of(weights)
    at_once = contextlib.nullcontext() if whole is None else as_one_device.held(True)
    with at_once, traced(share, training, as_is=is_sum) as values:
        total = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=training)
    parts = [tf.reduce_sum(tf.cast(value, tf.float32)) * share for value in [total, *values]]
    if is_sum or (whole is None and len(total.shape)):
        parts[0] = tf.reduce_sum(tf.cast(total, tf.float32))
    # The mean over an empty share is not a number, and none of the examples is in it.
    return tf.where(share > 0, tf.stack(parts), 0.0)


def find(model: keras.Model, batch: Batch, gather: bool) -> list[str]:
    """Tells the losses of an exact model how they scale; returns notes of those that do not add up."""
    with without_keras_scaling():
        unfit = [] if gather else _compiled(model, batch)
        own = not gather and reduction.is_own(model, "compute_loss")
        if own or any(
            getattr(layer, "activity_regularizer", None) is not None or reduction.mentions(type(layer), "add_loss")
            for layer in model._flatten_layers()
        ):
            # Whatever a model of a person's own raises on made-up examples; what was found before stays.
            with contextlib.suppress(Exception):
                unfit.extend(_of_model(model, batch, own, quiet=bool(unfit)))
    by_gathering = "train.gather=true, or gather=True in pipeline.fit"
    instead = "that loss in compile or compute_loss, from the model's outputs" if gather else by_gathering
    return [
        f"Expected losses that are means or sums over examples, received {name}, which depends on the batch as a "
        f"whole: over several replicas it is the mean of each replica's, not one device's. Try {instead}."
        for name in unfit
    ]


def rules_of(layer: keras.layers.Layer) -> "Rules":
    """Returns the reductions of what a layer of an exact model adds to the loss."""
    return layer._losses.rules  # type: ignore[no-any-return]


def call(model: keras.Model, x: Batch, training: bool) -> Batch:
    """The model's outputs, with `training` where its `call` takes that."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


@dataclass
class Rules:
    """Reductions of what a layer adds in training (True) or not, and of the `whole` loss that a model computes."""

    added: Mapping[bool, tuple[Reduction, ...]] = field(default_factory=dict)
    whole: Reduction | None = None


class _Tracing(threading.local):
    share: tf.Tensor
    # The losses of each output; None where no step is traced.
    values: list[tf.Tensor] | None = None
    training = True
    # Losses are left as they are, because they are summed; they are tried without other replicas.
    as_is = alone = False
    # Of a loss's values before Keras reduced them, as far as it has.
    rank: int | None = None
    mask: tf.Tensor | None = None
    # Maps this replica's sum or mean of weights to the global batch's.
    weighed: Callable[[tf.Tensor], tf.Tensor] | None = None


_tracing = _Tracing()


@contextlib.contextmanager
def traced(share: tf.Tensor, training: bool, as_is: bool = False, alone: bool = False) -> Iterator[list[tf.Tensor]]:
    """Inside, losses are brought to the rule for a replica with that share; gives those of each of several outputs."""
    values: list[tf.Tensor] = []
    with patched(_tracing, {"share": share, "values": values, "training": training, "as_is": as_is, "alone": alone}):
        yield values
    if len(values) < 2:
        values.clear()


class _LossesOfThread(threading.local):
    """Losses that a layer adds, for each replica apart: replicas are traced in turns, and would share Keras's list."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self._losses = rules, list[tf.Tensor]()
        self.extend, self.clear = self._losses.extend, self._losses.clear

    def __len__(self) -> int:
        return len(self._losses)

    def __getitem__(self, index: slice) -> list[tf.Tensor]:
        if _tracing.values is None or _tracing.as_is:
            return self._losses[index]
        return added(self._losses, self.rules, _tracing.share, _tracing.training)[index]


def added(losses: list[tf.Tensor], rules: Rules, share: tf.Tensor, training: bool) -> list[tf.Tensor]:
    """Scales a layer's losses so that each times the replica's share adds up to the global value."""
    reductions = itertools.chain(rules.added.get(training, ()), itertools.repeat(Reduction.MEAN))
    return [
        tf.math.divide_no_nan(loss, tf.cast(share, loss.dtype)) if reduction is Reduction.SUM else loss
        for loss, reduction in zip(losses, reductions, strict=False)
    ]


class ExactLoss:
    """A Keras loss brought to the rule that its value times the replica's share adds up to the global value."""

    def __init__(self, loss: keras.losses.Loss, collective: Collective[Addend]) -> None:
        self.loss, self.name, self._collective = loss, loss.name, collective
        # How it scales; None: as its reduction says.
        self.rule: Reduction | None = None

    def __call__(self, y_true: tf.Tensor, y_pred: Batch, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
        """The loss as a step needs it."""
        if _tracing.values is None:
            # No step of ours: a callback evaluates a copy of the model.
            return self.loss(y_true, y_pred, sample_weight)
        apart = self._collective.replicas > 1 and not (_tracing.as_is or as_one_device.value or _tracing.alone)
        _tracing.rank, _tracing.mask, _tracing.weighed = None, None, self._weighed if apart else None
        value = self.loss(y_true, y_pred, sample_weight)
        _tracing.weighed = None
        part, scaled = None if as_one_device.value else self._part(y_pred, sample_weight), value
        if part is not None:
            scaled *= tf.cast(tf.math.divide_no_nan(part, _tracing.share), value.dtype)
        _tracing.values.append(scaled)
        # One for each example is summed in the end, and the step's other losses with it, once for each.
        return value if _tracing.as_is or len(value.shape) else scaled

    def _weighed(self, weights: tf.Tensor) -> tf.Tensor:
        """Returns the sum or mean of the weights of all replicas' examples, from that of this replica's `weights`."""
        is_sum = self.loss.reduction in ("sum", "none", None)
        mask = None if is_sum else _tracing.mask
        share = tf.cast(_tracing.share if mask is None else tf.math.count_nonzero(mask), weights.dtype)
        part = tf.stack([tf.reduce_sum(weights) * (1.0 if is_sum else share), share])
        (sums,) = self._collective.sum([tf.where(_tracing.share > 0, part, tf.zeros((), weights.dtype))])
        # A mean of weights is over what is not masked.
        return sums[0] if mask is None else tf.math.divide_no_nan(sums[0], sums[1])

    def _part(self, y_pred: Batch, sample_weight: tf.Tensor | None) -> tf.Tensor | None:
        """Returns this replica's part of the global value; None where that is its share of the examples."""
        reduction = getattr(self.loss, "reduction", "sum_over_batch_size")
        rule = self.rule or (Reduction.SUM if reduction in ("sum", "none", None) else Reduction.MEAN)
        if rule is Reduction.SUM:
            return tf.constant(1.0)
        # One number for the batch is a mean over its examples, whatever is masked among them.
        one = _tracing.rank == 0
        mask = None if one or _tracing.alone else get_keras_mask(y_pred) if _tracing.rank is None else _tracing.mask
        by_weight = rule is Reduction.WEIGHTED or (reduction == "mean_with_sample_weight" and not one)
        weights = sample_weight if by_weight and not _tracing.alone else None
        factors = [tf.cast(factor, tf.float32) for factor in (weights, mask) if factor is not None]
        if not factors:
            return None
        # An example that only pads a static batch is none.
        count = tf.reduce_sum(functools.reduce(tf.multiply, factors)) * tf.cast(_tracing.share > 0, tf.float32)
        return tf.math.divide_no_nan(count, *self._collective.sum([count]))


def _compiled(model: keras.Model, batch: Batch) -> list[str]:
    """Tries compiled losses, each on its part of labels and outputs; returns the names of those that do not add up."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    compiled = [entry.loss for entry in getattr(model._compile_loss, "_flat_losses", None) or ()]
    for loss in compiled:
        loss.rule = None
    if not compiled or y is None:
        return []

    def samples(piece: Batch, share: float) -> list[list[Any]]:
        of_all: list[list[Any]] = [[] for _ in compiled]

        def tried(loss: keras.losses.Loss, of_loss: list[Any], *values: tf.Tensor) -> tf.Tensor:
            # Keras applies weights to what `call` gives.
            weights = None if type(loss).__call__ is keras.losses.Loss.__call__ else values[2]
            _tracing.mask = None
            try:
                value, mask = loss(*values[:2], weights), _tracing.mask
                counted = weights if mask is None else tf.cast(mask, tf.float32)
                applied = None if counted is None else total(counted)
                of_loss.append((total(value), applied, reduction.tolerance_of(value.dtype), mask is not None))
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
    """Returns a loss's reduction from a batch and its parts; None where they do not tell.

    Of each (the value, the sum of weights or mask that the loss applies itself, tolerance, is anything masked?).
    """
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

    def own_losses(training: bool, moved: bool, piece: Batch, share: float) -> list[list[float]]:
        with reduction.scope(model, moved):
            call(model, keras.utils.unpack_x_y_sample_weight(piece)[0], training)
            return [[total(loss) for loss in layer._get_own_losses()] for layer in layers]

    @functools.cache
    def tried(training: bool, moved: bool) -> list[list[list[float]]]:
        return on_pieces(partial(own_losses, training, moved), examples)

    def rules_at(place: int, training: bool, moved: bool) -> tuple[Reduction | None, ...]:
        pieces, validated = ([of_all[place] for of_all in tried(one, moved)] for one in (training, False))
        return _rules(pieces, validated, exact, tolerance)

    for place, layer in enumerate(layers):
        rules = dict[bool, tuple[Reduction, ...]]()
        for training in (True, False):
            first = rules_at(place, training, moved=False)
            # What initial weights make zero tells nothing.
            again = rules_at(place, training, moved=True)[: len(first)] if None in first else first
            both = itertools.zip_longest(first, again)
            rules[training] = tuple(one or other or Reduction.MEAN for one, other in both)
        rules_of(layer).added = rules
        if any(Reduction.NEITHER in of_calls for of_calls in rules.values()):
            yield f"what {layer.name} adds to the loss"
            quiet = True
    if own:
        ways = {_rule_of_whole(model, examples, moved, exact, tolerance) for moved in (False, True)} - {None}
        rules_of(model).whole = rule = Reduction.NEITHER if len(ways) > 1 else next(iter(ways), Reduction.MEAN)
        if rule is Reduction.NEITHER and not quiet:
            yield f"compute_loss of {type(model).__name__}"


def _rules(
    pieces: Sequence[list[float]], in_validation: Sequence[list[float]], exact: bool, tolerance: float
) -> tuple[Reduction | None, ...]:
    """The reduction of each loss that a layer adds, from all pieces in training and validation; None: not told."""
    if len({len(piece) for piece in pieces}) != 1:
        return ()
    trained, validated = list(zip(*pieces, strict=True)), list(zip(*in_validation, strict=False))
    rules = []
    for place, values in enumerate(trained):
        rule = reduction_of(values[:3], tolerance)
        if not exact and rule is Reduction.NEITHER:
            # In validation layers know of no statistics of the batch; in training those of the same examples are alike.
            again = reduction_of(validated[place][:3], tolerance) if len(validated) == len(trained) else None
            rule = again or reduction.of_doubled(values, tolerance)
        rules.append(rule)
    return tuple(rules)


def _rule_of_whole(model: keras.Model, examples: Batch, moved: bool, exact: bool, tolerance: float) -> Reduction | None:
    """MEAN: a loss that is one once sums in it are brought to that; SUM: a sum; None: not told."""
    scaled, as_it_is = (on_pieces(partial(_whole, model, as_is, moved), examples) for as_is in (False, True))
    if (rule := reduction_of(scaled[:3], tolerance)) in (None, Reduction.MEAN):
        return rule
    if reduction_of(as_it_is[:3], tolerance) is Reduction.SUM:
        return Reduction.SUM
    return (None if exact else reduction.of_doubled(as_it_is, tolerance)) or Reduction.NEITHER


def _whole(model: keras.Model, as_is: bool, moved: bool, piece: Batch, share: float) -> float:
    x, y = keras.utils.unpack_x_y_sample_weight(piece)[:2]
    part = tf.constant(share)
    with reduction.scope(model, moved), contextlib.ExitStack() as stack:
        y_pred = call(model, x, training=True)
        if not as_is:
            # The losses of all layers, as a step has them.
            of_layers = (added(one._get_own_losses(), rules_of(one), part, True) for one in model._flatten_layers())
            override = [*itertools.chain.from_iterable(of_layers), *model._get_regularization_losses()]
            stack.enter_context(patched(model, {"_losses_override": override}))
        stack.enter_context(traced(part, training=True, as_is=as_is, alone=True))
        return total(model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=None, training=True))
