"""Turns throughputs, measured or predicted, into time, cost, energy, the best of each, and the knee."""

import itertools
import statistics
from collections.abc import Hashable, Sequence
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
        if not result.speed.examples_per_second:
            continue
        seconds, costs = 1 / result.speed.examples_per_second, result.cost
        needs["time"][place] = seconds
        if (price := cost(costs.price_per_hour, result.layout.hosts or 1, seconds)) is not None:
            needs["cost"][place] = price
        if costs.energy_joules and costs.seconds_to_finish:
            needs["energy"][place] = costs.energy_joules / costs.seconds_to_finish * seconds
    return {what: min(values, key=values.__getitem__) for what, values in needs.items() if values}


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
    return knee_under(None, [*speeds.items()], share) if alike else None


def knee_under(strategy: str | None, speeds: Sequence[tuple[int, float]], share: float) -> Knee | None:
    """The knee of (workers, speed) of runs under a strategy; None where all have as many workers."""
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
