"""Finds the run that a command goes on with: one that ended early, to resume it, or one whose driver it takes over."""

import contextlib
import json
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from pipeline.config import config as configs
from pipeline.config.schema import Config
from pipeline.driver import run_folders
from pipeline.driver.group import Replay
from pipeline.driver.run import Run
from pipeline.driver.session import RunRequest, Session
from pipeline.driver.start import AUTO, NEVER
from pipeline.driver.timing import Measurements
from pipeline.errors import UserError
from pipeline.plan import plan as plans
from pipeline.record import commands, events, log
from pipeline.record.files import AGENTS, forget_agents, trains_on
from pipeline.record.results import Baseline

if TYPE_CHECKING:
    from pipeline.driver.supervisor import Supervisor

# Of a run whose processes outlive its driver: the measurements before its present attempt. Its log has those since.
FILE = "attempt.json"


@dataclass
class Handover:
    """A run under way, for its next driver: its config as YAML, where it was typed, and its present attempt.

    That has a `plan`, as JSON, and `began` when the log had the size `offset`; what was `measured` is from before it.
    `resume`: the checkpoint that it resumes from. `restarts`: how many of the `launch.max_restarts` are used up;
    `failed`: the log of the process that failed last. `baseline` is the plan of one device, as JSON, and `known` what
    an earlier run measured of it; `ask_size`: the model's size was not known.
    """

    config: str
    directory: str
    plan: str
    began: float
    offset: int
    measured: Measurements
    resume: commands.Resume | None = None
    restarts: int = 0
    failed: str | None = None
    overrides: list[str] = field(default_factory=list)
    baseline: str | None = None
    known: Baseline | None = None
    ask_size: bool = False


