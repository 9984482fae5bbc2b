"""This machine, where processes outlive the command: an agent that dials it on loopback starts and watches them.

The agent has a session of its own, so that neither a Ctrl-C nor a terminal that is closed reaches it. It ends when it
is told to, or once it has been without a driver for `launch.orphan_timeout` seconds.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.config.schema import ClusterConfig
from pipeline.launch import LaunchError, this_machine
from pipeline.launch.agents.dialling import Contact, DiallingCluster
from pipeline.launch.agents.messages import PACKAGE
from pipeline.launch.agents.remote import RemoteJob
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan


class DetachedCluster(DiallingCluster):
    """This machine, by one agent."""

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._machine: Machine | None = None
        self._agent: subprocess.Popen[bytes] | None = None

    @property
    def count(self) -> int:
        """One agent."""
        return 1

    def listens_at(self) -> str:
        """On loopback."""
        return "127.0.0.1:0"

    def inventory(self) -> Machine:
        """This machine, looked at once."""
        if self._machine is None:
            self._machine = this_machine.detect(self.environ)
        return self._machine

    def assumed(self) -> Machine:
        """The same."""
        return self.inventory()

    def warm_up(self) -> None:
        """Starts the agent, whose imports run beside what the driver does next."""
        self.gather()

    def begin(self, contact: Contact) -> None:
        """Starts the agent, which is given the token by its standard input."""
        path = os.pathsep.join(filter(None, [str(PACKAGE.parent), self.environ.get("PYTHONPATH")]))
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._agent = subprocess.Popen(
            self._command(contact.address),
            stdin=pipe,
            stdout=nowhere,
            stderr=pipe,
            env={**self.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        assert self._agent.stdin is not None
        self._agent.stdin.write(contact.token + b"\n")
        self._agent.stdin.close()

    def check(self, absent: int) -> None:
        """Raises `LaunchError` where the agent has ended."""
        if self._agent is None or self._agent.poll() in (None, 0):
            return
        output = b"" if self._agent.stderr is None else self._agent.stderr.read()
        lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
        raise LaunchError(
            "an agent that outlives this command",
            f"one that has ended with {self._agent.returncode}{f': {lines[-1]}' if lines else ''}",
            "launch.detach=false",
        )

    def end(self) -> None:
        """Lets go of what has started the agent, and has ended once that was there."""
        if self._agent is not None:
            self._agent.wait()
            if self._agent.stderr is not None:
                self._agent.stderr.close()

    def addresses(self, plan: Plan) -> Sequence[str]:
        """Ports of this machine that the agent holds, for a plan of several processes."""
        return super().addresses(plan) if len(plan.processes) > 1 else []

    def start(self, plan: Plan, group: str, folder: Path) -> RemoteJob:
        """Starts a plan's processes by the agent."""
        self.gather()
        return super().start(plan, group, folder)

    def describe(self, plan: Plan) -> str:
        """The command that starts the agent, and where it dials."""
        typed = shlex.join(self._command("127.0.0.1:PORT"))
        return f"One agent, which outlives this command: this one, with a token on its standard input.\n{typed}"

    def _where(self, plan: Plan) -> dict[int, str]:
        """All processes are the one agent's, also those that stand for hosts."""
        return dict.fromkeys((process.rank for process in plan.processes), self.inventory().hostname)

    def _command(self, address: str) -> list[str]:
        name, method = self.inventory().hostname, self.config.start_method.value
        arguments = ["--name", name, "--order", "0", "--address", self.config.host, "--start-method", method]
        return [sys.executable, "-m", "pipeline.launch", address, *arguments, "--detach"]
