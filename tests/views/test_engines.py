"""Made-up sweeps over two engines, read whole as a person reads them: which pays, and the table says the same."""

import re
from pathlib import Path
from typing import Any

import pytest
from test_compare import wrote
from test_verdict import Point, point, told_of, without_figures  # noqa: F401

from pipeline.analyze import verdict
from pipeline.analyze.history import load
from pipeline.commands import compare
from pipeline.record.events import Report
from pipeline.record.log import read
from pipeline.record.tracking import Store
from pipeline.views import report


class Nowhere:
    """Sends nothing: what MLflow is to be told lies in the log."""

    def follow(self, folder: Path, store: Store) -> None:
        """Leaves it there."""


VERSIONS = {"python": "3", "keras": "3", "numpy": "2"}


def tensorflow(strategy: str, workers: int, speed: float, **result: Any) -> Point:
    return point(strategy, workers, speed, versions=VERSIONS | {"tensorflow": "2"}, **result)


def jax(strategy: str, workers: int, speed: float, **result: Any) -> Point:
    return point(strategy, workers, speed, backend="jax", versions=VERSIONS | {"jax": "0", "jaxlib": "0"}, **result)


ONCE = (
    "Each point was run once, so nothing here is surer: if equal runs lie as far apart as elsewhere, chance alone "
    "would make such a difference about once in {} times."
)
SWEEPS: dict[str, tuple[list[Point], list[str]]] = {
    "jax clearly": (
        [
            tensorflow("mirrored", 2, 180),
            jax("mirrored", 2, 320),
        ],
        [
            "mirrored/jax on 2 workers (point 1) is the fastest: 320 examples/s (317 to 323), 3.20 times one device "
            "under jax, and 1.78 times as fast as mirrored on 2 workers (point 0), the next; fairly sure; type "
            "sweep.repeats=3 to be surer.",
            ONCE.format("120,000"),
            "So of the engines jax pays: at its best it is 1.78 times as fast as tensorflow at its best.",
        ],
    ),
    "tensorflow clearly": (
        [
            tensorflow("mirrored", 2, 320),
            jax("mirrored", 2, 180),
        ],
        [
            "mirrored on 2 workers (point 0) is the fastest: 320 examples/s (317 to 323), 3.20 times one device under "
            "tensorflow, and 1.78 times as fast as mirrored/jax on 2 workers (point 1), the next; fairly sure; type "
            "sweep.repeats=3 to be surer.",
            ONCE.format("120,000"),
            "So of the engines tensorflow pays: at its best it is 1.78 times as fast as jax at its best.",
        ],
    ),
    "a tie": (
        [
            tensorflow("mirrored", 2, 180),
            jax("mirrored", 2, 185),
        ],
        [
            "A tie: mirrored/jax on 2 workers (point 1) and mirrored on 2 workers (point 0) cannot be told apart, at "
            "185 and 180 examples/s, 1.80 to 1.85 times one device under the same engine, since equal runs may well "
            "lie as far apart; type sweep.repeats=3 to tell them apart.",
            "Which engine pays cannot be told: jax and tensorflow tie.",
        ],
    ),
    "one engine failed": (
        [
            tensorflow("mirrored", 1, 100),
            tensorflow("mirrored", 2, 185),
            jax("mirrored", 1, 0, status="FAILED"),
            jax("mirrored", 2, 0, status="REFUSED"),
        ],
        [
            "mirrored on 2 workers (point 1) is the fastest: 185 examples/s (183 to 187), 1.85 times one device under "
            "tensorflow, and 1.85 times as fast as mirrored on 1 worker (point 0), the next; fairly sure; type "
            "sweep.repeats=3 to be surer.",
            ONCE.format("190,000"),
            "Up to 2 workers, the most measured, each brought 50% of one alone or more.",
            "Whether jax pays cannot be told: none of its points was judged.",
            "Without a speed, and so not judged: points 2 and 3.",
        ],
    ),
    "only one has a baseline": (
        [
            tensorflow("mirrored", 2, 180),
            jax("mirrored", 2, 320, speedup=None),
        ],
        [
            "mirrored/jax on 2 workers (point 1) is the fastest: 320 examples/s (317 to 323), and 1.78 times as fast "
            "as mirrored on 2 workers (point 0), the next; fairly sure; type sweep.repeats=3 to be surer.",
            ONCE.format("120,000"),
            "So of the engines jax pays: at its best it is 1.78 times as fast as tensorflow at its best.",
        ],
    ),
    "a tie in which only one has a baseline": (
        [
            tensorflow("mirrored", 2, 180),
            jax("mirrored", 2, 185, speedup=None),
        ],
        [
            "A tie: mirrored/jax on 2 workers (point 1) and mirrored on 2 workers (point 0) cannot be told apart, at "
            "185 and 180 examples/s, since equal runs may well lie as far apart; type sweep.repeats=3 to tell them "
            "apart.",
            "Which engine pays cannot be told: jax and tensorflow tie.",
        ],
    ),
    "unlike batches": (
        [
            tensorflow("mirrored", 2, 180),
            tensorflow("mirrored", 4, 320),
            jax("mirrored", 2, 400, replica_batch=32),
        ],
        [
            "mirrored on 4 workers (point 1) is the fastest: 320 examples/s (317 to 323), 3.20 times one device under "
            "tensorflow, and 1.78 times as fast as mirrored on 2 workers (point 0), the next; fairly sure; type "
            "sweep.repeats=3 to be surer.",
            ONCE.format("120,000"),
            "Up to 4 workers, the most measured, each brought 50% of one alone or more.",
            "Whether jax pays cannot be told: none of its points was judged.",
            "Left out of the verdict: point 2 (differs in batch rule).",
        ],
    ),
    "three strategies each": (
        [
            tensorflow("one_device", 1, 101),
            tensorflow("mirrored", 2, 180),
            tensorflow("multi_worker", 2, 150),
            jax("one_device", 1, 160),
            jax("mirrored", 2, 300),
            jax("multi_worker", 2, 240),
        ],
        [
            "mirrored/jax on 2 workers (point 4) is the fastest: 300 examples/s (297 to 303), 3.00 times one device "
            "under jax, and 1.25 times as fast as multi_worker/jax on 2 workers (point 5), the next; fairly sure; "
            "type sweep.repeats=3 to be surer.",
            ONCE.format("42"),
            "Of the engines jax pays: its fastest point is 1.67 times as fast as mirrored on 2 workers (point 1), the "
            "fastest under tensorflow, fairly sure.",
        ],
    ),
    "an engine whose strategies tie": (
        [
            tensorflow("one_device", 1, 101),
            tensorflow("mirrored", 2, 180),
            jax("mirrored", 2, 300),
            jax("multi_worker", 2, 295),
            jax("one_device", 1, 140),
        ],
        [
            "A tie: mirrored/jax on 2 workers (point 2) and multi_worker/jax on 2 workers (point 3) cannot be told "
            "apart, at 300 and 295 examples/s, 2.95 to 3.00 times one device under jax, since the ranges of their "
            "repeats overlap; type sweep.repeats=3 to tell them apart.",
            "The first of these is 1.67 times as fast as mirrored on 2 workers (point 1), the next, fairly sure.",
            ONCE.format("12,000"),
            "So of the engines jax pays: at its best it is 1.67 times as fast as tensorflow at its best.",
        ],
    ),
    "rehearsals": (
        [
            tensorflow("mirrored", 2, 180, rehearsal=True),
            jax("mirrored", 2, 320, rehearsal=True),
        ],
        [
            "No verdict: no measured point has the speed of its hardware.",
            "Where that hardware is, the same without hardware.rehearse=true has one.",
            "Left out of the verdict: points 0 and 1 (rehearsal).",
        ],
    ),
    "one engine's are rehearsals": (
        [
            tensorflow("mirrored", 2, 180),
            jax("mirrored", 2, 320, rehearsal=True),
        ],
        [
            "mirrored on 2 workers (point 0) is the only point to judge: 180 examples/s (178 to 182), 1.80 times one "
            "device under tensorflow; type more values, such as workers=1,2, to compare it.",
            "Whether jax pays cannot be told: none of its points was judged.",
            "Left out of the verdict: point 1 (rehearsal).",
        ],
    ),
    "wide intervals": (
        [
            tensorflow("mirrored", 2, 180, within=0.5),
            jax("mirrored", 2, 320, within=0.5),
        ],
        [
            "A tie: mirrored/jax on 2 workers (point 1) and mirrored on 2 workers (point 0) cannot be told apart, at "
            "320 and 180 examples/s, 1.80 to 3.20 times one device under the same engine, since the ranges of their "
            "repeats overlap; type sweep.repeats=3 to tell them apart.",
            "Which engine pays cannot be told: jax and tensorflow tie.",
        ],
    ),
    "a wide point of the slower engine": (
        [
            tensorflow("mirrored", 2, 90),
            tensorflow("multi_worker", 2, 60, within=0.9),
            jax("mirrored", 2, 320),
            jax("one_device", 1, 150),
        ],
        [
            "A tie: mirrored/jax on 2 workers (point 2) and multi_worker on 2 workers (point 1) cannot be told apart, "
            "at 320 and 60.0 examples/s, 0.60 to 3.20 times one device under the same engine, since repeats within a "
            "run vary too much; type sweep.repeats=3 to tell them apart.",
            "The first of these is 2.13 times as fast as one_device/jax on 1 worker (point 3), fairly sure.",
            ONCE.format("310,000"),
            "Which engine pays cannot be told: jax and tensorflow tie.",
        ],
    ),
    "one device does as well": (
        [
            tensorflow("one_device", 1, 180),
            tensorflow("mirrored", 2, 110),
            jax("mirrored", 2, 185),
            jax("one_device", 1, 100),
        ],
        [
            "A tie: mirrored/jax on 2 workers (point 2) and one_device on 1 worker (point 0) cannot be told apart, at "
            "185 and 180 examples/s, 1.80 to 1.85 times one device under the same engine, since equal runs may well "
            "lie as far apart; type sweep.repeats=3 to tell them apart.",
            "The first of these is 1.68 times as fast as mirrored on 2 workers (point 1), the next, fairly sure.",
            ONCE.format("18,000"),
            "Which engine pays cannot be told: jax and tensorflow tie.",
            "So one_device on 1 worker (point 0) does as well, as far as this tells.",
        ],
    ),
    "speedups that overlap": (
        [
            tensorflow(
                "mirrored",
                2,
                180,
                speedup=1.8,
                speedup_low=1.7,
                speedup_high=1.9,
                baseline_examples_per_second=100,
                baseline_source="measured in this run",
            ),
            jax(
                "mirrored",
                2,
                360,
                speedup=1.8,
                speedup_low=1.7,
                speedup_high=1.9,
                baseline_examples_per_second=200,
                baseline_source="measured in this run",
            ),
        ],
        [
            "mirrored/jax on 2 workers (point 1) is the fastest: 360 examples/s (356 to 364), 1.80 times one device "
            "under jax, and 2.00 times as fast as mirrored on 2 workers (point 0), the next; fairly sure; type "
            "sweep.repeats=3 to be surer.",
            ONCE.format("470,000"),
            "So of the engines jax pays: at its best it is 2.00 times as fast as tensorflow at its best.",
        ],
    ),
}


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_verdict_over_engines_says_which_pays_and_contradicts_nothing(tmp_path, capsys, sweep):
    points, wanted = SWEEPS[sweep]
    table, told = told_of(tmp_path, capsys, points)
    assert told == wanted
    # Each measured point is marked with its engine, and what the verdict names as an engine is one.
    engines = ["jax" if "backend" in result else "tensorflow" for _, _, speed, result in points if speed]
    if len(set(engines)) > 1:
        assert re.findall(r"engine (\w+)", table) == engines
    assert set(re.findall(r"(\w+) pays", " ".join(told))) <= {"jax", "tensorflow", "engine"}
    # It pays only if it has the fastest of the points that were judged.
    if paying := re.search(r"engines (\w+) pays", " ".join(told)):
        speed, which = max((speed, "jax" if "backend" in result else "tensorflow") for _, _, speed, result in points)
        assert paying[1] == which
        assert f"{speed:.0f} examples/s" in told[0] or f"at {speed:.0f} and" in told[0]


