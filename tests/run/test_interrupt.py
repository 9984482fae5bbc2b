"""What a Ctrl-C does while a run is under way: the first one lets it leave with a checkpoint, the second ends it."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from shown_runs import a_plan, told

from pipeline.commands import train
from pipeline.config.schema import Config, SweepConfig
from pipeline.record.events import Signalled
from pipeline.record.results import Result, Survival
from pipeline.run.parallel import _own
from pipeline.run.requests import Requests
from pipeline.run.results import preempted
from pipeline.run.session import PERSON_SECONDS, Preemption, RunRequest, Session
from pipeline.run.views import RunResult
from pipeline.views.mlflow import Tracker
from pipeline.views.terminal import Terminal, console_on


def test_a_first_ctrl_c_is_left_to_the_run_and_a_second_ends_it() -> None:
    session = Session((), {}, Terminal(console_on(sys.stdout)), Tracker)
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


@pytest.mark.parametrize(
    ("step", "config", "many", "words"),
    [
        (1240, {}, False, "a has a checkpoint of step 1,240: the same command goes on from there."),
        (None, {}, False, "a has no checkpoint yet: the same command goes on from its beginning."),
        (8, {"resume": "never"}, False, "a has a checkpoint of step 8: resume=a goes on from there."),
        (8, {"sweep": SweepConfig("mine")}, True, "goes on from there, and keeps the points that have finished."),
        (8, {}, True, "goes on from there; with sweep.name=mine it would keep other points too."),
    ],
)
def test_what_goes_on_is_said(step: int | None, config: dict[str, Any], many: bool, words: str) -> None:
    session = Session((), {}, Terminal(console_on(sys.stdout)), Tracker)
    session.ended_early.append(RunResult(Result(survival=Survival(checkpoint_step=step)), "a"))
    requests = Requests(session)
    requests.many, requests.to_run = many, {(0, 0): RunRequest(Config(**config), Path("a"), [], None)}
    assert train._how_to_go_on(requests, session).endswith(words)


def test_of_points_that_were_under_way_at_once_all_are_named() -> None:
    session = Session((), {}, Terminal(console_on(sys.stdout)), Tracker)
    requests = Requests(session)
    one = RunRequest(Config(sweep=SweepConfig("mine")), Path("a"), [], None)
    requests.many, requests.to_run = True, {(0, 0): one}
    own = _own(session, session.screen, {}, Preemption(session.preemption))
    own.ended_early.append(RunResult(Result(survival=Survival(checkpoint_step=8)), "c"))
    for name in ("a", "b"):
        session.ended_early.append(RunResult(Result(), name))
    assert train._how_to_go_on(requests, session) == (
        "a has no checkpoint yet, b has no checkpoint yet and c has a checkpoint of step 8: the same command goes on "
        "from there, and keeps the points that have finished."
    )
