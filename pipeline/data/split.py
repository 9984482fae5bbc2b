"""Chooses which examples train and which are held out for validation, by a seed alone."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.data.errors import DataError

Rows: TypeAlias = NDArray[np.intp]

# In more rows than these, a value that is another in each row is no class.
_FEW = 20


def split(groups: np.ndarray, validation_fraction: float, split_seed: int) -> tuple[Rows, Rows]:
    """The rows that train and those that validate, each shuffled: the same fraction of every group is held out.

    `groups` has one number or text for each row, its class; rows without classes are all of one group. Raises
    `DataError`.

    >>> train, validation = split(np.arange(10) % 2, validation_fraction=0.2, split_seed=0)
    >>> len(train), sorted((validation % 2).tolist())
    (8, [0, 1])
    >>> [len(part) for part in split(np.arange(100), validation_fraction=0.2, split_seed=0)]
    [80, 20]
    >>> [len(split(np.zeros(178), fraction, 0)[1]) for fraction in (0.2, 0.0001, 0.9999)]
    [36, 1, 177]
    """
    check_split(validation_fraction, split_seed)
    rng = np.random.default_rng(split_seed)
    held = np.zeros(len(groups), dtype=bool)
    # Sorted once: a search through all rows for each of many groups would take minutes.
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(groups[order][1:] != groups[order][:-1]) + 1):
        # The nearest to its fraction that leaves some on either side.
        count = min(max(round(len(members) * validation_fraction), 1), len(members) - 1)
        held[rng.permutation(members)[:count]] = True
    if len(groups) > _FEW and not held.any():
        # Each row is a group of its own: these are quantities.
        return split(np.zeros(len(groups)), validation_fraction, split_seed)
    return rng.permutation(np.flatnonzero(~held)), rng.permutation(np.flatnonzero(held))


def check_split(validation_fraction: float, split_seed: int) -> None:
    """Refuses a share that holds out none or all, and a seed below 0. Raises `DataError`."""
    numbers = isinstance(validation_fraction, int | float) and isinstance(split_seed, int)
    if not numbers or not 0 < validation_fraction < 1 or split_seed < 0:
        expected = "a validation_fraction between 0 and 1 and a split_seed of at least 0"
        usual = "data.build.validation_fraction=0.2 data.build.split_seed=0"
        raise DataError(expected, f"{validation_fraction} and {split_seed}", usual)
