"""The verdict of made-up sweeps, read whole as a person reads it: no sentence contradicts another, or the table."""

import re
from pathlib import Path
from typing import Any

import pytest
from test_compare import wrote

from pipeline.commands.report import main
from pipeline.views import report

# Each point: strategy, workers, examples a second, and what else its result says. One device makes 100.
Point = tuple[str, int, float, dict[str, Any]]
ONCE = (
    "Each point was run once, so nothing here is surer: if equal runs lie as far apart as elsewhere, chance alone "
    "would make such a difference about once in {} times."
)


def point(strategy: str, workers: int, speed: float, **result: Any) -> Point:
    return strategy, workers, speed, result


SWEEPS: dict[str, tuple[list[Point], list[str]]] = {
    "a clear win": (
        [point("mirrored", 1, 100), point("mirrored", 2, 185), point("mirrored", 4, 340)],
        [
            "mirrored on 4 workers (point 2) is the fastest: 340 examples/s (337 to 343), 3.40 times one device, and "
            "1.84 times as fast as mirrored on 2 workers (point 1), the next; fairly sure; type sweep.repeats=3 to "
            "be surer.",
            ONCE.format("88,000"),
            "Up to 4 workers, the most measured, each brought 50% of one alone or more.",
        ],
    ),
    "a tie": (
        [point("mirrored", 2, 180), point("multi_worker", 2, 186), point("one_device", 1, 101)],
        [
            "A tie: multi_worker on 2 workers (point 1) and mirrored on 2 workers (point 0) cannot be told apart, at "
            "186 and 180 examples/s, 1.80 to 1.86 times one device, since equal runs may well lie as far apart; type "
            "sweep.repeats=3 to tell them apart.",
            "The first of these is 1.84 times as fast as one_device on 1 worker (point 2), the next, fairly sure.",
            ONCE.format("90,000"),
        ],
    ),
    "one point": (
        [point("mirrored", 2, 185)],
        [
            "mirrored on 2 workers (point 0) is the only point to judge: 185 examples/s (183 to 187), 1.85 times one "
            "device; type more values, such as workers=1,2, to compare it.",
        ],
    ),
    "one failed": (
        [point("mirrored", 1, 100), point("mirrored", 2, 185), point("mirrored", 4, 0, status="FAILED")],
        [
            "mirrored on 2 workers (point 1) is the fastest: 185 examples/s (183 to 187), 1.85 times one device, and "
            "1.85 times as fast as mirrored on 1 worker (point 0), the next; fairly sure; type sweep.repeats=3 to "
            "be surer.",
            ONCE.format("190,000"),
            "Up to 2 workers, the most measured, each brought 50% of one alone or more.",
            "Without a speed, and so not judged: point 2.",
        ],
    ),
    "a wide interval": (
        [point("mirrored", 1, 100), point("mirrored", 2, 130, within=0.3)],
        [
            "A tie: mirrored on 2 workers (point 1) and mirrored on 1 worker (point 0) cannot be told apart, at 130 "
            "and 100 examples/s, 1.00 to 1.30 times one device, since the ranges of their repeats overlap; type "
            "sweep.repeats=3 to tell them apart.",
            "So one device does as well, as far as this tells.",
        ],
    ),
    "a tie with one of two on one device": (
        [point("mirrored", 2, 130), point("mirrored", 1, 128), point("one_device", 1, 60)],
        [
            "A tie: mirrored on 2 workers (point 0) and mirrored on 1 worker (point 1) cannot be told apart, at 130 "
            "and 128 examples/s, 1.28 to 1.30 times one device, since the ranges of their repeats overlap; type "
            "sweep.repeats=3 to tell them apart.",
            "The first of these is 2.17 times as fast as one_device on 1 worker (point 2), the next, fairly sure.",
            ONCE.format("550,000"),
            "So mirrored on 1 worker (point 1) does as well, as far as this tells.",
        ],
    ),
    "two strategies close": (
        [point("mirrored", 4, 300), point("multi_worker", 4, 290), point("mirrored", 2, 185)],
        [
            "A tie: mirrored on 4 workers (point 0) and multi_worker on 4 workers (point 1) cannot be told apart, at "
            "300 and 290 examples/s, 2.90 to 3.00 times one device, since equal runs may well lie as far apart; type "
            "sweep.repeats=3 to tell them apart.",
            "The first of these is 1.62 times as fast as mirrored on 2 workers (point 2), the next, fairly sure.",
            ONCE.format("16,000"),
            "Up to 4 workers, the most measured, each brought 50% of one alone or more.",
        ],
    ),
    "one that varies much": (
        [point("mirrored", 2, 240), point("multi_worker", 2, 50, within=0.8), point("one_device", 1, 75)],
        [
            "A tie: mirrored on 2 workers (point 0) and multi_worker on 2 workers (point 1) cannot be told apart, at "
            "240 and 50.0 examples/s, 0.50 to 2.40 times one device, since repeats within a run vary too much; type "
            "sweep.repeats=3 to tell them apart.",
            "The first of these is 3.20 times as fast as one_device on 1 worker (point 2), fairly sure.",
            ONCE.replace("about once in {} times", "less than once in a million times"),
        ],
    ),
    "more workers slower": (
        [point("mirrored", 1, 100), point("mirrored", 2, 180), point("mirrored", 4, 120)],
        [
            "mirrored on 2 workers (point 1) is the fastest: 180 examples/s (178 to 182), 1.80 times one device, and "
            "1.50 times as fast as mirrored on 4 workers (point 2), the next; fairly sure; type sweep.repeats=3 to "
            "be surer.",
            ONCE.format("4,600"),
            "More than 2 workers did not pay under mirrored: from 2 to 4 workers it got slower.",
        ],
    ),
    "one device best": (
        [point("one_device", 1, 101), point("mirrored", 2, 70), point("multi_worker", 2, 50)],
        [
            "one_device on 1 worker (point 0) is the fastest: 101 examples/s (100 to 102), and 1.44 times as fast as "
            "mirrored on 2 workers (point 1), the next; fairly sure; type sweep.repeats=3 to "
            "be surer.",
            ONCE.format("2,300"),
            "No point with more workers was as fast as one device.",
        ],
    ),
    "a rehearsal": (
        [point("mirrored", 2, 185, rehearsal=True), point("mirrored", 4, 300, rehearsal=True)],
        [
            "No verdict: no measured point has the speed of its hardware.",
            "Where that hardware is, the same without hardware.rehearse=true has one.",
            "Left out of the verdict: points 0 and 1 (rehearsal).",
        ],
    ),
    "unlike runs": (
        [point("mirrored", 1, 100), point("mirrored", 2, 124), point("mirrored", 2, 900, model="cnn")],
        [
            "mirrored on 2 workers (point 1) is the fastest: 124 examples/s (123 to 125), 1.24 times one device, and "
            "1.24 times as fast as mirrored on 1 worker (point 0), the next; fairly sure; type sweep.repeats=3 to "
            "be surer.",
            ONCE.format("170"),
            "2 workers are the fastest under mirrored, and not efficient: worker 2 brought 24% of what one of the "
            "first did, and predict.knee_share asks for 50%.",
            "Left out of the verdict: point 2 (differs in model).",
        ],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a second, and have no part in the words."""
    monkeypatch.setattr(report, "draw", lambda sweep: ())


def told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], points: list[Point]) -> tuple[str, list[str]]:
    """The table and the sentences that the report of a sweep of `points` prints."""
    for place, (strategy, workers, speed, others) in enumerate(points):
        result = dict(others)
        within = result.pop("within", 0.01)
        told = {"strategy": strategy, "workers": workers, "replicas": workers} | result
        repeats = [speed * (1 + off * within) for off in (-1, -0.5, 0, 0.5, 1)]
        if speed:
            told |= {"examples_per_second": speed, "examples_per_second_low": repeats[0],
                     "examples_per_second_high": repeats[-1], "speedup": speed / 100} | result  # fmt: skip
        wrote(tmp_path / "sweeps" / "s" / f"{place}_{strategy}", repeats if speed else [], {"workers": workers}, **told)
    assert main(["s", f"output_dir={tmp_path}"]) == 0
    table, _, below = capsys.readouterr().out.partition("\n\n")
    lines = list(filter(None, below.splitlines()))
    first = next(at for at, line in enumerate(lines) if re.search("fastest|A tie|only point|No verdict", line))
    last = next(at for at, line in enumerate(lines) if line.startswith("report: "))
    return table, lines[first:last]


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_verdict_reads_as_one_coherent_sentence_and_what_follows_from_it(tmp_path, capsys, sweep):
    points, wanted = SWEEPS[sweep]
    table, told = told_of(tmp_path, capsys, points)
    assert told == wanted
    assert not re.search(r"e-\d\d|probability", " ".join(told))
    # Its speeds are those of the table.
    speeds = {
        word for line in told for words in re.findall(r"([\d,. and]+) examples/s", line) for word in words.split()
    }
    assert speeds - {"and"} <= set(table.split())


def test_runs_that_were_repeated_make_it_surer_and_say_nothing_of_one_run(tmp_path, capsys):
    points = [point("mirrored", 1, speed) for speed in (100, 101, 99)]
    points += [point("mirrored", 2, speed) for speed in (190, 191, 189)]
    folder = tmp_path / "sweeps" / "s"
    folder.mkdir(parents=True)
    listed = ",".join(
        f'{{"place": {place // 3}, "repeat": {place % 3}, "fingerprint": "{place // 3}", "folder": "{place}_mirrored",'
        f' "overrides": [], "status": "FINISHED"}}'
        for place in range(6)
    )
    (folder / "sweep.json").write_text(f'{{"name": "s", "points": [{listed}]}}')
    _, told = told_of(tmp_path, capsys, points)
    assert told[0].endswith(
        "the next; very sure, since chance alone would make such a difference less than once in a million times."
    )
    assert not [line for line in told if line.startswith("Each point was run once")]
