"""A run: its folder, its plan, its log, and its state, which the log rebuilds; its name and tags in MLflow."""

import getpass
import json
import os
import re
import shlex
import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from pipeline.analyze import comparable, measure
from pipeline.config import offered, parts, targets
from pipeline.config.schema import Config, Store
from pipeline.driver import run_folders
from pipeline.driver.session import RunRequest
from pipeline.driver.timing import Measurements
from pipeline.errors import UserError
from pipeline.plan import plan as plans
from pipeline.plan.backends import other
from pipeline.record import events, log, results
from pipeline.record.files import TrackingStore
from pipeline.record.findings import Check, Pace

PROGRAM = ("python", "-m", "pipeline")
# A value in JSON that is typed as it stands.
PLAIN = re.compile(r'"?[\w./-]+"?')
COMMIT = "mlflow.source.git.commit"
ENDED = {"PREEMPTED": "preempted", "FAILED": "failed", "KILLED": "interrupted", "FINISHED": "finished"}
_Repeats = defaultdict[str, defaultdict[int, dict[int, events.Measured]]]


@dataclass(eq=False)
class Run:
    """One run: `plan` has the values of its plan as they were written, all else is a fold over its log."""

    folder: Path
    plan: Mapping[str, Any] = field(default_factory=dict)
    is_new: bool = True
    # The log has events, and says as what the last command ended, if it says so.
    began: bool = False
    ended: str | None = None
    # The last step and epoch that the log tells of, and the step and the folder of the last checkpoint.
    step: int = 0
    epoch: int = 0
    saved_step: int | None = None
    saved_in: str | None = None
    check: Check | None = None
    profile: Pace | None = None
    # XLA compiles the steps, and how many times as fast that was, as first chosen.
    xla: bool | None = None
    xla_speedup: float | None = None
    goodput: measure.Goodput = field(default_factory=measure.Goodput)
    # Why all processes were started again, each time.
    restarts: list[str] = field(default_factory=list)
    # Measurements by group, repeat and rank.
    _repeats: _Repeats = field(default_factory=lambda: defaultdict(lambda: defaultdict(dict)))
    _lock: run_folders.Lock | None = None
    _log: log.EventLog = field(init=False)

    @classmethod
    def from_log(cls, folder: Path) -> "Run":
        """Rebuilds a run from its folder; resume, takeover and tests start here."""
        run = cls(folder)
        run.is_new, run.plan = False, log.read_whole(folder / run_folders.PLAN)
        for event, _ in log.read(folder / run_folders.EVENTS):
            run.apply(event)
        return run

    @classmethod
    def locked(cls, folder: Path) -> "Run":
        """The same, once no other command can work on it. Raises `OSError` if one does."""
        lock = run_folders.Lock(folder)
        run = cls.from_log(folder)
        run._lock = lock
        return run

    @classmethod
    def without_driver(cls, folder: Path, try_this: str) -> "Run":
        """The same. Raises `UserError`, with what to do instead, if one does."""
        try:
            return cls.locked(folder)
        except BlockingIOError:
            received = f"{log.from_here(folder)}, on which one still works"
            raise UserError("a run whose driver is gone", received, try_this) from None
        except OSError as error:
            expected = f"to be able to write {log.from_here(folder)}"
            raise UserError(expected, error.strerror, "as the user who has begun it, or resume=never") from None

    @property
    def status(self) -> str:
        """The way its last command ended, in words; "killed" if the log does not say."""
        return ENDED.get(str(self.ended), "killed")

    def apply(self, event: events.Event) -> None:
        """Takes in the next event of the log."""
        self.began, self.ended = True, event.status if isinstance(event, events.Ended) else None
        self.goodput.note(event)
        match event:
            case events.Restarted(text=text):
                self.restarts.append(text)
            case events.Profiled(values=profile):
                self.profile = profile
            case events.Measured(group=str(group)):
                self._repeats[group][event.repeat][event.rank] = event
            case _ if not event.of_point:
                pass
            case events.Steps(step=step):
                self.step = max(self.step, step)
            case events.Epoch(epoch=epoch):
                self.epoch = max(self.epoch, epoch)
            case events.Checkpoint(step=step, path=path):
                self.saved_step, self.saved_in = step, path.rpartition("/")[0]
            case events.Checked(values=check, rank=0):
                self.check = check
            case events.Built(xla=bool(xla), rank=0) if self.xla is None:
                self.xla, self.xla_speedup = xla, event.xla_speedup

    def measured(self, plan: plans.Plan, baseline: plans.Plan | None) -> Measurements:
        """Its measurements, as far as they hold for the plan that resumes it."""
        restarts = self.restarts
        measured = Measurements(step=self.step, check=self.check, notes=list(restarts), restarts=len(restarts))
        same = plans.identity(self.plan) == plans.identity(json.loads(plan.to_json()))
        same = same and plans.from_values(self.plan).collective == plan.collective
        # Timings of another machine do not hold for this one.
        if same and self.plan.get("machine") == plan.hardware.machine:
            measured.point = self._whole_repeats("point", plan.leaders)
            measured.baseline = self._whole_repeats("baseline", baseline.leaders if baseline else (0,))
            measured.profile = self.profile
        return measured

    def timed(self, *groups: str) -> list[events.Event]:
        """The events of what some groups have measured, in their order."""
        by_rank = [each for group in groups for each in self._repeats[group].values()]
        return sorted((event for each in by_rank for event in each.values()), key=lambda event: event.time)

    def first_event(
        self, name: str, experiment: str, params: dict[str, object], tags: dict[str, object]
    ) -> events.Event:
        """The event that the run begins, or that this command resumes it."""
        pid, host, now = os.getpid(), os.uname().nodename, time.time()
        if self.began:
            return events.Resumed(params, tags, pid, host, time=now)
        key, folder = uuid.uuid4().hex, str(self.folder)
        return events.Run(key, name, folder, experiment, params, tags, pid, host, events.VERSION, time=now)

    def begin(self, plan: plans.Plan, output: Path) -> None:
        """Writes its plan. Raises `OSError` if another command works on it."""
        self._lock = self._lock or run_folders.Lock(self.folder)
        with suppress(OSError):
            (self.folder / results.FILE).unlink()
        log.write_whole(self.folder / run_folders.PLAN, plan.to_json())
        run_folders.note(self.folder, plan, output)

    def open(self) -> None:
        """Opens its log, to append to it."""
        self._log = log.EventLog(self.folder / run_folders.EVENTS)

    def append(self, event: events.Event) -> None:
        """Writes an event to the log, and takes it in."""
        self._log.append(event)
        self.apply(event)

    def close(self) -> None:
        """Closes its log. Raises `OSError` if that cannot be written."""
        self._log.close()

    def release(self) -> None:
        """Lets other commands work on it."""
        if self._lock is not None:
            self._lock.release()

    def _whole_repeats(self, group: str, ranks: Sequence[int]) -> list[measure.Repeat]:
        """The repeats, from the first on, that every process of a group has measured."""
        by_repeat, repeats = self._repeats[group], list[measure.Repeat]()
        while by_repeat.get(len(repeats), {}).keys() >= set(ranks):
            repeats.append(measure.slowest(by_repeat[len(repeats)]))
        return repeats


