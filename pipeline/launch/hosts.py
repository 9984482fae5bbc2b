"""Plain machines: an agent on each, started by the program `ssh`, which needs no password for them.

Each agent dials this command, and goes on without the connection that has started it. It ends when it is told to, or
once it was without a driver for `launch.orphan_timeout` seconds.
"""

import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import STDOUT
from typing import Annotated

from pipeline.config.schema import ClusterConfig, Object
from pipeline.launch import Address, Helpers, LaunchError, Line, Seconds, line_to, option, options_of, this_machine
from pipeline.launch.agents.dialling import DiallingCluster, reached_from, with_port
from pipeline.launch.agents.messages import FILES, LOCK, PACKAGE, alike, modules
from pipeline.launch.agents.remote import Known
from pipeline.plan.checks import HOST, stays_here
from pipeline.plan.machine import Host, Machine, inventory
from pipeline.plan.plan import Plan

# Nobody is asked for a password, and a host that is down is given up before its agent is.
SSH = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
# Connections that are made side by side, and seconds before a host that was lost is tried again.
MOST_AT_ONCE, AGAIN_SECONDS = 32, 5.0
# Of a user's own code, what is copied: no more than this, and nothing from folders with these names.
MOST_COPIED = 64 << 20
NOT_COPIED = {"outputs", "multirun", "node_modules", "site-packages", "__pycache__", "mlruns", "mlartifacts"}
# Where it goes, in the home of the hosts' user.
COPIES = ".cache/pipeline"
# Lines of what ssh said that a user is shown, and what is said of one that says nothing.
LINES, NO_END = 3, "no end of it"


@dataclass(frozen=True)
class HostsOptions:
    """`cluster.options` of cluster=hosts; conf/cluster/hosts.yaml says what each means."""

    conductor: Address | None = None
    python: str | None = None
    directory: str | None = None
    environment: Object = field(default_factory=dict)
    ssh: Annotated[list[str], option("the program and its options", "[ssh]", min_length=1)] = field(
        default_factory=lambda: ["ssh"]
    )
    timeout: Seconds = 60.0


