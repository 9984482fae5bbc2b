"""Runs one point from its config to its result: plan, launch, record. A session holds what points share."""

import dataclasses
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import Config, Mode, Store
from pipeline.errors import UserError
from pipeline.launch import Cancelled, LaunchError, outlives
from pipeline.launch.signals import PREEMPTING
from pipeline.plan.backends import JAX
from pipeline.plan.plan import Plan, as_long_as
from pipeline.record import log
from pipeline.run import sweep
from pipeline.run.beforehand import killed, refused
from pipeline.run.estimating import estimated, expect_room, tell_shards
from pipeline.run.laying_out import lay_out, reachable
from pipeline.run.session import PointRequest, Session
from pipeline.run.views import PointResult

if TYPE_CHECKING:
    from pipeline.run.resume import Earlier

# Where Hydra writes what was composed, in the folder of a point.
HYDRA_S = "hydra"


# Signals by which a person, or a terminal, leaves a run whose processes outlive the command.
LEAVING = (signal.SIGINT, signal.SIGHUP)
# What a point that cannot be laid out, or predicted, raises.
REFUSALS = (
    UserError, UserError, LaunchError, UserError, UserError, UserError, UserError,
    UserError,
)  # fmt: skip


def look_over(request: PointRequest, session: Session) -> PointRequest | PointResult:
    """The point laid out, whose imports begin; the result of one that cannot be, before any is run."""
    config = request.config
    try:
        made = lay_out(config, session, begin=False)
        if config.mode is Mode.run and config.resume not in ("auto", "never"):
            from pipeline.run import resume

            resume.only_named(config.resume, Path(config.output_dir))
        there = config.mode is not Mode.run or made.cluster.arrived()
        if there and not _may_be_held(config):
            reachable(made.plan, made.cluster, config, session)
    except REFUSALS as error:
        return _refused(error, request)
    if config.mode is Mode.run:
        if config.backend != JAX:
            # Whose processes are forked from one that has TensorFlow.
            made.cluster.warm_up()
        if config.tracking.store is not Store.none:
            session.tracker(Path(config.output_dir) / "tracker.log").begin()
    return dataclasses.replace(request, laid_out=made if there else None)


def run(request: PointRequest, session: Session) -> PointResult:
    """One point that was looked over. Returns what became of it, except when a signal ends the command.

    Its `status` is FINISHED, FAILED, KILLED, PREEMPTED, PLANNED, PREDICTED, or REFUSED where it cannot be laid out.
    """
    config, full = request.config, request.config.mode is Mode.plan
    starts = config.mode is Mode.run
    earlier = known = None
    try:
        made = request.laid_out or lay_out(config, session)
        cluster, baseline = made.cluster, made.baseline
        if starts:
            # What conducts processes, which a plan does without, takes a moment to import.
            from pipeline.run import resume

            attempts = list(sweep.attempts(request.folder))
            only = request.folder if request.own else None
            earlier = resume.find(config, made.plan, Path(config.output_dir), only, attempts, session.screen.say)
        with _let_go(earlier):
            if earlier is not None:
                # Whose processes have the ports that are asked for, and the files that are written.
                cluster.end_earlier(earlier.folder)
            elif starts and _may_be_held(config):
                for folder in resume.in_the_way(made.plan, config.cluster.base_port, Path(config.output_dir)):
                    cluster.end_earlier(folder)
            length = made.plan if earlier is None else as_long_as(made.plan, earlier.plan)
            planned = reachable(length, cluster, config, session)
            if starts:
                expect_room(planned, request, cluster, session)
    except Cancelled as cancelled:
        return request.ended(killed(str(cancelled), config, request.folder))
    except REFUSALS as error:
        return _refused(error, request)
    request = _in_its_folder(request, earlier, session)
    if starts:
        from pipeline.run.point import Point, known_baseline

        known = known_baseline(baseline, Path(config.output_dir), session)
    if not starts:
        # First: who reads what follows may leave in the middle of it.
        remove(request.folder, Path(config.output_dir))
    session.screen.planned(planned, full, None if known is None else str(log.from_here(Path(known.folder))))
    if full and (typed := cluster.describe(planned)):
        session.screen.described(typed)
    if config.mode is Mode.predict:
        from pipeline.run.predicting import predicted

        try:
            return predicted(planned, request, session.here(config), session)
        except REFUSALS as error:
            return _refused(error, request)
    if full:
        try:
            return estimated(planned, request, cluster, session)
        except UserError as error:
            return _refused(error, request)
    tell_shards(planned, request, session)
    point = Point(request, _with_folder(planned, request, earlier), session, earlier, known)
    return request.ended(point.run(cluster, baseline))


