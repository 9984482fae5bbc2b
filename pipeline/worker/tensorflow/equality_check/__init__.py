"""Compares, before training, what all replicas would make of a small batch with what one device makes of it.

A loss over pairs of examples, a layer that looks at its whole batch or keeps a mean of its own: each replica computes
it from its own part, and nothing else tells. Every process takes part; the first one compares.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from pipeline.record.findings import Check, Difference
from pipeline.worker.collective import Pausable
from pipeline.worker.data.reading import Batch, pieces
from pipeline.worker.layout import ReplicaPlace
from pipeline.worker.model_error import ModelError, told
from pipeline.worker.tensorflow.collective import Addend, by_replica, lost_a_peer, texts
from pipeline.worker.tensorflow.equality_check.trial import Trial, Trials
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling.global_batch import GlobalBatch
from pipeline.worker.tensorflow.step import NOTED_AS

# Examples of a replica with an even number and of the next one: means go wrong where replicas have not as many.
SHARES = (3, 2)
# So many layers run within two seconds in a process: one takes 3 ms of a core, three times as long with its gradient.
MOST_LAYERS, MOST_WITH_GRADIENTS = 750, 250
# Elements of the gradients that are compared, and seconds of a core for a forward pass where they are.
MOST_ELEMENTS, QUICK_SECONDS = 20_000_000, 0.5
# Seconds, of the clock and of a core, after which a forward pass is given up.
LONG_SECONDS = 1.0
# What sums in another order leave, by the type that a model computes in, as a share of what is compared; so many layers
# add up to one of these.
TOLERANCES = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
LAYERS_OF_TOLERANCE = 20
# What differs is told where it is so many times what a disturbance of the last digits makes of it on one device.
TIMES_NOISE = 30.0
# Where all but gradients is equal, so far apart they may be: rounding switches a unit of a deep model, like one of ReLU
# whose input is about 0, and all gradients before it change by its part.
SWITCHED = 1e-2
# Of a tensor that is next to nothing beside others of its kind, the others' size counts; of a number next to 0, this.
LEAST_SHARE, LEAST = 1e-4, 1e-6
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
    """Compares a step of all replicas with one device's, or says why not; all processes call it together."""
    began = time.perf_counter()
    try:
        result = _Comparison(loop, collective, where).made(examples)
    except ModelError as why:
        result = Check("not made", unsaid=str(why))
    return dataclasses.replace(result, seconds=round(time.perf_counter() - began, 3))


class _Comparison:
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
        parts = list(pieces(local, edges))
        whole = self._whole(local, parts)

        def forward() -> Trial:
            trials.with_gradients = self._own is not None
            until = time.perf_counter() + LONG_SECONDS
            # What a process's replicas do is tried beforehand.
            for part in parts if where.processes > 1 else ():
                if _count(part):
                    trials.on_one(part, until=until)
            return trials.on_one(whole, until=until) if where.chief else Trial()

        one = self._together(forward)
        quick = self._is_small and one.cpu_seconds <= QUICK_SECONDS
        if self._own is None and self._told(FULL * quick)[0]:
            trials.with_gradients = True
            one = self._together(lambda: trials.on_one(whole) if where.chief else Trial())
        on_all = partial(trials.on_all, _count(whole), parts)
        # Others would wait for ever for one that failed; what may fail has been tried.
        replicas = self._together(on_all) if where.processes == 1 else on_all()
        if not where.chief:
            return Check("not made", unsaid="the first process compares")
        return self._compared(replicas, one, whole, [*edges, _count(whole)])

    def _compared(self, replicas: Trial, one: Trial, whole: Batch, edges: list[int]) -> Check:
        unsaid = "" if self._trials.with_gradients else WITHOUT
        if differing := _differences(replicas, one, self._tolerance):
            try:
                disturbed = self._trials.on_one(whole, np.random.default_rng(0))
                differing = _differences(replicas, one, self._tolerance, disturbed)
            except Exception as error:
                raise ModelError(told(error)) from error
        if not differing:
            return Check("equal", unsaid=unsaid)
        # The names of layers in the order of their calls, on each replica.
        outputs = [of_one for trial in (replicas, one, disturbed) for of_one in trial.outputs.values()]
        aligned = len({tuple(name for name, _ in of_one) for of_one in outputs}) == 1
        layer = _first_layer(replicas, one, edges, self._tolerance, disturbed) if aligned else None
        cause, advice = _explained(differing, layer, aligned, self._own is not None)
        # Has a note at build time told of the loss that makes such differences where no layer does?
        kinds, by_no_layer = {difference.what for difference in differing}, aligned and layer is None
        by_loss = "loss" in kinds if self._own is None else "state" not in kinds
        is_noted = by_no_layer and by_loss and vars(self._loop.model)[NOTED_AS]
        if is_noted and self._own is not None:
            cause, advice = SUMMED
        return Check("different", [layer, *differing] if layer else differing, cause, advice, unsaid, noted=is_noted)

    def _whole(self, local: Batch, parts: list[Batch]) -> Batch:
        """The examples of all processes, in the order of their replicas, of which those here have these `parts`."""
        if self._where.processes == 1:
            return local
        if any(leaf.dtype == tf.string for leaf in tf.nest.flatten(local)):
            raise ModelError("examples of text do not travel between processes")
        strategy = self._loop.strategy
        all_of = partial(GlobalBatch, self._collective, share=tf.constant(1.0))
        gathered = strategy.run(lambda part: all_of(batch=part).of(part), args=(by_replica(strategy, parts),))
        return tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], gathered)

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
        strategy, where = self._loop.strategy, self._where
        return [text] if where.processes == 1 else texts(strategy, self._collective, where, text)


