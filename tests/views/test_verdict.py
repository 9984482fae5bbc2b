"""The verdict of made-up sweeps as a person reads it: what to use, how surely, and nothing against the table."""

import re
import shlex
from typing import Any

import pytest
from judged_points import Point, point, told_of, without_figures

from pipeline.views import report

__all__ = ["without_figures"]
pytestmark = pytest.mark.usefixtures("without_figures")

IN_TURN = {"baseline_source": "measured in this run", "baseline_examples_per_second": 100.0}

SLOWED = {"examples_per_second": 102.0, "examples_per_second_low": 101.0, "examples_per_second_high": 103.0,
          "baseline_examples_per_second": 64.0}  # fmt: skip


def in_turn(strategy: str, workers: int, speedup: float, low: float, high: float, **result: Any) -> Point:
    """A point whose baseline was measured in turn with it."""
    ends = {"speedup": speedup, "speedup_low": low, "speedup_high": high}
    return point(strategy, workers, 100 * speedup, **IN_TURN | ends | result)


# What it says to use, how surely that is, and the points that it is faster than, as fast as, and cannot be told from.
Said = tuple[str, str, list[int], list[int], list[int]]
SURELY = "almost certainly"
SWEEPS: dict[str, tuple[list[Point], Said]] = {
    "a clear win": (
        [point("mirrored", 1, 100), point("mirrored", 2, 185), point("mirrored", 4, 340)],
        ("point 2", SURELY, [1, 0], [], []),
    ),
    "a tie": (
        [point("mirrored", 2, 180), point("multi_worker", 2, 186), point("one_device", 1, 101)],
        ("point 1", SURELY, [2], [], [0]),
    ),
    "one point": ([point("mirrored", 2, 185)], ("point 0", SURELY, [], [], [])),
    "one failed": (
        [point("mirrored", 1, 100), point("mirrored", 2, 185), point("mirrored", 4, 0, status="FAILED")],
        ("point 1", SURELY, [0], [], []),
    ),
    "too noisy to say": (
        [in_turn("mirrored", 2, 1.1, 0.8, 1.6), in_turn("one_device", 1, 1.0, 0.98, 1.02)],
        ("not known", "not known", [], [], [1]),
    ),
    "more workers slower": (
        [point("mirrored", 1, 100), point("mirrored", 2, 180), point("mirrored", 4, 120)],
        ("point 1", SURELY, [2, 0], [], []),
    ),
    "one device best": (
        [point("one_device", 1, 101), point("mirrored", 2, 70), point("multi_worker", 2, 50)],
        ("point 0", SURELY, [1, 2], [], []),
    ),
    "one device best, and not among the points": (
        [in_turn("mirrored", 2, 0.8, 0.79, 0.81), in_turn("multi_worker", 2, 0.6, 0.59, 0.61)],
        ("one device", SURELY, [1], [], []),
    ),
    "as fast on one device": (
        [in_turn("mirrored", 2, 1.003, 1.0, 1.005), in_turn("one_device", 1, 1.0, 0.997, 1.002)],
        ("one device", "probably", [], [], [1]),
    ),
    "one device best, but for what was disturbed": (
        [in_turn("mirrored", 2, 0.7, 0.68, 1.4), in_turn("one_device", 1, 1.0, 0.98, 1.02)],
        ("not known", "not known", [], [], [0]),
    ),
    "busy, and the issue's own": (
        [
            in_turn("central_storage", 2, 1.78, 1.50, 2.06),
            in_turn("mirrored", 2, 1.51, 0.82, 1.81),
            in_turn("multi_worker", 2, 1.53, 1.43, 1.68),
            in_turn("parameter_server", 2, 1.11, 1.03, 1.22),
            in_turn("default", 1, 0.99, 0.89, 1.03),
        ],
        ("point 0", SURELY, [3, 4], [], [2, 1]),
    ),
    "a busy machine on which one device seems as fast": (
        [in_turn("mirrored", 2, 0.97, 0.95, 0.99, other_work=0.45), in_turn("one_device", 1, 1.0, 0.99, 1.01)],
        ("not known", "not known", [], [], [0]),
    ),
    "a machine that gets slower": (
        [
            in_turn("one_device", 1, 1.0, 0.98, 1.02, examples_per_second=1_000.0),
            in_turn("mirrored", 2, 1.7, 1.66, 1.74, examples_per_second=900.0, baseline_examples_per_second=530.0),
        ],
        ("point 1", SURELY, [0], [], []),
    ),
    "a baseline that was slowed": (
        [
            in_turn("default", 1, 1.6, 1.58, 1.62, **SLOWED),
            in_turn("mirrored", 2, 1.7, 1.66, 1.74),
        ],
        ("point 1", SURELY, [0], [], []),
    ),
    "a rehearsal": (
        [point("mirrored", 2, 185, rehearsal=True), point("mirrored", 4, 300, rehearsal=True)],
        ("", "", [], [], []),
    ),
    "unlike runs": (
        [point("mirrored", 1, 100), point("mirrored", 2, 124), point("mirrored", 2, 900, model="cnn")],
        ("point 1", "very likely", [0], [], []),
    ),
}


