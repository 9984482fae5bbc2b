"""What cannot be compared: refused or marked wherever the number shows, for each kind."""

import contextlib
import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from shown_runs import wrote

from pipeline.analyze import comparable
from pipeline.analyze.history import load
from pipeline.commands.results import compare
from pipeline.commands.results import report as main
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
    assert re.search(rf"^{place:>2}  .*\n.*{mark}$", out, re.MULTILINE)
    for name in re.findall(r"differs in (.*)", mark):
        assert f"Not comparable, since {name.split(' and ')[0]} differs (" in out
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
    assert compare([str(folder / "0_mirrored"), str(other)]) == 0
    out = capsys.readouterr().out
    why = re.search("0 and 1: not compared, since (.*)", out)
    assert why is not None
    assert why[1].startswith((mark.removeprefix("differs in ").split(" and ")[0], "one of them"))
    assert f"Speeds are not comparable: {why[1]}." in out
    assert "times as fast" not in out
    assert mark in out


def test_the_points_that_compare_win_a_sweep_of_all_kinds(all_kinds):
    words = r"Use mirrored on 2 workers \(point [01]\): .*\n.*cannot be told from .*\(point [01],"
    assert re.search(words, all_kinds[1])


@pytest.mark.usefixtures("without_figures")
def test_asynchronous_steps_are_marked_and_still_compared(tmp_path, capsys):
    folder = a_sweep(tmp_path / "sweeps" / "kinds", ({}, {"strategy": "parameter_server", "asynchronous": True}))
    assert main(["sweep=kinds", f"output_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "Use parameter_server on 2 workers (point 2)" in out
    assert "(asynchronous)" in out
    assert 'class="mark">asynchronous<' in (folder / "report.html").read_text()


def test_what_follows_from_the_strategy_or_an_earlier_version_lacks_keeps_nothing_from_being_compared(tmp_path):
    one, two, older, newer = (tmp_path / name for name in ("one", "two", "older", "newer"))
    wrote(one, [1.0], ASKED | {"shard": "auto", "static_batches": False, "seed": 0})
    wrote(two, [1.0], ASKED | {"shard": "file", "static_batches": True, "seed": 1}, strategy="tpu", workers=8)
    wrote(older, [1.0])
    wrote(newer, [1.0], {"optimizer": "sgd", "gradient_bits": 32})
    assert comparable.unlike(load(one), load(two)) == comparable.unlike(load(older), load(newer)) == []


@pytest.mark.usefixtures("without_figures")
def test_the_largest_group_of_sound_points_decides(tmp_path):
    other = {"precision": "mixed_bfloat16"}
    written = report.write(a_sweep(tmp_path, ({}, other), ({}, other), ({}, other | {"rehearsal": True}), ({}, {})))
    assert [point.group for point in written.sweep.points] == ["A", "A", "B", "B", "B", "A"]
    assert written.verdict.best.places == (5,)
