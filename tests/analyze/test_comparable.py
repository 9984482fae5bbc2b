"""What cannot be compared: refused or marked wherever the number shows, for each kind."""

import contextlib
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_compare import wrote

from pipeline.analyze import comparable, verdict
from pipeline.analyze.history import Run, load
from pipeline.commands import compare
from pipeline.commands.report import main
from pipeline.record.results import Result
from pipeline.views import report

MLP = {"_target_": "pipeline.models.mlp"}
# (what the plan says otherwise, what the result says otherwise, what is written beside the speed)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "model": ({}, {"model": "cnn"}, "differs in model"),
    "model of another width": ({"model_build": MLP | {"hidden": [16]}}, {}, "differs in model"),
    "data": ({}, {"data": "mnist5k"}, "differs in data"),
    "data made otherwise": ({"data_build": {"split_seed": 1}}, {}, "differs in data"),
    "batch rule": ({}, {"replica_batch": 32}, "differs in batch rule"),
    "scaling": ({}, {"scaling": "strong"}, "differs in scaling and batch rule"),
    "precision": ({}, {"precision": "mixed_bfloat16"}, "differs in precision"),
    "machine": ({}, {"machine": "there"}, "differs in machine"),
    "versions": ({}, {"versions": {"keras": "4"}}, "differs in versions"),
    "rehearsal": ({}, {"rehearsal": True}, "rehearsal"),
    "oversubscribed": ({}, {"oversubscribed": True}, "oversubscribed"),
    "fewer workers": ({}, {"timed_workers": 1}, "fewer workers"),
    "optimizer": ({"optimizer": "sgd"}, {}, "differs in optimizer"),
    "gradient bits": ({"gradient_bits": 16}, {}, "differs in gradient bits"),
    "determinism": ({"deterministic": True}, {}, "differs in deterministic"),
    "threads": ({"threads_per_device": 2}, {}, "differs in threads per device"),
    "cache": ({"cache": "memory"}, {}, "differs in cache"),
    "skipped data": ({}, {"train_examples_skipped": 7}, "differs in examples left out"),
}
ASKED = {
    "data_build": {"split_seed": 0}, "optimizer": None, "gradient_bits": 32, "deterministic": False,
    "threads_per_device": 1, "cache": "none",
}  # fmt: skip


def a_sweep(folder: Path, *points: tuple[dict[str, Any], dict[str, Any]]) -> Path:
    """A sweep of two equal points, and of others that are twice as fast."""
    measured = {"speedup": 1.5, "efficiency": 0.75, "baseline_examples_per_second": 100.0, "train_examples_skipped": 0}
    for place, (asked, result) in enumerate([({}, {}), ({}, {}), *points]):
        speed = 150.0 if place < 2 else 300.0
        told = measured | {"examples_per_second": speed, "mlflow_run_id": f"{place}" * 8} | result
        wrote(folder / f"{place}_mirrored", [speed - 1, speed, speed + 1, speed, speed], ASKED | asked, **told)
    return folder


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory) -> tuple[Path, str]:
    """A sweep with a point of each kind, all faster than the two that compare, and what its report prints."""
    output = tmp_path_factory.mktemp("outputs")
    folder = a_sweep(output / "sweeps" / "kinds", *((asked, result) for asked, result, _ in KINDS.values()))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["sweep=kinds", f"output_dir={output}"]) == 0
    return folder, printed.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_compared_is_refused_or_marked_wherever_it_shows(all_kinds, capsys, kind):
    (folder, out), mark, place = all_kinds, KINDS[kind][2], list(KINDS).index(kind) + 2
    # The terminal: beside the speed, and in the verdict, which another point wins.
    row = next(at for at, line in enumerate(out.splitlines()) if line.startswith(f"{place:>2}  "))
    assert out.splitlines()[row + 1].endswith(mark)
    (left_out,) = (line for line in out.splitlines() if line.startswith("Left out of the verdict"))
    assert re.search(rf"points? (\d+ and )?{place}( and \d+)? \({mark}\)[;.]", left_out)
    # The table of all numbers.
    row = list(csv.DictReader((folder / "points.csv").read_text().splitlines()))[place]
    assert (row["point"], row["marks"]) == (str(place), mark)
    # The page: throughput, speedup and efficiency in its table, and its figures.
    page = (folder / "report.html").read_text()
    row = re.search(rf"<tr[^>]*><td class=\"number\">{place}</td>.*", page)
    assert row is not None
    assert row[0].count(f'<small class="mark">{mark}</small>') == 3
    assert re.search(rf"{place}  mirrored, 2 workers \([^()]*{mark}\): 300", page)
    # The comparison of two runs.
    (other,) = folder.glob(f"{place}_*")
    assert compare.main([str(folder / "0_mirrored"), str(other)]) == 0
    out = capsys.readouterr().out
    assert "0 and 1: not compared, since" in out
    assert "times as fast" not in out
    assert mark in out