def find(
    config: Config,
    plan: plans.Plan,
    output: Path,
    only: Path | None = None,
    also: Sequence[Path] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Run | None:
    """The run to resume, locked; None if a new one begins. Raises `UserError`.

    By itself it is the last run of the same config, in the output folder or in the folders `also`, or, with `only`, the
    one in that folder. `say` hears if another command still works on it.
    """
    if config.resume == NEVER:
        return None
    if config.resume != AUTO:
        return _named(config, plan, only_named(config.resume, output))
    candidates = [only] if only else dict.fromkeys([*run_folders.same_identity(plan, output), *also])
    if only is not None and (only / run_folders.LOCK).exists():
        # Another command may work on it that has attached to it.
        Run.without_driver(only, "again once that has ended").release()
    for folder in sorted(candidates, key=run_folders.began)[::-1]:
        values = log.read_whole(folder / run_folders.PLAN)
        if not values or plans.identity(values) != plans.identity(_values_of(plan, values)):
            continue
        try:
            run = Run.locked(folder)
        except BlockingIOError:
            # An older one was not meant to be resumed when this one began, and is not now.
            say(f"{log.from_here(folder)}, of the same config, is still under way: another run begins.")
            return None
        except OSError:
            # It is somebody else's.
            continue
        failed_early = run.status == "failed" and run.saved_step is None
        if run.began and run.status != "finished" and not failed_early:
            _expect_no_processes(run)
            return run
        run.release()
        return None
    return None


def only_named(name: str, output: Path) -> Path:
    """The folder of the one run that `resume` names. Raises `UserError`."""
    expected = "resume to be auto, never, or a run's folder, name or id in MLflow"
    others = "resume=auto or resume=never"
    return run_folders.find(name, output, run_folders.PLAN, expected, f"resume={{}}, {others}", others)


def in_the_way(plan: plans.Plan, base_port: int | None, output: Path) -> Iterator[Path]:
    """Yields runs without a driver, each locked, whose processes may have the ports needed and are to end soon."""
    needed = set() if base_port is None else {base_port + process.rank for process in plan.processes}
    hosts = set(plan.hardware.host_names)
    for folder in sorted(output / within for within in run_folders.all_within(output)):
        values = log.read_whole(folder / run_folders.PLAN) if (folder / AGENTS).exists() else {}
        addresses = [str(process.get("address")) for process in values.get("processes", ())]
        ports = {int(port) for address in addresses if (port := address.rpartition(":")[2]).isdecimal()}
        its_hosts = set(values.get("host_names", ()))
        apart = hosts and its_hosts and not hosts & its_hosts
        if ports & needed and not apart and not trains_on(folder, time.time()):
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                stack.callback(run_folders.Lock(folder).release)
                yield folder


@contextlib.contextmanager
def attach(folder: Path, session: Session, end: bool = False) -> Iterator["Supervisor"]:
    """Takes over the run in a folder, with its processes, which save and leave if `end`. Raises `UserError`.

    Inside, the working directory is that of the run's command, which typed folders and modules are relative to.
    """

    def live() -> None:
        if end:
            session.preemption.ask(signal.SIGTERM, "the driver", of_command=True)

    run, shown = Run.without_driver(folder, "again once that has ended"), log.from_here(folder)
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as failed:
        failed.callback(run.release)
        if run.ended is not None:
            again = "" if run.ended == "FINISHED" else " The same command goes on from its last checkpoint."
            raise UserError(
                f"Expected a run that is under way, received {shown}, which has ended as {run.ended}.{again} "
                f"Try python -m pipeline compare {shown} and another one."
            )
        if (left := log.read_json(Handover, folder / FILE)) is None:
            expected = (
                "a run whose processes outlive their driver (launch.detach=true, cluster=hosts, slurm or kubernetes)"
            )
            instead = "the same command again: it goes on from the last checkpoint"
            raise UserError(expected, f"{shown}, whose processes have ended with it", instead)
        from pipeline.driver.supervisor import Supervisor

        if Path(left.directory).is_dir():
            stack.enter_context(contextlib.chdir(left.directory))
        composed = OmegaConf.create(left.config)
        assert isinstance(composed, DictConfig)
        config = configs.typed_as(Config, composed)
        logged = [event for event, _ in log.read(folder / run_folders.EVENTS, left.offset)]
        cluster = session.cluster(config)
        session.serve(config)
        again_begun = any(isinstance(event, events.Restarted | events.Resumed) for event in logged)
        if again_begun or not cluster.attach(folder):
            forget(folder)
            again = shlex.join(["python", "-m", "pipeline", *left.overrides])
            instead = f"{again}, which goes on from the last checkpoint"
            raise UserError("processes that wait for a driver", f"none of {shown}: they have ended", instead)
        plan = plans.from_json((folder / run_folders.PLAN).read_text())
        baseline = None if left.baseline is None else plans.from_json(left.baseline)
        request = RunRequest(config, folder, left.overrides, None, plan=plan, baseline=baseline)
        supervisor = Supervisor(request, run, session, left.known, left, Replay(logged, left.began, live))
        failed.pop_all()
        yield supervisor


def how(folder: Path) -> str:
    """Says how to take over from a driver that has left."""
    return f"`python -m pipeline attach {log.from_here(folder)}` takes this command's place."


def forget(folder: Path) -> None:
    """Deletes what the next driver would go by: the run is over."""
    forget_agents(folder)
    (folder / FILE).unlink(missing_ok=True)


def _named(config: Config, plan: plans.Plan, folder: Path) -> Run:
    values = log.read_whole(folder / run_folders.PLAN)
    differing = [
        key
        for key in plans.changed(values, _values_of(plan, values))
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in config.resume_changes)
    ]
    if differing:
        also = f"resume_changes=[{','.join(differing)}] to go on with what is different"
        instead = f"the same, or {also}, or resume=never"
        raise UserError(f"the config of {folder}, whose training goes on", f"another {', '.join(differing)}", instead)
    run = Run.without_driver(folder, "resume=never, or wait for it")
    _expect_no_processes(run)
    if run.status == "finished" and not config.resume_changes:
        run.release()
        instead = "resume=never to train anew, or more with train.epochs=... resume_changes=[train.epochs]"
        raise UserError("a run that did not finish", f"{folder}, which did", instead)
    return run


def _values_of(plan: plans.Plan, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the plan once it is as long as that of an earlier run."""
    return dict(json.loads(plans.as_long_as(plan, values).to_json()))


def _expect_no_processes(run: Run) -> None:
    # Two trainings would write the same files.
    if trains_on(run.folder, time.time()):
        run.release()
        folder = log.from_here(run.folder)
        received = f"{folder}, whose processes train on without a driver"
        instead = f"python -m pipeline attach {folder}, or resume=never for another run"
        raise UserError("a run that has ended", received, instead)