def test_the_page_the_table_and_mlflow_say_of_engines_what_the_terminal_says(tmp_path, capsys):
    points, wanted = SWEEPS["three strategies each"]
    told_of(tmp_path, capsys, points)
    folder = tmp_path / "sweeps" / "s"
    page, rows = (folder / "report.html").read_text(), (folder / "points.csv").read_text()
    assert all(f"<p>{line}</p>" in page for line in wanted)
    assert "<dd>tensorflow: points 0-2; jax: points 3-5; each speedup is over one device under the same engine" in page
    assert "Not comparable" not in page
    assert rows.count("engine jax") == rows.count("engine tensorflow") == 3
    report.track(folder, report.write(folder), Nowhere(), Store("none", "", ""))
    (event,) = (event for event, _ in read(folder / "report" / "events.jsonl") if isinstance(event, Report))
    assert event.tags["verdict"] == " ".join(wanted)
    assert event.tags["best"] == "mirrored/jax on 2 workers (point 4)"
    assert all(line in event.text for line in wanted)


def test_two_runs_of_different_engines_are_compared_and_said_to_be(tmp_path, capsys):
    folders = [
        wrote(tmp_path / name, [speed - 1, speed, speed + 1], strategy="mirrored", **others)
        for name, speed, others in (
            ("one", 100.0, {"versions": VERSIONS | {"tensorflow": "2"}}),
            ("two", 150.0, {"versions": VERSIONS | {"jax": "0"}, "backend": "jax"}),
            ("three", 151.0, {"versions": VERSIONS | {"jax": "0"}, "backend": "jax"}),
        )
    ]
    assert compare.main(folders) == 0
    out = capsys.readouterr().out
    assert "1 (jax) is 1.50 times as fast as 0 (tensorflow), very sure, since " in out
    assert "1 and 2: a tie" in out
    assert "The speeds say nothing of each other" not in out


