"""Processes of which something else started one command each, with `TF_CONFIG` or the like to say which is which.

The chief's command, or the first worker's where there is no chief, conducts; those of the other tasks are its agents:
they listen at their task's address, which is free until TensorFlow's own server has it. Once the conductor has dialled
them there, they dial it, at a port of its own, whenever the connection is lost.
"""

import contextlib
import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config.schema import ClusterConfig
from pipeline.launch import asking
from pipeline.launch.agents.agent import Agent, Place
from pipeline.launch.agents.conductor import AgentLine, Agents
from pipeline.launch.agents.messages import CONDUCTOR, Redial
from pipeline.launch.agents.remote import RemoteJob
from pipeline.launch.asking import Helpers
from pipeline.launch.env.tasks import CHIEF, EVALUATOR, SERVER, WORKER, Task, Tasks, tasks_of
from pipeline.launch.errors import LaunchError
from pipeline.launch.line.hub import Hub
from pipeline.launch.line.link import Link
from pipeline.launch.local import LocalCluster, LocalJob
from pipeline.launch.steady import Steady
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan

# What conductor and agents show each other that they have, where the environment has it.
TOKEN = "PIPELINE_TOKEN"
# Seconds for which tasks wait for each other, unless `cluster.options.timeout` says otherwise.
WAIT_SECONDS = 600.0
# For which agents that were not needed are told of the end, and tried for.
CLOSE_SECONDS = 5.0
POLL_SECONDS, RETRY_SECONDS = 0.2, 0.3
# For tasks to be asked how their hosts are.
HELPERS_SECONDS = 60.0
# Without a line to the conductor, and one that nobody refuses, its processes are ended.
GONE_SECONDS = 30.0
# The roles of a plan's processes that tasks of a kind have.
KINDS = {"parameter server": SERVER, "worker": WORKER}


