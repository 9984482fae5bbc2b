"""Makes a data set of any size out of its arguments: class means under noise, so that learning shows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.data.errors import DataError, expect_at_least
from pipeline.data.packaged import Part

_MEAN_CELLS = 4
_BLOCK_EXAMPLES = 64


def synthetic(
    *,
    shape: Sequence[int] = (28, 28, 1),
    num_classes: int = 10,
    train_examples: int = 8_192,
    validation_examples: int = 1_024,
    noise: float = 0.7,
    seed: int = 0,
) -> tuple[Part, Part]:
    """Two parts of one distribution: float32 [examples, *shape] in [0, 1], and int32 [examples].

    An example is `(1 - noise) * mean of its class + noise * uniform noise`: a linear model can learn it.

    >>> (x, y), validation = synthetic(shape=[5], num_classes=3, train_examples=6, validation_examples=2)
    >>> x.shape, x.dtype.name, y.shape, y.dtype.name
    ((6, 5), 'float32', (6,), 'int32')
    """
    _check(shape, num_classes, train_examples, validation_examples, noise, seed)
    # A stream for each use: the validation part stays the same however many examples train.
    streams = [np.random.default_rng([seed, use]) for use in range(3)]
    means = np.float32(1 - noise) * _class_means(shape, num_classes, streams[0])
    train = _draw(means, shape, train_examples, noise, streams[1])
    return train, _draw(means, shape, validation_examples, noise, streams[2])


def _class_means(shape: Sequence[int], num_classes: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """One mean per class, float32 [class, *cells, shape[-1]] in [0, 1].

    All axes but the last are cut into a few cells of one value, wide enough for a convolution to see.
    """
    cells = [min(size, _MEAN_CELLS) for size in shape[:-1]]
    return rng.random((num_classes, *cells, shape[-1]), dtype=np.float32)


def _spread(cells: NDArray[np.float32], shape: Sequence[int]) -> NDArray[np.float32]:
    """Repeats the cells of each example until it has its shape: float32 [examples, *shape].

    >>> _spread(np.array([[[1], [2]]], np.float32), shape=[5, 1])[0, :, 0].tolist()
    [1.0, 1.0, 1.0, 2.0, 2.0]
    """
    for axis, size in enumerate(shape, start=1):
        cells = cells.take(np.arange(size) * cells.shape[axis] // size, axis=axis)
    return cells


def _draw(
    means: NDArray[np.float32], shape: Sequence[int], examples: int, noise: float, rng: np.random.Generator
) -> Part:
    """Labels at random, and their means under noise; in blocks, since all means at once double the memory."""
    labels = rng.integers(len(means), size=examples, dtype=np.int32)
    x = rng.random((examples, *shape), dtype=np.float32)
    for start in range(0, examples, _BLOCK_EXAMPLES):
        block = x[start : start + _BLOCK_EXAMPLES]
        block *= np.float32(noise)
        block += _spread(means[labels[start : start + _BLOCK_EXAMPLES]], shape)
    return np.minimum(x, 1, out=x), labels


def _check(
    shape: Sequence[int],
    num_classes: int,
    train_examples: int,
    validation_examples: int,
    noise: float,
    seed: int,
) -> None:
    """Refuses what cannot be made, in words.

    >>> _check([28, 28, 1], num_classes=10, train_examples=1, validation_examples=0, noise=0.5, seed=0)
    """
    if len(shape) < 1 or min(shape) < 1:
        raise DataError(
            "a shape of one or more sizes of at least 1 for data=synthetic", list(shape), "'data.build.shape=[28,28,1]'"
        )
    limits = (
        ("num_classes", num_classes, 2, 10),
        ("train_examples", train_examples, 1, 8_192),
        ("validation_examples", validation_examples, 0, 1_024),
        ("seed", seed, 0, 0),
    )
    expect_at_least("synthetic", limits)
    if not 0 <= noise <= 1:
        raise DataError("noise between 0 and 1 for data=synthetic", noise, "data.build.noise=0.7")
