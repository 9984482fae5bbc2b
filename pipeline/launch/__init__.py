"""Starts a plan's processes on a cluster, hands back what they tell and how they end. One file per kind of cluster.

Whoever calls sees events (`pipeline.record.events`) and nothing of how they travelled. Besides what processes tell, a
job gives `started` for each process, `stopped` while the system says that one is, and, when one ends, `exited` with
its `code` (negative: minus the signal).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.config.offers import find
from pipeline.config.schema import ClusterConfig
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.record.events import Event


class LaunchError(RuntimeError):
    """Processes that cannot be started: the message says what was expected, received, and what to type instead."""


class Job(Protocol):
    """Processes that were started together."""

    def events(self, timeout: float) -> list[Event]:
        """What has come in; waits up to `timeout` seconds for something."""

    def send(self, command: dict[str, Any]) -> None:
        """Gives every process a command; see `pipeline.worker.worker`."""

    def restart(self, rank: int) -> None:
        """Ends a process, if it still is one, and starts it anew, at the same address."""

    def dump_stacks(self) -> None:
        """Has every process that still can write its stack to its log."""

    def stop(self, grace: float) -> None:
        """Ends every process, killing those that have not ended after `grace` seconds. Returns when none is left."""


class Cluster(Protocol):
    """Somewhere that processes can be started."""

    def inventory(self) -> Machine:
        """What there is to lay a plan over, looked at once."""

    def warm_up(self) -> None:
        """Begins what starting processes will wait for, beside what the conductor does next."""

    def ports(self, count: int) -> Sequence[int]:
        """Ports for `count` processes to listen on. Raises `LaunchError` where one that was asked for is taken."""

    def start(self, plan: Plan, group: str, folder: Path) -> Job:
        """Starts the processes of `plan`; `group` names them in events and logs, which go to `folder`."""

    def close(self) -> None:
        """Lets go of whatever is kept between jobs."""


# Ours; a package offers others as entry points of the group `pipeline.clusters`, called with the same arguments.
CLUSTERS = {"local": "pipeline.launch.local:LocalCluster"}


def cluster_of(config: ClusterConfig, environ: Mapping[str, str]) -> Cluster:
    """The cluster that a config names. Raises `OfferError` where there is none, `LaunchError` where it is broken."""
    made = find("clusters", config.name, "cluster", CLUSTERS, "cluster=local")
    if config.name in CLUSTERS:
        cluster: Cluster = made(config, environ)
        return cluster
    built = _Offered(config.name, lambda *given: made(*given))(config, environ)
    for part in ("inventory", "warm_up", "ports", "start", "close"):
        if not callable(getattr(built, part, None)):
            raise LaunchError(
                f"Expected cluster={config.name} to have {part}(), received one without. Try cluster=local."
            )
    offered: Any = _Offered(config.name, built)
    return offered  # type: ignore[no-any-return]


class _Offered:
    """Something of another package's, whose errors name it."""

    def __init__(self, name: str, made: Any) -> None:
        self._name, self._made = name, made

    def __getattr__(self, part: str) -> Any:
        found = _Offered(self._name, getattr(self._made, part))
        return (lambda *given: _Offered(self._name, found(*given))) if part == "start" else found

    def __call__(self, *given: Any) -> Any:
        try:
            return self._made(*given)
        except LaunchError:
            raise
        except Exception as error:
            raise LaunchError(
                f"Expected cluster={self._name} to work, received {type(error).__name__}: {error}. Try cluster=local."
            ) from error