def _may_be_held(config: Config) -> bool:
    """May processes that a command which was killed has left have the ports that are named? `run` ends them first."""
    return config.cluster.base_port is not None and outlives(config.cluster.name, config.launch.detach)


@contextmanager
def _let_go(earlier: "Earlier | None") -> Iterator[None]:
    """Lets go of the run that would have been gone on with where that fails."""
    try:
        yield
    except BaseException:
        if earlier is not None:
            earlier.lock.release()
        raise


def _refused(error: Exception, request: PointRequest) -> PointResult:
    ended = request.ended(refused(str(error), request.config, request.folder))
    if request.sweep is None:
        remove(request.folder, Path(request.config.output_dir))
    return ended


def _in_its_folder(request: PointRequest, earlier: "Earlier | None", session: Session) -> PointRequest:
    """The point in the folder of the run that it goes on with; its own, where it is new and empty, is removed.

    One that goes on with nothing, and whose folder holds a run, gets another one.
    """
    if earlier is None:
        taken = (request.folder / "events.jsonl").exists()
        return dataclasses.replace(request, folder=sweep.make_another(request.folder)) if taken else request
    if request.folder.resolve() != earlier.folder.resolve():
        _empty(request.folder)
    session.screen.resumed(str(earlier.folder), earlier.status, earlier.step, earlier.saved_step)
    return dataclasses.replace(request, folder=earlier.folder.resolve())


def _with_folder(planned: Plan, request: PointRequest, earlier: "Earlier | None") -> Plan:
    """The plan with the folder of this run's checkpoints, and that of an earlier command where it was another."""
    named, folder = planned.checkpoint.folder, request.folder.resolve()
    if named is None:
        where = str(folder / "checkpoints")
    else:
        output = Path(request.config.output_dir).resolve()
        own = folder.relative_to(output) if folder.is_relative_to(output) else Path(folder.name)
        where = f"{named if '://' in named else Path(named).resolve()}/{'_'.join(own.parts)}"
    then = None if earlier is None else (earlier.plan.get("checkpoint") or {}).get("folder")
    kept = dataclasses.replace(planned.checkpoint, folder=where, before=None if then == where else then)
    return dataclasses.replace(planned, checkpoint=kept)


def remove(folder: Path, output: Path) -> None:
    """Removes the folder of a point that starts nothing, of which nothing stays, and with the last one its sweep's."""
    _empty(folder)
    with suppress(OSError):
        if [path.name for path in folder.parent.iterdir()] == ["multirun.yaml"]:
            shutil.rmtree(folder.parent)
    # What Hydra has made on the way there.
    with suppress(OSError):
        for parent in folder.resolve().parents:
            if not parent.is_relative_to(output.resolve()) or parent == Path.cwd():
                break
            if parent.exists():
                parent.rmdir()


def _empty(folder: Path) -> None:
    """Removes what Hydra has put into a folder, and the folder if that was all: one that was named may hold a run."""
    if (folder / "events.jsonl").exists():
        return
    shutil.rmtree(folder / HYDRA_S, ignore_errors=True)
    with suppress(OSError):
        (folder / "result.json").unlink(missing_ok=True)
        folder.rmdir()


def leaves_running(session: Session) -> Callable[[int], bool]:
    """Tells whether a signal comes while a point is under way, which then ends by itself: a scheduler's, or a first
    Ctrl-C. One whose processes outlive this command is left to them by Ctrl-C, and by a terminal that is closed."""

    def spared(number: int) -> bool:
        if number in LEAVING and session.leaves is not None:
            session.leave(session.leaves)
            return False
        if number == signal.SIGINT and session.saves and session.preemption.asked is None:
            session.preemption.ask(number, "the conductor", of_command=True)
            return True
        if number not in PREEMPTING:
            return False
        session.preemption.ask(number, "the conductor", of_command=True)
        return session.busy

    return spared
