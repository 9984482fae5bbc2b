"""Verdicts on made-up sweeps and runs, as a person reads them: who is faster, who ties, and what cannot be compared."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shown_runs import wrote

from pipeline.analyze import comparable
from pipeline.analyze.comparable import Marks
from pipeline.analyze.compare import Judge
from pipeline.analyze.history import load
from pipeline.commands.results import compare
from pipeline.commands.results import report as main
from pipeline.driver.run_folders import find
from pipeline.record.events import Report
from pipeline.record.files import Entry, TrackingStore, write_sweep
from pipeline.record.log import read
from pipeline.views import report

pytestmark = pytest.mark.usefixtures("without_figures")

# Each point: strategy, workers, examples a second, and what else its result says. One device makes 100.
Point = tuple[str, int, float, dict[str, Any]]
VERSIONS = {"python": "3", "keras": "3", "numpy": "2"}
JAX = {"versions": VERSIONS | {"jax": "0", "jaxlib": "0"}, "backend": "jax"}
ENGINES_S = {"tensorflow": {"versions": VERSIONS | {"tensorflow": "2"}}, "jax": JAX}
IN_TURN = {"baseline_source": "measured in this run", "baseline_examples_per_second": 100.0}


def rows(text: str, **result: Any) -> list[Point]:
    """The points of rows such as "mirrored 2 185" or "jax mirrored 2 320": strategy, workers and examples a second.

    With two more numbers, as in "mirrored 2 1.85 1.8 1.9", a baseline was measured in turn: a speedup and its ends.
    """
    points = []
    for words in (row.split() for row in text.split(", ")):
        engine = ENGINES_S[words.pop(0)] if words[0] in ENGINES_S else {}
        strategy, workers, speed, *ends = words
        about: dict[str, Any] = engine | result
        if ends:
            speedups = zip(("speedup", "speedup_low", "speedup_high"), map(float, (speed, *ends)), strict=True)
            about = IN_TURN | dict(speedups) | about
        points.append((strategy, int(workers), float(speed) * (100 if ends else 1), about))
    return points


def told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], points: list[Point]) -> tuple[str, list[str], str]:
    """The table, the sentences, and the last line of what the report of a sweep of `points` prints."""
    for place, (strategy, workers, speed, others) in enumerate(points):
        within = others.get("within", 0.01)
        told = {"strategy": strategy, "workers": workers, "replicas": workers} | others
        repeats = [speed * (1 + off * within) for off in (-1, -0.5, 0, 0.5, 1)]
        if speed:
            told = {"examples_per_second": speed, "examples_per_second_low": repeats[0],
                    "examples_per_second_high": repeats[-1], "speedup": speed / 100} | told  # fmt: skip
        wrote(tmp_path / "sweeps" / "s" / f"{place}_{strategy}", repeats if speed else [], {"workers": workers}, **told)
    assert main(["s", f"output_dir={tmp_path}"]) == 0
    table, _, below = capsys.readouterr().out.partition("\n\n")
    lines = list(filter(None, below.splitlines()))
    first = next(at for at, line in enumerate(lines) if re.match("Use |Not known |No verdict", line))
    last = next(at for at, line in enumerate(lines) if line.startswith("report: "))
    return table, lines[first:last], lines[-1]


# What it says to use, how surely that is, and the points that it is faster than, as fast as, and cannot be told from.
Said = tuple[str, str, list[int], list[int], list[int]]
SURELY = "almost certainly"
SWEEPS: dict[str, tuple[list[Point], Said]] = {
    "a clear win": (rows("mirrored 1 100, mirrored 2 185, mirrored 4 340"), ("point 2", SURELY, [1, 0], [], [])),
    "a tie": (rows("mirrored 2 180, multi_worker 2 186, one_device 1 101"), ("point 1", SURELY, [2], [], [0])),
    "one point": (rows("mirrored 2 185"), ("point 0", SURELY, [], [], [])),
    "too noisy to say": (
        rows("mirrored 2 1.1 0.8 1.6, one_device 1 1.0 0.98 1.02"), ("not known", "not known", [], [], [1]),
    ),
    "a smaller win": (rows("mirrored 1 100, mirrored 2 124"), ("point 1", "very likely", [0], [], [])),
    "one device best": (
        rows("one_device 1 101, mirrored 2 70, multi_worker 2 50"), ("point 0", SURELY, [1, 2], [], []),
    ),
    "one device best, and not among the points": (
        rows("mirrored 2 0.8 0.79 0.81, multi_worker 2 0.6 0.59 0.61"), ("one device", SURELY, [1], [], []),
    ),
    "as fast on one device": (
        rows("mirrored 2 1.003 1.0 1.005, one_device 1 1.0 0.997 1.002"), ("one device", "probably", [], [], [1]),
    ),
    "a busy machine": (
        rows("central_storage 2 1.78 1.50 2.06, mirrored 2 1.51 0.82 1.81, multi_worker 2 1.53 1.43 1.68, "
             "parameter_server 2 1.11 1.03 1.22, default 1 0.99 0.89 1.03"),
        ("point 0", SURELY, [3, 4], [], [2, 1]),
    ),
    "a busy machine on which one device seems as fast": (
        [*rows("mirrored 2 0.97 0.95 0.99", other_work=0.45), *rows("one_device 1 1.0 0.99 1.01")],
        ("not known", "not known", [], [], [0]),
    ),
    "a rehearsal": (rows("mirrored 2 185, mirrored 4 300", rehearsal=True), ("", "", [], [], [])),
}  # fmt: skip


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_verdict_says_first_what_to_use_and_contradicts_nothing(tmp_path, capsys, sweep):
    points, (use, surely, faster, as_fast, unknown) = SWEEPS[sweep]
    table, told, last = told_of(tmp_path, capsys, points)
    written = report.write(tmp_path / "sweeps" / "s")
    expected = {"faster": faster, "as fast": as_fast, "not known": unknown}
    against = comparable.grouped((each.answer, each.other.places[0]) for each in written.verdict.against)
    assert against == {answer: places for answer, places in expected.items() if places}
    begins = {"not known": "Not known", "one device": "Use one device", "": "No verdict"}
    assert told[0].startswith(begins.get(use, "Use "))
    assert (written.verdict.best is None) == (not use)
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


def test_where_it_is_not_known_what_to_use_the_last_line_measures_more(tmp_path, capsys):
    points, _ = SWEEPS["too noisy to say"]
    (tmp_path / "sweeps/s").mkdir(parents=True)
    write_sweep(tmp_path / "sweeps/s", [
        Entry(number, 0, "", f"{number}_{strategy}", ("sweep.name=s", f"strategy={strategy}"), "FINISHED")
        for number, (strategy, *_) in enumerate(points)
    ])  # fmt: skip
    *_, last = told_of(tmp_path, capsys, points)
    assert last == "python -m pipeline -m sweep.name=s strategy=mirrored,one_device sweep.repeats=3"


# Which engine pays, or none where that is not known, and the point to use.
ENGINES: dict[str, tuple[list[Point], tuple[str, int]]] = {
    "jax clearly": (rows("tensorflow mirrored 2 180, jax mirrored 2 320"), ("jax", 1)),
    "tensorflow clearly": (rows("tensorflow mirrored 2 320, jax mirrored 2 180"), ("tensorflow", 0)),
    "a tie": (rows("tensorflow mirrored 2 180, jax mirrored 2 185"), ("", 1)),
    "one engine failed": (
        [*rows("tensorflow mirrored 1 100, tensorflow mirrored 2 185"), *rows("jax mirrored 1 0", status="FAILED"),
         *rows("jax mirrored 2 0", status="REFUSED")],
        ("", 1),
    ),
    "only one has a baseline": (
        [*rows("tensorflow mirrored 2 180"), *rows("jax mirrored 2 320", speedup=None)], ("jax", 1),
    ),
    "three strategies each": (
        rows("tensorflow one_device 1 101, tensorflow mirrored 2 180, tensorflow multi_worker 2 150, "
             "jax one_device 1 160, jax mirrored 2 300, jax multi_worker 2 240"),
        ("jax", 4),
    ),
    "wide intervals": (rows("tensorflow mirrored 2 180, jax mirrored 2 320", within=0.8), ("", 1)),
    "speedups that are the same over devices that are not": (
        [*rows("tensorflow mirrored 2 1.8 1.7 1.9"),
         *rows("jax mirrored 2 360", **IN_TURN | {"baseline_examples_per_second": 200.0, "speedup": 1.8,
                                                  "speedup_low": 1.7, "speedup_high": 1.9})],
        ("jax", 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("sweep", ENGINES)
def test_a_verdict_over_engines_says_which_pays_and_contradicts_nothing(tmp_path, capsys, sweep):
    points, (pays, use) = ENGINES[sweep]
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
    points, _ = ENGINES["three strategies each"]
    _, told, last = told_of(tmp_path, capsys, points)
    said = [line for line in told if not line.endswith("held.")]
    folder = tmp_path / "sweeps" / "s"
    page, rows = (folder / "report.html").read_text(), (folder / "points.csv").read_text()
    assert all(f"<p>{line}</p>" in page for line in said)
    assert last in page.replace("<wbr>", "")
    assert "<dd>tensorflow: points 0-2; jax: points 3-5; each speedup is over one device under the same engine" in page
    assert "Not comparable" not in page
    assert rows.count("engine jax") == rows.count("engine tensorflow") == 3
    # Sent nowhere, what MLflow is to be told lies in the log.
    report.track(report.write(folder), SimpleNamespace(follow=lambda *_: None), TrackingStore("none", "", ""))
    (event,) = (event for event, _ in read(folder / "report" / "events.jsonl") if isinstance(event, Report))
    assert event.tags["verdict"] == " ".join(said)
    assert event.tags["best"] == "mirrored/jax on 2 workers (point 4)"
    assert event.tags["confidence"] == "probably"
    assert all(line in event.text for line in [*said, last])


def test_other_versions_of_an_engine_keep_its_points_from_being_compared(tmp_path, capsys):
    """Of what engines share, test_compare has it."""
    points = rows("tensorflow mirrored 2 180, jax mirrored 2 185, jax mirrored 4 400")
    points[2][3]["versions"] = points[2][3]["versions"] | {"jax": "9"}
    table, told, _ = told_of(tmp_path, capsys, points)
    assert "engine jax, differs in versions of jax" in table
    assert told[-1] == "Left out of the verdict: point 2 (differs in versions of jax)."


def test_equal_runs_of_one_engine_say_how_far_they_lie_apart_and_other_engines_do_not_count_as_equal(tmp_path):
    runs = [
        load(Path(wrote(tmp_path / str(speed), [speed], strategy="mirrored", versions={"keras": "3"}, backend=backend,
                        **IN_TURN | {"baseline_examples_per_second": speed})))
        for speed, backend in ((100.0, None), (102.0, None), (300.0, "jax"), (303.0, "jax"))
    ]  # fmt: skip
    # What was 2% apart is known to differ no more than that; what was three times as fast is no luck.
    assert Judge(runs).between(runs[0], runs[3]).answer == "faster"


def said(capsys: pytest.CaptureFixture[str], *runs: str) -> str:
    assert compare(runs) == 0
    return capsys.readouterr().out


def test_a_faster_run_is_named_with_how_much_and_how_sure_and_with_its_engine_if_that_differs(tmp_path, capsys):
    other = {"strategy": "multi_worker"}
    elsewhere = other | {"checkpoint": {"folder": "two/checkpoints"}}
    two = wrote(tmp_path / "two", [150.0, 149.0, 151.0, 150.0, 160.0], elsewhere, **other)
    out = said(capsys, wrote(tmp_path / "one", [100.0, 101.0, 99.0, 100.0, 102.0]), two)
    assert "checkpoint.folder" not in out
    assert "1 is 1.50 times as fast as 0, almost certainly" in out
    assert "strategy   mirrored  multi_worker" in out
    assert "model_build" not in out
    assert "val_metrics.accuracy" in out
    out = said(capsys, *(
        wrote(tmp_path / str(speed), [speed - 1, speed, speed + 1], strategy="mirrored", **ENGINES_S[engine])
        for speed, engine in ((100.0, "tensorflow"), (150.0, "jax"), (151.0, "jax"))
    ))  # fmt: skip
    assert "1 (jax) is 1.50 times as fast as 0 (tensorflow), almost certainly" in out
    assert "2 (jax) is 1.51 times as fast as 0 (tensorflow), almost certainly" in out
    assert "1 and 2: not known which is faster" in out
    assert "not comparable" not in out
    for place, (one, two, verdict) in enumerate((
        ([100.0, 120.0], [105.0, 130.0], "0 and 1: not known which is faster"),
        ([1.0], [], "0 and 1: not compared, since one was not measured"),
    )):  # fmt: skip
        out = said(capsys, wrote(tmp_path / f"a{place}", one), wrote(tmp_path / f"b{place}", two, {"workers": 4}))
        assert verdict in out
        assert "workers" in out
        # Nothing that neither has, and beside one repeat no range.
        assert not re.search(r"staleness_mean|\(\)", out)


def test_repeats_of_an_attempt_that_was_cut_short_are_those_that_were_timed_again(tmp_path):
    """By fewer workers, after the third repeat of all was told by one of them alone."""
    folder = Path(wrote(tmp_path / "one", [100.0, 110.0]))
    (folder / "result.json").write_text('{"status": "FINISHED", "repeats": 1}')
    told = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    cut = told[2] | {"repeat": 2, "calls": [[1, 0.5], [1, 0.5]]}
    again = told[2] | {"examples": 70.0, "seconds": 1.0}
    events = [*told, cut, {"event": "restarted", "time": 2.0, "text": "Goes on with one."}, again]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert load(folder).repeats == [70.0]


def test_what_is_not_known_of_a_run_does_not_keep_it_from_being_compared(tmp_path):
    asked = ({"cache": "none", "prefetch": 2}, {"cache": "none"}, {"cache": "none", "prefetch": 4})
    runs = [load(Path(wrote(tmp_path / str(place), [1.0], each))) for place, each in enumerate(asked)]
    assert comparable.groups(runs) == [[0, 1], [2]]
    assert comparable.marks(runs) == [Marks(), Marks(), Marks(differs=("prefetch",))]


@pytest.mark.parametrize(("names", "words"), [
    (["nothing", "nothing"], "received nothing, which is that of no runs. Try "),
    (["ab", "abc"], "received ab, which is that of 2 runs. Try "),
    (["abc"], "Try python -m pipeline compare RUN RUN [RUN ...] ["),
    (["refused", "abc"], "with result.json and plan.json, received "),
])  # fmt: skip
def test_a_run_is_found_by_folder_name_or_id_and_what_cannot_be_compared_is_refused(tmp_path, capsys, names, words):
    folder = Path(wrote(tmp_path / "runs" / "one", [1.0], mlflow_run_id="abc123"))
    wrote(tmp_path / "sweeps" / "then" / "0_default", [1.0], mlflow_run_id="abd456")
    assert [find(name, tmp_path) for name in (str(folder), "one", "abc", "abc123")] == [folder] * 4
    refused = tmp_path / "runs" / "refused"
    refused.mkdir()
    (refused / "result.json").write_text('{"status": "REFUSED"}')
    assert compare([*names, f"output_dir={tmp_path}"]) == 2
    assert words in capsys.readouterr().err
