"""Compares, before training, what all replicas would make of a small batch with what one device makes of it.

A loss over pairs of examples, a layer that looks at its whole batch or keeps a mean of its own: each replica computes
it from its own part, and nothing else tells. Every process takes part; the first one compares.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import tensorflow as tf

from pipeline.record.findings import Check, Difference
from pipeline.worker.checkpoint import State, grouped
from pipeline.worker.collective import Pausable
from pipeline.worker.data.reading import Batch
from pipeline.worker.layout import ReplicaPlace
from pipeline.worker.model_error import ModelError, told
from pipeline.worker.tensorflow.agreement import texts
from pipeline.worker.tensorflow.collective import Addend, lost_a_peer
from pipeline.worker.tensorflow.equality_check.differences import TOLERANCES, are_aligned, differences, first_layer
from pipeline.worker.tensorflow.equality_check.trial import Trial, Trials
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling import probing
from pipeline.worker.tensorflow.state import on_all

# Examples of a replica with an even number and of the next one: means go wrong where replicas have not as many.
SHARES = (3, 2)
# A layer that is run at once takes 3 ms on a core, and three times as long with its gradient: so many of them in a
# process are run within two seconds.
MOST_LAYERS, MOST_WITH_GRADIENTS = 750, 250
# Elements of the gradients that are compared, and seconds of a core for a forward pass where they are.
MOST_ELEMENTS, QUICK_SECONDS = 20_000_000, 0.5
# Seconds, of the clock and of a core, after which a forward pass is given up.
LONG_SECONDS = 1.0
# Layers that add up the rounding of one tolerance.
LAYERS_OF_TOLERANCE = 20
# What to try with a loss of a step of a model's own, which is not gathered.
GATHERED = "compile(loss=...) or compute_loss, with train.gather=true, in place of train_step"
SUMMED = (
    "The step takes gradients of a sum over examples, of which each replica's counts by its share.",
    "Try ops.mean over the first axis.",
)
FULL, WITHOUT = "with gradients", "gradients were left out, to take no longer than two seconds"


# (number of the first, count) -> so many examples, or fewer where there are no more.
Examples = Callable[[int, int], Batch]
Made = TypeVar("Made")


def check(loop: Loop, collective: Pausable[Addend], where: ReplicaPlace, examples: Examples) -> Check:
    """Compares a step of all replicas on a few `examples` with one device's; all processes call it together.

    Nothing of the loop is changed. What keeps it from being compared is said in `unsaid`, and raises nothing.
    """
    began = time.perf_counter()
    try:
        result = _Comparison(loop, collective, where).made(examples)
    except ModelError as why:
        result = Check("not made", unsaid=str(why))
    return dataclasses.replace(result, seconds=round(time.perf_counter() - began, 3))


class _Comparison:
    """One small batch, and what becomes of it."""

    def __init__(self, loop: Loop, collective: Pausable[Addend], where: ReplicaPlace) -> None:
        self._loop, self._collective, self._where = loop, collective, where
        self._trials = Trials(loop, collective)
        self._own = self._trials.own
        layers = loop.model._flatten_layers()
        loosest = max(TOLERANCES.get(layer.compute_dtype, 0.0) for layer in layers)
        self._tolerance = loosest * max(1.0, len(layers) / LAYERS_OF_TOLERANCE)
        # Layers that this process runs in all, and whether the model is small enough to compare gradients as well.
        runs = len(layers) * (1 + where.local)
        elements = sum(int(np.prod(variable.shape)) for variable in loop.model.trainable_variables)
        self._is_small = runs <= MOST_WITH_GRADIENTS and elements <= MOST_ELEMENTS
        if runs > MOST_LAYERS or (self._own is not None and not self._is_small):
            raise ModelError(f"{len(layers)} layers, run one by one, would take longer than two seconds")

    def made(self, examples: Examples) -> Check:
        """Returns what differs. Raises `ModelError` where nothing can be compared."""
        where, trials = self._where, self._trials
        shares = [SHARES[number % len(SHARES)] for number in range(where.replicas)]
        first, own_shares = sum(shares[: where.first]), shares[where.first : where.first + where.local]
        local = self._together(lambda: examples(first, sum(own_shares)))
        edges = [min(edge, _count(local)) for edge in itertools.accumulate(own_shares, initial=0)]
        parts = [_cut(local, *pair) for pair in itertools.pairwise(edges)]
        whole = self._whole(local)
        one = self._together(lambda: self._forward(whole, parts))
        if self._own is None:
            quick = self._is_small and one.cpu_seconds <= QUICK_SECONDS
            trials.with_gradients = bool(self._told(FULL * quick)[0])
            if trials.with_gradients:
                forward = one
                one = self._together(lambda: trials.on_one(whole) if where.chief else forward)
        if where.processes == 1:
            replicas = self._together(lambda: trials.on_all(_count(whole), parts))
        else:
            # Others would wait for ever for one that failed; what may fail has been tried.
            replicas = trials.on_all(_count(whole), parts)
        if not where.chief:
            return Check("not made", unsaid="the first process compares")
        return self._compared(replicas, one, whole, [*edges, _count(whole)])

    def _forward(self, whole: Batch, parts: list[Batch]) -> Trial:
        """A step of one device, of Keras's own without gradients; what a process's replicas do is tried beforehand."""
        self._trials.with_gradients = self._own is not None
        until = time.perf_counter() + LONG_SECONDS
        for part in parts if self._where.processes > 1 else ():
            if _count(part):
                self._trials.on_one(part, until=until)
        return self._trials.on_one(whole, until=until) if self._where.chief else Trial()

    def _compared(self, replicas: Trial, one: Trial, whole: Batch, edges: list[int]) -> Check:
        unsaid = "" if self._trials.with_gradients else WITHOUT
        if differing := differences(replicas, one, self._tolerance):
            try:
                disturbed = self._trials.on_one(whole, np.random.default_rng(0))
                differing = differences(replicas, one, self._tolerance, disturbed)
            except Exception as error:
                raise ModelError(told(error)) from error
        if not differing:
            return Check("equal", unsaid=unsaid)
        layer, aligned = None, are_aligned(replicas, one, disturbed)
        if aligned:
            layer = first_layer(replicas, one, edges, self._tolerance, disturbed)
        cause, advice = explained(differing, layer, aligned, self._own is not None)
        is_noted = aligned and layer is None and self._is_noted(differing)
        if is_noted and self._own is not None:
            cause, advice = SUMMED
        return Check("different", [layer, *differing] if layer else differing, cause, advice, unsaid, noted=is_noted)

    def _is_noted(self, differing: list[Difference]) -> bool:
        """True if a note at build time told of the loss that makes such differences where no layer does."""
        if self._own is not None:
            return self._own.sums and "state" not in {difference.what for difference in differing}
        return "loss" in {difference.what for difference in differing} and probing.depends_on_batch(self._loop.model)

    def _whole(self, local: Batch) -> Batch:
        """The examples of all processes, in the order of their replicas."""
        if self._where.processes == 1:
            return local
        if any(leaf.dtype == tf.string for leaf in tf.nest.flatten(local)):
            raise ModelError("examples of text do not travel between processes")
        leaves = [leaf.numpy() for leaf in tf.nest.flatten(local)]
        state, parts = State({}, grouped("examples", leaves)), []
        for number in range(self._where.processes):
            own = number == self._where.number
            sent = on_all(state if own else None, self._loop.strategy, self._collective, number * self._where.local)
            assert sent is not None, "each sends something"
            parts.append(sent.group("examples"))
        joined = [tf.constant(np.concatenate(pieces)) for pieces in zip(*parts, strict=True)]
        return tf.nest.pack_sequence_as(local, joined)

    def _together(self, what: Callable[[], Made]) -> Made:
        """Calls something in this process. Raises `ModelError` in all processes where it failed in one."""
        try:
            result, failure = what(), ""
        except Exception as error:
            if lost_a_peer(error):
                raise
            failure = told(error) or type(error).__name__
            # One of the system's has a number.
            if isinstance(error, TimeoutError) and error.errno is None:
                failure = f"a step on {sum(SHARES)} examples takes longer than {LONG_SECONDS:g} s"
        for text in self._told(failure):
            if text:
                raise ModelError(text)
        return result

    def _told(self, text: str) -> list[str]:
        """Returns the text of each process."""
        alone = self._where.processes == 1
        return [text] if alone else texts(self._loop.strategy, self._collective, self._where, text)


def _count(batch: Batch) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


def _cut(batch: Batch, start: int, stop: int) -> Batch:
    return tf.nest.map_structure(lambda leaf: leaf[start:stop], batch)


def explained(differences: list[Difference], layer: Difference | None, aligned: bool, own: bool) -> tuple[str, str]:
    """(what most likely makes the differences, what to try), in a sentence each, of a model whose steps are its `own`
    or Keras's.

    `layer` is the first one whose output differs; where what layers return could not be `aligned`, it is not known.
    """
    kinds = {difference.what: difference for difference in reversed(differences)}
    if layer is not None:
        return (
            f"It begins in layer {layer.name}, which does not treat each example by itself.",
            "Try a layer that does, or keras.layers.BatchNormalization, whose statistics are those of the global "
            "batch; or train.check=off, if each replica's own part of the batch is what it is meant to see.",
        )
    if "loss" in kinds and aligned:
        return (
            "Layers return the same: the loss is no mean over examples, such as one over pairs of them.",
            f"Try {GATHERED if own else 'train.gather=true'}, or train.check=off, if each replica's own part of the "
            f"batch is what it is meant to see.",
        )
    if "loss" not in kinds and "gradient" not in kinds and "state" in kinds:
        return (
            f"{kinds['state'].name} is assigned from each replica's own part of the batch.",
            'Try keras.layers.BatchNormalization, or aggregation="mean" in add_weight, which is exact where replicas '
            "have as many examples; or train.check=off, if that is meant.",
        )
    if set(kinds) == {"metric"}:
        return (
            f"What {kinds['metric'].name} keeps is not added up over replicas to what one device has.",
            "Try a metric that keeps sums, or train.check=off, if its value does not matter.",
        )
    if "loss" not in kinds and "gradient" in kinds:
        last = [difference for difference in differences if difference.what == "gradient"][-1]
        return (
            f"The loss does not: a gradient is made of a replica's part of the batch as a whole, at {last.name} or "
            f"after it.",
            "Try a gradient that is a sum over examples, or train.check=off, if that is meant.",
        )
    return (
        "Something in it depends on the other examples of a batch.",
        f"Try {GATHERED if own else 'train.gather=true'} for a loss, keras.layers.BatchNormalization for a "
        f"normalization; or train.check=off.",
    )
