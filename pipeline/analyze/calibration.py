"""Scores earlier predictions against their runs, and corrects the next one by them: its bias and its interval.

The error of a prediction's logarithm is a run's luck, which its repeats share, the uncertainty of the fit, and a bias
of the model. All are taken as normal with fixed ratios of their variances and one scale, which a longer log tells
better (a conjugate prior; Gelman et al., 2013, *Bayesian data analysis*, chapter 3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from pipeline.analyze.comparable import grouped
from pipeline.analyze.history import TimedRun
from pipeline.analyze.predict import Basis, Prediction, spread_of
from pipeline.analyze.step_model import CONFIDENCE, identity
from pipeline.plan.plan import Plan
from pipeline.record.files import Predicted, PredictionLine, Scored
from pipeline.record.results import Result

# The standard deviation of a run's own luck where nothing was logged, and what that weighs, in degrees of freedom.
# Equal runs lie 2% to 4% apart on a machine with little else to do, and 8% on a shared one (benchmarks/ties.py).
PRIOR_SPREAD, PRIOR_FREEDOM = 0.05, 3
# The variance of what a model is off everywhere, over that of a run's luck.
OF_MODEL = 0.5
# What is taken off from here on is told.
TOLD = 0.02


@dataclass(frozen=True)
class Calibration:
    """The expected error of the next prediction, as a logarithm, and its `deviation` from a fit that is sure.

    `spread` is the standard deviation of equal runs, as `equal` of them tell.
    """

    shift: float
    deviation: float
    freedom: float
    spread: float
    equal: int

    def half_width(self, unsure: float = 0.0) -> float:
        """Half the interval, as a logarithm, for a fit that is so unsure (a standard deviation)."""
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, (1 + CONFIDENCE) / 2)) * math.hypot(self.deviation, unsure)


def calibration(
    runs: Sequence[tuple[str, float]], errors: Sequence[tuple[float, float]], repeats: float = 0.0
) -> Calibration:
    """The calibration from (point, logarithm of its speed) of runs, and from what predictions were off.

    `errors` are logarithms of measured over fitted speeds, and how unsure each fit was, as standard deviations;
    `repeats` is the spread of the repeats of one run.
    """
    expected = math.hypot(PRIOR_SPREAD, repeats)
    # A point that ran once says nothing of a spread.
    equal = [values for values in grouped(runs).values() if len(values) > 1]
    off, unsure = np.asarray(errors, float).reshape(-1, 2).T
    # What the fit itself was unsure of comes to a prediction's error, in units of the scale that is expected.
    weights = 1 / (1 + (unsure / expected) ** 2)
    weight = 1 / OF_MODEL + float(weights.sum())
    shift = float(weights @ off) / weight
    squares = sum(len(values) * float(np.var(values)) for values in equal)
    squares += float(weights @ (off - shift) ** 2) + shift**2 / OF_MODEL
    freedom = PRIOR_FREEDOM + sum(len(values) - 1 for values in equal) + len(errors)
    spread = math.sqrt((PRIOR_FREEDOM * expected**2 + squares) / freedom)
    deviation, equal_runs = spread * math.sqrt(1 + 1 / weight), sum(map(len, equal))
    return Calibration(shift, deviation, freedom, spread, equal_runs)


def of_log(planned: Plan, basis: Basis, logged: Sequence[TimedRun]) -> Calibration:
    """The calibration from the runs that a plan is predicted from, and from all that had a prediction."""
    errors, scored_folders, machine = list[tuple[float, float]](), set(), basis.fitted_on.machine
    for timed_run in logged:
        result, strategy = timed_run.run.result, planned.strategy.name
        like = [one for one in result.predictions if one.fitted_on and one.fitted_on.machine == machine]
        like = [one for one in like if one.strategy == strategy]
        if like and (measured := result.speed.examples_per_second):
            # Of several for one run, the last was made nearest to it.
            last = like[-1]
            fitted, unsure = last.examples_per_second / last.correction, last.unsure
            if unsure is None:
                # Lines of an earlier version have no more than their interval.
                unsure = math.log(last.high / last.low) / 2 / normal(last.confidence or CONFIDENCE)
            errors.append((math.log(measured / fitted), unsure))
            scored_folders.add(timed_run.run.folder)
    others = [timed_run for timed_run in basis.runs if timed_run.run.folder not in scored_folders]
    speeds = [(identity(timed_run.plan), timed_run.run.result.speed.examples_per_second) for timed_run in others]
    runs = [(name, math.log(speed)) for name, speed in speeds if speed]
    # Of each run by itself: how far equal runs lie apart is told by their speeds, and would count twice.
    repeats = [timed_run.run.repeats for timed_run in basis.runs]
    return calibration(runs, errors, float(np.median([spread_of(rates, float(np.median(rates))) for rates in repeats])))


def calibrated(prediction: Prediction, calibration: Calibration) -> Prediction:
    """The prediction without the bias of earlier ones, with the spread between runs in its interval.

    >>> from pipeline.record.files import FittedOn
    >>> made = Prediction(examples_per_second=100.0, low=90.0, high=110.0, confidence=0.9, fitted_on=FittedOn(runs=1),
    ...                   step_seconds=1.0, parts={})
    >>> wider = calibrated(made, Calibration(shift=math.log(0.9), deviation=0.07, freedom=20, spread=0.06, equal=8))
    >>> round(wider.examples_per_second, 6), wider.low < 81 < 99 < wider.high
    (90.0, True)
    >>> wider.notes
    ('What runs of earlier predictions were slower than the fit, 10%, is taken off.',)
    """
    factor = math.exp(calibration.shift)
    middle, one = prediction.examples_per_second * factor, normal(prediction.confidence)
    below = math.log(prediction.examples_per_second / prediction.low) / one
    above = math.log(prediction.high / prediction.examples_per_second) / one
    off = f"{abs(factor - 1):.0%}, is {'put on' if factor > 1 else 'taken off'}"
    note = f"What runs of earlier predictions were {'faster' if factor > 1 else 'slower'} than the fit, {off}."
    return replace(
        prediction,
        examples_per_second=middle,
        low=middle * math.exp(-calibration.half_width(below)),
        high=middle * math.exp(calibration.half_width(above)),
        step_seconds=prediction.step_seconds / factor,
        notes=(*prediction.notes, note) if abs(factor - 1) >= TOLD else prediction.notes,
        correction=factor,
        unsure=(below + above) / 2,
        spread=calibration.spread,
        equal=calibration.equal,
    )


def normal(confidence: float) -> float:
    """Half the width of an interval of that confidence, in standard deviations of a normal distribution."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


