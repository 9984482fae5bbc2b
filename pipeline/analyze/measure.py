"""Turns timings into throughput, step-time quantiles, intervals and speedups. Seconds come in as arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.plan.plan import REPEAT_SECONDS
from pipeline.record.events import Event, Measured, Profiling, Resumed, Run, Steps
from pipeline.record.profile import Profile

# One call of the compiled loop is made to last about this long, so that calling it costs nothing to speak of.
CALL_SECONDS = 0.25
ASYNC_CALL_SECONDS = 0.1
MOST_STEPS_PER_CALL = 200
# The share of the step time spent waiting for input from which a run is called input-bound.
INPUT_BOUND = 0.1
# The input and the model are timed alone in pieces of about this length, of not more steps.
PIECE_SECONDS, MOST_STEPS_OF_PIECE = 0.5, 20_000
# The share of the cores' time that other programs take from which a throughput is said to be that of a busy machine.
BUSY = 0.1
# Within this of each other, neither of the two is called the slower one.
NEAR = 0.05


@dataclass(frozen=True)
class Repeat:
    """One timed stretch of training: seconds of the slowest process, and the step time of each call in it.

    `input_shares` are the shares of that time in which workers waited for their batches, 0 to 1: one for each process,
    or for each worker of an asynchronous training. `other_work` is the share in which their cores worked for others.
    """

    examples: float
    seconds: float
    step_seconds: tuple[float, ...]
    input_shares: tuple[float, ...] = ()
    other_work: float | None = None

    @property
    def examples_per_second(self) -> float:
        """Training examples per second over all replicas."""
        return throughput(self.examples, self.seconds)


def throughput(examples: float, seconds: float) -> float:
    """Training examples per second, summed over all replicas.

    >>> throughput(examples=6_400, seconds=2.0)
    3200.0
    """
    return examples / seconds


def slowest(measured: Mapping[int, Measured], others: bool = False) -> Repeat:
    """One repeat from what each process measured of it: the slowest decides, as a whole and in each call.

    Only where these are all processes that work is it to be told what others did.

    >>> from pipeline.record.events import TimedCall
    >>> slowest({0: Measured(0, 64.0, 1.0, calls=[TimedCall(2, 1.0)], input_seconds=[0.5]),
    ...          1: Measured(0, 64.0, 2.0, calls=[TimedCall(2, 2.0)], input_seconds=[0.5])})
    Repeat(examples=64.0, seconds=2.0, step_seconds=(1.0,), input_shares=(0.5, 0.25), other_work=None)
    """
    everyone = [measured[rank] for rank in sorted(measured)]
    calls = zip(*(repeat.calls for repeat in everyone), strict=True)
    return Repeat(
        examples=everyone[0].examples,
        seconds=max(repeat.seconds for repeat in everyone),
        step_seconds=tuple(max(timed.seconds / timed.steps for timed in call) for call in calls),
        # Those whose events are of an earlier version have none.
        input_shares=tuple(min(1.0, waited / repeat.seconds) for repeat in everyone for waited in repeat.input_seconds),
        other_work=other_work(measured) if others else None,
    )


def other_work(measured: Mapping[int, Measured]) -> float | None:
    """Share of the cores' time, 0 to 1, in which they worked for others while all these processes were timed.

    None where one of them did not tell. Processes of one machine may share cores, or have some each.

    >>> from pipeline.record.training import CoreTime
    >>> other_work({0: Measured(0, 64.0, 1.0, core_time=CoreTime("a", [0, 1], busy_seconds=1.5, own_seconds=0.5)),
    ...             1: Measured(0, 64.0, 1.0, core_time=CoreTime("a", [0, 1], busy_seconds=1.5, own_seconds=0.5))})
    0.25
    """
    shared: dict[tuple[str, tuple[int, ...]], tuple[float, float, float]] = {}
    for told in measured.values():
        if told.core_time is None or not told.seconds:
            return None
        machine, cores, busy, own = told.core_time
        before = shared.get((machine, tuple(cores)), (0.0, 0.0, 0.0))
        shared[machine, tuple(cores)] = max(before[0], told.seconds * len(cores)), max(before[1], busy), before[2] + own
    whole = sum(there for there, _, _ in shared.values())
    return min(1.0, sum(max(0.0, busy - own) for _, busy, own in shared.values()) / whole) if shared else None


def input_wait(repeats: Sequence[Repeat]) -> tuple[float | None, list[float]]:
    """(share of the step time in which the worker that waited longest waited for input, that of each worker).

    Medians over the repeats; who waits longest is looked for in each of them.

    >>> input_wait([Repeat(64, 1.0, (1.0,), (0.5, 0.25)), Repeat(64, 1.0, (1.0,), (0.0, 0.75))])
    (0.625, [0.25, 0.5])
    """
    shares = [repeat.input_shares for repeat in repeats if repeat.input_shares]
    if not shares:
        return None, []
    workers = zip(*shares, strict=False)
    return float(np.median([max(share) for share in shares])), [float(np.median(worker)) for worker in workers]


def others_of(repeats: Sequence[Repeat]) -> float | None:
    """The median over the repeats of the share of the cores' time that other programs took; None if none tells it.

    >>> others_of([Repeat(64, 1.0, (1.0,), other_work=share) for share in (0.5, None, 0.25)])
    0.375
    """
    shares = [repeat.other_work for repeat in repeats if repeat.other_work is not None]
    return float(np.median(shares)) if shares else None


def steps_of_piece(step_seconds: float, piece_seconds: float = PIECE_SECONDS) -> int:
    """Steps of one of the pieces in which a part of training is timed alone.

    >>> steps_of_piece(0.05)
    10
    """
    return int(np.clip(round(piece_seconds / max(step_seconds, 1e-9)), 1, MOST_STEPS_OF_PIECE))


def slowest_rates(told: Sequence[Profiling]) -> list[float]:
    """Examples per second of each piece that all processes timed at the same time: the slowest decides.

    >>> slowest_rates([Profiling("input", None, [64, 64], [1.0, 2.0]), Profiling("input", None, [64, 64], [2.0, 1.0])])
    [32.0, 32.0]
    """
    slow = [max(piece) for piece in zip(*(event.seconds or () for event in told), strict=True)]
    return [throughput(examples, seconds) for examples, seconds in zip(told[0].examples or (), slow, strict=True)]


def verdict(fed: Sequence[float], trained: Sequence[float]) -> Profile:
    """Whether the input or the model sets the pace, and what there is to gain, from examples/s of each alone.

    One is slower where the best quarter of its pieces is slower than the worst of the other's, and their medians are a
    twentieth apart. Without the bound training could be as fast as the other.

    >>> found = verdict([100.0, 99.0, 101.0], [400.0, 410.0, 390.0])
    >>> found.bound, found.ceiling_examples_per_second
    ('input', 400.0)
    """
    read, made = float(np.median(fed)), float(np.median(trained))
    if _upper(fed) < _lower(trained) and read < (1 - NEAR) * made:
        return Profile(read, made, "input", made)
    if _upper(trained) < _lower(fed) and made < (1 - NEAR) * read:
        return Profile(read, made, "model", read)
    return Profile(read, made, "neither", None)


def step_ms(repeats: Sequence[Repeat]) -> dict[str, float]:
    """The 50th, 95th and 99th percentile of step time in milliseconds; a call's steps share its mean."""
    times = 1_000 * np.concatenate([np.asarray(repeat.step_seconds) for repeat in repeats])
    return {f"step_ms_p{percent}": float(np.percentile(times, percent)) for percent in (50, 95, 99)}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest) of repeats.

    >>> interval([3.0, 1.0, 2.0])
    (2.0, 1.0, 3.0)
    """
    return float(np.median(values)), float(min(values)), float(max(values))


def confidence(repeats: int) -> float:
    """The probability that the range of so many independent repeats holds the true median.

    It misses only when all fall on one side: 1 - 2 (1/2)^n, whatever the distribution (David & Nagaraja, Order
    Statistics, 2003, section 7.1).

    >>> confidence(5)
    0.9375
    """
    return float(1 - 0.5 ** (repeats - 1))


def speedup(point: Sequence[float], baseline: Sequence[float]) -> tuple[float, float, float]:
    """(speedup, low, high): the ratio of the medians, and the range of the ratios of repeats taken in turn.

    Where the baseline comes from another run its repeats pair with nothing, and the range is the widest possible.

    >>> speedup([190.0, 200.0, 180.0], [100.0, 100.0, 100.0])
    (1.9, 1.8, 2.0)
    """
    ratio = float(np.median(point) / np.median(baseline))
    if len(point) == len(baseline):
        pairs = [ours / one for ours, one in zip(point, baseline, strict=True)]
        return ratio, min(*pairs, ratio), max(*pairs, ratio)
    return ratio, min(point) / max(baseline), max(point) / min(baseline)


def steps_per_call(step_seconds: float, concurrent_steps: int = 1) -> int:
    """Steps that fill a call. Workers that step at their own pace make shorter ones: none knows whose is the last.

    >>> steps_per_call(0.05)
    5
    >>> steps_per_call(0.05, concurrent_steps=2)
    2
    """
    seconds = CALL_SECONDS if concurrent_steps == 1 else ASYNC_CALL_SECONDS
    return int(np.clip(round(seconds / max(step_seconds, 1e-9)), 1, MOST_STEPS_PER_CALL))


def steps_per_repeat(step_seconds: float, per_call: int, concurrent_steps: int = 1) -> int:
    """Steps that fill a repeat, in whole calls, three or more for each of the workers that step at once.

    >>> steps_per_repeat(step_seconds=0.05, per_call=5)
    15
    """
    calls = round(REPEAT_SECONDS / max(step_seconds * per_call, 1e-9))
    return concurrent_steps * per_call * int(np.clip(calls, 3, 1_000))


@dataclass
class Goodput:
    """What a run's steps came to, counted from the events of its log as they are written.

    A run's time is that of its commands, each from its first event to its last: starting, measuring the baseline,
    steps that were made again and checkpoints count against it, and the time between two commands does not.

    >>> counted, again = Goodput(), [(2, 3.0), (3, 6.0)]
    >>> for event in (Run(), *(Steps(step, [1.0, 1.0], seconds=2.0, time=time) for step, time in again)):
    ...     counted.note(event)
    >>> counted.repeated, counted.share
    (1, 0.5)
    """

    # Steps that were made twice, and times that the run was gone on with.
    repeated: int = 0
    resumed: int = 0
    _top: int = 0
    _useful: float = 0.0
    _wall: float = 0.0
    _last: float | None = None

    def note(self, event: Event) -> None:
        """Counts an event."""
        begins = isinstance(event, Run | Resumed)
        self.resumed += isinstance(event, Resumed)
        self._wall += 0.0 if begins or self._last is None else event.time - self._last
        self._last = event.time
        if isinstance(event, Steps) and event.of_point:
            count = max(1, len(event.losses))
            new = min(count, max(0, event.step - self._top))
            self._top, self.repeated = max(self._top, event.step), self.repeated + count - new
            self._useful += (event.seconds or 0.0) * new / count

    @property
    def share(self) -> float | None:
        """The share of the run's time in which it made steps that counted; None before there is any."""
        return self._useful / self._wall if self._wall > 0 else None


def _lower(values: Sequence[float]) -> float:
    return float(np.percentile(values, 25, method="higher"))


def _upper(values: Sequence[float]) -> float:
    return float(np.percentile(values, 75, method="lower"))
