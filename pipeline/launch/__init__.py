"""Starts a plan's processes on a cluster, hands back what they tell and how they end. One file per kind of cluster.

Whoever calls sees events (`pipeline.record.events`) and nothing of how they travelled. Besides what processes tell, a
job gives `Started` for each process, `Stopped` while the system says that one is, and, when one ends, `Exited` with its
`code` (negative: minus the signal).
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.config.schema import ClusterConfig
from pipeline.config.shipped import load_offer
from pipeline.launch.asking import Helpers
from pipeline.launch.errors import Cancelled, LaunchError
from pipeline.launch.steady import Steady
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.record.commands import Command
from pipeline.record.events import Event, EventBase

__all__ = ["AT_ONCE", "CLUSTERS", "DEVICES", "JOBS", "Cancelled", "Cluster", "Job", "LaunchError", "cluster_of"]


class Job(Protocol):
    """Processes that were started together."""

    def events(self, timeout: float) -> list[Event]:
        """What has come in; waits up to `timeout` seconds for something."""

    def send(self, command: Command[EventBase]) -> None:
        """Gives every process a command, as `Command.to_json` writes it."""

    def restart(self, rank: int) -> None:
        """Ends a process, if it still is one, and starts it anew, at the same address."""

    def dump_stacks(self) -> None:
        """Has every process that still can write its stack to its log."""

    def stop(self, grace: float) -> None:
        """Ends every process, killing those that have not ended after `grace` seconds. Returns when none is left."""


class Cluster(Protocol):
    """Somewhere that processes can be started."""

    def serve(self, say: Callable[[str], None], asked: Callable[[], str | None]) -> int | None:
        """Where the same command was started several times and another one conducts: does what that says, to its end.

        Returns that one's exit code; None, at once, where this one conducts. `asked` has a scheduler's signal in words
        once there was one; `say` tells the person at this terminal what is going on. Raises `LaunchError`.
        """

    def inventory(self) -> Machine:
        """What there is to lay a plan over, looked at once."""

    def assumed(self) -> Machine:
        """The same where nothing is to be started: nobody is asked, what is not known is taken to be as here."""

    def describe(self, plan: Plan) -> str:
        """In full, what would be typed or submitted to start a plan's processes; empty where that is nothing."""

    def arrived(self) -> bool:
        """Are hosts there that can be asked? Where not, `inventory` has them come, once a run needs them."""

    def moved(self) -> bool:
        """Are hosts others than were laid over last, so that what is started again is to be laid out anew?"""

    def returns(self, ends: bool) -> str | None:
        """How processes that a scheduler had leave can be started again, in words; None: the command is to end.

        `ends`: it was asked to itself. Raises `Cancelled` where somebody has taken the hosts away for good.
        """

    def helpers(self) -> Helpers:
        """Processes that a doctor asks how their hosts are, one a host, of any version, and which hosts have none."""

    def warm_up(self) -> None:
        """Begins what starting processes will wait for, beside what the conductor does next."""

    def addresses(self, plan: Plan) -> Sequence[str]:
        """HOST:PORT for each process of a plan to listen at, by rank. Raises `LaunchError` where one is taken."""

    def start(self, plan: Plan, group: str, folder: Path) -> Job:
        """Starts the processes of `plan`; `group` names them in events and logs, which go to `folder`."""

    def attach(self, folder: Path) -> bool:
        """Takes the place of the conductor of the run in a folder: is anything of it there? Raises `LaunchError`.

        What is started then, in the same order, goes on where that one left it.
        """

    def end_earlier(self, folder: Path) -> None:
        """Ends what is left of the run in a folder by a command that was killed: no two train one run.

        Returns once it has ended. Raises `LaunchError`.
        """

    def leave(self) -> None:
        """Leaves processes to another conductor, where they outlive this one: nothing ends them any more."""

    def close(self, code: int) -> None:
        """Lets go of whatever is kept between jobs; `code` is what the command ends with."""


