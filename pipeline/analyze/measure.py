"""Turns timings into throughput, step-time quantiles, intervals and speedups. Seconds come in as arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.analyze.comparable import BUSY, UNSTEADY
from pipeline.plan.plan import REPEAT_SECONDS
from pipeline.record.events import Event, Measured, Profiling, Resumed, Run, Steps
from pipeline.record.findings import Pace
from pipeline.record.results import MOST_EFFICIENCY

# One call of the compiled loop is made to last about this long, so that calling it costs nothing to speak of.
CALL_SECONDS = 0.25
ASYNC_CALL_SECONDS = 0.1
MOST_STEPS_PER_CALL = 200
# The share of the step time spent waiting for input from which a run is called input-bound.
INPUT_BOUND = 0.1
# The input and the model are timed alone in pieces of about this length, of not more steps.
PIECE_SECONDS, MOST_STEPS_OF_PIECE = 0.5, 20_000
# Within this of each other, neither of the two is called the slower one.
NEAR = 0.05
# Fewer repeats do not tell whether anything has disturbed them.
FEWEST = 3


@dataclass(frozen=True)
class Repeat:
    """One timed stretch of training: seconds of the slowest process, and the step time of each call in it.

    Shares, 0 to 1, are of the time in which each worker waited for its batches, and its cores worked for others.
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
    """Training examples per second, summed over all replicas."""
    return examples / seconds


def slowest(measured: Mapping[int, Measured], others: bool = False) -> Repeat:
    """One repeat from what each process measured of it: the slowest decides, as a whole and in each call.

    Pass `others=True` only when every process is included.
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
    """
    shared: dict[tuple[str, tuple[int, ...]], tuple[float, float, float]] = {}
    for event in measured.values():
        if event.core_time is None or not event.seconds:
            return None
        machine, cores, busy, own = event.core_time
        whole, busiest, owns = shared.get((machine, tuple(cores)), (0.0, 0.0, 0.0))
        shared[machine, tuple(cores)] = max(whole, event.seconds * len(cores)), max(busiest, busy), owns + own
    whole = sum(seconds for seconds, _, _ in shared.values())
    return min(1.0, sum(max(0.0, busy - own) for _, busy, own in shared.values()) / whole) if shared else None


def input_wait(repeats: Sequence[Repeat]) -> tuple[float | None, list[float]]:
    """(median over the repeats of the longest share of step time in which a worker waited for input, that of each).

    >>> input_wait([Repeat(64, 1.0, (1.0,), (0.5, 0.25)), Repeat(64, 1.0, (1.0,), (0.0, 0.75))])
    (0.625, [0.25, 0.5])
    """
    shares = [repeat.input_shares for repeat in repeats if repeat.input_shares]
    if not shares:
        return None, []
    workers = zip(*shares, strict=False)
    return float(np.median([max(share) for share in shares])), [float(np.median(worker)) for worker in workers]


def others_of(repeats: Sequence[Repeat]) -> float | None:
    """The median over the repeats of the share of the cores' time that other programs took; None if none tells it."""
    shares = [repeat.other_work for repeat in repeats if repeat.other_work is not None]
    return float(np.median(shares)) if shares else None


def steps_of_piece(step_seconds: float, piece_seconds: float = PIECE_SECONDS) -> int:
    """Steps of one of the pieces in which a part of training is timed alone."""
    return int(np.clip(round(piece_seconds / max(step_seconds, 1e-9)), 1, MOST_STEPS_OF_PIECE))


def slowest_rates(events: Sequence[Profiling]) -> list[float]:
    """Examples per second of each piece that all processes timed at the same time: the slowest decides."""
    slow = [max(piece) for piece in zip(*(event.seconds or () for event in events), strict=True)]
    return [throughput(examples, seconds) for examples, seconds in zip(events[0].examples or (), slow, strict=True)]


def verdict(fed: Sequence[float], trained: Sequence[float]) -> Pace:
    """The slower of input and model, and what there is to gain, from examples/s of each alone.

    The best quarter of the slower one's pieces is slower than the worst of the other's, and the medians lie apart.

    >>> found = verdict([100.0, 99.0, 101.0], [400.0, 410.0, 390.0])
    >>> found.bound, found.ceiling_examples_per_second
    ('input', 400.0)
    """
    ends = [(np.percentile(one, 25, method="higher"), np.percentile(one, 75, method="lower")) for one in (fed, trained)]
    (least_read, most_read), (least_trained, most_trained) = ends
    read, model_rate = float(np.median(fed)), float(np.median(trained))
    if most_read < least_trained and read < (1 - NEAR) * model_rate:
        return Pace(read, model_rate, "input", model_rate)
    if most_trained < least_read and model_rate < (1 - NEAR) * read:
        return Pace(read, model_rate, "model", read)
    return Pace(read, model_rate, "neither", None)