def parameters(planned: plans.Plan, config: Config) -> dict[str, object]:
    """The choices and the resolved numbers, flat and short, as MLflow's parameters."""
    flat = parts.flat(planned, parts.Part.PARAMETER) | {
        "processes": len(planned.processes),
        "collective": planned.collective,
    }
    optimizer = config.train.optimizer
    flat["optimizer"] = optimizer.get(targets.KEY, "") if isinstance(optimizer, dict) else optimizer
    for group, build in (("model", planned.model.build), ("data", planned.data.build)):
        flat |= {f"{group}.{name}": value for name, value in build.items() if name != targets.KEY}
    return {name: value for name, value in flat.items() if value is not None}


def name_of(planned: plans.Plan) -> str:
    """The run's name in MLflow, which is all that charts show of it."""
    hardware = planned.hardware
    doubts = comparable.doubts(results.Layout(rehearsal=hardware.rehearsal, oversubscribed=hardware.oversubscribed))
    marked = f" ({', '.join(doubts)})" if doubts else ""
    called = results.Choices(planned.strategy.name, backend=other(planned.backend)).called
    return f"{called}-{planned.workers}-{planned.model.name}-{planned.data.name}{marked}"


def store_of(config: Config) -> TrackingStore | None:
    """The store that tracks a run; None if none does."""
    tracking, output = config.tracking, Path(config.output_dir).resolve()
    if tracking.store is Store.none:
        return None
    uri = tracking.uri or f"sqlite:///{output / 'mlflow.db'}"
    artifacts = (output / "mlartifacts").as_uri() if tracking.store is Store.sqlite else None
    return TrackingStore(tracking.store.value, uri, tracking.experiment, artifacts, tracking.log_model)


