"""What predictions are off, and by how much runs differ: held against made-up hours of a machine, read from a log."""

import dataclasses
import json
import math

import hours
import numpy as np
import pytest
from predicted_runs import ASKED, ran
from shipped_sizes import planned

from pipeline.analyze import calibration, history, predict
from pipeline.analyze.calibration import Past
from pipeline.driver import Foreseen
from pipeline.record.files import PREDICTIONS, FittedOn, PredictionLine, read_predictions
from pipeline.record.results import Layout, Result, Speed
from pipeline.views.terminal.result import predicted_lines


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "widest"), [("usual", 4.5), ("loud", 3.0), ("minutes", 2.5)])
def test_intervals_hold_17_of_20_and_are_few_times_as_wide_as_the_spread_of_equal_runs(kind, widest):
    rng = np.random.default_rng(24)
    made = [hours.hour(rng, hours.KINDS[kind]) for _ in range(12)]
    shares = [share for found, _ in made for share in hours.together(found)]
    assert np.mean(shares) >= 0.9, shares
    assert np.mean([share >= 0.85 for share in shares]) >= 0.8, shares
    half_width = np.median([one.half_width for found, _ in made for one in found])
    assert half_width < widest * math.sqrt(np.mean([apart**2 for _, apart in made if apart]))


def test_what_earlier_predictions_were_off_is_taken_off_the_more_the_more_they_are():
    def shift(count: int) -> float:
        return calibration.calibration([Past(-0.15, unsure=0.02)] * count).shift

    assert 0 > shift(1) > shift(4) > shift(16) > -0.15
    assert shift(16) < -0.1


def test_a_runs_luck_is_in_the_interval_once_and_what_the_fit_is_unsure_of_beside_it():
    sure = calibration.calibration([Past(0.1 * (-1) ** place, f"{place // 2}") for place in range(200)])
    assert sure.spread == pytest.approx(0.1 * math.sqrt(2), rel=0.02)
    # Until predictions have told what the model is off, that is half as much (in variances) as runs lie apart.
    assert sure.deviation == pytest.approx(sure.spread * math.sqrt(1.5))
    told = calibration.calibration([Past(0.1 * (-1) ** place) for place in range(200)])
    assert told.half_width() == pytest.approx(1.98 * 0.1, rel=0.02)
    assert told.half_width(0.1) == pytest.approx(math.sqrt(2) * told.half_width(), rel=0.02)


def test_runs_of_one_point_that_lie_apart_widen_the_interval_and_say_so():
    def of_pairs(apart: float) -> calibration.Calibration:
        runs = [Past(apart * (place % 2), f"{place // 2}") for place in range(24)]
        return calibration.calibration([*runs, Past(5.0, "ran once")])

    quiet, busy = of_pairs(0.01), of_pairs(0.2)
    assert quiet.half_width() < 0.08 < 0.2 < busy.half_width()
    assert quiet.equal == busy.equal == 24
    assert busy.spread == pytest.approx(0.2 / math.sqrt(2), rel=0.15)
    assert quiet.freedom == calibration.PRIOR_FREEDOM + 12


def line(plan, speed: float, **other: object) -> PredictionLine:
    made = predict.Prediction(
        examples_per_second=speed, low=speed * 0.9, high=speed * 1.1, confidence=0.9, step_seconds=1.0, parts={},
        fitted_on=FittedOn(runs=4, machine="host"), strategy=plan.strategy.name,
    )  # fmt: skip
    return dataclasses.replace(calibration.line_of(plan, made, 1.0), **other)


# Of an earlier version there is none, and the interval says it.
@pytest.mark.parametrize("unsure", [None, math.log(1.1 / 0.9) / 2 / calibration.normal(0.9)])
def test_the_log_tells_of_runs_that_are_alike_and_of_predictions_once_for_each_run(tmp_path, unsure):
    plans = [planned(*ASKED, "hardware=8gpu", f"workers={workers}") for workers in (1, 2)]
    machine = plans[0].hardware.machine
    for began in range(3):
        for plan in plans:
            ran(tmp_path, plan, [1e-3 * (1 + 0.05 * began)] * 3, began=100.0 * began)
    # 20% too fast, before half of that was taken off; and two that say nothing of this strategy and machine.
    fitted, speed = FittedOn(runs=4, machine=machine), 2 * 64 / 1e-3
    lines = [
        line(plans[1], speed * 9, fitted_on=fitted, strategy="mirrored"),
        line(plans[1], speed * 9, fitted_on=FittedOn(runs=4, machine="elsewhere")),
        line(plans[1], speed * 3, fitted_on=fitted),
        line(plans[1], speed * 1.1, fitted_on=fitted, correction=1.1 / 1.2, unsure=unsure),
    ]
    scored = [calibration.scored([made], made.identity, speed)[0] for made in lines]
    ran(tmp_path, plans[1], [1e-3] * 3, began=400.0, predictions=[dataclasses.asdict(made) for made in scored])
    logged = history.finished(tmp_path)
    found = calibration.of_log(plans[0], predict.basis(plans[0], logged, "outputs"), logged)
    assert found.equal == 6
    assert found.shift == pytest.approx(-0.0305, abs=1e-4)
    assert found.freedom == calibration.PRIOR_FREEDOM + 6 - 2 + 1


def test_a_line_of_an_earlier_version_is_read_and_had_nothing_taken_off(tmp_path):
    values = dataclasses.asdict(line(planned(*ASKED, "hardware=8gpu", "workers=2"), 100.0))
    for name in ("correction", "unsure"):
        del values[name]
    (tmp_path / PREDICTIONS).write_text(json.dumps(values) + "\n")
    (read,) = read_predictions(tmp_path)
    assert (read.correction, read.unsure) == (1.0, None)


def test_beside_a_prediction_stands_how_wide_it_is_how_far_runs_lie_apart_and_how_many_earlier_ones_held():
    speed = Speed(100.0, 85.0, 115.0, interval_confidence=0.9)
    result = Result(speed=speed, layout=Layout(workers=2, scaling="weak"))
    score = calibration.Score(count=20, median_error=0.06, held=0.85)
    prediction = predict.Prediction(
        examples_per_second=100.0, low=85.0, high=115.0, confidence=0.9, step_seconds=1.0, parts={"compute": 1.0},
        fitted_on=FittedOn(runs=4), spread=0.071, equal=12,
    )  # fmt: skip
    foreseen = Foreseen(prediction, score, 0.5)
    lines = predicted_lines(result, foreseen)
    wide = "15% to either side; equal runs lie 7.1% apart (a standard deviation, as 12 of them tell)"
    assert f"interval   {wide}" in lines
    assert "earlier    20 predictions scored: off by 6.0% (median), 17 of 20 intervals held." in lines
    unknown = dataclasses.replace(foreseen, prediction=dataclasses.replace(prediction, equal=0))
    told = predicted_lines(result, unknown)[1]
    assert told.endswith("7.1% apart (a standard deviation, as on other machines, since none was run again here)")