def _count(batch: Batch) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


def _explained(differences: list[Difference], layer: Difference | None, aligned: bool, own: bool) -> tuple[str, str]:
    """(what most likely makes the differences, what to try); the first `layer` that differs is known if `aligned`."""
    kinds = {difference.what: difference for difference in reversed(differences)}
    gather = GATHERED if own else "train.gather=true"
    meant = "or train.check=off, if each replica's own part of the batch is what it is meant to see."
    if layer is not None:
        does = "a layer that does, or keras.layers.BatchNormalization, whose statistics are those of the global batch"
        cause = f"It begins in layer {layer.name}, which does not treat each example by itself."
        return cause, f"Try {does}; {meant}"
    if "loss" in kinds and aligned:
        cause = "Layers return the same: the loss is no mean over examples, such as one over pairs of them."
        return cause, f"Try {gather}, {meant}"
    if "loss" not in kinds and "gradient" not in kinds and "state" in kinds:
        return (
            f"{kinds['state'].name} is assigned from each replica's own part of the batch.",
            'Try keras.layers.BatchNormalization, or aggregation="mean" in add_weight, which is exact where replicas '
            "have as many examples; or train.check=off, if that is meant.",
        )
    if set(kinds) == {"metric"}:
        cause = f"What {kinds['metric'].name} keeps is not added up over replicas to what one device has."
        return cause, "Try a metric that keeps sums, or train.check=off, if its value does not matter."
    if "loss" not in kinds and "gradient" in kinds:
        *_, last = (difference.name for difference in differences if difference.what == "gradient")
        cause = f"a gradient is made of a replica's part of the batch as a whole, at {last} or after it"
        advice = "Try a gradient that is a sum over examples, or train.check=off, if that is meant."
        return f"The loss does not: {cause}.", advice
    advice = f"Try {gather} for a loss, keras.layers.BatchNormalization for a normalization; or train.check=off."
    return "Something in it depends on the other examples of a batch.", advice


def _differences(all_replicas: Trial, one: Trial, tolerance: float, disturbed: Trial | None = None) -> list[Difference]:
    """Lists what differs by more than `tolerance`, and by more than `disturbed`, one device's step with noise, does."""
    differing = [
        Difference(what, name, float(apart) if np.isfinite(apart) else None, *numbers)
        for apart, noise, what, name, *numbers in _candidates(all_replicas, one, disturbed)
        if not np.isfinite(apart) or (apart > tolerance and not apart <= TIMES_NOISE * noise)
    ]
    switched = all(
        difference.what == "gradient" and difference.relative is not None and difference.relative <= SWITCHED
        for difference in differing
    )
    return [] if switched else differing


def _first_layer(of_all: Trial, one: Trial, edges: list[int], tolerance: float, disturbed: Trial) -> Difference | None:
    """The first layer whose output differs; after the `edges` of replicas here comes how many examples all have."""
    (whole,), (noisy,) = one.outputs.values(), disturbed.outputs.values()
    for place, (name, _) in enumerate(whole):
        worst, noise = 0.0, 0.0
        for number, outputs in of_all.outputs.items():
            for leaf, of_one, of_noise in zip(outputs[place][1], whole[place][1], noisy[place][1], strict=False):
                expected, other = (_rows_of(tensor, leaf, edges, number) for tensor in (of_one, of_noise))
                if expected is not None and other is not None:
                    worst = max(worst, _apart(leaf.numpy(), expected))
                    noise = max(noise, _apart(other, expected))
        if worst > tolerance and not worst <= TIMES_NOISE * noise:
            return Difference("output", name, worst)
    return None


