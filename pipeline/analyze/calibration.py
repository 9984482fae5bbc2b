"""Turns what equal runs and earlier predictions came to into what a prediction is off, and how far the next run may be.

Repeats of one run share its luck, so they say too little. The logarithm of a run's speed is that of its point, and its
own luck; a prediction's error is that luck, what its fit was unsure of, and what the model is off everywhere, each
once. What an hour has in common is luck too: a step that was timed just before has it as well. All are taken as normal,
with fixed ratios of their variances and one scale, of which the log tells the more the longer it is (a conjugate prior;
Gelman et al., 2013, *Bayesian data analysis*, chapter 3). Arithmetic only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

import numpy as np

from pipeline.analyze.fitting import CONFIDENCE
from pipeline.analyze.history import TimedRun
from pipeline.analyze.predict import Basis, Prediction
from pipeline.analyze.step_model import identity, spread_of
from pipeline.plan.plan import Plan
from pipeline.record.predictions import Line, Predicted, Scored
from pipeline.record.results import Result

# The standard deviation of a run's own luck where nothing was logged, and what that weighs, in degrees of freedom.
# Equal runs lie 2% to 4% apart on a machine with little else to do, and 8% on a shared one (benchmarks/ties.py).
PRIOR_SPREAD, PRIOR_FREEDOM = 0.05, 3
# The variance of what a model is off everywhere, over that of a run's luck.
OF_MODEL = 0.5
# What is taken off from here on is told.
TOLD = 0.02


@dataclass(frozen=True)
class Past:
    """The logarithm of a speed: of a run of the point with this name, or without one of a run over what was predicted.

    That is before anything was taken off, and the fit was so `unsure` of it (a standard deviation).
    """

    value: float
    point: str | None = None
    unsure: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """What the next run is expected to differ from its prediction by, as a logarithm, and how sure that is.

    `deviation` is that of a run from what the fit says, were that sure. `spread` is how far equal runs lie apart, as a
    standard deviation; `equal` runs have told it.
    """

    shift: float
    deviation: float
    freedom: float
    spread: float
    equal: int
    predictions: int

    def half_width(self, unsure: float = 0.0) -> float:
        """Of the interval, as a logarithm, where the fit is so unsure (a standard deviation)."""
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, (1 + CONFIDENCE) / 2)) * math.hypot(self.deviation, unsure)


def calibration(past: Sequence[Past], repeats: float = 0.0) -> Calibration:
    """What past runs and predictions say of the next one, whose own repeats lie so far apart.

    >>> made = calibration([])
    >>> (made.shift, round(made.deviation, 3), made.freedom)
    (0.0, 0.061, 3)
    """
    expected = math.hypot(PRIOR_SPREAD, repeats)
    points: dict[str, list[float]] = {}
    for one in past:
        if one.point is not None:
            points.setdefault(one.point, []).append(one.value)
    # A point that ran once says nothing of a spread.
    equal = [values for values in points.values() if len(values) > 1]
    predictions = [one for one in past if one.point is None]
    off = np.asarray([one.value for one in predictions])
    # What the fit itself was unsure of comes to a prediction's error, in units of the scale that is expected.
    weights = 1 / (1 + (np.asarray([one.unsure for one in predictions]) / expected) ** 2)
    known = 1 / OF_MODEL + float(weights.sum())
    shift = float(weights @ off) / known
    squares = sum(len(values) * float(np.var(values)) for values in equal)
    squares += float(weights @ (off - shift) ** 2) + shift**2 / OF_MODEL
    freedom = PRIOR_FREEDOM + sum(len(values) - 1 for values in equal) + len(predictions)
    spread = math.sqrt((PRIOR_FREEDOM * expected**2 + squares) / freedom)
    return Calibration(
        shift=shift,
        deviation=spread * math.sqrt(1 + 1 / known),
        freedom=freedom,
        spread=spread,
        equal=sum(map(len, equal)),
        predictions=len(predictions),
    )


def of_log(planned: Plan, found: Basis, logged: Sequence[TimedRun]) -> Calibration:
    """The same from the runs that a plan is predicted from, and from all runs that predictions were made for before."""
    past: list[Past] = []
    scored = set()
    for timed_run in logged:
        result = timed_run.run.result
        measured = result.speed.examples_per_second
        like = [made for made in result.predictions if _is_like(made, planned, found)]
        if like and measured:
            # Of several for one run, the last was made nearest to it.
            fitted = like[-1].examples_per_second / like[-1].correction
            past.append(Past(math.log(measured / fitted), unsure=_unsure(like[-1])))
            scored.add(timed_run.run.folder)
    for timed_run in found.runs:
        speed = timed_run.run.result.speed.examples_per_second
        if speed and timed_run.run.folder not in scored:
            past.append(Past(math.log(speed), identity(timed_run.plan)))
    # Of each run by itself: how far equal runs lie apart is told by their speeds, and would count twice.
    repeats = [timed_run.run.repeats for timed_run in found.runs]
    return calibration(past, float(np.median([spread_of(rates, float(np.median(rates))) for rates in repeats])))


def calibrated(made: Prediction, found: Calibration) -> Prediction:
    """The prediction with what earlier ones were off taken off, and the spread between runs in its interval.

    >>> from pipeline.record.predictions import FittedOn
    >>> made = Prediction(100.0, 90.0, 110.0, 0.9, 1.0, {}, FittedOn(runs=1))
    >>> wider = calibrated(made, Calibration(shift=math.log(0.9), deviation=0.07, freedom=20, spread=0.06, equal=8,
    ...                                      predictions=4))
    >>> round(wider.examples_per_second, 6), wider.low < 81 < 99 < wider.high
    (90.0, True)
    >>> wider.notes
    ('What runs of earlier predictions were slower than the fit, 10%, is taken off.',)
    """
    factor = math.exp(found.shift)
    middle = made.examples_per_second * factor
    one = normal(made.confidence)
    below = math.log(made.examples_per_second / made.low) / one
    above = math.log(made.high / made.examples_per_second) / one
    off = f"{abs(factor - 1):.0%}, is {'put on' if factor > 1 else 'taken off'}"
    said = f"What runs of earlier predictions were {'faster' if factor > 1 else 'slower'} than the fit, {off}."
    return replace(
        made,
        examples_per_second=middle,
        low=middle * math.exp(-found.half_width(below)),
        high=middle * math.exp(found.half_width(above)),
        step_seconds=made.step_seconds / factor,
        notes=(*made.notes, said) if abs(factor - 1) >= TOLD else made.notes,
        correction=factor,
        unsure=(below + above) / 2,
        spread=found.spread,
        equal=found.equal,
    )


def normal(confidence: float) -> float:
    """Half the width of an interval of that confidence, in standard deviations of a normal distribution.

    >>> round(normal(0.9), 3), round(normal(0.95), 3)
    (1.645, 1.96)
    """
    return NormalDist().inv_cdf((1 + confidence) / 2)


@dataclass(frozen=True)
class Score:
    """How good predictions were: how many, the median of their errors' sizes, and the share of intervals that held."""

    count: int = 0
    median_error: float | None = None
    held: float | None = None


