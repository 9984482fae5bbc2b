"""Turns timings into throughput, quantiles, intervals and speedups, and these into time, cost, energy and the knee."""

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.analyze.comparable import BUSY, UNSTEADY, grouped
from pipeline.plan.plan import REPEAT_SECONDS, Plan
from pipeline.record.events import Event, Measured, Profiling, Resumed, Run, Steps
from pipeline.record.findings import Pace
from pipeline.record.results import MOST_EFFICIENCY, Result

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
    """One repeat from what each process measured, with `others` from all: the slowest decides, in each call as well."""
    everyone = [measured[rank] for rank in sorted(measured)]
    calls = zip(*(repeat.calls for repeat in everyone), strict=True)
    return Repeat(
        examples=everyone[0].examples,
        seconds=max(repeat.seconds for repeat in everyone),
        step_seconds=tuple(max(timed.seconds / timed.steps for timed in call) for call in calls),
        # Events of an earlier version have none.
        input_shares=tuple(min(1.0, waited / repeat.seconds) for repeat in everyone for waited in repeat.input_seconds),
        other_work=other_work(measured) if others else None,
    )


def other_work(measured: Mapping[int, Measured]) -> float | None:
    """Share of the cores' time, 0 to 1, that others took while all these were timed; None where one did not tell."""
    times = [(event.core_time, event.seconds) for event in measured.values() if event.core_time and event.seconds]
    if not times or len(times) < len(measured):
        return None
    # Processes of one machine may share cores, or have some each.
    shared = grouped(((at.machine, tuple(at.cores)), (seconds * len(at.cores), *at[2:])) for at, seconds in times)
    columns = [[*zip(*of_cores, strict=True)] for of_cores in shared.values()]
    others = sum(max(0.0, max(busy) - sum(own)) for _, busy, own in columns)
    return float(min(1.0, others / sum(max(whole) for whole, _, _ in columns)))


def input_wait(repeats: Sequence[Repeat]) -> tuple[float | None, list[float]]:
    """(median over the repeats of the longest share of step time in which a worker waited for input, that of each).

    >>> input_wait([Repeat(64, 1.0, (1.0,), (0.5, 0.25)), Repeat(64, 1.0, (1.0,), (0.0, 0.75))])
    (0.625, [0.25, 0.5])
    """
    shares = [repeat.input_shares for repeat in repeats if repeat.input_shares]
    if not shares:
        return None, []
    return median(map(max, shares)), [median(worker) for worker in zip(*shares, strict=False)]


def steps_of_piece(step_seconds: float, piece_seconds: float = PIECE_SECONDS) -> int:
    """Steps of one of the pieces in which a part of training is timed alone."""
    return min(max(round(piece_seconds / max(step_seconds, 1e-9)), 1), MOST_STEPS_OF_PIECE)


def slowest_rates(events: Sequence[Profiling]) -> list[float]:
    """Examples per second of each piece that all processes timed at the same time: the slowest decides."""
    slow = [max(piece) for piece in zip(*(event.seconds or () for event in events), strict=True)]
    return [throughput(examples, seconds) for examples, seconds in zip(events[0].examples or (), slow, strict=True)]


def verdict(fed: Sequence[float], trained: Sequence[float]) -> Pace:
    """The slower of input and model, and what there is to gain, from examples/s of each alone.

    The best quarter of one's pieces is slower than the worst of the other's, and the medians lie apart.

    >>> found = verdict([100.0, 99.0, 101.0], [400.0, 410.0, 390.0])
    >>> found.bound, found.ceiling_examples_per_second
    ('input', 400.0)
    """
    quarters = [(sorted(one), (len(one) - 1) / 4) for one in (fed, trained)]
    ends = [(rates[math.ceil(quarter)], rates[math.floor(3 * quarter)]) for rates, quarter in quarters]
    (least_read, most_read), (least_trained, most_trained) = ends
    read, model_rate = median(fed), median(trained)
    if most_read < least_trained and read < (1 - NEAR) * model_rate:
        return Pace(read, model_rate, "input", model_rate)
    if most_trained < least_read and model_rate < (1 - NEAR) * read:
        return Pace(read, model_rate, "model", read)
    return Pace(read, model_rate, "neither", None)