def _candidates(all_replicas: Trial, one: Trial, disturbed: Trial | None) -> Iterator[tuple[Any, ...]]:
    """(how far apart, what noise makes of it, kind, name, both numbers) of losses, metrics, state and gradients."""
    for (what, name), number in one.numbers.items():
        of_all = all_replicas.numbers[what, name]
        of_noise = number if disturbed is None else disturbed.numbers[what, name]
        size = max(abs(of_all), abs(number), LEAST)
        apart, noise = (_apart(np.array(value), np.array(number), size) for value in (of_all, of_noise))
        yield apart, noise, what, name, of_all, number
    for path, (expected_copy, *_) in one.state.items():
        noisy_copies = [] if disturbed is None else disturbed.state[path]
        apart = max((_apart(copy, expected_copy) for copy in all_replicas.state.get(path, [])), default=np.inf)
        noise = max((_apart(value, expected_copy) for value in noisy_copies), default=0.0)
        yield apart, noise, "state", path
    differing, arrays = list[tuple[float, str]](), list(map(_values, one.gradients.values()))
    # The root of the mean square of all elements.
    typical = float((sum(_size(array) ** 2 for array in arrays) / max(sum(array.size for array in arrays), 1)) ** 0.5)
    # A unit that rounding switches on or off changes some gradients and no others: the noise of the largest counts.
    trials, largest = [all_replicas, one] if disturbed is None else [all_replicas, one, disturbed], 0.0
    for path in one.gradients:
        ours, expected, *noisy = _aligned([trial.gradients[path] for trial in trials])
        size = max(_size(expected), LEAST_SHARE * typical * expected.size**0.5)
        largest = max([largest, *(_apart(one, expected, size) for one in noisy)])
        differing.append((_apart(ours, expected, size), path))
    yield from ((apart, largest, "gradient", path) for apart, path in differing)


def _apart(ours: np.ndarray, expected: np.ndarray, size: float | None = None) -> float:
    """Returns how far two are apart, in shares of a size; infinite where one has no number and the other one has."""
    size = _size(expected) if size is None else size
    ours, expected = _as_float(ours), _as_float(expected)
    if ours.shape != expected.shape:
        return np.inf
    apart = _size(ours - expected)
    if not np.isfinite(apart):
        finite = np.isfinite(ours)
        # No share of a size, which may itself be no number: that would be NaN, which `max` drops.
        if (finite != np.isfinite(expected)).any():
            return np.inf
        apart = _size((ours - expected)[finite])
    return apart / max(size, float(np.finfo(np.float32).tiny))


def _size(array: np.ndarray) -> float:
    return float(np.linalg.norm(_as_float(array)))


def _as_float(array: np.ndarray) -> np.ndarray:
    """In the narrowest type with enough digits: float32 for what has no more, float64 for whole numbers."""
    return np.asarray(array, np.float64 if array.dtype.kind in "iu" or array.dtype == np.float64 else np.float32)


def _values(gradient: Addend) -> np.ndarray:
    return np.asarray(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient, np.float32)


def _aligned(gradients: Sequence[Addend]) -> list[np.ndarray]:
    """Gradients as arrays of one shape; of those of tables, the rows that any of them has."""
    values = list(map(_values, gradients))
    if not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return values
    rows = [
        np.asarray(gradient.indices) if isinstance(gradient, tf.IndexedSlices) else np.arange(len(array))
        for gradient, array in zip(gradients, values, strict=True)
    ]
    numbers = np.unique(np.concatenate(rows))
    arrays = [np.zeros((len(numbers), *array.shape[1:])) for array in values]
    for array, own_rows, own_values in zip(arrays, rows, values, strict=True):
        np.add.at(array, np.searchsorted(numbers, own_rows), own_values)
    return arrays


def _rows_of(whole: tf.Tensor, part: tf.Tensor, edges: Sequence[int], number: int) -> np.ndarray | None:
    """Returns a replica's rows of one device's output; None where the shapes do not tell."""
    start, stop, count = edges[number], edges[number + 1], edges[-1]
    if whole.shape.rank and whole.shape[1:] == part.shape[1:]:
        times, rest = divmod(int(whole.shape[0]), count)
        if not rest and times and int(part.shape[0]) == times * (stop - start):
            # Several rows of each example come one after the other, or those of all examples do, as of joined batches.
            array: np.ndarray = whole.numpy()
            apart = array.reshape(times, count, *array.shape[1:])[:, start:stop].reshape(part.shape)
            ways = (array[times * start : times * stop], apart)
            return min(ways, key=lambda way: np.nan_to_num(_size(way - part.numpy()), nan=np.inf))
    return whole.numpy() if whole.shape == part.shape else None
