"""The session that the runs of a command share, what it waits for at its end, and a run as it was requested."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import targets
from pipeline.config.schema import ClusterConfig, Config
from pipeline.driver import Ahead, RunResult, Screen, Tracking
from pipeline.launch import AT_ONCE, ELSEWHERE, JOBS, Cluster, cluster_of
from pipeline.launch.signals import PREEMPTING, Interrupted
from pipeline.plan import plan as plans
from pipeline.plan.backends import COMPUTING
from pipeline.record import results
from pipeline.record.files import run_id_of
from pipeline.record.findings import Check
from pipeline.record.log import from_here, read_json, write_json
from pipeline.record.results import Baseline, Choices, Ending, Layout, Result

if TYPE_CHECKING:
    from pipeline.analyze.history import TimedRun
    from pipeline.analyze.step_model import Observed

# A run's place in the command, and which repeat of it this is.
Key = tuple[int, int]
# For a checkpoint after Ctrl-C.
PERSON_SECONDS = 5.0
# For the tracker to send what is left, without getting on; `python -m pipeline sync` sends the rest.
CLOSE_SECONDS = 12.0
# At most for runs that a signal has ended, and after a second one.
HURRIED_SECONDS, AT_ONCE_SECONDS = 3.0, 0.2
# Before the terminal says why it waits.
SAY_SECONDS = 1.0
WAITING = "Uploading to MLflow (Ctrl-C to skip; `python -m pipeline sync` uploads later)."


class RunPreempted(Exception):
    """The machine was requested, by a scheduler or Ctrl-C; all processes have left, with a checkpoint if in time."""


@dataclass
class Preemption:
    """A request for the machine, by a scheduler's signal or a person's Ctrl-C, to one run or to the `command`'s."""

    command: "Preemption | None" = None
    # The first signal, and until it was met who got it, in words; then the one that ends runs in threads.
    number: int | None = None
    signal: str | None = None
    ending: int | None = None
    _of_command: bool = False

    @property
    def of_command(self) -> bool:
        """True if the command itself got the signal, and ends."""
        return self._of_command or (self.command is not None and self.command.of_command)

    @property
    def asked(self) -> str | None:
        """The signal and who got it, in words; None if there was none."""
        return self.signal or (self.command.asked if self.command else None)

    @property
    def by_person(self) -> bool:
        """True if it was a person's Ctrl-C."""
        return self.number == signal.SIGINT or (self.command is not None and self.command.by_person)

    def ask(self, number: int, whom: str, of_command: bool = False) -> None:
        """Notes the first signal."""
        if self.signal is None:
            self.signal, self.number = f"{signal.Signals(number).name} to {whom}", number
        self._of_command |= of_command

    def patience(self, limit: float) -> float:
        """Seconds for a last checkpoint: `limit`, or the few that a person waits for."""
        return min(limit, PERSON_SECONDS) if self.by_person else limit

    def heed(self) -> None:
        """Raises `RunPreempted` once a scheduler has requested the machine, `Interrupted` once the command must end."""
        if (ending := (self.command or self).ending) is not None:
            raise Interrupted(ending)
        if self.asked:
            raise RunPreempted