@dataclass(frozen=True)
class Score:
    """The number of predictions, the median size of their errors, and the share of intervals that held."""

    count: int = 0
    median_error: float | None = None
    held: float | None = None


def line_of(planned: Plan, prediction: Prediction, now: float) -> PredictionLine:
    """A prediction as a line of predictions.jsonl."""
    return PredictionLine(**_fields(replace(prediction, time=now)), identity=identity(planned))


def scored(lines: Sequence[PredictionLine], identity: str, measured: float) -> list[Scored]:
    """Returns the predictions of the plan with that identity, each number once, with how far off each was."""
    distinct = {(line.examples_per_second, line.low, line.high): line for line in lines if line.identity == identity}
    predictions = []
    for line in distinct.values():
        error, held = round(line.examples_per_second / measured - 1, 6), line.low <= measured <= line.high
        predictions.append(Scored(**_fields(line), measured=measured, error=error, held=held))
    return predictions


def _fields(predicted: Predicted) -> dict[str, Any]:
    return {field.name: getattr(predicted, field.name) for field in fields(Predicted)}


def score(results: Sequence[Result]) -> Score:
    """The score of all predictions of some runs."""
    predictions = [prediction for result in results for prediction in result.predictions]
    if not predictions:
        return Score()
    median = round(float(np.median([abs(prediction.error) for prediction in predictions])), 6)
    return Score(len(predictions), median, sum(prediction.held for prediction in predictions) / len(predictions))
