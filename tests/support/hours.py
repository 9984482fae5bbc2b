"""Made-up hours of a machine, in which benchmarks/predict.py is gone through with the real fit and calibration.

    python tests/support/hours.py 20

prints for each kind of noise how many intervals held, and how wide they are beside the spread of equal runs.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.analyze import calibration, predict, step_model
from pipeline.analyze.calibration import Past
from pipeline.analyze.least_squares import CONFIDENCE
from pipeline.analyze.step_model import Case, Observed
from pipeline.record.files import FittedOn

SEEN, UNSEEN = (200_000, 1_630_000), (300_000, 407_000, 610_000, 815_000, 1_220_000)
WORKERS, REPEATS, LIVES = (1, 2), 5, 3
# Of a run, and of the steps that are timed for a prediction.
SECONDS, TIMED_SECONDS = 30.0, 15.0
# Intervals that a person looks at together.
TOGETHER = 20


@dataclass(frozen=True)
class Noise:
    """Standard deviations of logarithms: of a run's luck, of what an hour shares, and of what the model is off.

    A run's repeats lie half as far apart as runs do. Other work `comes` after so many runs, makes the rest so much
    slower, and their luck so large. `tails` are degrees of freedom of the luck; None: it is normal.
    """

    run: float
    hour: float
    rounds: int = 2
    bias: float = 0.0
    memory: float = 3600.0
    slower_in_an_hour: float = 0.0
    tails: float | None = None
    timed: bool = True
    comes: tuple[int, float, float] | None = None
    model: float = 0.03


KINDS = {
    "quiet": Noise(0.015, 0.01),
    "usual": Noise(0.04, 0.03),
    "loud": Noise(0.2, 0.1),
    "very loud": Noise(0.3, 0.2),
    "minutes": Noise(0.1, 0.25, memory=300.0),
    "drifting": Noise(0.04, 0.03, slower_in_an_hour=0.5),
    "heavy tails": Noise(0.1, 0.05, tails=2.5),
    "work comes": Noise(0.04, 0.03, comes=(20, 0.25, 0.15)),
    "one round": Noise(0.1, 0.05, rounds=1),
    "six rounds": Noise(0.1, 0.05, rounds=6),
    "biased": Noise(0.04, 0.03, bias=0.12),
    "not timed": Noise(0.1, 0.05, timed=False),
}


@dataclass
class Machine:
    """Where runs take as long as their size lets expect, times what the hour and their luck make of it."""

    rng: np.random.Generator
    noise: Noise
    now: float = 0.0
    runs: int = 0
    shared: float = field(init=False)

    def __post_init__(self) -> None:
        self.shared = self.rng.normal(0, self.noise.hour)

    def passes(self, seconds: float) -> tuple[float, float]:
        """(how much slower all is then, the standard deviation of a run's luck), as logarithms."""
        kept = math.exp(-seconds / self.noise.memory)
        self.shared = kept * self.shared + math.sqrt(1 - kept**2) * self.rng.normal(0, self.noise.hour)
        self.now += seconds
        slower = self.shared + self.noise.slower_in_an_hour * self.now / 3600
        if self.noise.comes and self.runs >= self.noise.comes[0]:
            return slower + self.noise.comes[1], self.noise.comes[2]
        return slower, self.noise.run

    def luck(self, deviation: float) -> float:
        """Of one run."""
        if self.noise.tails:
            return 0.6 * deviation * float(self.rng.standard_t(self.noise.tails))
        return float(self.rng.normal(0, deviation))

    def run(self, seconds: float) -> list[float]:
        """The step times of a run's repeats, whose point takes so many seconds."""
        slower, deviation = self.passes(SECONDS)
        self.runs += 1
        return self._repeats(seconds, slower, deviation)

    def timed(self, seconds: float) -> list[list[float]]:
        """The step times of repeats in several lives of a process, which share a part of their luck."""
        slower, deviation = self.passes(TIMED_SECONDS)
        half = deviation / math.sqrt(2)
        slower += self.luck(half)
        return [self._repeats(seconds, slower, half) for _ in range(LIVES)]

    def _repeats(self, seconds: float, slower: float, deviation: float) -> list[float]:
        middle = math.log(seconds) + slower + self.luck(deviation)
        return [math.exp(middle + self.rng.normal(0, deviation / 2)) for _ in range(REPEATS)]


@dataclass(frozen=True)
class Foretold:
    """A prediction beside the run that followed it: the logarithm of measured over predicted."""

    off: float
    held: bool
    half_width: float


def hour(rng: np.random.Generator, noise: Noise) -> tuple[list[Foretold], float | None]:
    """The predictions of one hour, and how far equal runs lay apart, as a standard deviation."""
    machine = Machine(rng, noise)
    of_size = {size: rng.normal(0, 1.5 * noise.model) for size in (*SEEN, *UNSEEN)}
    off = {_case(workers, size): of_size[size] + (workers - 1) * rng.normal(0, noise.model)
           for size in of_size for workers in WORKERS}  # fmt: skip
    seen: list[tuple[Case, list[float]]] = []
    past: list[Past] = []
    found: list[Foretold] = []
    measured: dict[Case, list[float]] = {}
    for number in range(noise.rounds):
        order = WORKERS if number % 2 else WORKERS[::-1]
        for case in [_case(workers, int(size)) for size in rng.permutation(SEEN) for workers in order]:
            repeats = machine.run(_seconds(case, off[case]))
            seen.append((case, repeats))
            past.append(Past(-math.log(np.median(repeats)), str(case)))
        for size in map(int, rng.permutation(UNSEEN)):
            one = _case(1, size)
            timed = step_model.one_run(one, machine.timed(_seconds(one, off[one]))) if noise.timed else None
            cases = [_case(workers, size) for workers in order]
            for case, made in [(case, _predicted(case, seen, timed, past)) for case in cases]:
                speed = 1 / float(np.median(machine.run(_seconds(case, off[case] + noise.bias))))
                measured.setdefault(case, []).append(math.log(speed))
                past.append(Past(math.log(speed / made.examples_per_second * made.correction), unsure=made.unsure or 0))
                wide = (made.high - made.low) / 2 / made.examples_per_second
                found.append(Foretold(math.log(speed / made.examples_per_second), made.low <= speed <= made.high, wide))
    apart = math.sqrt(np.mean([np.var(speeds, ddof=1) for speeds in measured.values()])) if noise.rounds > 1 else None
    return found, apart


def _case(workers: int, parameters: int) -> Case:
    return Case(workers, 512, parameters, 4 * parameters, 1, workers, workers, 1, "all_reduce", "cpu", None)


def _seconds(case: Case, off: float) -> float:
    return (1.5e-3 + 9e-9 * case.parameters) * (1 + 0.35 * (case.workers - 1)) * math.exp(off)


def _predicted(
    case: Case, seen: Sequence[tuple[Case, list[float]]], timed: Observed | None, past: Sequence[Past]
) -> predict.Prediction:
    repeats = float(np.median([step_model.spread_of(run, float(np.median(run))) for _, run in seen]))
    known = calibration.calibration(past, repeats)
    runs = [replace(run, spread=known.spread) for run in step_model.of_repeats(*zip(*seen, strict=True))]
    seconds, low, high, *_ = predict.predict(
        case, runs, timed and replace(timed, spread=max(known.spread, timed.spread))
    )
    made = predict.Prediction(
        examples_per_second=1 / seconds, low=1 / high, high=1 / low, confidence=CONFIDENCE, step_seconds=seconds,
        parts={}, fitted_on=FittedOn(runs=len(seen)),
    )  # fmt: skip
    return calibration.calibrated(made, known)


def together(found: Sequence[Foretold]) -> list[float]:
    """The shares of intervals that held, of as many predictions each as are seen together."""
    return [float(np.mean([one.held for one in found[at : at + TOGETHER]])) for at in range(0, len(found), TOGETHER)]


def main() -> None:
    """Prints one line for each kind of noise."""
    for name, noise in KINDS.items():
        rng = np.random.default_rng(1)
        hours = [hour(rng, noise) for _ in range(int(sys.argv[1]))]
        every = [one for found, _ in hours for one in found]
        good = np.mean([share >= 0.85 for found, _ in hours for share in together(found)])
        wide = float(np.median([one.half_width for one in every]))
        apart = [equal for _, equal in hours if equal]
        beside = f"{wide / np.median(apart):4.1f} times equal runs' {np.median(apart):.1%}" if apart else ""
        held = np.mean([one.held for one in every])
        print(f"{name:12} held {held:6.1%}, at least 17 of 20 in {good:4.0%}, half width {wide:6.1%} {beside}")


if __name__ == "__main__":
    main()