def places_of(written: report.WrittenReport, answer: str) -> list[int]:
    return [each.other.places[0] for each in written.verdict.against if each.answer == answer and each.other]


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_verdict_says_first_what_to_use_and_contradicts_nothing(tmp_path, capsys, sweep):
    points, (use, surely, faster, as_fast, unknown) = SWEEPS[sweep]
    table, told, last = told_of(tmp_path, capsys, points)
    written = report.write(tmp_path / "sweeps" / "s")
    found = tuple(places_of(written, answer) for answer in ("faster", "as fast", "not known"))
    assert found == (faster, as_fast, unknown)
    first = told[0].partition(":")[0]
    assert first.startswith("Not known" if use == "not known" else f"Use {use}" if use == "one device" else "")
    assert use in told[0].lower()
    assert surely in told[0] or surely == "not known"
    # Every figure is one of the table.
    assert set(re.findall(r"\d\.\d\dx", " ".join(told))) <= set(re.findall(r"\d\.\d\dx", table))
    assert not re.search(r"e-\d\d|probability", " ".join(told))
    # What was disturbed is said at once.
    assert bool(written.verdict.disturbed) == ("busy" in told[0])
    typed = shlex.split(last)
    assert typed[:3] == ["python", "-m", "pipeline"] if use.startswith(("point", "one")) else typed[0] != "python"
    if use == "one device":
        assert {"strategy=one_device", "workers=1"} < set(typed)
    elif use.startswith("point"):
        strategy, workers, *_ = points[int(use[-1])]
        assert {f"strategy={strategy}", f"workers={workers}"} < set(typed)


def test_runs_that_were_repeated_show_that_two_are_as_fast(tmp_path, capsys):
    points = [point("mirrored", 1, speed) for speed in (100, 101, 99)]
    points += [point("mirrored", 2, speed) for speed in (190, 191, 189)]
    points += [point("multi_worker", 2, speed) for speed in (190.5, 189.5, 190.5)]
    folder = tmp_path / "sweeps" / "s"
    folder.mkdir(parents=True)
    names = [strategy for strategy, *_ in points]
    listed = ",".join(
        f'{{"place": {place // 3}, "repeat": {place % 3}, "fingerprint": "{place // 3}", "folder": "{place}_{name}",'
        f' "overrides": ["strategy={name}"], "status": "FINISHED"}}'
        for place, name in enumerate(names)
    )
    (folder / "sweep.json").write_text(f'{{"name": "s", "points": [{listed}]}}')
    told_of(tmp_path, capsys, points)
    written = report.write(folder)
    assert (places_of(written, "faster"), places_of(written, "as fast")) == ([0], [3])
    assert min(each.odds for each in written.verdict.against) > 0.8


def test_where_it_is_not_known_what_to_use_the_last_line_measures_more(tmp_path, capsys):
    folder = tmp_path / "sweeps" / "s"
    points, _ = SWEEPS["too noisy to say"]
    folder.mkdir(parents=True)
    listed = ",".join(
        f'{{"place": {place}, "repeat": 0, "fingerprint": "{place}", "folder": "{place}_{strategy}",'
        f' "overrides": ["sweep.name=s", "strategy={strategy}"], "status": "FINISHED"}}'
        for place, (strategy, *_) in enumerate(points)
    )
    (folder / "sweep.json").write_text(f'{{"name": "s", "points": [{listed}]}}')
    *_, last = told_of(tmp_path, capsys, points)
    assert last == "python -m pipeline -m sweep.name=s strategy=mirrored,one_device sweep.repeats=3"