def step_ms(repeats: Sequence[Repeat]) -> dict[str, float]:
    """The 50th, 95th and 99th percentile of step time in milliseconds; a call's steps share its mean."""
    times = 1_000 * np.concatenate([np.asarray(repeat.step_seconds) for repeat in repeats])
    return {f"step_ms_p{percent}": float(np.percentile(times, percent)) for percent in (50, 95, 99)}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest) of repeats."""
    return float(np.median(values)), float(min(values)), float(max(values))


def confidence(repeats: int) -> float:
    """The probability that the range of so many independent repeats holds the true median.

    It misses where all fall on one side: 1 - 2 (1/2)^n (David & Nagaraja, Order Statistics, 2003, section 7.1).
    """
    return float(1 - 0.5 ** (repeats - 1))


def speedup(point: Sequence[float], baseline: Sequence[float], in_turn: bool = True) -> tuple[float, float, float]:
    """(speedup, low, high): the median and the range of the ratios of repeats taken in turn.

    Repeats of another run pair with nothing: it is the ratio of the medians then, and the range is the widest possible.
    """
    if in_turn and len(point) == len(baseline):
        return interval([ours / one for ours, one in zip(point, baseline, strict=True)])
    return float(np.median(point) / np.median(baseline)), min(point) / max(baseline), max(point) / min(baseline)


def counted(point: Sequence[Repeat], baseline: Sequence[Repeat], repeats: int, devices: int) -> list[int]:
    """Places of the repeats, and of those of the baseline taken in turn, that a run's figures are of.

    They are the last quiet ones, once these are not disturbed, or else those that other work disturbed least.

    >>> timed = [Repeat(64, 1.0, (1.0,), other_work=share) for share in (0.4, 0.0, 0.3, 0.02, 0.05, 0.01)]
    >>> counted(timed, [], 3, 1), counted(timed[:4], [], 3, 1), counted(timed[:4], [], 4, 1)
    ([1, 3, 4], [1, 2, 3], [0, 1, 2, 3])
    """
    turns = [point] if not baseline else [point, baseline]
    shares = [max(repeat.other_work or 0.0 for repeat in turn) for turn in zip(*turns, strict=False)]
    places: list[int] = []
    for end in range(min(repeats, len(shares)), len(shares) + 1):
        places = [place for place in range(end) if shares[place] < BUSY][-repeats:]
        if len(places) < min(repeats, end):
            places = sorted(sorted(range(end), key=shares.__getitem__)[:repeats])
        one = [baseline[place] for place in places] if baseline else []
        if not is_disturbed([point[place] for place in places], one, devices):
            break
    return places


def is_disturbed(point: Sequence[Repeat], baseline: Sequence[Repeat], devices: int) -> bool:
    """True if three or more repeats, in turn with the baseline's, show other work, spread, or a slowed baseline."""
    if len(point) < FEWEST:
        return False
    if any((repeat.other_work or 0.0) >= BUSY for repeat in (*point, *baseline)):
        return True
    rates = [repeat.examples_per_second for repeat in point]
    if baseline:
        rates = [rate / one.examples_per_second for rate, one in zip(rates, baseline, strict=True)]
    middle, low, high = interval(rates)
    return high > UNSTEADY * low or bool(baseline and middle > MOST_EFFICIENCY * devices)


def steps_per_call(step_seconds: float, concurrent_steps: int = 1) -> int:
    """Steps that fill a call. Workers that step at their own pace make shorter ones: none knows whose is the last."""
    seconds = CALL_SECONDS if concurrent_steps == 1 else ASYNC_CALL_SECONDS
    return int(np.clip(round(seconds / max(step_seconds, 1e-9)), 1, MOST_STEPS_PER_CALL))


def steps_per_repeat(step_seconds: float, per_call: int, concurrent_steps: int = 1) -> int:
    """Steps that fill a repeat, in whole calls, three or more for each of the workers that step at once."""
    calls = round(REPEAT_SECONDS / max(step_seconds * per_call, 1e-9))
    return concurrent_steps * per_call * int(np.clip(calls, 3, 1_000))


@dataclass
class Goodput:
    """The useful share of a run's time, counted from the events of its log as they are written.

    A run's time is that of its commands, each from its first event to its last, and of steps between two of them that
    no driver has heard at once. Starting, the baseline, steps that were made again and checkpoints count against it.

    >>> counted, again = Goodput(), [(2, 3.0), (3, 6.0)]
    >>> for event in (Run(), *(Steps(step, [1.0, 1.0], seconds=2.0, time=time) for step, time in again)):
    ...     counted.note(event)
    >>> counted.repeated, counted.share
    (1, 0.5)
    >>> for event in (Resumed(time=20.0), Steps(5, [1.0, 1.0], seconds=2.0, time=9.0)):
    ...     counted.note(event)
    >>> counted.repeated, counted.share
    (1, 0.625)
    """

    # Steps that were made twice, and times that the run was gone on with.
    repeated: int = 0
    resumed: int = 0
    _top: int = 0
    _useful: float = 0.0
    _wall: float = 0.0
    _began: float = 0.0
    _last: float | None = None

    def note(self, event: Event) -> None:
        """Counts an event."""
        begins = isinstance(event, Run | Resumed)
        self.resumed += isinstance(event, Resumed)
        self._began = event.time if begins else self._began
        if event.time < self._began:
            self._wall += (event.seconds or 0.0) if isinstance(event, Steps) and event.of_point else 0.0
        else:
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
