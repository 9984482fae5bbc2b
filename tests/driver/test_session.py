"""What the runs of a command share: signals, their data, and what is waited for at its end."""

import io
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from plans import config
from shown_runs import a_plan, told

from pipeline.commands import running
from pipeline.config.schema import Config, SweepConfig
from pipeline.data import needed
from pipeline.driver import RunResult
from pipeline.driver import session as module
from pipeline.driver.parallel import own_session
from pipeline.driver.planner import plan_run
from pipeline.driver.requests import Requests
from pipeline.driver.results import preempted
from pipeline.driver.session import PERSON_SECONDS, WAITING, Preemption, RunRequest, Session
from pipeline.launch.signals import Interrupted
from pipeline.record import results
from pipeline.record.events import Signalled
from pipeline.record.files import Copied, TrackingState, TrackingStore, write_tracking
from pipeline.record.results import Ending, Result, Survival, Tracked
from pipeline.views.terminal import console_on
from pipeline.views.terminal.live import Terminal


def test_a_first_ctrl_c_is_left_to_the_run_and_a_second_ends_it() -> None:
    session = session_of()
    assert not session.spares(signal.SIGINT)
    session.saves = session.busy = True
    assert session.spares(signal.SIGINT)
    assert session.preemption.by_person
    assert not session.spares(signal.SIGINT)
    assert session.spares(signal.SIGTERM)
    assert session.preemption.by_person


def test_a_scheduler_is_waited_for_as_long_as_it_says_and_a_person_for_seconds() -> None:
    scheduler, person = Preemption(), Preemption()
    scheduler.ask(signal.SIGTERM, "the conductor")
    person.ask(signal.SIGINT, "the conductor")
    assert (scheduler.patience(25.0), person.patience(25.0), person.patience(1.0)) == (25.0, PERSON_SECONDS, 1.0)
    assert preempted(person, 8).startswith("The run was ended by Ctrl-C. The last checkpoint is of step 8;")


def test_it_is_said_what_a_ctrl_c_does_and_what_another_would() -> None:
    text = told(a_plan(), iter([(0.0, Signalled(signal.SIGINT)), (1.0, Signalled(signal.SIGTERM, group="point"))]))
    assert text == "Ctrl-C: leaving with a checkpoint, if that takes seconds. Ctrl-C again ends it at once.\n"


@pytest.mark.parametrize(("step", "config", "many", "words"), [
    (1240, {}, False, "a has a checkpoint of step 1,240: the same command goes on from there."),
    (None, {}, False, "a has no checkpoint yet: the same command goes on from its beginning."),
    (8, {"resume": "never"}, False, "a has a checkpoint of step 8: resume=a goes on from there."),
    (8, {"sweep": SweepConfig("mine")}, True, "goes on from there, and keeps the points that have finished."),
    (8, {}, True, "goes on from there; with sweep.name=mine it would keep other points too."),
])  # fmt: skip
def test_what_goes_on_is_said(step: int | None, config: dict[str, Any], many: bool, words: str) -> None:
    session = session_of()
    session.ended_early.append(RunResult(Result(survival=Survival(checkpoint_step=step)), Path("a")))
    requests = Requests(session)
    requests.many, requests.to_run = many, {(0, 0): RunRequest(Config(**config), Path("a"), [], None)}
    assert running._how_to_go_on(requests, session).endswith(words)


def test_of_points_that_were_under_way_at_once_all_are_named() -> None:
    session = session_of()
    requests = Requests(session)
    one = RunRequest(Config(sweep=SweepConfig("mine")), Path("a"), [], None)
    requests.many, requests.to_run = True, {(0, 0): one}
    own = own_session(session, session.screen, {}, Preemption(session.preemption))
    own.ended_early.append(RunResult(Result(survival=Survival(checkpoint_step=8)), Path("c")))
    for name in ("a", "b"):
        session.ended_early.append(RunResult(Result(), Path(name)))
    said = running._how_to_go_on(requests, session)
    assert said.startswith("a has no checkpoint yet, b has no checkpoint yet and c has a checkpoint of step 8: ")


