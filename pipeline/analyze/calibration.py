"""Turns what equal runs and earlier predictions came to into what a prediction is off, and how far the next run may be.

Repeats of one run share its luck, so they say too little. The logarithm of a run's speed is that of its point, and what
all runs of that hour share, and its own luck; a prediction's error has besides what the model is off everywhere. All
are taken as normal (a Gaussian process in time; Rasmussen & Williams, 2006, chapter 2), with fixed ratios of their
variances and one scale, of which the log tells the more the longer it is (a conjugate prior; Gelman et al., 2013,
*Bayesian data analysis*, chapter 14). Arithmetic only: time is an argument.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from pipeline.analyze.fitting import CONFIDENCE
from pipeline.analyze.history import TimedRun
from pipeline.analyze.predict import Basis, Prediction
from pipeline.analyze.step_model import identity, observed
from pipeline.plan.plan import Plan
from pipeline.record.predictions import Predicted

# The standard deviation of a run's own luck where nothing was logged, and what that weighs, in degrees of freedom.
# Equal runs lie 2% to 4% apart on a machine with little else to do, and 8% on a shared one (benchmarks/ties.py).
PRIOR_SPREAD, PRIOR_FREEDOM = 0.05, 3
# Variances over that of a run's luck: of what runs of an hour share, and of what a model is off everywhere.
OF_HOURS, OF_MODEL = 1.0, 0.5
# The seconds after which what runs share is forgotten to a third.
HOUR = 3600.0
# Older ones say nothing that these do not.
MOST = 300
# What is taken off from here on is told.
TOLD = 0.02


@dataclass(frozen=True)
class Past:
    """The logarithm of a speed at a time: of a run of the point with this name, or without one of a run over what was
    predicted of it, before anything was taken off, whose interval has half the width `unsure`.
    """

    time: float
    value: float
    point: str | None = None
    unsure: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """What the next run is expected to differ from its prediction by, as a logarithm, and how sure that is.

    `spread` is how far equal runs of different hours lie apart, as a standard deviation; `equal` runs have told it.
    """

    shift: float
    deviation: float
    freedom: float
    spread: float
    equal: int
    predictions: int

    @property
    def half_width(self) -> float:
        """Of the interval, as a logarithm."""
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, (1 + CONFIDENCE) / 2)) * self.deviation


def calibration(past: Sequence[Past], now: float, repeats: float = 0.0) -> Calibration:
    """What past runs and predictions say of one that is predicted `now`.

    >>> made = calibration([], now=0.0)
    >>> (made.shift, round(made.deviation, 3), made.freedom)
    (0.0, 0.079, 3)
    """
    known = sorted(_telling(past), key=lambda one: one.time)[-MOST:]
    own = 1 + OF_HOURS + OF_MODEL
    expected = math.hypot(PRIOR_SPREAD, repeats)
    if not known:
        return Calibration(0.0, expected * math.sqrt(own), PRIOR_FREEDOM, expected * math.sqrt(1 + OF_HOURS), 0, 0)
    times = np.asarray([one.time for one in known])
    predicted = np.asarray([one.point is None for one in known])
    values = np.asarray([one.value for one in known])
    shared = OF_HOURS * np.exp(-np.abs(times[:, None] - times) / HOUR)
    # What the fit itself was unsure of comes to a prediction's error, in units of the scale that is expected.
    noise = 1 + (np.asarray([one.unsure for one in known]) / expected) ** 2
    covariance = shared + OF_MODEL * np.outer(predicted, predicted) + np.diag(noise)
    toward = OF_HOURS * np.exp(-np.abs(now - times) / HOUR) + OF_MODEL * predicted
    points = sorted({one.point for one in known if one.point is not None})
    design = np.asarray([[float(one.point == point) for point in points] for one in known]).reshape(len(known), -1)
    # Generalized least squares: the middle of each point is not known before.
    solved = np.linalg.solve(covariance, np.column_stack([values, toward, design]))
    of_values, of_toward, of_design = solved[:, 0], solved[:, 1], solved[:, 2:]
    information = design.T @ of_design
    middles = np.linalg.solve(information, design.T @ of_values) if points else np.zeros(0)
    rest = values - design @ middles
    missing = design.T @ of_toward
    unknown = float(missing @ np.linalg.solve(information, missing)) if points else 0.0
    squares = float(rest @ (of_values - of_design @ middles))
    freedom = PRIOR_FREEDOM + len(known) - len(points)
    scale = math.sqrt((PRIOR_FREEDOM * expected**2 + squares) / freedom)
    variance = max(own - float(toward @ of_toward) + unknown, 1.0)
    return Calibration(
        shift=float(of_toward @ rest),
        deviation=scale * math.sqrt(variance),
        freedom=freedom,
        spread=scale * math.sqrt(1 + OF_HOURS),
        equal=int(np.sum(~predicted)),
        predictions=int(np.sum(predicted)),
    )


def of_log(planned: Plan, found: Basis, logged: Sequence[TimedRun], now: float) -> Calibration:
    """The same from the runs that a plan is predicted from, and from all runs that predictions were made for before."""
    past: list[Past] = []
    scored = set()
    for timed_run in logged:
        result, at = timed_run.run.result, timed_run.run.measured_at
        measured = result.speed.examples_per_second
        like = [made for made in result.predictions if _is_like(made, planned, found)]
        if like and at is not None and measured:
            # Of several for one run, the last was made nearest to it.
            past.append(Past(at, math.log(measured / (like[-1].examples_per_second / like[-1].correction)), None,
                             _unsure(like[-1])))  # fmt: skip
            scored.add(timed_run.run.folder)
    for timed_run in found.runs:
        speed, at = timed_run.run.result.speed.examples_per_second, timed_run.run.measured_at
        if speed and at is not None and timed_run.run.folder not in scored:
            past.append(Past(at, math.log(speed), identity(timed_run.plan)))
    return calibration(past, now, float(np.median([run.spread for run in observed(found.runs)])))


def calibrated(made: Prediction, found: Calibration) -> Prediction:
    """The prediction with what runs and earlier ones were off taken off, and the spread between runs in its interval.

    >>> from pipeline.record.predictions import FittedOn
    >>> made = Prediction(100.0, 90.0, 110.0, 0.9, 1.0, {}, FittedOn(runs=1))
    >>> wider = calibrated(made, Calibration(shift=math.log(0.9), deviation=0.07, freedom=20, spread=0.06, equal=8,
    ...                                      predictions=4))
    >>> round(wider.examples_per_second, 6), wider.low < 81 < 99 < wider.high
    (90.0, True)
    >>> wider.notes
    ('What runs of late and earlier predictions were slower than the fit, 10%, is taken off.',)
    """
    factor = math.exp(found.shift)
    middle = made.examples_per_second * factor
    below, above = math.log(made.examples_per_second / made.low), math.log(made.high / made.examples_per_second)
    off = f"{abs(factor - 1):.0%}, is {'put on' if factor > 1 else 'taken off'}"
    said = f"What runs of late and earlier predictions were {'faster' if factor > 1 else 'slower'} than the fit, {off}."
    return replace(
        made,
        examples_per_second=middle,
        low=middle * math.exp(-math.hypot(below, found.half_width)),
        high=middle * math.exp(math.hypot(above, found.half_width)),
        step_seconds=made.step_seconds / factor,
        notes=(*made.notes, said) if abs(factor - 1) >= TOLD else made.notes,
        correction=factor,
        unsure=(below + above) / 2 / normal(made.confidence),
        spread=found.spread,
        equal=found.equal,
    )


def normal(confidence: float) -> float:
    """Half the width of an interval of that confidence, in standard deviations of a normal distribution.

    >>> round(normal(0.9), 3), round(normal(0.95), 3)
    (1.645, 1.96)
    """
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _is_like(made: Predicted, planned: Plan, found: Basis) -> bool:
    """Was it made of the strategy, and from runs of the machine, that another is made of?"""
    machine = made.fitted_on.machine if made.fitted_on else None
    return made.strategy == planned.strategy.name and machine == found.machine


def _unsure(made: Predicted) -> float:
    """How sure the fit of an earlier prediction was, as a standard deviation of the logarithm."""
    return (
        made.unsure
        if made.unsure is not None
        else math.log(made.high / made.low) / 2 / normal(made.confidence or CONFIDENCE)
    )


def _telling(past: Sequence[Past]) -> list[Past]:
    """Without the runs of points that ran once, which say nothing of a spread."""
    counts: dict[str | None, int] = {}
    for one in past:
        counts[one.point] = counts.get(one.point, 0) + 1
    return [one for one in past if one.point is None or counts[one.point] > 1]