def step_ms(repeats: Sequence[Repeat]) -> dict[str, float]:
    """The 50th, 95th and 99th percentile of step time in milliseconds; a call's steps share its mean."""
    # Whoever only shows results can do without it.
    import numpy as np

    times = 1_000 * np.concatenate([np.asarray(repeat.step_seconds) for repeat in repeats])
    return {f"step_ms_p{percent}": float(np.percentile(times, percent)) for percent in (50, 95, 99)}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest) of repeats."""
    return median(values), min(values), max(values)


def confidence(repeats: int) -> float:
    """The probability that the range of so many independent repeats holds the true median."""
    # It misses where all fall on one side: 1 - 2 (1/2)^n (David & Nagaraja, Order Statistics, 2003, section 7.1).
    return float(1 - 0.5 ** (repeats - 1))


def speedup(point: Sequence[float], baseline: Sequence[float], in_turn: bool = True) -> tuple[float, float, float]:
    """(speedup, low, high) of repeats taken in turn; of others the ratio of medians, and the widest possible range."""
    if in_turn and len(point) == len(baseline):
        return interval([ours / one for ours, one in zip(point, baseline, strict=True)])
    return median(point) / median(baseline), min(point) / max(baseline), max(point) / min(baseline)


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
    return min(max(round(seconds / max(step_seconds, 1e-9)), 1), MOST_STEPS_PER_CALL)


def steps_per_repeat(step_seconds: float, per_call: int, concurrent_steps: int = 1) -> int:
    """Steps that fill a repeat, in whole calls, three or more for each of the workers that step at once."""
    calls = round(REPEAT_SECONDS / max(step_seconds * per_call, 1e-9))
    return concurrent_steps * per_call * min(max(calls, 3), 1_000)


def seconds_to_finish(planned: Plan, examples_per_second: float, train_examples: int | None) -> float | None:
    """Seconds of a training's steps alone; None where it is of epochs whose examples are not known."""
    step = planned.training.global_batch / examples_per_second
    if planned.training.steps is not None:
        return planned.training.steps * step
    examples = train_examples or planned.data.train_examples
    return None if examples is None else (planned.training.epochs or 0) * planned.steps_per_epoch(examples) * step


def cost(price_per_hour: float | None, hosts: int, seconds: float | None) -> float | None:
    """The price of so many hosts for so long."""
    return None if price_per_hour is None or seconds is None else price_per_hour * hosts * seconds / 3600


def best(results: Sequence[Result]) -> dict[str, int]:
    """The places of the best points: for each thing that is known, the one that needs least for an example."""
    needs: dict[str, dict[int, float]] = {"time": {}, "cost": {}, "energy": {}}
    for place, result in enumerate(results):
        if rate := result.speed.examples_per_second:
            costs, needs["time"][place] = result.cost, 1 / rate
            if (price := cost(costs.price_per_hour, result.layout.hosts or 1, 1 / rate)) is not None:
                needs["cost"][place] = price
            if costs.energy_joules and costs.seconds_to_finish:
                needs["energy"][place] = costs.energy_joules / costs.seconds_to_finish / rate
    return {what: min(values, key=values.__getitem__) for what, values in needs.items() if values}


@dataclass(frozen=True)
class Knee:
    """The point where another worker brings less than `share` of what one of the first does.

    `found` is (few, many, what each worker between them brought); None if each brings enough up to the `most` measured.
    """

    share: float
    most: int
    found: tuple[int, int, float] | None


def knee_of(results: Sequence[Result], share: float) -> Knee | None:
    """The knee of points that have a throughput; None where they are not alike but for their workers."""
    speeds, others = dict[int, float](), list[Hashable]()
    for result in results:
        choices, layout = result.choices, result.layout
        if (speed := result.speed.examples_per_second) and layout.workers is not None:
            batch = layout.global_batch if layout.scaling == "strong" else layout.replica_batch
            others.append((choices.called, choices.model, choices.data, layout.precision, layout.scaling, batch))
            speeds[layout.workers] = speed
    alike = len(set(others)) == 1 and len(speeds) == len(others)
    return knee([*speeds.items()], share) if alike else None


def knee(speeds: Sequence[tuple[int, float]], share: float) -> Knee | None:
    """The knee of (workers, speed) of runs that are else alike; None where all have as many workers."""
    middle = {count: median(of_count) for count, of_count in sorted(grouped(speeds).items())}
    if len(middle) < 2:
        return None
    (first, speed), turn = next(iter(middle.items())), None
    for few, many in reversed([*itertools.pairwise(middle)]):
        brought = (middle[many] - middle[few]) / (many - few) / (speed / first)
        turn = (few, many, brought) if brought < share else turn
    return Knee(share, max(middle), turn)


def watts_of_worker(results: Sequence[Result]) -> float | None:
    """The median power of a worker over runs whose energy was read."""
    of_runs = [(one.cost.energy_joules, one.training.seconds_training, one.layout) for one in results]
    # Counters are those of one host.
    watts = [
        joules * (layout.hosts or 1) / seconds / layout.workers
        for joules, seconds, layout in of_runs if joules and seconds and layout.workers
    ]  # fmt: skip
    return median(watts) if watts else None


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
