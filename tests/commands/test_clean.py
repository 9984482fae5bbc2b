"""Old runs removed: which go, which stay and why, and nothing before it was said."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import results
from pipeline.commands.results import clean as main
from pipeline.driver.run_folders import Lock

DAY = 86_400


def a_run(folder: Path, days: float = 40, **result: Any) -> None:
    """A run that was last written to so many days ago."""
    folder.mkdir(parents=True)
    values = {"status": "FINISHED", "model": "cnn", "data": "mnist5k", "speedup": 1.5, "examples_per_second": 100.0}
    (folder / "plan.json").write_text("{}")
    (folder / "result.json").write_text(json.dumps(values | result))
    (folder / "model.keras").write_bytes(b"m" * 2**20)
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - days * DAY,) * 2)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Eight runs of different age and speed, and two sweeps."""
    runs, sweeps = tmp_path / "outputs" / "runs", tmp_path / "outputs" / "sweeps"
    for number in range(4):
        a_run(runs / f"old_{number}", speedup=1.0 + number / 10)
    a_run(runs / "young", 1, speedup=0.5)
    a_run(runs / "other_model", model="mlp", speedup=0.1)
    for status in ("killed", "failed"):
        a_run(runs / status, status=status.upper(), speedup=None)
    for folder, speedup in (("worse/0_a", 0.9), ("worse/1_b", 0.8), ("best/0_a", 1.9), ("best/1_b", 0.1)):
        a_run(sweeps / folder, speedup=speedup)
    return tmp_path / "outputs"


def left(output: Path) -> set[str]:
    return {path.name for place in ("runs", "sweeps") for path in (output / place).iterdir()}


GOING = {"old_0", "old_1", "old_2", "failed", "worse"}
EVERYTHING = GOING | {"old_3", "young", "other_model", "killed", "best"}


def test_it_says_what_would_go_and_why_the_rest_stays_and_without_dry_removes_that_and_no_other(output, capsys):
    assert main(["keep_best=2", f"output_dir={output}"]) == 0
    out = capsys.readouterr().out
    would = [line for line in out.splitlines() if line.startswith("would remove: ")]
    assert {line.partition(", ")[0].rpartition("/")[2] for line in would} == GOING
    for words in (
        "old_0, 1.0 MiB, 40 days old, 1.00x at best", "worse, 2 runs, 2.0 MiB, 40 days old, 0.90x at best",
        "5 folders would go, 6.0 MiB; 5 stay (", "3 among the best", "1 younger",
        "1 not finished, so that a command can go on with it",
    ):  # fmt: skip
        assert words in out
    assert out.endswith("Nothing was removed yet: type it again with dry=false.\n")
    assert left(output) == EVERYTHING
    assert main(["keep_best=2", "dry=false", f"output_dir={output}"]) == 0
    assert left(output) == EVERYTHING - GOING
    assert "5 folders went, 6.0 MiB; 5 stay (" in capsys.readouterr().out


def test_whatever_is_asked_for_nothing_of_other_programs_is_removed(output):
    for place in ("runs", "sweeps"):
        (output / place / "theirs").mkdir()
        (output / place / "theirs" / "result.json").write_text("{}")
    assert main(["keep_best=0", "older_than=0h", "unfinished=true", "dry=false", f"output_dir={output}"]) == 0
    assert left(output) == {"theirs"}


def test_what_was_killed_half_way_is_listed_again(output, monkeypatch):
    deleted = []

    def unlink(path, **opened):
        # The last of three files.
        if len(deleted) == 2:
            raise KeyboardInterrupt
        deleted.append(Path(path).name)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        main(["keep_best=0", "dry=false", f"output_dir={output}"])
    assert deleted == ["model.keras", "result.json"]


def test_what_is_under_way_and_what_a_sweep_that_stays_has_gone_on_with_stay(output):
    lock = Lock(output / "runs" / "old_0")
    points = [{"place": 0, "repeat": 0, "fingerprint": "a", "folder": "../../runs/old_1", "overrides": []}]
    (output / "sweeps" / "best" / "sweep.json").write_text(json.dumps({"points": points}))
    why = results.staying(results.gather(output), 1, 30 * DAY, False, time.time())
    lock.release()
    # The sweep was written to just now.
    names = ("runs/old_0", "sweeps/best", "runs/old_1", "runs/old_2")
    assert [why[output / name] for name in names] == [results.BUSY, results.YOUNG, results.NEEDED, None]
