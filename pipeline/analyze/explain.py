"""Turns seconds of steps, with parts of them switched off in turn, into the parts of the lost efficiency."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import Any

from pipeline.plan.backends import HOROVOD
from pipeline.plan.plan import SHARED_MEMORY, Plan
from pipeline.record.findings import Explanation, LostShare

PARTS = ("input wait", "communication", "batch statistics", "contention", "stragglers", "host overhead", "other")
# Of the ends of each part, where there are rounds enough for it.
CONFIDENCE = 0.9
# What takes a smaller share of the step time is not called the bound.
LEAST_SHARE = 0.1
# Shares that are closer are the same as they are written.
LEAST_SAID = 0.005
# A worker is a straggler where it takes so much longer than the others.
BEHIND = 1.1


@dataclass(frozen=True)
class Round:
    """Seconds of a step of all workers, as measured in turn within one round.

    `everything` is what training does, `no_input` the same on a batch that is there, `no_statistics` that without
    exchanging what layers normalize by, where there are such, and `calling` what a step costs of calling the compiled
    loop. Without communication, `together` has what each replica takes while all compute, and `alone` while the others
    wait; both are empty where there is one replica. `one_everything`, `one_no_input` and `one_calling` are the
    baseline's, for as many examples on ideal devices.
    """

    everything: float
    no_input: float
    calling: float
    one_everything: float
    one_no_input: float
    one_calling: float
    together: Mapping[int, float]
    alone: Mapping[int, float]
    no_statistics: float | None = None


def explain(rounds: Sequence[Round], names: Sequence[str], plan: Plan) -> Explanation:
    """The parts of the lost efficiency, `explained` of result.json, from rounds and the replicas' names.

    A share is that of the step time, and so of the ideal throughput: efficiency is `one_everything / everything`.
    Shares are those of the medians; their ends hold the median of such rounds with a probability of `CONFIDENCE`.
    """
    middle, behind = Round(*(_median([getattr(one, field.name) for one in rounds]) for field in fields(Round))), None
    together = {place: [one.together[place] for one in rounds] for place in middle.together}
    if len(together) > 1:
        # The replica that others wait for is slower than they are by more than either varies.
        slowest = max(together, key=lambda place: middle.together[place])
        slow = together.pop(slowest)
        others = [median(of_round) for of_round in zip(*together.values(), strict=True)]
        if ends(slow)[0] > ends(others)[1] and median(slow) > BEHIND * median(others):
            behind = slowest
    split = [shares(one, behind) for one in (middle, *rounds)]
    parts = {name: _with_ends([one[name] for one in split]) for name in PARTS if name in split[0]}
    lost, lost_low, lost_high = _with_ends([sum(one.values()) for one in split])
    # No part that scaling has to do with can bring more than all that is lost.
    gains = {name: (min(share, lost), min(low, lost_low)) for name, (share, low, _) in parts.items()}
    # The baseline waits for its input too, which is no loss of scaling, but would be gained just as well.
    waits = [(one.everything - one.no_input) / one.everything for one in (middle, *rounds)]
    gains["input wait"] = (waits[0], ends(waits[1:])[0])
    largest = max(parts, key=lambda name: waits[0] if name == "input wait" else parts[name][0])
    gain, low = gains[largest]
    bound, straggler = largest if gain >= LEAST_SHARE and low > 0 else None, None if behind is None else names[behind]
    advice = _advice(bound, gain, parts[largest][0], lost, straggler, plan)
    lost_shares = [LostShare(name, *share) for name, share in parts.items()]
    return Explanation(lost, lost_low, lost_high, lost_shares, bound, straggler, advice)


def shares(one: Round, behind: int | None = None) -> dict[str, float]:
    """The share of a step's time that each part takes beyond ideal scaling; others wait for the replica `behind`."""
    # A step of one replica has no communication to switch off.
    without = fair = alone = one.no_input - one.calling + one.one_calling
    if one.together:
        others = [place for place in one.alone if place != behind]
        fair, alone = (fmean(seconds_of[place] for place in others) for seconds_of in (one.together, one.alone))
    statistics = 0.0 if one.no_statistics is None else one.no_input - one.no_statistics
    slow = fair if behind is None else one.together[behind]
    seconds = {
        "input wait": (one.everything - one.no_input) - (one.one_everything - one.one_no_input),
        "communication": without - statistics - slow,
        **({} if one.no_statistics is None else {"batch statistics": statistics}),
        "contention": fair - alone,
        "stragglers": slow - fair,
        "host overhead": one.calling - one.one_calling,
        "other": alone - one.one_no_input,
    }
    return {name: seconds_of / one.everything for name, seconds_of in seconds.items()}


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The closest two of the values that hold the true median with a probability of `CONFIDENCE`, or the outermost.

    The k-th from either end misses it where fewer than k of n fall on one side (as in `measure.confidence`).

    >>> ends([3.0, 1.0, 2.0, 5.0, 4.0]), ends([8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    ((1.0, 5.0), (2.0, 7.0))
    """
    count, place = len(values), 0
    missed = 2 * 0.5**count
    while (missed := missed + 2 * math.comb(count, place + 1) * 0.5**count) <= 1 - CONFIDENCE:
        place += 1
    return sorted(values)[place], sorted(values, reverse=True)[place]


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {place: _median([value[place] for value in values]) for place in values[0]}
    return None if values[0] is None else median(values)


def _with_ends(values: Sequence[float]) -> tuple[float, float, float]:
    """(the first value, the ends of the others, which may be moved for it to be between them)."""
    low, high = ends(values[1:])
    return values[0], min(low, values[0]), max(high, values[0])


def _advice(bound: str | None, gain: float, share: float, lost: float, straggler: str | None, plan: Plan) -> str:
    """The change to make, and the most that it would bring, in one sentence. `share` is the part's."""
    if bound is None and lost >= LEAST_SHARE:
        return f"{lost:.0%} is lost, and no part of it is sure to be the largest; try again while the machine is idle."
    if bound is None:
        return f"No part of the {max(0.0, lost):.0%} that is lost stands out: there is little to gain on this machine."
    cache = "" if plan.data.cache == "memory" else "data.cache=memory or "
    in_memory = plan.collective == SHARED_MEMORY and plan.hosts_that_train == 1
    may_be_fewer = plan.training.gradient_bits == 32 and plan.collective != HOROVOD and not in_memory
    fewer_bits = "train.gradient_bits=16, " * may_be_fewer
    larger = "a larger train.replica_batch" if plan.training.scaling == "weak" else "a larger train.global_batch"
    longer_calls = "train.steps_per_call=null" if plan.training.steps_per_call else larger
    locally = f"train.batch_statistics=replica, {larger}, GroupNormalization in its place, or fewer workers"
    what, instead = {
        "input wait": ("Waiting for input", f"{cache}data.service=2; data.profile=true tells the stage"),
        "communication": ("Communication", f"{fewer_bits}{larger}, or fewer workers"),
        "batch statistics": ("Exchanging what BatchNormalization normalizes by", locally),
        "contention": ("Contention between workers of one machine", "fewer workers on it, or the same on more hosts"),
        "stragglers": (f"Waiting for {straggler}", "to see what else runs on its cores, or to do without it"),
        "host overhead": ("Calling the compiled loop", longer_calls),
        "other": ("What is none of the parts that can be switched off", f"{larger}, or another strategy"),
    }[bound]
    takes, more = f"{share:.0%} of a step's time", ", some of which other parts make up for"
    if bound == "input wait":
        takes, more = f"{gain:.0%} of a step's time", f" ({max(0.0, share):.0%} of it more than one device waits)"
    takes += more * bool(abs(gain - share) >= LEAST_SAID)
    return f"{what} takes {takes}: without it at most {1 / (1 - gain):.2g} times as fast; try {instead}."