class EnvCluster(Steady):
    """The tasks of this process's environment."""

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        self._tasks: Tasks = tasks_of(environ)
        self._local = LocalCluster(config, environ)
        self._environ, self._timeout = environ, _timeout(config)
        said = json.dumps([str(task) for task in self._tasks.tasks])
        self._key = (environ.get(TOKEN) or hashlib.sha256(said.encode()).hexdigest()).encode()
        self._addresses = {f"{task}": task.address for task in self._tasks.tasks}
        self._agents: Agents | None = None
        self._redialled_at = ""
        # Tasks that are dialled just now.
        self._dialled = set[str]()
        # Does this command conduct a run, of whose end the others are to hear?
        self._conducts = False

    def serve(self, say: Callable[[str], None], asked: Callable[[], str | None]) -> int | None:
        """Where another task conducts, does what that says, to the end of its command; returns the exit code of that.

        None where this one conducts. `asked` tells of a scheduler's signal to this process.
        """
        own, conductor = self._tasks.own, self._tasks.conductor
        if own == conductor:
            self._conducts = True
            return None
        if own.kind == EVALUATOR:
            say(f"{own} has nothing to do: validation runs where training does.")
            return 0
        say(f"{own} waits for {conductor}, which conducts.")
        self._local.warm_up()
        until = time.monotonic() + self._timeout
        while time.monotonic() < until:
            with self._listening(own) as hub:
                link = hub.link(CONDUCTOR)
                while not link.life and time.monotonic() < until:
                    if asked() is not None:
                        return int(128 + _number(asked()))
                    time.sleep(POLL_SECONDS)
                if not link.life:
                    break
                say(f"{conductor} has begun.")
                hub.stop_listening()
                place = Place(self._tasks.tasks.index(own), own.host)
                agent = Agent(hub, link, self._local, place, _gone)
                code = agent.serve(lambda: None if asked() is None else _number(asked()))
            if code is not None:
                say(f"{conductor} has ended with {code}.")
                return code
            say(f"The connection to {conductor} was lost. {own} waits for it again.")
            until = time.monotonic() + self._timeout
        raise LaunchError(
            f"{conductor} to conduct",
            f"nothing from it for {self._timeout:g} s",
            f"the same command there, or cluster.options.timeout={2 * self._timeout:g}",
        )

    def assumed(self) -> Machine:
        """The same as the inventory: the environment says it."""
        return self.inventory()

    def describe(self, plan: Plan) -> str:
        """Nothing: whoever started the tasks has done it."""
        return ""

    def inventory(self) -> Machine:
        """This machine, as many like it as the tasks have hosts, and the tasks' kinds."""
        kinds = tuple(task.kind for task in self._tasks.tasks if task.kind != EVALUATOR)
        return replace(self._local.inventory(), hosts=len(self._tasks.hosts), tasks=kinds)

    def helpers(self) -> Helpers:
        """This task's host, and those of other tasks that answer within some seconds, each by one of its tasks."""
        agents, own = self._conducting(), self._tasks.own
        agents.tolerates = True
        others = {task.host: str(task) for task in self._tasks.tasks if task.host != own.host}
        until = time.monotonic() + min(self._timeout, HELPERS_SECONDS)
        while (absent := [name for name in others.values() if not agents.is_there(name)]) and time.monotonic() < until:
            self._missing(absent)
            agents.listen_to((), POLL_SECONDS)
        there = {host: AgentLine(agents, name) for host, name in others.items() if name not in absent}
        why = "nobody answers: the same command is to be typed there"
        return Helpers(
            {own.host: asking.here(self._environ), **there},
            {host: host for host in self._tasks.hosts},
            {host: why for host, name in others.items() if name in absent},
            own.host,
        )

    def warm_up(self) -> None:
        """Begins the imports of this host's processes."""
        self._local.warm_up()

    def addresses(self, plan: Plan) -> Sequence[str]:
        """Those of the tasks; what no task is for, such as a data server, runs on this host."""
        where = self._where(plan)
        beside = iter(self._local.free(len(plan.processes) - len(where)))
        host = self._tasks.own.host
        return [
            where[process.rank].address if process.rank in where else f"{host}:{next(beside)}"
            for process in plan.processes
        ]

    def start(self, plan: Plan, group: str, folder: Path) -> RemoteJob | LocalJob:
        """Starts the processes of this host's task here, and those of others by their agents."""
        where = {rank: str(task) for rank, task in self._where(plan).items() if task != self._tasks.own}
        if not where:
            return self._local.start(plan, group, folder)
        return RemoteJob(
            self._conducting(),
            plan,
            group,
            folder,
            where,
            missing=self._missing,
            timeout=self._timeout,
            returns=self._timeout,
            here=self._local,
        )

    def close(self, code: int) -> None:
        """Tells all tasks what the command ends with."""
        others = [str(task) for task in self._tasks.tasks if task not in (self._tasks.own, *self._tasks.of(EVALUATOR))]
        if self._conducts:
            agents, until = self._conducting(), time.monotonic() + CLOSE_SECONDS
            while absent := [name for name in others if not agents.is_there(name)]:
                if time.monotonic() > until:
                    break
                self._missing(absent)
                with contextlib.suppress(LaunchError):
                    agents.listen_to((), POLL_SECONDS)
            agents.close(code)
        self._local.close(code)

    @contextlib.contextmanager
    def _listening(self, own: Task) -> Iterator[Hub]:
        """A hub that a conductor with the key can dial at a task's address."""
        hub = Hub(str(own), self._key)
        try:
            hub.listen(own.address)
            yield hub
        except OSError as error:
            raise LaunchError(
                f"Expected to be able to listen at {own}, received: {error.strerror or error}. "
                f"Try another port in {self._tasks.source}, the same in all tasks."
            ) from error
        finally:
            hub.close(1.0)

    def _conducting(self) -> Agents:
        """The lines of a conductor, which is dialled again at a port of its own."""
        if self._agents is None:
            self._agents = Agents(self._key)
            self._redialled_at = self._agents.hub.listen(f"{self._tasks.own.host}:0")
        return self._agents

    def _missing(self, names: Sequence[str]) -> str:
        """Dials tasks, each in a thread, and says what is wrong where they do not answer."""
        for name in names:
            if name not in self._dialled:
                self._dialled.add(name)
                threading.Thread(target=self._dial, args=(name,), daemon=True).start()
        return (
            f"Expected {' and '.join(names)} to be there, received no answer for {self._timeout:g} s. "
            f"Try the same command there, or cluster.options.timeout={2 * self._timeout:g}."
        )

    def _dial(self, name: str) -> None:
        agents = self._conducting()
        if agents.hub.dial_once(name, self._addresses[name]):
            agents.say(name, Redial(self._redialled_at))
        else:
            time.sleep(RETRY_SECONDS)
        self._dialled.discard(name)

    def _where(self, plan: Plan) -> dict[int, Task]:
        """The task of each process of a plan that has one. Refuses a plan whose hosts are not those of the tasks."""
        if len(plan.processes) == 1:
            return {}
        coordinator = [process.rank for process in plan.processes if process.role == "coordinator"]
        left = {kind: list(self._tasks.of(kind)) for kind in (CHIEF, WORKER, SERVER)}
        if not coordinator:
            # A chief is the first of the workers.
            left[WORKER] = left[CHIEF] + left[WORKER]
        found: dict[int, Task] = {}
        for process in plan.processes:
            kind = CHIEF if process.rank in coordinator else WORKER if process.devices else KINDS.get(process.role)
            if kind is not None:
                found[process.rank] = left[kind].pop(0)
        hosts = {plan.processes[rank].host: set[str]() for rank in found}
        for rank, task in found.items():
            if plan.processes[rank].devices:
                hosts[plan.processes[rank].host].add(task.host)
        if any(len(names) > 1 for names in hosts.values()):
            raise LaunchError(
                f"processes on the hosts of their tasks in {self._tasks.source}, {len(self._tasks.hosts)} of them",
                "a plan with several of these as one",
                f"hardware.hosts={len(self._tasks.hosts)}",
            )
        return found


def _gone(link: Link, orphan_timeout: float) -> bool:
    """Nobody takes the place of a conductor that is gone: the same command is typed again, which starts all anew."""
    return link.refused or (link.away > 0 and (link.nobody or link.away > GONE_SECONDS))


def _timeout(config: ClusterConfig) -> float:
    given = config.options.get("timeout", WAIT_SECONDS)
    with contextlib.suppress(ValueError):
        if isinstance(given, int | float | str) and 0 < float(given) < 1e9:
            return float(given)
    raise LaunchError(
        "cluster.options.timeout to be seconds above 0", given, f"cluster.options.timeout={WAIT_SECONDS:g}"
    )


def _number(asked: str | None) -> int:
    """The number of the signal that is named first."""
    return signal.Signals[(asked or "SIGTERM").split()[0]].value