def test_the_points_that_compare_win_a_sweep_of_all_kinds(all_kinds):
    tied = "mirrored on 2 workers (point 0) and mirrored on 2 workers (point 1)"
    assert f"A tie: {tied} cannot be told apart, at 150 and 150 examples/s" in all_kinds[1]


def test_asynchronous_steps_are_marked_and_still_compared(tmp_path, capsys):
    folder = a_sweep(tmp_path / "sweeps" / "kinds", ({}, {"strategy": "parameter_server", "asynchronous": True}))
    assert main(["sweep=kinds", f"output_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "parameter_server on 2 workers (point 2) is the fastest" in out
    assert "(asynchronous)" in out
    assert 'class="mark">asynchronous<' in (folder / "report.html").read_text()


def test_what_follows_from_the_strategy_keeps_nothing_from_being_compared(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    wrote(one, [1.0], ASKED | {"shard": "auto", "static_batches": False, "seed": 0})
    wrote(two, [1.0], ASKED | {"shard": "file", "static_batches": True, "seed": 1}, strategy="tpu", workers=8)
    assert comparable.unlike(load(one), load(two)) == []


def test_a_run_of_an_earlier_version_lacks_settings_and_is_compared(tmp_path):
    wrote(tmp_path / "old", [1.0])
    wrote(tmp_path / "new", [1.0], {"optimizer": "sgd", "gradient_bits": 32})
    assert comparable.unlike(load(tmp_path / "old"), load(tmp_path / "new")) == []


def test_the_largest_group_of_sound_points_decides(tmp_path):
    other = {"precision": "mixed_bfloat16"}
    folder = a_sweep(tmp_path, ({}, other), ({}, other), ({}, other | {"rehearsal": True}), ({}, {}))
    written = report.write(folder)
    assert [point.group for point in written.sweep.points] == ["A", "A", "B", "B", "B", "A"]
    assert written.verdict.best is not None
    assert written.verdict.best.places == (5,)


def test_a_sweep_of_rehearsals_has_no_verdict(tmp_path):
    folder = a_sweep(tmp_path)
    for path in folder.glob("*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rehearsal": True}))
    written = report.write(folder)
    assert written.lines[0] == "No verdict: no measured point has the speed of its hardware."
    assert written.verdict.best is None


def runs(tmp_path: Path, *speeds: float, **result: Any) -> list[verdict.Contestant]:
    """A contestant for each speed, whose repeats lie 1% around it."""
    start = len(list(tmp_path.iterdir()))
    folders = [
        wrote(tmp_path / f"{start + place}", [speed * (1 + off / 100) for off in (-1, 0, 1, -0.5, 0.5)], **result)
        for place, speed in enumerate(speeds)
    ]
    return [verdict.Contestant((place,), (load(Path(each)),)) for place, each in enumerate(folders)]


@pytest.mark.parametrize(("faster", "tie"), [(1.005, True), (1.06, True), (1.3, False)])
def test_ranges_that_fall_apart_by_less_than_equal_runs_do_are_a_tie(tmp_path, faster, tie):
    one, two = runs(tmp_path, 100.0, 100.0 * faster)
    assert (verdict.told_apart(one, two, verdict.spread([*one.runs, *two.runs][:1])) is None) is tie


@pytest.mark.parametrize(
    ("apart", "within", "least", "most"),
    [(0.01, 0.01, 0.0, 0.05), (0.04, 0.01, 0.0, 0.08), (0.15, 0.15, 0.0, 0.1)],
    ids=["quiet", "as usual", "busy"],
)
@pytest.mark.parametrize("turns", ["one run", "three runs"])
def test_nine_in_ten_pairs_of_equal_points_tie_however_busy_the_machine(apart, within, least, most, turns):
    told = _told_apart(apart, within, faster=1.0, runs=1 if turns == "one run" else 3)
    assert least <= told <= most


def test_what_is_a_third_faster_is_told_apart_on_a_usual_machine():
    assert _told_apart(0.04, 0.01, faster=1.33, runs=1) > 0.9
    assert _told_apart(0.02, 0.01, faster=1.08, runs=5) > 0.9


def _told_apart(apart: float, within: float, faster: float, runs: int, pairs: int = 400) -> float:
    """Of simulated pairs the share that is told apart: runs lie `apart`, and the repeats of each lie `within`."""
    rng = np.random.default_rng(0)

    def side(speed: float) -> verdict.Contestant:
        made = [Run(Path(), Result()) for _ in range(runs)]
        for run in made:
            run.__dict__["repeats"] = list(speed * np.exp(apart * rng.normal() + within * rng.normal(size=5)))
        return verdict.Contestant(tuple(range(runs)), tuple(made))

    told = 0
    for _ in range(pairs):
        one, two = side(100.0), side(100.0 * faster)
        squares = sum(float(np.var(np.log(each.speeds))) * runs for each in (one, two))
        degrees = 2 * (runs - 1)
        seen = verdict.Spread((squares / degrees) ** 0.5 if degrees else 0.0, degrees)
        told += verdict.told_apart(one, two, seen) is not None
    return told / pairs


def test_runs_that_are_repeated_and_agree_make_a_smaller_difference_visible(tmp_path):
    ours = runs(tmp_path, 100.0, 100.5, 99.5, 100.2, strategy="mirrored")
    theirs = runs(tmp_path, 106.0, 106.5, 105.5, 106.2, strategy="multi_worker")
    every = [each.runs[0] for each in (*ours, *theirs)]
    seen = verdict.spread(every)
    assert seen.degrees == 6
    assert seen.deviation < 0.01
    one, two = (verdict.Contestant(tuple(range(4)), tuple(each.runs[0] for each in side)) for side in (ours, theirs))
    assert verdict.told_apart(one, two, seen) is not None
    # One run of each says less.
    assert verdict.told_apart(ours[0], theirs[0], verdict.Spread(0.0, 0)) is None


def test_runs_that_are_repeated_and_disagree_make_a_larger_difference_a_tie(tmp_path):
    ours = runs(tmp_path, 80.0, 100.0, 130.0, strategy="mirrored")
    theirs = runs(tmp_path, 150.0, 140.0, strategy="multi_worker")
    seen = verdict.spread([each.runs[0] for each in (*ours, *theirs)])
    assert verdict.told_apart(ours[1], theirs[1], verdict.Spread(0.0, 0)) is not None
    assert verdict.told_apart(ours[1], theirs[1], seen) is None


def test_speedups_over_baselines_in_turn_that_overlap_are_a_tie(tmp_path):
    in_turn = {"baseline_source": "measured in this run", "speedup": 1.5, "baseline_examples_per_second": 100.0}
    (one,) = runs(tmp_path, 100.0, **in_turn, speedup_low=1.4, speedup_high=1.6)
    (two,) = runs(tmp_path, 150.0, **in_turn, speedup_low=1.5, speedup_high=1.7)
    (three,) = runs(tmp_path, 150.0, **in_turn, speedup_low=2.5, speedup_high=2.7)
    assert verdict.told_apart(one, two, verdict.Spread(0.0, 0)) is None
    assert verdict.told_apart(one, three, verdict.Spread(0.0, 0)) is not None


def test_baselines_that_were_measured_again_tell_how_far_equal_runs_lie_apart(tmp_path):
    in_turn = {"baseline_source": "measured in this run"}
    wrote(tmp_path / "one", [1.0], **in_turn, baseline_examples_per_second=100.0)
    wrote(tmp_path / "two", [5.0], **in_turn, baseline_examples_per_second=110.0, strategy="multi_worker")
    seen = verdict.spread([load(tmp_path / "one"), load(tmp_path / "two")])
    assert seen.degrees == 1
    assert seen.deviation == pytest.approx(0.0953 / 2**0.5, rel=1e-3)
