"""Judges whether a case trains under a strategy what it trains on one device."""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from differing.asked import Found
from differing.case import Case
from differing.pair import Pair

# Of what is compared, relative to its largest number where that is above 1: float32 has seven digits, and a sum over
# replicas adds in another order.
TOLERANCE = 1e-5
# One device itself is this far from equal on the same examples in another order within each batch, and with the last
# digits of them and of the initial weights disturbed; a difference of not more than so many times that is the
# arithmetic's.
NOISE = 10.0
ORDERS = (1, 2)


class Verdict(Enum):
    """What became of a case."""

    EQUAL = "equal"
    WITHIN_NOISE = "equal within what the order of a batch's examples changes on one device"
    TOLD = "refused in words"
    NOT_TRAINABLE = "not trained by one device either"
    DIFFERENT = "different"


@dataclass(frozen=True)
class Judged:
    """A verdict, with what differs or why it was not trained, and how far apart the furthest numbers are."""

    verdict: Verdict
    words: str = ""
    apart: float = 0.0


def judged(case: Case, pair: Pair) -> Judged:
    """The verdict on a case, which the pair trains."""
    one, several = pair.both(case)
    if one.found is None and several.found is None:
        return Judged(Verdict.NOT_TRAINABLE, one.error)
    if one.found is None:
        return Judged(Verdict.DIFFERENT, f"One device fails, several do not: {one.error}\n{one.trace}")
    if several.error.startswith("Expected "):
        return Judged(Verdict.TOLD, several.error)
    if several.found is None:
        return Judged(Verdict.DIFFERENT, f"{several.error}\n{several.trace}")
    apart = _apart(one.found, several.found)
    worst = max(apart.values(), default=0.0)
    if worst <= TOLERANCE:
        return Judged(Verdict.EQUAL, apart=worst)
    orders = [pair.in_another_order(case, seed).found for seed in ORDERS]
    noises = [_apart(one.found, found) for found in orders if found is not None]
    noise = {name: max((noisy.get(name, 0.0) for noisy in noises), default=0.0) for name in apart}
    # What feeds one number feeds others: the noise of the largest group counts for all.
    floor = NOISE * max(noise.values(), default=0.0)
    wrong = {name: far for name, far in apart.items() if far > TOLERANCE and far > floor}
    if not wrong:
        return Judged(Verdict.WITHIN_NOISE, apart=worst)
    words = [f"{name}: {far:.1e} apart, in another order {noise[name]:.1e}" for name, far in wrong.items()]
    return Judged(Verdict.DIFFERENT, "\n".join(words), worst)


def _apart(one: Found, several: Found) -> dict[str, float]:
    """How far apart numbers of one name are, relative to the largest of them where it is above 1."""
    if list(one) != list(several):
        return {f"only there: {sorted(set(one) ^ set(several))}": np.inf}
    apart = {}
    for name, expected in one.items():
        received = several[name]
        if expected.shape != received.shape:
            apart[f"{name} has shape {received.shape} in place of {expected.shape}"] = np.inf
            continue
        scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
        equal = (expected == received) | (np.isnan(expected) & np.isnan(received))
        with np.errstate(invalid="ignore"):
            far = np.where(equal, 0.0, np.abs(expected - received) / scale)
        apart[name] = float(np.nan_to_num(far, nan=np.inf).max(initial=0.0))
    return apart
