"""Made-up hours of a machine, in which benchmarks/predict.py is gone through with the real fit and calibration."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipeline.analyze import calibration, predict
from pipeline.analyze.step_model import CONFIDENCE, Case, Observed
from pipeline.record.files import FittedOn

SEEN, UNSEEN = (200_000, 1_630_000), (300_000, 407_000, 610_000, 815_000, 1_220_000)
WORKERS, REPEATS, LIVES, ROUNDS = (1, 2), 5, 3, 2
# Of a run, and of the steps that are timed for a prediction.
SECONDS, TIMED_SECONDS = 30.0, 15.0
# Intervals that a person looks at together, and the deviation of the logarithm by which the model is off.
TOGETHER, MODEL = 20, 0.03


class Noise(NamedTuple):
    """Standard deviations of logarithms: of a run's luck, and of what the runs of so many seconds share."""

    run: float
    hour: float
    memory: float = 3600.0


KINDS = {"usual": Noise(0.04, 0.03), "loud": Noise(0.2, 0.1), "minutes": Noise(0.1, 0.25, memory=300.0)}


class Machine:
    """Where runs take as long as their size lets expect, times what the hour and their luck make of it."""

    def __init__(self, rng: np.random.Generator, noise: Noise) -> None:
        self.rng, self.noise, self.shared = rng, noise, rng.normal(0, noise.hour)

    def passes(self, seconds: float) -> float:
        """How much slower all is then, as a logarithm."""
        share = math.exp(-seconds / self.noise.memory)
        self.shared = share * self.shared + math.sqrt(1 - share**2) * self.rng.normal(0, self.noise.hour)
        return self.shared

    def run(self, seconds: float, slower: float | None = None, deviation: float | None = None) -> list[float]:
        """The step times of a run's repeats, whose point takes so many seconds; they lie half as far apart as runs."""
        deviation = deviation or self.noise.run
        middle = math.log(seconds) + (self.passes(SECONDS) if slower is None else slower)
        middle += self.rng.normal(0, deviation)
        return [math.exp(middle + self.rng.normal(0, deviation / 2)) for _ in range(REPEATS)]

    def timed(self, seconds: float) -> list[list[float]]:
        """The step times of repeats in several lives of a process, which share a part of their luck."""
        half = self.noise.run / math.sqrt(2)
        slower = self.passes(TIMED_SECONDS) + self.rng.normal(0, half)
        return [self.run(seconds, slower, half) for _ in range(LIVES)]


class Foretold(NamedTuple):
    """A prediction beside the run that followed it: the logarithm of measured over predicted."""

    off: float
    held: bool
    half_width: float


def hour(rng: np.random.Generator, noise: Noise) -> tuple[list[Foretold], float]:
    """The predictions of one hour, and how far equal runs lay apart, as a standard deviation."""
    machine = Machine(rng, noise)
    of_size = {size: rng.normal(0, 1.5 * MODEL) for size in (*SEEN, *UNSEEN)}
    off = {_case(workers, size): of_size[size] + (workers - 1) * rng.normal(0, MODEL)
           for size in of_size for workers in WORKERS}  # fmt: skip
    seen, found, errors = list[tuple[Case, list[float]]](), list[Foretold](), list[tuple[float, float]]()
    measured: dict[Case, list[float]] = {}
    for number in range(ROUNDS):
        order = WORKERS if number % 2 else WORKERS[::-1]
        for case in [_case(workers, int(size)) for size in rng.permutation(SEEN) for workers in order]:
            seen.append((case, machine.run(_seconds(case, off[case]))))
        for size in map(int, rng.permutation(UNSEEN)):
            one = _case(1, size)
            timed = predict.one_run(one, machine.timed(_seconds(one, off[one])))
            cases = [_case(workers, size) for workers in order]
            for case, made in [(case, _predicted(case, seen, timed, errors)) for case in cases]:
                speed = 1 / float(np.median(machine.run(_seconds(case, off[case]))))
                measured.setdefault(case, []).append(math.log(speed))
                errors.append((math.log(speed / made.examples_per_second * made.correction), made.unsure or 0))
                wide = (made.high - made.low) / 2 / made.examples_per_second
                found.append(Foretold(math.log(speed / made.examples_per_second), made.low <= speed <= made.high, wide))
    return found, math.sqrt(np.mean([np.var(speeds, ddof=1) for speeds in measured.values()]))


def _case(workers: int, parameters: int) -> Case:
    return Case(workers, 512, parameters, 4 * parameters, 1, workers, workers, 1, "all_reduce", "cpu", None)


def _seconds(case: Case, off: float) -> float:
    return (1.5e-3 + 9e-9 * case.parameters) * (1 + 0.35 * (case.workers - 1)) * math.exp(off)


def _predicted(
    case: Case, seen: Sequence[tuple[Case, list[float]]], timed: Observed, errors: Sequence[tuple[float, float]]
) -> predict.Prediction:
    repeats = float(np.median([predict.spread_of(run, float(np.median(run))) for _, run in seen]))
    speeds = [(str(case), -math.log(np.median(run))) for case, run in seen]
    known = calibration.calibration(speeds, errors, repeats)
    runs = [replace(run, spread=known.spread) for run in predict.of_repeats(*zip(*seen, strict=True))]
    seconds, low, high, *_ = predict.predict(case, runs, replace(timed, spread=max(known.spread, timed.spread)))
    made = predict.Prediction(
        examples_per_second=1 / seconds, low=1 / high, high=1 / low, confidence=CONFIDENCE, step_seconds=seconds,
        parts={}, fitted_on=FittedOn(runs=len(seen)),
    )  # fmt: skip
    return calibration.calibrated(made, known)


def together(found: Sequence[Foretold]) -> list[float]:
    """The shares of intervals that held, of as many predictions each as are seen together."""
    return [float(np.mean([one.held for one in found[at : at + TOGETHER]])) for at in range(0, len(found), TOGETHER)]
