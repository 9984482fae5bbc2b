"""Takes over a run whose driver is gone: from its folder to a supervisor that hears the event log first."""

import contextlib
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from pipeline.config import config as configs
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.plan.plan import from_json
from pipeline.record import log
from pipeline.record.events import Restarted, Resumed
from pipeline.run import folders, handover
from pipeline.run.folders import EVENTS, PLAN
from pipeline.run.group import Replay
from pipeline.run.handover import Handover
from pipeline.run.run import Run
from pipeline.run.session import Planned, RunRequest, Session
from pipeline.run.supervisor import Supervisor


def named(name: str, output: Path) -> Path:
    """The folder of the run that `name` names. Raises `UserError`."""
    expected = "a run's folder, its name or its id in MLflow"
    return folders.named(name, output, expected, "python -m pipeline attach {}", "output_dir=...").resolve()


@contextlib.contextmanager
def attach(folder: Path, session: Session, end: bool = False) -> Iterator[Supervisor]:
    """Takes over the run in a folder, with its processes. Raises `UserError`, and `LaunchError`.

    `end`: once they are caught up with, they save a checkpoint and leave. Inside, the working directory is that of the
    run's command, which folders and modules that were typed are relative to.
    """
    shown = log.from_here(folder)
    try:
        run = Run.locked(folder)
    except OSError:
        raise UserError(
            "a run whose conductor is gone", f"{shown}, on which one still works", "again once that has ended"
        ) from None
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
            "a run whose processes outlive their conductor (launch.detach=true, cluster=hosts, slurm or kubernetes)",
            f"{shown}, whose processes have ended with it",
            "the same command again: it goes on from the last checkpoint",
        )
    return left


def _supervisor(run: Run, left: Handover, session: Session, end: bool) -> Supervisor:
    folder, config = run.folder, _config(left)
    logged = [event for event, _ in log.read(folder / EVENTS, left.offset)]
    cluster = session.cluster(config)
    session.serve(config)
    if any(isinstance(event, Restarted | Resumed) for event in logged) or not cluster.attach(folder):
        handover.forget(folder)
        raise UserError(
            "processes that wait for a conductor",
            f"none of {log.from_here(folder)}: they have ended",
            f"{typed(left)}, which goes on from the last checkpoint",
        )

    def live() -> None:
        if end:
            session.preemption.ask(signal.SIGTERM, "the conductor", of_command=True)

    baseline = None if left.baseline is None else from_json(left.baseline)
    planned = Planned(from_json((folder / PLAN).read_text()), baseline, cluster)
    request = RunRequest(config, folder, left.overrides, None, planned=planned)
    replay = Replay(logged, left.attempt.began, live)
    return Supervisor(request, run, session, left.known, left, replay)


def typed(left: Handover) -> str:
    """The command that a run was started by.

    >>> from pipeline.run.handover import Attempt, Measured
    >>> typed(Handover("", Attempt("", 0.0, Measured()), 0, "/", ["cluster.hosts=[a,b]"]))
    "python -m pipeline 'cluster.hosts=[a,b]'"
    """
    return shlex.join(["python", "-m", "pipeline", *left.overrides])


def _config(left: Handover) -> Config:
    composed = OmegaConf.create(left.config)
    assert isinstance(composed, DictConfig)
    return configs.typed(composed)
