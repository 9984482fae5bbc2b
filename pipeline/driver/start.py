"""Takes a requested run from its config to its result: validate it, plan it, then train, estimate or predict."""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import Config, Mode, Store
from pipeline.driver import RunResult, run_folders
from pipeline.driver.planner import plan_run, reachable
from pipeline.driver.session import Planned, RunRequest, Session
from pipeline.errors import UserError
from pipeline.launch import Cancelled, outlives
from pipeline.plan.backends import JAX
from pipeline.plan.plan import Plan, as_long_as
from pipeline.record import log

if TYPE_CHECKING:
    from pipeline.driver.run import Run

AUTO, NEVER = "auto", "never"


def validate(request: RunRequest, session: Session) -> RunRequest | RunResult:
    """The request with its plan, whose imports begin; the result of one that is refused, before any run starts."""
    config, trains = request.config, request.config.mode is Mode.run
    try:
        planned = plan_run(config, session, begin=False)
        if trains and config.resume not in (AUTO, NEVER):
            from pipeline.driver import resume

            resume.only_named(config.resume, request.output)
        arrived = not trains or planned.cluster.arrived()
        if arrived and not _may_be_held(config):
            reachable(planned.plan, planned.cluster, config, session)
    except UserError as error:
        return _refused(error, request)
    if trains and config.backend != JAX:
        # Its processes are forked from one that has TensorFlow.
        planned.cluster.warm_up()
    if trains and config.tracking.store is not Store.none:
        session.tracker(request.output).begin()
    return replace(request, planned=planned if arrived else None)


def run(request: RunRequest, session: Session) -> RunResult:
    """The result of a run that was validated. Raises `Interrupted` if a signal ends the command."""
    began = time.monotonic()
    try:
        planned = request.planned or plan_run(request.config, session)
        if request.config.mode is not Mode.run:
            return _without_training(request, planned, session)
        planned, earlier = _to_train(request, planned, session)
    except Cancelled as cancelled:
        return request.unstarted("KILLED", str(cancelled))
    except UserError as error:
        return _refused(error, request)
    from pipeline.driver.memory_check import cut
    from pipeline.driver.run import Run
    from pipeline.driver.supervisor import Supervisor

    request = _in_its_folder(request, earlier, session)
    baseline = session.known_baseline(planned.baseline, request.output)
    reused = None if baseline is None else str(log.from_here(Path(baseline.folder)))
    session.screen.planned(planned.plan, False, reused, cut(planned.plan, request, session))
    request = replace(request, planned=replace(planned, plan=_with_folder(planned.plan, request, earlier)))
    supervisor = Supervisor(request, earlier or Run(request.folder), session, baseline, began=began)
    return request.ended(supervisor.train())


def _without_training(request: RunRequest, planned: Planned, session: Session) -> RunResult:
    config, cluster = request.config, planned.cluster
    plan = reachable(planned.plan, cluster, config, session)
    # First, since whoever reads the output may close it in the middle.
    run_folders.remove(request.folder, request.output)
    session.screen.planned(plan, config.mode is Mode.plan, None)
    if config.mode is Mode.predict:
        # It brings along NumPy, which a plan does without.
        from pipeline.driver.predicting import predicted

        return predicted(plan, request, session.here(config), session)
    from pipeline.driver.memory_check import estimated

    if typed := cluster.describe(plan):
        session.screen.described(typed)
    return estimated(plan, request, cluster, session)


def _to_train(request: RunRequest, planned: Planned, session: Session) -> "tuple[Planned, Run | None]":
    # What drives processes takes a moment to import.
    from pipeline.driver import resume
    from pipeline.driver.memory_check import expect_room

    config, plan, cluster, output = request.config, planned.plan, planned.cluster, request.output
    attempts, only = [*run_folders.attempts(request.folder)], request.folder if request.own else None
    earlier = resume.find(config, plan, output, only, attempts, session.screen.say)
    with ExitStack() as stack:
        if earlier is not None:
            stack.callback(earlier.release)
            # Its processes have the ports that are needed, and write the same files.
            cluster.end_earlier(earlier.folder)
            plan = as_long_as(plan, earlier.plan)
        elif _may_be_held(config):
            for folder in resume.in_the_way(plan, config.cluster.base_port, output):
                cluster.end_earlier(folder)
        plan = reachable(plan, cluster, config, session)
        expect_room(plan, request, cluster, session)
        stack.pop_all()
    return replace(planned, plan=plan), earlier


def _may_be_held(config: Config) -> bool:
    """True if a killed command's processes may have the ports that are named; `run` ends them first."""
    return config.cluster.base_port is not None and outlives(config.cluster.name, config.launch.detach)


def _refused(error: Exception, request: RunRequest) -> RunResult:
    result = request.unstarted("REFUSED", str(error))
    if request.sweep is None:
        run_folders.remove(request.folder, request.output)
    return result


def _in_its_folder(request: RunRequest, earlier: "Run | None", session: Session) -> RunRequest:
    """The request in the folder of the run that it resumes, or in another one if its own holds a run."""
    if earlier is None:
        holds_run = (request.folder / run_folders.EVENTS).exists()
        return replace(request, folder=run_folders.make_another(request.folder)) if holds_run else request
    if request.folder.resolve() != earlier.folder.resolve():
        run_folders.remove_empty(request.folder)
    session.screen.resumed(str(earlier.folder), earlier.status, earlier.step, earlier.saved_step)
    if (path := run_folders.newer_code(request.config, earlier.folder, session.search)) is not None:
        session.screen.say(f"{log.from_here(path)} was written after the run began, which goes on with what it says.")
    return replace(request, folder=earlier.folder.resolve())


def _with_folder(plan: Plan, request: RunRequest, earlier: "Run | None") -> Plan:
    root, folder, output = plan.checkpoint.folder, request.folder.resolve(), request.output.resolve()
    checkpoints = str(folder / "checkpoints")
    if root is not None:
        parts = (folder.relative_to(output) if folder.is_relative_to(output) else Path(folder.name)).parts
        checkpoints = f"{root if '://' in root else Path(root).resolve()}/{'_'.join(parts)}"
    before = None if earlier is None else earlier.saved_in or (earlier.plan.get("checkpoint") or {}).get("folder")
    before = None if before == checkpoints else before
    return replace(plan, checkpoint=replace(plan.checkpoint, folder=checkpoints, before=before))