@dataclass
class Session:
    """Shared by all runs of a command: the machine, the cluster with its fork server, and the tracker.

    `open_screen` opens the screen, `track` starts the tracker, `options` say where the command's configs are.
    """

    search: tuple[str, ...]
    environ: Mapping[str, str]
    open_screen: Callable[[], Screen]
    track: Callable[[Mapping[str, str], Path], Tracking]
    options: tuple[str, ...] = ()
    results: dict[Key, RunResult] = field(default_factory=dict)
    baselines: dict[Path, Baseline] = field(default_factory=dict)
    # How many examples train of data that this machine has, by what they are built by; None: not known beforehand.
    examples: dict[str, int | None] = field(default_factory=dict)
    # Addresses where a TPU has answered.
    tpus: set[str] = field(default_factory=set)
    # Why a model could not be built, by the file for its size.
    unbuilt: dict[Path, str] = field(default_factory=dict)
    # Single-worker step timings by step-model key; None if timing failed.
    timed: dict[str, "Observed | None"] = field(default_factory=dict)
    # Comparisons of replicas with one device, by the file for the model's size and what the run was to do.
    checks: dict[tuple[Path, str], Check | None] = field(default_factory=dict)
    # Runs that were logged before, by sweep.
    histories: dict[str | None, "list[TimedRun]"] = field(default_factory=dict)
    preemption: Preemption = field(default_factory=Preemption)
    # A run is under way, which a scheduler's signal leaves to end by itself; so does Ctrl-C if it saves checkpoints.
    busy: bool = False
    saves: bool = False
    # Runs that a signal has ended, and whether a second Ctrl-C has.
    ended_early: list[RunResult] = field(default_factory=list)
    at_once: bool = False
    # The folder of the run under way that a Ctrl-C leaves training, and of the one that was left.
    leaves: Path | None = None
    left: Path | None = None
    ahead: Ahead | None = None
    # Ended runs whose logs the tracker still sends: `settle` waits so many seconds for each while that does not get on.
    pending: dict[Path, float] = field(default_factory=dict)
    # What was wrong with those that were not sent.
    _unsent: dict[Path, str | None] = field(default_factory=dict)
    _clusters: dict[str, Cluster] = field(default_factory=dict)
    _tracker: Tracking | None = None

    @cached_property
    def screen(self) -> Screen:
        """The screen of the runs, opened late, since what draws takes a moment to import."""
        return self.open_screen()

    def cluster(self, config: Config) -> Cluster:
        """The cluster that `config` names, the same one each time."""
        name, launch = cluster_key(config), config.launch
        if name not in self._clusters:
            self._clusters[name] = cluster_of(config.cluster, self.environ, launch.detach, launch.keep)
        return self._clusters[name]

    def here(self, config: Config) -> Cluster:
        """The cluster, or this machine in place of others, for models that are built or timed without a run."""
        if config.cluster.name in ELSEWHERE or config.launch.detach:
            local = replace(config.cluster, name="local", host=ClusterConfig.host, hosts=[], copy=False, options={})
            config = replace(config, cluster=local, launch=replace(config.launch, detach=False))
        return self.cluster(config)

    def tracker(self, output: Path) -> Tracking:
        """The process that writes to MLflow; its own output goes to a log in the output folder."""
        if self._tracker is None:
            self._tracker = self.track(self.environ, output / "tracker.log")
        return self._tracker

    def note_uploads(self) -> None:
        """Notes which of the runs that have ended MLflow holds by now, the first ones first. Waits for nothing."""
        while self._tracker is not None and (folder := next(iter(self.pending), None)):
            if not self._tracker.drain(folder, 0.0)[0]:
                return
            del self.pending[folder]
            _note_tracked(folder, None)

    def settle(self, hurried: bool = False) -> tuple[str | None, Interrupted | None]:
        """Waits until MLflow holds all ended runs, for seconds if `hurried`: (what it lacks, the signal that came)."""
        if self._tracker is None:
            return None, None
        began, says_why, interrupted = time.monotonic(), False, None

        def limit() -> float:
            if interrupted is not None:
                return 0.0
            if self.at_once:
                return AT_ONCE_SECONDS
            return HURRIED_SECONDS if hurried or self.preemption.asked else math.inf

        def waits() -> bool:
            nonlocal says_why
            waited = time.monotonic() - began
            if waited > SAY_SECONDS and not says_why:
                says_why = True
                self.screen.say(WAITING)
            return waited < limit()

        self.busy = True
        try:
            while folder := next(iter(self.pending), None):
                # Once one was waited for in vain, the others are only looked at.
                seconds = 0.0 if self._unsent else min(self.pending[folder], limit())
                try:
                    sent, problem = self._tracker.drain(folder, seconds, waits)
                except Interrupted as signalled:
                    interrupted = signalled
                    continue
                del self.pending[folder]
                if not sent:
                    self._unsent[folder] = problem
                _note_tracked(folder, None if sent else lacks({folder: problem}))
        finally:
            self.busy = False
        return lacks(self._unsent) if self._unsent else None, interrupted

    def serve(self, config: Config) -> int | None:
        """The exit code once this process has served a driver elsewhere; None if this process is the driver."""
        self.busy = True
        try:
            return self.cluster(config).serve(lambda text: self.screen.say(text), lambda: self.preemption.number)
        finally:
            self.busy = False

    def release(self, config: Config, others: Iterable[Config]) -> None:
        """Ends the job of a run that has ended, unless another run of the command goes on in it."""
        name = cluster_key(config)
        if AT_ONCE.get(config.cluster.name) != JOBS or any(cluster_key(other) == name for other in others):
            return
        if cluster := self._clusters.pop(name, None):
            cluster.close(0)

    def spares(self, number: int) -> bool:
        """True if the run under way ends by itself after a signal: a scheduler's, or a first Ctrl-C.

        A run whose processes outlive this command is left training by Ctrl-C, and by a terminal that is closed.
        """
        if number in (signal.SIGINT, signal.SIGHUP) and self.leaves is not None:
            self.left = self.leaves
            for cluster in self._clusters.values():
                cluster.leave()
            return False
        first_by_person = number == signal.SIGINT and self.saves and self.preemption.asked is None
        if first_by_person or number in PREEMPTING:
            self.preemption.ask(number, "the driver", of_command=True)
        return first_by_person or (number in PREEMPTING and self.busy)

    def known_baseline(self, baseline: plans.Plan | None, output: Path) -> Baseline | None:
        """A baseline that this command, or with `auto` another, has measured before; None if there is none."""
        how = baseline.measurement.baseline if baseline else "none"
        if baseline is None or how not in ("once", "auto"):
            return None
        path = self._baseline_file(baseline, output)
        return self.baselines.get(path) or (read_json(Baseline, path) if how == "auto" else None)

    def keep_baseline(self, baseline: plans.Plan, output: Path, repeats: Sequence[float], folder: Path) -> None:
        """Keeps what the run in a folder measured of its baseline. Raises `OSError`."""
        path = self._baseline_file(baseline, output)
        self.baselines[path] = Baseline(tuple(repeats), str(folder), time.time())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.baselines[path])

    def _baseline_file(self, baseline: plans.Plan, output: Path) -> Path:
        """The file of a baseline, named by all that its throughput depends on."""
        from importlib import metadata

        depends = {name: metadata.version(name) for name in (*COMPUTING.get(baseline.backend, ()), "keras", "numpy")}
        if (code := own_code(baseline, self.search)) is not None:
            depends["sources"] = code
        return output / "baselines" / f"{plans.fingerprint(baseline, depends)}.json"

    def close(self, code: int) -> None:
        """Ends the tracker and the clusters; `code` is what the command ends with."""
        self.settle(hurried=True)
        if self._tracker is not None:
            self._tracker.close(AT_ONCE_SECONDS if self.at_once else CLOSE_SECONDS, lambda: not self.at_once)
        for cluster in self._clusters.values():
            cluster.close(code)