@pytest.mark.parametrize("package", ["keras", "jax"])
def test_other_versions_of_what_they_share_or_of_one_engine_keep_points_from_being_compared(tmp_path, capsys, package):
    points = [tensorflow("mirrored", 2, 180), jax("mirrored", 2, 185), jax("mirrored", 4, 400)]
    points[2][3]["versions"] = points[2][3]["versions"] | {package: "9"}
    table, told = told_of(tmp_path, capsys, points)
    named = "versions" if package == "keras" else "versions of jax"
    assert f"engine jax, differs in {named}" in table
    assert told[-1] == f"Left out of the verdict: point 2 (differs in {named})."


def test_equal_runs_of_one_engine_say_how_far_they_lie_apart_and_other_engines_do_not_count_as_equal(tmp_path):
    speeds = ((100.0, {}), (102.0, {}), (300.0, {"backend": "jax"}), (303.0, {"backend": "jax"}))
    baseline = {"baseline_source": "measured in this run"}
    runs = [
        load(Path(wrote(tmp_path / str(place), [speed], strategy="mirrored", baseline_examples_per_second=speed,
                        versions={"keras": "3"}, **baseline, **others)))
        for place, (speed, others) in enumerate(speeds)
    ]  # fmt: skip
    seen = verdict.spread(runs)
    assert seen.degrees == 4
    assert seen.deviation < 0.02
