"""Tells what a step of all replicas differs in from the same step on one device, by more than arithmetic explains."""

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from pipeline.record.findings import Difference
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.equality_check.trial import Trial

# What sums in another order leave, by the type that a model computes in, as a share of what is compared.
TOLERANCES = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
# What differs is told where it is so many times what a disturbance of the last digits makes of it on one device.
TIMES_NOISE = 30.0
# Where all but gradients is equal, so far apart they may be: rounding switches a unit of a deep model on or off, like
# one of ReLU whose input is about 0, and all gradients before it change by its part.
SWITCHED = 1e-2
# Of a tensor that is next to nothing beside others of its kind, element by element, the others' size counts.
LEAST_SHARE = 1e-4
# Of a loss or a metric next to 0.
LEAST = 1e-6


def differences(all_replicas: Trial, one: Trial, tolerance: float, disturbed: Trial | None = None) -> list[Difference]:
    """Lists what differs by more than `tolerance`, and by more than `disturbed`, one device's step with noise, does."""
    candidates = [*_of_numbers(all_replicas, one, disturbed), *_of_tensors(all_replicas, one, disturbed)]
    differing = [difference for difference, noise in candidates if _is_told(difference.relative, noise, tolerance)]
    switched = all(
        difference.what == "gradient" and difference.relative is not None and difference.relative <= SWITCHED
        for difference in differing
    )
    return [] if switched else differing


def are_aligned(*trials: Trial) -> bool:
    """True if all replicas ran the same layers in the same order."""
    return len({tuple(name for name, _ in outputs) for trial in trials for outputs in trial.outputs.values()}) == 1


def first_layer(
    all_replicas: Trial, one: Trial, edges: Sequence[int], tolerance: float, disturbed: Trial
) -> Difference | None:
    """The first layer whose output differs: what it was given, which earlier ones returned, does not.

    `edges` are those of the examples of replicas here, then comes how many all have.
    """
    (whole,), (noisy,) = one.outputs.values(), disturbed.outputs.values()
    for place, (name, _) in enumerate(whole):
        worst, noise = 0.0, 0.0
        for number, outputs in all_replicas.outputs.items():
            for leaf, of_one, of_noise in zip(outputs[place][1], whole[place][1], noisy[place][1], strict=False):
                expected, other = (_rows_of(tensor, leaf, edges, number) for tensor in (of_one, of_noise))
                if expected is not None and other is not None:
                    size = _size(expected)
                    worst = max(worst, _apart(leaf.numpy(), expected, size))
                    noise = max(noise, _apart(other, expected, size))
        if _is_told(worst, noise, tolerance):
            return Difference("output", name, worst)
    return None


def _of_numbers(all_replicas: Trial, one: Trial, disturbed: Trial | None) -> Iterator[tuple[Difference, float]]:
    """Losses and metrics, each with what noise makes of it."""
    for (what, name), expected in one.numbers.items():
        ours = all_replicas.numbers[what, name]
        noisy = expected if disturbed is None else disturbed.numbers[what, name]
        size = max(abs(ours), abs(expected), LEAST)
        apart, noise = (_apart(np.array(value), np.array(expected), size) for value in (ours, noisy))
        yield Difference(what, name, _told(apart), ours, expected), noise


def _of_tensors(all_replicas: Trial, one: Trial, disturbed: Trial | None) -> Iterator[tuple[Difference, float]]:
    """State and gradients, each with what noise makes of it."""
    for path, expected_copies in one.state.items():
        copies, noisy = all_replicas.state.get(path, []), [] if disturbed is None else disturbed.state[path]
        size = _size(expected_copies[0])
        apart = max((_apart(copy, expected_copies[0], size) for copy in copies), default=np.inf)
        noise = max((_apart(value, expected_copies[0], size) for value in noisy), default=0.0)
        yield Difference("state", path, _told(apart)), noise
    typical, pairs = _typical(list(one.gradients.values())), list[tuple[Difference, float]]()
    for path, gradient in one.gradients.items():
        gradients = [all_replicas.gradients[path], gradient]
        ours, expected, *noisy = _aligned(gradients if disturbed is None else [*gradients, disturbed.gradients[path]])
        size = max(_size(expected), LEAST_SHARE * typical * expected.size**0.5)
        noise = _apart(noisy[0], expected, size) if noisy else 0.0
        pairs.append((Difference("gradient", path, _told(_apart(ours, expected, size))), noise))
    # A unit that rounding switches on or off changes some gradients and no others: the noise of the largest counts.
    largest = max((noise for _, noise in pairs), default=0.0)
    yield from ((difference, largest) for difference, _ in pairs)


def _is_told(relative: float | None, noise: float, tolerance: float) -> bool:
    return relative is None or (relative > tolerance and not relative <= TIMES_NOISE * noise)


def _told(apart: float) -> float | None:
    """None for what is no number on one side alone."""
    return float(apart) if np.isfinite(apart) else None


def _apart(ours: np.ndarray, expected: np.ndarray, size: float) -> float:
    """Returns how far two are apart, in shares of a size; infinite where one has no number and the other one has."""
    ours, expected = _as_float(ours), _as_float(expected)
    if ours.shape != expected.shape:
        return np.inf
    apart = _size(ours - expected)
    if not np.isfinite(apart):
        finite = np.isfinite(ours)
        if (finite != np.isfinite(expected)).any():
            return np.inf
        apart = _size((ours - expected)[finite])
    return apart / max(size, float(np.finfo(np.float32).tiny))


def _size(array: np.ndarray) -> float:
    return float(np.linalg.norm(_as_float(array)))


def _as_float(array: np.ndarray) -> np.ndarray:
    """In the narrowest type with enough digits: float32 for what has no more, float64 for whole numbers."""
    return np.asarray(array, np.float64 if array.dtype.kind in "iu" or array.dtype == np.float64 else np.float32)


def _typical(gradients: Sequence[Addend]) -> float:
    """The root of the mean square of all elements."""
    arrays = [_values(gradient) for gradient in gradients]
    count = sum(array.size for array in arrays)
    return float((sum(_size(array) ** 2 for array in arrays) / max(count, 1)) ** 0.5)


def _values(gradient: Addend) -> np.ndarray:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return np.asarray(values, np.float32)


def _aligned(gradients: Sequence[Addend]) -> list[np.ndarray]:
    """Gradients as arrays of one shape; of those of tables, the rows that any of them has."""
    if not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return [_values(gradient) for gradient in gradients]
    as_rows = [_rows(gradient) for gradient in gradients]
    numbers = np.unique(np.concatenate([rows for rows, _ in as_rows]))
    arrays = []
    for rows, values in as_rows:
        dense = np.zeros((len(numbers), *values.shape[1:]))
        np.add.at(dense, np.searchsorted(numbers, rows), values)
        arrays.append(dense)
    return arrays


def _rows(gradient: Addend) -> tuple[np.ndarray, np.ndarray]:
    values = _values(gradient)
    return (np.asarray(gradient.indices) if isinstance(gradient, tf.IndexedSlices) else np.arange(len(values))), values


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
