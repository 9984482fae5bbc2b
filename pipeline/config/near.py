"""Finds the names that a person probably meant."""

import difflib
from collections.abc import Iterable, Sequence

# How alike two names are that may be meant for each other, from 0 to 1.
ALIKE = 0.6
# That of two with the same letters in another order.
SWAPPED = 0.95
# Shorter ones are in too many others.
LEAST_LETTERS = 3


def near(word: str, names: Iterable[str], count: int = 1) -> list[str]:
    """The names nearest to a word, the nearest first: those that hold it or are in it, and those that are spelt alike.

    >>> near("stratgy", ["strategy", "hardware"]), near("input_shape", ["noise", "shape"]), near("foo", ["bar"])
    (['strategy'], ['shape'], [])
    """
    typed = word.lower()
    likeness = {name: _likeness(typed, name.lower()) for name in names}
    found = [name for name, alike in likeness.items() if alike >= ALIKE]
    return sorted(found, key=lambda name: -likeness[name])[:count]


def near_keys(key: str, keys: Sequence[str], count: int = 2) -> list[str]:
    """The dotted keys nearest to one: those with its last name in another group, or the one that is spelt alike.

    >>> keys = ["train.steps", "measure.steps", "train.epochs", "workers"]
    >>> near_keys("steps", keys), near_keys("trian.epochs", keys), near_keys("wokers", keys)
    (['train.steps', 'measure.steps'], ['train.epochs'], ['workers'])
    """
    group, _, name = key.rpartition(".")
    if same := [known for known in keys if known.rpartition(".")[2] == name and known != key]:
        return (near(group, same, count) if group and len(same) > count else same)[:count]
    groups = {known.rpartition(".")[0] for known in keys}
    # In the group that was typed, or those that are spelt alike; without one, in any.
    meant = {group} if group in groups and group else set(near(group, groups, count)) if group else groups
    names: dict[str, str] = {}
    for known in keys:
        place, _, last = known.rpartition(".")
        if place in meant:
            names.setdefault(last, known)
    return [names[last] for last in near(name, names)]


def _likeness(typed: str, name: str) -> float:
    ratio = difflib.SequenceMatcher(None, typed, name).ratio()
    shorter, longer = sorted((typed, name), key=len)
    if sorted(shorter) == sorted(longer):
        return max(ratio, SWAPPED)
    within = len(shorter) >= LEAST_LETTERS and shorter in longer
    return max(ratio, ALIKE + (1 - ALIKE) * len(shorter) / len(longer)) if within else ratio
