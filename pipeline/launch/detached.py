"""This machine, where processes outlive the command: an agent that dials it on loopback starts and watches them.

The agent has a session of its own, so that neither a Ctrl-C nor a terminal that is closed reaches it. It ends when it
is told to, or once it has been without a driver for `launch.orphan_timeout` seconds.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config.schema import ClusterConfig, Object
from pipeline.launch import LaunchError, this_machine
from pipeline.launch.agents.messages import PACKAGE
from pipeline.launch.agents.remote import RemoteJob
from pipeline.launch.hosts import HostsCluster
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan


class DetachedCluster(HostsCluster):
    """This machine as the only host, on which a shell does what ssh does on others."""

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [str(PACKAGE.parent), environ.get("PYTHONPATH")]))
        options: Object = {"conductor": "127.0.0.1:0", "environment": {"PYTHONPATH": path}}
        super().__init__(replace(config, hosts=["localhost"], options=options), environ)
        self._machine = this_machine.detect(environ)
        self._targets = {self._machine.hostname: "localhost"}

    def inventory(self) -> Machine:
        """This machine, looked at once."""
        return self._machine

    def assumed(self) -> Machine:
        """The same."""
        return self._machine

    def warm_up(self) -> None:
        """Starts the agent, whose imports run beside what the driver does next."""
        self.gather()

    def check(self, absent: int) -> None:
        """Raises `LaunchError` where the agent has ended."""
        for why in self._failed.values():
            raise LaunchError(
                "an agent that outlives this command", f"one that has ended: {why}", "launch.detach=false"
            )

    def addresses(self, plan: Plan) -> Sequence[str]:
        """Ports of this machine that the agent holds, for a plan of several processes."""
        return super().addresses(plan) if len(plan.processes) > 1 else []

    def start(self, plan: Plan, group: str, folder: Path) -> RemoteJob:
        """Starts a plan's processes by the agent."""
        self.gather()
        return super().start(plan, group, folder)

    def describe(self, plan: Plan) -> str:
        """The command that starts the agent, and where it dials."""
        typed = self._command(self._machine.hostname, "127.0.0.1:PORT")
        return f"One agent, which outlives this command: this one, with a token on its standard input.\n{typed}"

    def _where(self, plan: Plan) -> dict[int, str]:
        """All processes are the one agent's, also those that stand for hosts."""
        return dict.fromkeys((process.rank for process in plan.processes), self._machine.hostname)

    def _ssh(self, name: str) -> list[str]:
        return ["sh", "-c"]

    def _command(self, name: str, address: str) -> str:
        return f"{super()._command(name, address)} --address {self.config.host}"
