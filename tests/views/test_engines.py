"""Made-up sweeps over two engines, read whole as a person reads them: which pays, and the table says the same."""

import re
from pathlib import Path
from typing import Any

import pytest
from compared_runs import wrote
from judged_points import Point, point, told_of, without_figures

from pipeline.analyze.compare import Judge
from pipeline.analyze.history import load
from pipeline.commands import compare
from pipeline.record.events import Report
from pipeline.record.log import read
from pipeline.record.tracking import TrackingStore
from pipeline.views import report

__all__ = ["without_figures"]
pytestmark = pytest.mark.usefixtures("without_figures")


class Nowhere:
    """Sends nothing: what MLflow is to be told lies in the log."""

    def follow(self, folder: Path, store: TrackingStore) -> None:
        """Leaves it there."""


VERSIONS = {"python": "3", "keras": "3", "numpy": "2"}


def tensorflow(strategy: str, workers: int, speed: float, **result: Any) -> Point:
    return point(strategy, workers, speed, versions=VERSIONS | {"tensorflow": "2"}, **result)


def jax(strategy: str, workers: int, speed: float, **result: Any) -> Point:
    return point(strategy, workers, speed, backend="jax", versions=VERSIONS | {"jax": "0", "jaxlib": "0"}, **result)


# Which engine pays, or none where that is not known, and the point to use.
SWEEPS: dict[str, tuple[list[Point], tuple[str, int]]] = {
    "jax clearly": ([tensorflow("mirrored", 2, 180), jax("mirrored", 2, 320)], ("jax", 1)),
    "tensorflow clearly": ([tensorflow("mirrored", 2, 320), jax("mirrored", 2, 180)], ("tensorflow", 0)),
    "a tie": ([tensorflow("mirrored", 2, 180), jax("mirrored", 2, 185)], ("", 1)),
    "one engine failed": (
        [
            tensorflow("mirrored", 1, 100),
            tensorflow("mirrored", 2, 185),
            jax("mirrored", 1, 0, status="FAILED"),
            jax("mirrored", 2, 0, status="REFUSED"),
        ],
        ("", 1),
    ),
    "only one has a baseline": ([tensorflow("mirrored", 2, 180), jax("mirrored", 2, 320, speedup=None)], ("jax", 1)),
    "unlike batches": (
        [
            tensorflow("mirrored", 2, 180),
            tensorflow("mirrored", 4, 320),
            jax("mirrored", 2, 400, replica_batch=32),
        ],
        ("", 1),
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
        ("jax", 4),
    ),
    "an engine whose strategies tie": (
        [
            tensorflow("one_device", 1, 101),
            tensorflow("mirrored", 2, 180),
            jax("mirrored", 2, 300),
            jax("multi_worker", 2, 295),
            jax("one_device", 1, 140),
        ],
        ("jax", 2),
    ),
    "wide intervals": (
        [tensorflow("mirrored", 2, 180, within=0.8), jax("mirrored", 2, 320, within=0.8)],
        ("", 1),
    ),
    "speedups that are the same over devices that are not": (
        [
            tensorflow("mirrored", 2, 180, speedup_low=1.7, speedup_high=1.9, baseline_examples_per_second=100,
                       baseline_source="measured in this run"),
            jax("mirrored", 2, 360, speedup=1.8, speedup_low=1.7, speedup_high=1.9, baseline_examples_per_second=200,
                baseline_source="measured in this run"),
        ],
        ("jax", 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_verdict_over_engines_says_which_pays_and_contradicts_nothing(tmp_path, capsys, sweep):
    points, (pays, use) = SWEEPS[sweep]
    table, told, last = told_of(tmp_path, capsys, points)
    assert f"point {use})" in told[0]
    # Each measured point is marked with its engine, and what the verdict names as an engine is one.
    engines = ["jax" if "backend" in result else "tensorflow" for _, _, speed, result in points if speed]
    if len(set(engines)) > 1:
        assert re.findall(r"engine (\w+)", table) == engines
    paying = re.search(r"Of the engines (\w+) pays", " ".join(told))
    assert (paying[1] if paying else "") == pays
    assert ("backend=jax" in last) is ("backend" in points[use][3])


def test_the_page_the_table_and_mlflow_say_of_engines_what_the_terminal_says(tmp_path, capsys):
    points, _ = SWEEPS["three strategies each"]
    _, told, last = told_of(tmp_path, capsys, points)
    said = [line for line in told if not line.endswith("held.")]
    folder = tmp_path / "sweeps" / "s"
    page, rows = (folder / "report.html").read_text(), (folder / "points.csv").read_text()
    assert all(f"<p>{line}</p>" in page for line in said)
    assert last in page.replace("<wbr>", "")
    assert "<dd>tensorflow: points 0-2; jax: points 3-5; each speedup is over one device under the same engine" in page
    assert "Not comparable" not in page
    assert rows.count("engine jax") == rows.count("engine tensorflow") == 3
    report.track(folder, report.write(folder), Nowhere(), TrackingStore("none", "", ""))
    (event,) = (event for event, _ in read(folder / "report" / "events.jsonl") if isinstance(event, Report))
    assert event.tags["verdict"] == " ".join(said)
    assert event.tags["best"] == "mirrored/jax on 2 workers (point 4)"
    assert event.tags["confidence"] == "probably"
    assert all(line in event.text for line in [*said, last])


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
    assert "1 (jax) is 1.50 times as fast as 0 (tensorflow), almost certainly" in out
    assert "1 and 2: not known which is faster" in out
    assert "not comparable" not in out


@pytest.mark.parametrize("package", ["keras", "jax"])
def test_other_versions_of_what_they_share_or_of_one_engine_keep_points_from_being_compared(tmp_path, capsys, package):
    points = [tensorflow("mirrored", 2, 180), jax("mirrored", 2, 185), jax("mirrored", 4, 400)]
    points[2][3]["versions"] = points[2][3]["versions"] | {package: "9"}
    table, told, _ = told_of(tmp_path, capsys, points)
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
    # What was 2% apart is known to differ no more than that; what was three times as fast is no luck.
    assert Judge(runs).between(runs[0], runs[3]).answer == "faster"
