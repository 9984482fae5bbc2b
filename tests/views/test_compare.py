"""Runs compared by what they wrote: who is faster, who ties, and what cannot be compared."""

import json
from pathlib import Path

import pytest
from compared_runs import wrote

from pipeline.analyze import comparable
from pipeline.analyze.comparable import Marks
from pipeline.analyze.history import load
from pipeline.commands.results import compare as main
from pipeline.driver.run_folders import find


def said(capsys: pytest.CaptureFixture[str], *runs: str) -> str:
    assert main(runs) == 0
    return capsys.readouterr().out


def test_a_faster_run_is_named_with_how_much_and_how_sure(tmp_path, capsys):
    other = {"strategy": "multi_worker"}
    one = wrote(tmp_path / "one", [100.0, 101.0, 99.0, 100.0, 102.0])
    elsewhere = other | {"checkpoint": {"folder": "two/checkpoints"}}
    two = wrote(tmp_path / "two", [150.0, 149.0, 151.0, 150.0, 160.0], elsewhere, **other)
    out = said(capsys, one, two)
    assert "checkpoint.folder" not in out
    assert "1 is 1.50 times as fast as 0, almost certainly" in out
    assert "strategy   mirrored  multi_worker" in out
    assert "model_build" not in out
    assert "val_metrics.accuracy" in out


@pytest.mark.parametrize(("repeats", "verdict"), [
    (([100.0, 120.0], [105.0, 130.0]), "0 and 1: not known which is faster"),
    (([1.0], []), "0 and 1: not compared, since one was not measured"),
])  # fmt: skip
def test_runs_whose_repeats_overlap_or_that_have_none_are_compared_in_all_else(tmp_path, capsys, repeats, verdict):
    one, two = repeats
    out = said(capsys, wrote(tmp_path / "one", one), wrote(tmp_path / "two", two, {"workers": 4}))
    assert verdict in out
    assert "workers" in out
    assert "staleness_mean" not in out
    # Beside one repeat is no range.
    assert "()" not in out


def test_repeats_of_an_attempt_that_was_cut_short_are_those_that_were_timed_again(tmp_path):
    """By fewer workers, after the third repeat of all was told by one of them alone."""
    folder = Path(wrote(tmp_path / "one", [100.0, 110.0]))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"repeats": 1}))
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


def test_a_run_is_found_by_its_folder_its_name_and_the_first_letters_of_its_id(tmp_path):
    folder = Path(wrote(tmp_path / "runs" / "then_mirrored", [1.0], mlflow_run_id="abc123"))
    wrote(tmp_path / "sweeps" / "then" / "0_default", [1.0], mlflow_run_id="abd456")
    for name in (str(folder), "then_mirrored", "abc", "abc123"):
        assert find(name, tmp_path) == folder


@pytest.mark.parametrize(("names", "words"), [
    (["nothing", "nothing"], "received nothing, which is that of no runs. Try "),
    (["ab", "abc"], "received ab, which is that of 2 runs. Try "),
    (["abc"], "Try python -m pipeline compare RUN RUN [RUN ...] ["),
    (["refused", "abc"], "with result.json and plan.json, received "),
])  # fmt: skip
def test_runs_that_cannot_be_compared_are_refused_in_words(tmp_path, capsys, names, words):
    wrote(tmp_path / "runs" / "one", [1.0], mlflow_run_id="abc123")
    wrote(tmp_path / "runs" / "two", [1.0], mlflow_run_id="abd456")
    refused = tmp_path / "runs" / "refused"
    refused.mkdir()
    (refused / "result.json").write_text('{"status": "REFUSED"}')
    assert main([*names, f"output_dir={tmp_path}"]) == 2
    assert words in capsys.readouterr().err