def own_code(plan: plans.Plan, search: Sequence[str]) -> str | None:
    """A hash of the code of a person's own that a plan's model, data, optimizer and loss name; None where none does."""
    builds = (plan.model.build, plan.data.build, plan.training.optimizer, plan.training.loss)
    return targets.digest(builds, search)


def cluster_key(config: Config) -> str:
    """A text that is the same for configs of the same cluster."""
    return f"{config.cluster} {config.launch.detach} {config.launch.keep}"


@dataclass(frozen=True)
class RunRequest:
    """One run as it was requested; it resumes no other than that in its `own` folder. Its plans once validated."""

    config: Config
    folder: Path
    overrides: list[str]
    sweep: str | None
    own: bool = False
    plan: plans.Plan | None = None
    baseline: plans.Plan | None = None

    @property
    def output(self) -> Path:
        """The output folder."""
        return Path(self.config.output_dir)

    def unended(self, status: str | None = None) -> RunResult:
        """The result of a run before it has ended; one with a status has its whole layout."""
        layout = Layout(workers=(self.plan or self.config).workers)
        layout = Layout.of(self.plan) if self.plan and status is not None else layout
        return self.ended(Result(Ending(status), Choices.of(self.config), layout))

    def unstarted(self, status: str, error: str, is_read: bool = True) -> RunResult:
        """The result of a run that never starts, written into its folder unless that holds an earlier run."""
        result = Result(Ending(status, error))
        if is_read:
            result = replace(result, choices=Choices.of(self.config), layout=Layout(workers=self.config.workers))
        if not (self.folder / "events.jsonl").exists():
            with suppress(OSError):
                results.write(self.folder, result)
        return self.ended(result)

    def ended(self, result: Result) -> RunResult:
        """The result with the run's folder and what was typed."""
        return RunResult(result, self.folder, tuple(self.overrides))


def _note_tracked(folder: Path, note: str | None) -> None:
    """Notes in a run's result its id in MLflow, and what is missing there; a command that resumes it has deleted it."""
    result, run_id = results.read(folder), run_id_of(folder)
    if result is not None and (result.mlflow_run_id, result.tracking_note) != (run_id, note):
        with suppress(OSError):
            results.write(folder, replace(result, mlflow_run_id=run_id, tracking_note=note))


def lacks(unsent: Mapping[Path, str | None]) -> str:
    """Says which runs MLflow does not hold all of, with what was wrong, and what to type."""
    problem = next(filter(None, unsent.values()), None)
    folder = Path(os.path.commonpath([folder.resolve() for folder in unsent]))
    runs = f"all of {len(unsent)} runs" if len(unsent) > 1 else "all of it"
    return (
        f"MLflow does not hold {runs} yet{f' ({problem})' if problem else ''}. "
        f"`python -m pipeline sync {from_here(folder)}` sends the rest."
    )