def line_of(planned: Plan, parameters: int, made: Prediction, now: float) -> Line:
    """A prediction as a line of predictions.jsonl."""
    return Line(
        time=now,
        identity=identity(planned),
        examples_per_second=made.examples_per_second,
        low=made.low,
        high=made.high,
        confidence=made.confidence,
        strategy=planned.strategy.name,
        workers=planned.workers,
        parameters=parameters,
        fitted_on=made.fitted_on,
        correction=made.correction,
        unsure=made.unsure,
    )


def scored(lines: Sequence[Line], wanted: str, measured: float) -> list[Scored]:
    """The predictions of the plan whose identity is `wanted`, each number once, with how far off each was.

    >>> line = Line(identity="a", examples_per_second=110.0, low=90.0, high=130.0)
    >>> [(made.error, made.held) for made in scored([line, line], "a", measured=100.0)]
    [(0.1, True)]
    """
    found = {(line.examples_per_second, line.low, line.high): line for line in lines if line.identity == wanted}
    return [
        Scored(
            **{field.name: getattr(line, field.name) for field in fields(Predicted)},
            measured=measured,
            error=round(line.examples_per_second / measured - 1, 6),
            held=line.low <= measured <= line.high,
        )
        for line in found.values()
    ]


def score(results: Sequence[Result]) -> Score:
    """How good the predictions of these runs were.

    >>> off, held = (Scored(examples_per_second=1.0, low=1.0, high=1.0, error=error, held=error < 0)
    ...              for error in (0.2, -0.1))
    >>> score([Result(predictions=(off, held)), Result()])
    Score(count=2, median_error=0.15, held=0.5)
    """
    predictions = [prediction for result in results for prediction in result.predictions]
    if not predictions:
        return Score()
    return Score(
        count=len(predictions),
        median_error=round(float(np.median([abs(prediction.error) for prediction in predictions])), 6),
        held=sum(prediction.held for prediction in predictions) / len(predictions),
    )


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
