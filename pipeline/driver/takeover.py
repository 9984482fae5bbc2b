"""Takes over a run whose driver is gone: from what that left in its folder to a supervisor that hears the log first.

The measurements since the run's present attempt began are in the event log; those before stand in `attempt.json`.
"""

import contextlib
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from pipeline.config import config as configs
from pipeline.config.schema import Config
from pipeline.driver.group import Replay
from pipeline.driver.run import Run
from pipeline.driver.run_folders import EVENTS, PLAN
from pipeline.driver.session import Planned, RunRequest, Session
from pipeline.driver.timing import Measurements
from pipeline.errors import UserError
from pipeline.plan.plan import from_json
from pipeline.record import log
from pipeline.record.commands import Resume
from pipeline.record.events import Restarted, Resumed
from pipeline.record.files import forget_agents
from pipeline.record.results import Baseline

if TYPE_CHECKING:
    from pipeline.driver.supervisor import Supervisor

FILE = "attempt.json"


@dataclass(frozen=True)
class Attempt:
    """One attempt, from the first process to the last: its plan as JSON, when it began, what was measured before.

    `resume`: the checkpoint that it resumes from. `restarts`: how many of the `launch.max_restarts` are used up;
    `failed`: the log of the process that failed last.
    """

    plan: str
    began: float
    measured: Measurements
    resume: Resume | None = None
    restarts: int = 0
    failed: str | None = None


@dataclass(frozen=True)
class Handover:
    """A run under way: its config as YAML, what was typed and where, its attempt, and the log's size when that began.

    `baseline` is the plan of one device, as JSON, and `known` what an earlier run measured of it; `ask_size`: the
    model's size was not known.
    """

    config: str
    attempt: Attempt
    offset: int
    directory: str
    overrides: list[str] = field(default_factory=list)
    baseline: str | None = None
    known: Baseline | None = None
    ask_size: bool = False

    @classmethod
    def read(cls, folder: Path) -> "Handover | None":
        """That of the run in a folder; None if its processes end with their driver."""
        return log.read_json(cls, folder / FILE)

    def write(self, folder: Path) -> None:
        """Writes it, before the attempt starts any process. Raises `OSError`."""
        log.write_json(folder / FILE, self)


def forget(folder: Path) -> None:
    """Deletes what the next driver would go by: the run is over."""
    forget_agents(folder)
    (folder / FILE).unlink(missing_ok=True)


def how(folder: Path) -> str:
    """Says how to take over from a driver that has left."""
    return f"`python -m pipeline attach {log.from_here(folder)}` takes this command's place."


@contextlib.contextmanager
def attach(folder: Path, session: Session, end: bool = False) -> Iterator["Supervisor"]:
    """Takes over the run in a folder, with its processes. Raises `UserError`, and `LaunchError`.

    `end`: once they are caught up with, they save a checkpoint and leave. Inside, the working directory is that of the
    run's command, which folders and modules that were typed are relative to.
    """
    shown = log.from_here(folder)
    run = Run.without_driver(folder, "again once that has ended")
    with contextlib.ExitStack() as stack:
        try:
            left = _left(run, shown)
            if Path(left.directory).is_dir():
                stack.enter_context(contextlib.chdir(left.directory))
            supervisor = _supervisor(run, left, session, end)
        except BaseException:
            run.release()
            raise
        yield supervisor


def _left(run: Run, shown: Path) -> Handover:
    """Reads what the driver of a run has left. Raises `UserError` if the run has ended, or its processes have."""
    if run.ended is not None:
        again = "" if run.ended == "FINISHED" else " The same command goes on from its last checkpoint."
        raise UserError(
            f"Expected a run that is under way, received {shown}, which has ended as {run.ended}.{again} "
            f"Try python -m pipeline compare {shown} and another one."
        )
    left = Handover.read(run.folder)
    if left is None:
        raise UserError(
            "a run whose processes outlive their driver (launch.detach=true, cluster=hosts, slurm or kubernetes)",
            f"{shown}, whose processes have ended with it",
            "the same command again: it goes on from the last checkpoint",
        )
    return left


def _supervisor(run: Run, left: Handover, session: Session, end: bool) -> "Supervisor":
    from pipeline.driver.supervisor import Supervisor

    folder, config = run.folder, _config(left)
    logged = [event for event, _ in log.read(folder / EVENTS, left.offset)]
    cluster = session.cluster(config)
    session.serve(config)
    if any(isinstance(event, Restarted | Resumed) for event in logged) or not cluster.attach(folder):
        forget(folder)
        raise UserError(
            "processes that wait for a driver",
            f"none of {log.from_here(folder)}: they have ended",
            f"{typed(left)}, which goes on from the last checkpoint",
        )

    def live() -> None:
        if end:
            session.preemption.ask(signal.SIGTERM, "the driver", of_command=True)

    baseline = None if left.baseline is None else from_json(left.baseline)
    planned = Planned(from_json((folder / PLAN).read_text()), baseline, cluster)
    request = RunRequest(config, folder, left.overrides, None, planned=planned)
    replay = Replay(logged, left.attempt.began, live)
    return Supervisor(request, run, session, left.known, left, replay)


def typed(left: Handover) -> str:
    """The command that a run was started by.

    >>> from pipeline.driver.timing import Measurements
    >>> typed(Handover("", Attempt("", 0.0, Measurements()), 0, "/", ["cluster.hosts=[a,b]"]))
    "python -m pipeline 'cluster.hosts=[a,b]'"
    """
    return shlex.join(["python", "-m", "pipeline", *left.overrides])


def _config(left: Handover) -> Config:
    composed = OmegaConf.create(left.config)
    assert isinstance(composed, DictConfig)
    return configs.typed(composed)
