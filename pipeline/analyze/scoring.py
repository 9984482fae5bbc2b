"""Predictions that were made, and how far off they were from the runs that followed."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from pipeline.analyze.predict import Prediction
from pipeline.analyze.step_model import identity
from pipeline.plan.plan import Plan
from pipeline.record.predictions import Line, Predicted, Scored
from pipeline.record.results import Result


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