class HostsCluster(DiallingCluster):
    """The machines that `cluster.hosts` names."""

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._options = options_of(config, HostsOptions)
        self.dial_seconds = self._options.timeout
        # How each is called, and how ssh reaches it.
        self._targets = {target.rpartition("@")[2]: target for target in config.hosts}
        if not config.hosts:
            raise LaunchError("cluster.hosts to name machines", "none", "'cluster.hosts=[a,b]'")
        for host in config.hosts:
            user, _, name = host.rpartition("@")
            if config.hosts.count(host) > 1 or self._targets[name] != host:
                raise LaunchError("each of cluster.hosts once", f"{host} again", "each of them once")
            if not HOST.fullmatch(name) or user.startswith("-"):
                instead = "NAME or USER@NAME, and a port in cluster.options.ssh=[ssh,-p,'2222']"
                raise LaunchError("cluster.hosts to be names or addresses of machines", host, instead)
        self.count, self.waiting = len(self._targets), f"Starting agents on {', '.join(self._targets)}."
        # What ssh does now, for threads of the pool; none begins once it is over. When a host was tried, why in vain.
        self._running, self._lock, self._over = set[subprocess.Popen[bytes]](), threading.Lock(), False
        self._tried, self._failed = dict[str, float](), dict[str, str]()
        self._pool, self._copy = ThreadPoolExecutor(MOST_AT_ONCE, "ssh"), b""

    def listens_at(self) -> str:
        """`cluster.options.conductor`, or the address from which this machine reaches the first host."""
        return with_port(self._options.conductor or reached_from(next(iter(self._targets))))

    def begin(self, address: str) -> None:
        """Starts an agent on each host by ssh, several at a time."""
        self._pack()
        for name in self._targets:
            self._pool.submit(self._start_agent, name, address)

    def found(self, folder: Path) -> None:
        """Starts none but those that are to be started anew."""
        self._pack()

    def missing(self, names: Sequence[str]) -> str:
        """Starts agents anew on hosts that were lost, which may have been started again too; says what to do."""
        for name in names:
            if self.address and time.monotonic() > self._tried.get(name, 0.0) + AGAIN_SECONDS:
                self._tried[name] = time.monotonic() + self._options.timeout
                self._pool.submit(self._start_agent, name, self.address)
        return super().missing(names)

    def check(self, absent: int) -> None:
        """Raises `LaunchError` where ssh could not start an agent."""
        for name, why in self._failed.items():
            # An agent that was started ends ssh once it has reached this command.
            barred = f" If that ends, {self.address} is not reached: try cluster.options.conductor=HOST:PORT."
            raise LaunchError(
                f"Expected `{shlex.join(self._ssh(name))}` to start an agent on {name}, received: {why} "
                f"Try `{shlex.join([*self._options.ssh, self._targets[name], 'true'])}` in a terminal first."
                f"{barred if why.startswith(NO_END) else ''}"
            )

    def gather(self) -> None:
        """The same. Raises `LaunchError` where one of them is named twice, by its address and by its name, say."""
        super().gather()
        owners: dict[tuple[str, int], Known] = {}
        for agent in self.agents.ordered() if not self.agents.tolerates else ():
            for core in agent.host.cores if agent.hello.network else ():
                other = owners.setdefault((agent.hello.network, core), agent)
                if other is not agent:
                    received = f"{other.channel.name} and {agent.channel.name}, which are one"
                    raise LaunchError("cluster.hosts to be different machines", received, "one of these")

    def end(self) -> None:
        """Ends what still starts agents."""
        with self._lock:
            self._over = True
            for process in self._running:
                _kill(process)
        self._pool.shutdown(cancel_futures=True)

    def describe(self, plan: Plan) -> str:
        """The commands that start agents, and where they dial."""
        address = self._options.conductor
        where = with_port(address or ("127.0.0.1" if all(map(stays_here, self._targets)) else "HOST"), "PORT")
        lines = [f"One agent a host, which dials {where}: this command, with a token on its standard input."]
        if self.config.copy:
            lines.append(f"Before that, this code is copied to {self._home()} there.")
        lines += [shlex.join([*self._ssh(name), self._command(name, where)]) for name in self._targets]
        return "\n".join(lines)

    def helpers(self) -> Helpers:
        """A process that ssh starts on each host; whatever is wrong there is said of that host alone."""
        self._pack()
        lines, absent = dict[str, Line](), dict[str, str]()
        for name in self._targets:
            try:
                if (why := self._give_copy(name)) is not None:
                    raise LaunchError(why)
                lines[name] = line_to(self.environ, *self._ssh(name), self._typed_there(["pipeline.doctor"]))
            except LaunchError as error:
                absent[name] = str(error)
        return Helpers(lines, {name: name for name in self._targets}, absent)

    def assumed(self) -> Machine:
        """The hosts by their names, each like this machine."""
        own = this_machine.detect(self.environ)
        return inventory([Host(name, own.cores, own.memory_gib, own.cpu, own.gpus, own.tpus) for name in self._targets])

    def _pack(self) -> None:
        """Packs this package and the Python files below this folder, where they are copied. Raises `LaunchError`."""
        if not self.config.copy:
            return
        buffer, size, folder = io.BytesIO(), 0, Path.cwd()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path in filter(Path.is_file, [*modules(), LOCK]):
                archive.add(path, path.relative_to(PACKAGE.parent).as_posix())
            for where, names, files in os.walk(folder):
                below = [name for name in sorted(names) if not name.startswith(".") and name not in NOT_COPIED]
                names[:] = [name for name in below if Path(where, name).resolve() != PACKAGE]
                paths = [Path(where, name) for name in sorted(files) if name.endswith(".py")]
                # An editor's lock is a link to nowhere.
                for path in filter(os.path.isfile, paths):
                    size += path.stat().st_size
                    if size > MOST_COPIED:
                        expected = f"no more than {MOST_COPIED >> 20} MiB of Python files in {folder} to copy"
                        raise LaunchError(expected, "more", "cluster.copy=false, or the command in a folder of its own")
                    archive.add(path, path.relative_to(folder).as_posix())
        self._copy = buffer.getvalue()

    def _ssh(self, name: str) -> list[str]:
        return [*self._options.ssh, *SSH, self._targets[name]]

    def _home(self) -> str:
        return f"{COPIES}/{alike()[FILES]}"

    def _command(self, name: str, address: str) -> str:
        """The command that ssh runs on a host to start its agent, with the token on standard input."""
        order = list(self._targets).index(name)
        agent = ["pipeline.launch", address, "--name", name, "--order", str(order), "--detach"]
        return self._typed_there([*agent, "--start-method", self.config.start_method.value])

    def _typed_there(self, module: Sequence[str]) -> str:
        options = self._options
        variables = {"PYTHONPATH": self.environ.get("PYTHONPATH", ""), **options.environment}
        settings = {key: shlex.quote(str(value)) for key, value in variables.items() if str(value)}
        python = [options.python or sys.executable]
        change = f"cd {shlex.quote(options.directory or os.getcwd())}"
        if self.config.copy:
            copied = settings["PYTHONPATH"] = f'"$HOME/{self._home()}"'
            # Nothing that lies in the folder comes before the copy.
            python.append("-P")
            change = f"{{ {change} 2>/dev/null || cd {copied}; }}"
        assigned = [f"{key}={value}" for key, value in settings.items()]
        return f"{change} && {' '.join(['exec env', *assigned])} {shlex.join([*python, '-m', *module])}"

    def _give_copy(self, name: str) -> str | None:
        """Copies this code to a host, where that is asked for; what went wrong, in words, or None."""
        if not self._copy:
            return None
        home = f'"$HOME/{self._home()}"'
        return self._typed(name, f"mkdir -p {home} && tar -xzf - -C {home}", self._copy)

    def _start_agent(self, name: str, address: str) -> None:
        self._failed.pop(name, None)
        if why := self._give_copy(name) or self._typed(name, self._command(name, address), self.token + b"\n"):
            self._failed[name] = why
        self._tried[name] = time.monotonic()

    def _typed(self, name: str, command: str, data: bytes) -> str | None:
        """Runs a command on a host by ssh; returns what went wrong, in words, or None."""
        pipe, seconds, typed = subprocess.PIPE, self._options.timeout, [*self._ssh(name), command]
        with self._lock:
            if self._over:
                return "it was ended."
            try:
                process = subprocess.Popen(typed, stdin=pipe, stdout=pipe, stderr=STDOUT, start_new_session=True)
            except OSError as error:
                return f"{error.strerror or error}."
            self._running.add(process)
        try:
            out, _ = process.communicate(data, seconds)
        except subprocess.TimeoutExpired:
            return f"{NO_END} within {seconds:g} s."
        finally:
            with self._lock:
                self._running.remove(process)
                _kill(process)
            process.wait()
            # Its end is not waited for: a connection that ssh shares outlives it, and holds the pipe.
            for end in filter(None, (process.stdin, process.stdout)):
                end.close()
        if process.returncode == 0:
            return None
        lines = [line.strip() for line in out.decode(errors="replace").splitlines() if line.strip()][-LINES:]
        return f"{' '.join(lines) or 'nothing'} (exit code {process.returncode})."


class DetachedCluster(HostsCluster):
    """This machine as the only host, on which a shell does what ssh does on others, and an agent dials on loopback."""

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [str(PACKAGE.parent), environ.get("PYTHONPATH")]))
        options: Object = {"conductor": "127.0.0.1:0", "environment": {"PYTHONPATH": path}}
        super().__init__(replace(config, hosts=["localhost"], options=options), environ)
        self._machine = this_machine.detect(environ)
        self._targets = {self._machine.hostname: "localhost"}
        self.waiting = f"Starting agents on {self._machine.hostname}."

    def inventory(self) -> Machine:
        """This machine, looked at once."""
        return self._machine

    assumed = inventory

    def warm_up(self) -> None:
        """Starts the agent, whose imports run beside what the driver does next."""
        self.gather()

    def check(self, absent: int) -> None:
        """Raises `LaunchError` where the agent has ended."""
        for why in self._failed.values():
            expected = "an agent that outlives this command"
            raise LaunchError(expected, f"one that has ended: {why}", "launch.detach=false")

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


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends what has not ended, with what it has started itself, as a proxy's command."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
