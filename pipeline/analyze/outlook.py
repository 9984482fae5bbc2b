"""Turns throughputs, measured or predicted, into time, cost, energy, the best of each, and the knee.

Arithmetic only.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.plan.plan import Plan
from pipeline.record.results import Result


@dataclass(frozen=True)
class Knee:
    """The point where another worker under a strategy brings less than `share` of what one of the first does.

    `found` is (few, many, what each worker between them brought); None if each brings enough up to the `most` measured.
    """

    strategy: str | None
    share: float
    most: int
    found: tuple[int, int, float] | None


def seconds_to_finish(planned: Plan, examples_per_second: float, train_examples: int | None) -> float | None:
    """Seconds of a training's steps alone: not of its start, validation and checkpoints.

    None where it is of epochs whose examples are not known.
    """
    step = planned.training.global_batch / examples_per_second
    if planned.training.steps is not None:
        return planned.training.steps * step
    examples = train_examples or planned.data.train_examples
    return None if examples is None else (planned.training.epochs or 0) * planned.steps_per_epoch(examples) * step


def cost(price_per_hour: float | None, hosts: int, seconds: float | None) -> float | None:
    """The price of so many hosts for so long."""
    return None if price_per_hour is None or seconds is None else price_per_hour * hosts * seconds / 3600


def best(results: Sequence[Result]) -> dict[str, int]:
    """The places of the best points: for each thing that is known, the one that needs least for an example.

    >>> from pipeline.record.results import Speed
    >>> best([Result(speed=Speed(speed)) for speed in (100.0, 250.0, None)])
    {'time': 1}
    """
    places = {}
    for what, needs in (("time", _seconds), ("cost", _cost), ("energy", _joules)):
        if values := [(value, place) for place, one in enumerate(results) if (value := needs(one)) is not None]:
            places[what] = min(values)[1]
    return places


def knee_of(results: Sequence[Result], share: float) -> Knee | None:
    """The knee of points that have a throughput; None where they are not alike but for their workers."""
    points = [
        (_but_workers(result), workers, speed)
        for result in results
        if (speed := result.speed.examples_per_second) and (workers := result.layout.workers) is not None
    ]
    if len({others for others, *_ in points}) != 1 or len({workers for _, workers, _ in points}) < len(points):
        return None
    return knee_under(None, [(workers, speed) for _, workers, speed in points], share)


def knee_under(strategy: str | None, speeds: Sequence[tuple[int, float]], share: float) -> Knee | None:
    """The knee of (workers, speed) of runs under a strategy; None where all have as many workers.

    >>> knee_under("mirrored", [(1, 100.0), (2, 190.0), (4, 220.0)], share=0.5)
    Knee(strategy='mirrored', share=0.5, most=4, found=(2, 4, 0.15))
    """
    counts = sorted({workers for workers, _ in speeds})
    if len(counts) < 2:
        return None
    middle = {count: statistics.median(speed for workers, speed in speeds if workers == count) for count in counts}
    of_first, knee = middle[counts[0]] / counts[0], None
    for few, many in reversed([*itertools.pairwise(counts)]):
        brought = (middle[many] - middle[few]) / (many - few) / of_first
        knee = (few, many, brought) if brought < share else knee
    return Knee(strategy, share, counts[-1], knee)


def watts_of_worker(results: Sequence[Result]) -> float | None:
    """The median power of a worker over runs whose energy was read."""
    watts = [
        # Counters are those of one host.
        joules * (result.layout.hosts or 1) / seconds / workers
        for result in results
        if (joules := result.cost.energy_joules)
        and (seconds := result.training.seconds_training)
        and (workers := result.layout.workers)
    ]
    return statistics.median(watts) if watts else None


def _seconds(result: Result) -> float | None:
    """Seconds of an example."""
    speed = result.speed.examples_per_second
    return 1 / speed if speed else None


def _cost(result: Result) -> float | None:
    seconds, price = _seconds(result), result.cost.price_per_hour
    return None if seconds is None else cost(price, result.layout.hosts or 1, seconds)


def _joules(result: Result) -> float | None:
    joules, seconds, of_example = result.cost.energy_joules, result.cost.seconds_to_finish, _seconds(result)
    return None if not joules or not seconds or of_example is None else joules / seconds * of_example


def _but_workers(result: Result) -> tuple[str | int | None, ...]:
    choices, layout = result.choices, result.layout
    held = layout.global_batch if layout.scaling == "strong" else layout.replica_batch
    return choices.called, choices.model, choices.data, layout.precision, layout.scaling, held
