"""Takes the place of a run's conductor that is gone: from what its folder says, to what a `Point` goes on with."""

import contextlib
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from pipeline.config import config as configs
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.launch import Cluster
from pipeline.plan.plan import Plan, from_json
from pipeline.record import log
from pipeline.record.events import Ended, Event, Restarted, Resumed
from pipeline.run import attempts
from pipeline.run.attempts import UnderWay
from pipeline.run.lock import Lock
from pipeline.run.replay import Replay
from pipeline.run.resume import Earlier, all_folders, named
from pipeline.run.session import PointRequest, Session


@dataclass(frozen=True)
class Attached:
    """A run that another conductor had under way, locked, and the cluster whose processes of it are met."""

    request: PointRequest
    cluster: Cluster
    planned: Plan
    earlier: Earlier
    under_way: UnderWay
    # What its log tells of the attempt, and what tells it again.
    told: list[Event]
    replay: Replay

    @property
    def baseline(self) -> Plan | None:
        """The plan of one device, where there is one."""
        return None if self.under_way.baseline is None else from_json(self.under_way.baseline)


def found(name: str, output: Path) -> Path:
    """The folder of the run that `name` names. Raises `UserError`."""
    there = named(name, output)
    if len(there) == 1:
        return there[0].resolve()
    last = all_folders(output)[-1:]
    instead = f"Try python -m pipeline attach {last[0]}." if last else "Try output_dir=..."
    raise UserError(
        f"Expected a run's folder, its name or its id in MLflow, received {name}, which is that of "
        f"{len(there) or 'no'} run{'s' * (len(there) != 1)}. {instead}"
    )


@contextlib.contextmanager
def attach(folder: Path, session: Session, end: bool = False) -> Iterator[Attached]:
    """Meets the processes of the run in a folder. Raises `UserError`, and `LaunchError`.

    `end`: once what is known has been told again, they are to save a checkpoint and leave. Inside, the working
    directory is that of the run's command: what was typed there names folders and modules from there.
    """
    shown = log.from_here(folder)
    try:
        lock = Lock(folder)
    except OSError:
        raise UserError(
            "a run whose conductor is gone", f"{shown}, on which one still works", "again once that has ended"
        ) from None
    with contextlib.ExitStack() as stack:
        try:
            events, under_way = _left(folder)
            if Path(under_way.directory).is_dir():
                stack.enter_context(contextlib.chdir(under_way.directory))
            attached = _attached(folder, lock, session, end, events, under_way)
        except BaseException:
            lock.release()
            raise
        yield attached


def how(folder: Path) -> str:
    """What takes the place of a conductor that has left, in words."""
    return f"`python -m pipeline attach {log.from_here(folder)}` takes this command's place."


def _left(folder: Path) -> tuple[list[Event], UnderWay]:
    """What a conductor that is gone has left of a run under way: its events, and how to go on. Raises `UserError`."""
    events = [event for event, _ in log.read(folder / attempts.LOG)]
    under_way, shown = UnderWay.read(folder), log.from_here(folder)
    if events and isinstance(events[-1], Ended):
        again = "" if events[-1].status == "FINISHED" else " The same command goes on from its last checkpoint."
        raise UserError(
            f"Expected a run that is under way, received {shown}, which has ended as {events[-1].status}.{again} "
            f"Try python -m pipeline compare {shown} and another one."
        )
    if under_way is None:
        raise UserError(
            "a run whose processes outlive their conductor (launch.detach=true, cluster=hosts, slurm or kubernetes)",
            f"{shown}, whose processes have ended with it",
            "the same command again: it goes on from the last checkpoint",
        )
    return events, under_way


def _attached(
    folder: Path, lock: Lock, session: Session, end: bool, events: list[Event], under_way: UnderWay
) -> Attached:
    config = _config(under_way)
    told = [event for event, _ in log.read(folder / attempts.LOG, under_way.offset)]
    cluster = session.cluster(config)
    session.serve(config)
    if any(isinstance(event, Restarted | Resumed) for event in told) or not cluster.attach(folder):
        attempts.forget(folder)
        raise UserError(
            "processes that wait for a conductor",
            f"none of {log.from_here(folder)}: they have ended",
            f"{typed(under_way)}, which goes on from the last checkpoint",
        )
    earlier = Earlier(folder, lock, log.read_whole(folder / "plan.json"), events)
    planned = from_json((folder / "plan.json").read_text())
    request = PointRequest(config, folder, under_way.overrides, None)

    def live() -> None:
        if end:
            session.preemption.ask(signal.SIGTERM, "the conductor", of_command=True)

    replay = Replay(told, under_way.attempt.began, live)
    return Attached(request, cluster, planned, earlier, under_way, told, replay)


def typed(under_way: UnderWay) -> str:
    """The command that a run was started by.

    >>> from pipeline.run.attempts import Attempt, Measured
    >>> typed(UnderWay("", Attempt("", 0.0, Measured()), 0, "/", ["cluster.hosts=[a,b]"]))
    "python -m pipeline 'cluster.hosts=[a,b]'"
    """
    return shlex.join(["python", "-m", "pipeline", *under_way.overrides])


def kept(config: Config) -> str:
    """A config as it is kept."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _config(under_way: UnderWay) -> Config:
    composed = OmegaConf.create(under_way.config)
    assert isinstance(composed, DictConfig)
    return configs.typed(composed)