# Where points of a sweep run at once: each in a job of its own, or on devices that the others leave free.
JOBS, DEVICES = "jobs", "devices"
AT_ONCE = {"local": DEVICES, "kubernetes": JOBS, "slurm": JOBS}
# Ours; a package offers others as entry points of the group `pipeline.clusters`, called with the same arguments.
CLUSTERS = {
    "local": "pipeline.launch.local:LocalCluster",
    "env": "pipeline.launch.env.cluster:EnvCluster",
    "hosts": "pipeline.launch.hosts:HostsCluster",
    "kubernetes": "pipeline.launch.kubernetes.cluster:KubernetesCluster",
    "mpi": "pipeline.launch.mpi:MpiCluster",
    "slurm": "pipeline.launch.slurm.cluster:SlurmCluster",
}
# Those that start nothing on this machine.
ELSEWHERE = {*CLUSTERS} - {"local", "env"}
# Where processes outlive their conductor, for another to take its place; under `local` with launch.detach=true alone.
OUTLIVING = ("local", "hosts", "slurm", "kubernetes")
DETACHED = "pipeline.launch.detached:DetachedCluster"
# What a package's cluster may be without, and what stands for it.
OPTIONAL: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "assumed": lambda made: made.inventory,  # type: ignore[no-any-return]
    "describe": lambda made: lambda plan: "",
    "arrived": lambda made: Steady().arrived,
    "moved": lambda made: Steady().moved,
    "returns": lambda made: Steady().returns,
    "helpers": lambda made: lambda: Helpers({}),
    "attach": lambda made: Steady().attach,
    "end_earlier": lambda made: Steady().end_earlier,
    "leave": lambda made: Steady().leave,
}


def outlives(name: str, detach: bool) -> bool:
    """Do processes of a kind of cluster outlive their conductor, so that another can take its place?"""
    return name in OUTLIVING and (detach or name != "local")


def cluster_of(config: ClusterConfig, environ: Mapping[str, str], detach: bool = False) -> Cluster:
    """The cluster that a config names. Raises `UserError` where there is none, `LaunchError` where it is broken.

    `detach`: its processes are to outlive this command.
    """
    ours = CLUSTERS | ({"local": DETACHED} if detach else {})
    made = load_offer("clusters", config.name, "cluster", ours, "cluster=local")
    if detach and config.name not in OUTLIVING:
        raise LaunchError(
            f"a cluster whose processes outlive this command ({', '.join(OUTLIVING)}), for launch.detach=true",
            f"cluster={config.name}",
            "launch.detach=false",
        )
    if config.name in CLUSTERS:
        _check_hosts(config)
        cluster: Cluster = made(config, environ)
        return cluster
    built = _Offered(config.name, lambda *given: made(*given))(config, environ)
    for part in ("serve", "inventory", "warm_up", "addresses", "start", "close"):
        if not callable(getattr(built, part, None)):
            raise LaunchError(f"cluster={config.name} to have {part}()", "one without", "cluster=local")
    offered: Any = _Offered(config.name, built)
    return offered  # type: ignore[no-any-return]


def _check_hosts(config: ClusterConfig) -> None:
    """Refuses, for clusters of ours, hosts that nobody would ask."""
    if config.name == "hosts" or not (config.hosts or config.copy):
        return
    said = f"cluster.hosts=[{','.join(config.hosts)}]" if config.hosts else "cluster.copy=true"
    raise LaunchError(
        f"{said.partition('=')[0]} under cluster=hosts alone",
        f"{said} under cluster={config.name}",
        f"cluster=hosts {shlex.quote(said)}",
    )


class _Offered:
    """Something of another package's, whose errors name it."""

    def __init__(self, name: str, made: Any) -> None:
        self._name, self._made = name, made

    def __getattr__(self, part: str) -> Any:
        lacks = part in OPTIONAL and not hasattr(self._made, part)
        found = _Offered(self._name, OPTIONAL[part](self._made) if lacks else getattr(self._made, part))
        return (lambda *given: _Offered(self._name, found(*given))) if part == "start" else found

    def __call__(self, *given: Any) -> Any:
        try:
            return self._made(*given)
        except LaunchError:
            raise
        except Exception as error:
            raise LaunchError(
                f"cluster={self._name} to work", f"{type(error).__name__}: {error}", "cluster=local"
            ) from error