def command_of(overrides: Sequence[str], options: Sequence[str] = ()) -> str:
    """The command that runs one run again, even one of a sweep.

    A ready sweep stays one whatever else is typed, so the keys of its file are typed in its place.

    >>> command_of(["experiment=strategies", "strategy=mirrored", "sweep.name=mine"])
    'python -m pipeline measure.baseline=fresh strategy=mirrored'
    """
    typed = {_key(override): override for override in overrides if not _key(override).startswith("sweep.")}
    ready, keys = typed.pop("experiment", None), dict[str, str]()
    if ready is not None:
        named = [
            option.partition("=")[2] for option in options if option.startswith(("--config-dir=", "--config-path="))
        ]
        files = [
            folder / f"experiment/{ready.partition('=')[2]}.yaml" for folder in (*map(Path, named), offered.folder())
        ]
        contents: object = None
        with suppress(OSError, YAMLError, OmegaConfBaseException, StopIteration):
            file = next(file for file in files if file.is_file())
            contents = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        values: dict[str, str] | None = None
        if isinstance(contents, dict) and "defaults" not in contents:
            of_runs = {key: value for key, value in contents.items() if key not in ("sweep", "hydra")}
            values = {key: json.dumps(value) for key, value in comparable.flat(of_runs)}
        if values is None or not all(map(PLAIN.fullmatch, values.values())):
            # Its keys cannot be typed.
            return shlex.join([*PROGRAM, *options, *typed.values(), ready, "hydra.mode=RUN", "sweep.name=null"])
        keys = {key: f"{key}={value.strip(chr(34))}" for key, value in values.items()}
    return shlex.join([*PROGRAM, *options, *(keys | typed).values()])


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def origin() -> dict[str, str]:
    """User, program and commit, as MLflow shows them, as far as they are known."""
    tags = {"mlflow.source.name": shlex.join(PROGRAM), "mlflow.source.type": "LOCAL"}
    # A user may have no name, as in a container.
    with suppress(OSError, KeyError):
        tags["mlflow.user"] = getpass.getuser()
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=True)
        tags[COMMIT] = shown.stdout.strip()
    return {name: value for name, value in tags.items() if value}


def tags_of(planned: plans.Plan, request: RunRequest, options: Sequence[str] = ()) -> dict[str, str]:
    """A run's tags in MLflow. `options` are the command's that say where configs are."""
    tags, hardware = origin(), planned.hardware
    tags |= {
        "git_commit": tags.get(COMMIT, ""),
        "command": command_of(request.overrides, options),
        "host": os.uname().nodename,
        "device_kind": hardware.kind,
        "machine": hardware.machine,
        "sweep": request.sweep or "",
        "overrides": " ".join(request.overrides),
        "rehearsal": str(hardware.rehearsal).lower(),
        "oversubscribed": str(hardware.oversubscribed).lower(),
    }
    return {name: value for name, value in tags.items() if value}
