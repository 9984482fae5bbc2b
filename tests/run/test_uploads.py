"""What a command waits for once its runs have ended: MLflow, the first run that it cannot have, and a Ctrl-C."""

import signal
import time
from pathlib import Path

import pytest

from pipeline.launch.signals import Interrupted
from pipeline.record import results
from pipeline.record.results import Ending, Result, Tracked
from pipeline.run.uploads import WAITING, Uploads


class Slow:
    """A tracker that has so many runs after so many seconds, and notes for which it was waited how long."""

    def __init__(self, *sent: str, interrupts: bool = False, seconds: float = 0.0) -> None:
        self.sent, self.interrupts, self.seconds, self.waited = {*sent}, interrupts, seconds, list[float]()

    def run_id(self, folder, timeout, waits=None):
        return "id" if folder.name in self.sent else None

    def drain(self, folder, timeout, waits=None):
        if folder.name in self.sent:
            return True, None
        self.waited.append(timeout)
        if timeout and self.interrupts:
            raise Interrupted(signal.SIGINT)
        until = time.monotonic() + min(timeout, self.seconds)
        while time.monotonic() < until and waits():
            time.sleep(0.01)
        return False, "It is slow."


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Those of three runs that have ended, in one sweep."""
    named = [tmp_path / name for name in "abc"]
    for folder in named:
        folder.mkdir()
        results.write(folder, Result(Ending("FINISHED")))
    return named


def uploads_of(folders: list[Path], seconds: float = 60.0) -> Uploads:
    uploads = Uploads()
    for folder in folders:
        uploads.add(folder, seconds)
    return uploads


def tracked_of(folder: Path) -> Tracked:
    result = results.read(folder)
    assert result is not None
    assert result.finished
    return result.tracked


def test_between_two_runs_nothing_is_waited_for_and_those_that_mlflow_holds_get_their_ids(folders):
    tracker, uploads = Slow("a", seconds=60.0), uploads_of(folders)
    uploads.note(tracker)
    assert tracker.waited == [0.0]
    assert [tracked_of(folder).mlflow_run_id for folder in folders] == ["id", None, None]
    tracker.sent = {"b", "c"}
    assert uploads.settle(tracker, print, lambda: 60.0) == (None, None)
    assert [tracked_of(folder) for folder in folders] == [Tracked("id")] * 3


def test_a_store_that_is_down_is_waited_for_once_and_each_run_says_what_to_type(folders, tmp_path):
    tracker = Slow("b")
    lacks, interrupted = uploads_of(folders, 0.1).settle(tracker, print, lambda: 60.0)
    assert tracker.waited == [0.1, 0.0]
    assert interrupted is None
    assert lacks == (
        f"MLflow does not hold all of 2 runs yet (It is slow.). `python -m pipeline sync {tmp_path}` sends the rest."
    )
    assert tracked_of(folders[1]) == Tracked("id")
    for folder in (folders[0], folders[2]):
        assert f"`python -m pipeline sync {folder}`" in (tracked_of(folder).tracking_note or "")


def test_ctrl_c_ends_the_wait_at_once_and_says_what_to_type(folders):
    tracker = Slow(interrupts=True)
    lacks, interrupted = uploads_of(folders).settle(tracker, print, lambda: 60.0)
    assert interrupted is not None
    assert interrupted.number == signal.SIGINT
    assert tracker.waited == [60.0, 0.0, 0.0, 0.0]
    assert "3 runs" in (lacks or "")
    assert all(tracked_of(folder).tracking_note for folder in folders)


def test_who_is_hurried_waits_no_longer_than_that_and_a_person_is_told_why_it_waits(folders):
    said = list[str]()
    tracker, limits = Slow(seconds=60.0), iter([60.0] * 130)
    began = time.monotonic()
    uploads_of(folders[:1]).settle(tracker, said.append, lambda: next(limits, 0.0))
    assert 1.0 < time.monotonic() - began < 30.0
    assert said == [WAITING]


def test_a_run_that_another_command_has_resumed_meanwhile_is_left_alone(folders):
    (folders[0] / results.FILE).unlink()
    uploads_of(folders[:1]).settle(Slow("a"), print, lambda: 60.0)
    assert not (folders[0] / results.FILE).exists()