class Slow:
    """A tracker that has so many runs after so many seconds, and notes for which it was waited how long."""

    def __init__(self, *sent: str, interrupts: bool = False, seconds: float = 0.0) -> None:
        self.sent, self.interrupts, self.seconds, self.waited = {*sent}, interrupts, seconds, list[float]()

    def drain(self, folder, timeout, waits=None):
        if folder.name in self.sent:
            write_tracking(folder, TrackingState(TrackingStore(uri="there"), {"there": Copied("id")}))
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


def session_of(tracker: Slow | None = None, folders: Sequence[Path] = (), seconds: float = 60.0) -> Session:
    """One whose tracker still sends the runs in some folders."""
    session = Session((os.getcwd(),), {}, lambda: Terminal(console_on(io.StringIO()), lambda: 0.0), lambda *_: tracker)
    if tracker is not None:
        session.tracker(Path())
    for folder in folders:
        session.upload_later(folder, seconds)
    return session


def tracked_of(folder: Path) -> Tracked:
    result = results.read(folder)
    assert result is not None
    assert result.finished
    return result.tracked


def test_between_two_runs_nothing_is_waited_for_and_those_that_mlflow_holds_get_their_ids(folders):
    tracker = Slow("a", seconds=60.0)
    session = session_of(tracker, folders)
    session.note_uploads()
    assert tracker.waited == [0.0]
    assert [tracked_of(folder).mlflow_run_id for folder in folders] == ["id", None, None]
    tracker.sent = {"b", "c"}
    assert session.settle() == (None, None)
    assert [tracked_of(folder) for folder in folders] == [Tracked("id")] * 3


def test_a_store_that_is_down_is_waited_for_once_and_each_run_says_what_to_type(folders, tmp_path):
    tracker = Slow("b")
    lacks, interrupted = session_of(tracker, folders, 0.1).settle()
    assert tracker.waited == [0.1, 0.0]
    assert interrupted is None
    assert f"2 runs yet (It is slow.). `python -m pipeline sync {tmp_path}`" in (lacks or "")
    assert tracked_of(folders[1]) == Tracked("id")
    for folder in (folders[0], folders[2]):
        assert f"`python -m pipeline sync {folder}`" in (tracked_of(folder).tracking_note or "")


def test_ctrl_c_ends_the_wait_at_once_and_says_what_to_type(folders):
    tracker = Slow(interrupts=True)
    lacks, interrupted = session_of(tracker, folders).settle()
    assert interrupted is not None
    assert interrupted.number == signal.SIGINT
    assert tracker.waited == [60.0, 0.0, 0.0, 0.0]
    assert "3 runs" in (lacks or "")
    assert all(tracked_of(folder).tracking_note for folder in folders)


def test_who_is_hurried_waits_no_longer_than_that_and_a_person_is_told_why_it_waits(folders, monkeypatch):
    monkeypatch.setattr(module, "HURRIED_SECONDS", 1.5)
    session, said, began = session_of(Slow(seconds=60.0), folders[:1]), list[str](), time.monotonic()
    monkeypatch.setattr(session.screen, "say", said.append)
    session.settle(hurried=True)
    assert 1.0 < time.monotonic() - began < 30.0
    assert said == [WAITING]


def test_a_run_that_another_command_has_resumed_meanwhile_is_left_alone(folders):
    (folders[0] / results.FILE).unlink()
    session_of(Slow("a"), folders[:1]).settle()
    assert not (folders[0] / results.FILE).exists()


def test_runs_of_the_same_data_look_at_them_once_and_those_of_others_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[str]()
    monkeypatch.setattr(needed, "expect_data", lambda arguments: looked.append(arguments["path"]))
    monkeypatch.setattr(needed, "may_be_few", lambda arguments, least: False)
    session = session_of()
    for path in ("here", "here", "there"):
        build = {"_target_": "pipeline.data.csv", "path": path}
        plan_run(config("one_device", workers=1, data__build=build, data__name="csv"), session)
    assert looked == ["here", "there"]
