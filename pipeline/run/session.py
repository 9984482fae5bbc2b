"""What the points of a command share, and one point as it was asked for."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import ClusterConfig, Config
from pipeline.launch import AT_ONCE, ELSEWHERE, JOBS, Cluster, cluster_of
from pipeline.plan.plan import Plan
from pipeline.record.baselines import Baseline
from pipeline.record.results import Layout, Result
from pipeline.run.beforehand import chosen
from pipeline.run.preemption import Preemption
from pipeline.run.views import Ahead, PointResult, Screen, Tracking

if TYPE_CHECKING:
    from pipeline.analyze.history import TimedRun
    from pipeline.analyze.step_model import Observed

# The point's place in the command, and which repeat of it this is.
Key = tuple[int, int]
# For the tracker to send what is left, without getting on; `python -m pipeline sync` sends the rest.
CLOSE_SECONDS, AT_ONCE_SECONDS = 12.0, 0.2


@dataclass
class Session:
    """What all points of a command share: the machine, the cluster with its fork server, and the tracker."""

    search: tuple[str, ...]
    environ: Mapping[str, str]
    screen: Screen
    # Starts who tracks runs, whose own words go to the log that it is given.
    track: Callable[[Mapping[str, str], Path], Tracking]
    # Those of the command that say where configs are.
    options: tuple[str, ...] = ()
    results: dict[Key, PointResult] = field(default_factory=dict)
    baselines: dict[Path, Baseline] = field(default_factory=dict)
    # Addresses where a TPU has answered.
    tpus: set[str] = field(default_factory=set)
    # Why a model could not be built, by the file that its size would be in.
    unbuilt: dict[Path, str] = field(default_factory=dict)
    # A step of one worker that was timed to predict from, by what decides it; None where that failed.
    timed: dict[str, "Observed | None"] = field(default_factory=dict)
    # What was logged before, by the sweep that is asked for.
    histories: dict[str | None, "list[TimedRun]"] = field(default_factory=dict)
    preemption: Preemption = field(default_factory=Preemption)
    # Is a point under way, which a scheduler's signal lets end by itself? And a Ctrl-C, too?
    busy: bool = False
    saves: bool = False
    # The points that a signal has ended, of several at once too, and whether a second Ctrl-C has.
    ended_early: list[PointResult] = field(default_factory=list)
    at_once: bool = False
    # The folder of the run under way whose processes a Ctrl-C leaves to train on, and of the one that it has left.
    leaves: Path | None = None
    left: Path | None = None
    # How far the sweep is that the point under way belongs to.
    ahead: Ahead | None = None
    _clusters: dict[str, Cluster] = field(default_factory=dict)
    _tracker: Tracking | None = None

    def cluster(self, config: Config) -> Cluster:
        """The cluster that `config` names, the same one each time."""
        name = cluster_key(config)
        if name not in self._clusters:
            self._clusters[name] = cluster_of(config.cluster, self.environ, config.launch.detach)
        return self._clusters[name]

    def here(self, config: Config) -> Cluster:
        """The cluster, or this machine in place of others, for what is built or timed though nothing is to be run."""
        if config.cluster.name not in ELSEWHERE and not config.launch.detach:
            return self.cluster(config)
        local = dataclasses.replace(
            config.cluster, name="local", host=ClusterConfig.host, hosts=[], copy=False, options={}
        )
        ends = dataclasses.replace(config.launch, detach=False)
        return self.cluster(dataclasses.replace(config, cluster=local, launch=ends))

    def tracker(self, log: Path) -> Tracking:
        """The process that writes to MLflow; `log` takes what it says."""
        if self._tracker is None:
            self._tracker = self.track(self.environ, log)
        return self._tracker

    def serve(self, config: Config) -> int | None:
        """The exit code once this process has done what a conductor elsewhere said; None where it conducts itself."""
        self.busy = True
        try:
            return self.cluster(config).serve(self.screen.say, lambda: self.preemption.asked)
        finally:
            self.busy = False

    def let_go(self, unused: Config, others: Iterable[Config]) -> None:
        """Ends the job of a point that has ended, where no other point of the command goes on in it."""
        name = cluster_key(unused)
        if AT_ONCE.get(unused.cluster.name) != JOBS or any(cluster_key(other) == name for other in others):
            return
        if cluster := self._clusters.pop(name, None):
            cluster.close(0)

    def leave(self, folder: Path) -> None:
        """Leaves the run in a folder to processes that outlive this command."""
        self.left = folder
        for cluster in self._clusters.values():
            cluster.leave()

    def close(self, code: int) -> None:
        """Ends the tracker and the clusters; `code` is what the command ends with."""
        if self._tracker is not None:
            self._tracker.close(AT_ONCE_SECONDS if self.at_once else CLOSE_SECONDS, lambda: not self.at_once)
        for cluster in self._clusters.values():
            cluster.close(code)


def cluster_key(config: Config) -> str:
    """What tells a cluster from others."""
    return f"{config.cluster} {config.launch.detach}"


@dataclass(frozen=True)
class LaidOut:
    """A point's plan and that of its baseline, if it has one, made once, and the cluster that they are made for."""

    plan: Plan
    baseline: Plan | None
    cluster: Cluster


@dataclass(frozen=True)
class PointRequest:
    """One point as it was asked for: its config, its folder, what was typed, and the sweep it belongs to.

    The folder may have an earlier attempt at it where it is the point's `own`: it goes on with that and no other.
    `laid_out` once it was looked over.
    """

    config: Config
    folder: Path
    overrides: list[str]
    sweep: str | None
    own: bool = False
    laid_out: LaidOut | None = None

    def asked(self) -> PointResult:
        """What there is to say of it before it has ended."""
        made = self.laid_out
        layout = Layout(workers=made.plan.workers if made else self.config.workers)
        return self.ended(Result(choices=chosen(self.config), layout=layout))

    def ended(self, result: Result) -> PointResult:
        """What became of it."""
        return PointResult(result, str(self.folder), tuple(self.overrides))
