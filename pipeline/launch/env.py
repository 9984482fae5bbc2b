"""Processes of which something else started one command each, with variables that say which is which.

TensorFlow's `TF_CONFIG` (Vertex AI, Kubeflow's TFJob), Vertex AI's `CLUSTER_SPEC` for its other containers, and
SageMaker's `SM_HOSTS` with `SM_CURRENT_HOST`. Sources: the guide "Distributed training with TensorFlow", Vertex AI's
"Distributed training structure", and the README of sagemaker-training-toolkit.

The chief's command, or the first worker's where there is no chief, drives; those of the other tasks are its agents:
they listen at their task's address, which is free until TensorFlow's own server has it. Once the driver has dialled
them there, they dial it, at a port of its own, whenever the connection is lost.
"""

import contextlib
import hashlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.config.schema import ClusterConfig, Json
from pipeline.errors import refuse
from pipeline.launch import Cluster, Helpers, LaunchError, Line, Seconds, asking, options_of
from pipeline.launch.agents.agent import Agent
from pipeline.launch.agents.channel import Channel
from pipeline.launch.agents.endpoint import DRIVER, Endpoint
from pipeline.launch.agents.remote import POLL_SECONDS, Agents, RemoteJob
from pipeline.launch.local import LocalCluster, LocalJob
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan

CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
# What Vertex AI calls its pools of machines, and what each is for.
POOLS = {"workerpool0": CHIEF, "workerpool1": WORKER, "workerpool2": SERVER, "workerpool3": EVALUATOR}
# SageMaker names hosts and no ports; this one is of its own TensorFlow container.
SAGEMAKER, SAGEMAKER_PORT = "SM_HOSTS", 2222
ADDRESS = re.compile(r"(?:grpc://)?([A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5})")
# What driver and agents show each other that they have, where the environment has it.
TOKEN = "PIPELINE_TOKEN"
# For agents that were not needed to hear of the end; for tasks to be asked how their hosts are; and without a line to
# the driver, and one that nobody refuses, until its processes are ended.
CLOSE_SECONDS, HELPERS_SECONDS, GONE_SECONDS = 5.0, 60.0, 30.0
# The roles of a plan's processes that tasks of a kind have.
KINDS = {"coordinator": CHIEF, "parameter server": SERVER, "worker": WORKER}


@dataclass(frozen=True)
class Task:
    """One of the started processes: its kind, its number in that kind, and HOST:PORT, which an evaluator may lack."""

    kind: str
    index: int
    address: str

    def __str__(self) -> str:
        return f"{self.kind} {self.index}" + (f" at {self.address}" if self.address else "")

    @property
    def host(self) -> str:
        """The host of its address."""
        return self.address.rpartition(":")[0]


@dataclass(frozen=True)
class Tasks:
    """All tasks, in TensorFlow's order: the chief, workers, parameter servers; `own` is this process."""

    source: str
    tasks: tuple[Task, ...]
    own: Task

    @property
    def driver(self) -> Task:
        """The task whose command drives: the chief, or else the first worker."""
        return self.tasks[0]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the tasks that train or serve, each once."""
        return tuple(dict.fromkeys(task.host for task in self.tasks if task.kind != EVALUATOR))


@dataclass(frozen=True)
class EnvOptions:
    """`cluster.options` of cluster=env: the seconds for which tasks wait for each other."""

    timeout: Seconds = 600.0


class EnvCluster(Cluster):
    """The tasks of this process's environment."""

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        self._tasks: Tasks = tasks_of(environ)
        self._local = LocalCluster(config, environ)
        self._environ, self._timeout = environ, options_of(config, EnvOptions).timeout
        names = json.dumps([str(task) for task in self._tasks.tasks])
        self._key = (environ.get(TOKEN) or hashlib.sha256(names.encode()).hexdigest()).encode()
        others = [task for task in self._tasks.tasks if task != self._tasks.own and task.kind != EVALUATOR]
        self._addresses = {f"{task}": task.address for task in others}
        self._agents: Agents | None = None
        self._drives = False

    def serve(self, say: Callable[[str], None], signalled: Callable[[], int | None]) -> int | None:
        """Serves the task that drives to the end of its command, and returns its exit code; None if this one drives."""
        own, driver = self._tasks.own, self._tasks.driver

        def gone(channel: Channel, orphan_timeout: float) -> bool:
            # None takes the driver's place, as the same command is typed again, which starts all anew.
            return channel.refused or (channel.away > 0 and (channel.nobody or channel.away > GONE_SECONDS))

        if own == driver:
            self._drives = True
            return None
        if own.kind == EVALUATOR:
            say(f"{own} has nothing to do: validation runs where training does.")
            return 0
        say(f"{own} waits for {driver}, which conducts.")
        self._local.warm_up()
        until = time.monotonic() + self._timeout
        while time.monotonic() < until:
            with self._listening(own) as endpoint:
                channel = endpoint.channel(DRIVER)
                while not channel.life and time.monotonic() < until:
                    if (number := signalled()) is not None:
                        return 128 + number
                    time.sleep(POLL_SECONDS)
                if not channel.life:
                    break
                say(f"{driver} has begun.")
                endpoint.stop_listening()
                code = Agent(channel, self._local, self._tasks.tasks.index(own), own.host, gone).serve(signalled)
            if code is not None:
                say(f"{driver} has ended with {code}.")
                return code
            say(f"The connection to {driver} was lost. {own} waits for it again.")
            until = time.monotonic() + self._timeout
        instead = f"the same command there, or cluster.options.timeout={2 * self._timeout:g}"
        raise LaunchError(f"{driver} to conduct", f"nothing from it for {self._timeout:g} s", instead)

    def inventory(self) -> Machine:
        """This machine, as many like it as the tasks have hosts, and the tasks' kinds."""
        kinds = tuple(task.kind for task in self._tasks.tasks if task.kind != EVALUATOR)
        return replace(self._local.inventory(), hosts=len(self._tasks.hosts), tasks=kinds)

    def helpers(self) -> Helpers:
        """This task's host, and those of other tasks that answer within some seconds, each by one of its tasks."""
        agents, own = self._driving(), self._tasks.own
        agents.tolerates = True
        others = {task.host: str(task) for task in self._tasks.tasks if task.host != own.host}
        until = time.monotonic() + min(self._timeout, HELPERS_SECONDS)
        while (absent := [name for name in others.values() if not agents.is_there(name)]) and time.monotonic() < until:
            agents.listen_to((), POLL_SECONDS)
        lines = {host: Line(partial(agents.ask, name)) for host, name in others.items() if name not in absent}
        why = "nobody answers: the same command is to be typed there"
        silent = {host: why for host in others if host not in lines}
        addresses = {host: host for host in self._tasks.hosts}
        return Helpers({own.host: asking.here(self._environ), **lines}, addresses, silent, own.host)

    def warm_up(self) -> None:
        """Begins the imports of this host's processes."""
        self._local.warm_up()

    def addresses(self, plan: Plan) -> Sequence[str]:
        """Those of the tasks; what no task is for, such as a data server, runs on this host."""
        where, host, count = self._where(plan), self._tasks.own.host, len(plan.processes)
        beside = iter(self._local.free(count - len(where)))
        return [where[rank].address if rank in where else f"{host}:{next(beside)}" for rank in range(count)]

    def start(self, plan: Plan, group: str, folder: Path) -> RemoteJob | LocalJob:
        """Starts the processes of this host's task here, and those of others by their agents."""
        where = {rank: str(task) for rank, task in self._where(plan).items() if task != self._tasks.own}
        if not where:
            return self._local.start(plan, group, folder)
        return RemoteJob(
            self._driving(), plan, group, folder, where, missing=self._missing, timeout=self._timeout,
            returns=self._timeout, local=self._local,
        )  # fmt: skip

    def close(self, code: int) -> None:
        """Tells all tasks what the command ends with."""
        if self._drives:
            agents, until = self._driving(), time.monotonic() + CLOSE_SECONDS
            while not all(map(agents.is_there, self._addresses)) and time.monotonic() <= until:
                with contextlib.suppress(LaunchError):
                    agents.listen_to((), POLL_SECONDS)
            agents.close(code)
        self._local.close(code)

    @contextlib.contextmanager
    def _listening(self, own: Task) -> Iterator[Endpoint]:
        endpoint = Endpoint(str(own), self._key)
        try:
            endpoint.listen(own.address)
            yield endpoint
        except OSError as error:
            raise LaunchError(
                f"Expected to be able to listen at {own}, received: {error.strerror or error}. "
                f"Try another port in {self._tasks.source}, the same in all tasks."
            ) from error
        finally:
            endpoint.close(1.0)

    def _driving(self) -> Agents:
        """The channels of a driver, which dials the other tasks, and is dialled again at a port of its own."""
        if self._agents is None:
            self._agents = Agents(self._key)
            self._agents.endpoint.listen(f"{self._tasks.own.host}:0")
            for name in self._addresses:
                self._agents.endpoint.dial(name, self._addresses[name])
        return self._agents

    def _missing(self, names: Sequence[str]) -> str:
        return (
            f"Expected {' and '.join(names)} to be there, received no answer for {self._timeout:g} s. "
            f"Try the same command there, or cluster.options.timeout={2 * self._timeout:g}."
        )

    def _where(self, plan: Plan) -> dict[int, Task]:
        """The task of each process of a plan that has one. Refuses a plan whose hosts are not those of the tasks."""
        if len(plan.processes) == 1:
            return {}
        left = {kind: [task for task in self._tasks.tasks if task.kind == kind] for kind in (CHIEF, WORKER, SERVER)}
        if not plan.ranks("coordinator"):
            # A chief is the first of the workers.
            left[WORKER] = left[CHIEF] + left[WORKER]
        tasks: dict[int, Task] = {}
        hosts = defaultdict[int, set[str]](set)
        for process in plan.processes:
            kind = KINDS.get(process.role, WORKER if process.devices else None)
            if kind is not None:
                tasks[process.rank] = left[kind].pop(0)
            if process.devices:
                hosts[process.host].add(tasks[process.rank].host)
        if any(len(names) > 1 for names in hosts.values()):
            count = len(self._tasks.hosts)
            expected = f"processes on the hosts of their tasks in {self._tasks.source}, {count} of them"
            raise LaunchError(expected, "a plan with several of these as one", f"hardware.hosts={count}")
        return tasks


def tasks_of(environ: Mapping[str, str]) -> Tasks:
    """Reads the tasks of an environment. Raises `LaunchError` where it has none that make sense."""
    for source, kinds in (("TF_CONFIG", {"master": CHIEF}), ("CLUSTER_SPEC", POOLS)):
        if environ.get(source, "").strip():
            values = _parsed(source, environ[source])
            values = values if isinstance(values, dict) else {}
            return _tasks(source, values.get("cluster"), values.get("task"), kinds)
    if not environ.get(SAGEMAKER, "").strip():
        expected = "TF_CONFIG (or CLUSTER_SPEC, or SM_HOSTS) to say which task this process is, since cluster=env"
        raise LaunchError(expected, "none of them", "cluster=local for this machine alone")
    hosts, own = _parsed(SAGEMAKER, environ[SAGEMAKER]), environ.get("SM_CURRENT_HOST", "").strip('"')
    if not isinstance(hosts, list) or own not in hosts:
        expected = "SM_HOSTS to be a list with SM_CURRENT_HOST in it"
        raise LaunchError(expected, f"{hosts} and {own or 'none'}", "SM_HOSTS='[\"algo-1\"]' SM_CURRENT_HOST=algo-1")
    # In one order on all hosts.
    hosts = sorted(hosts)
    addresses = [f"{host}:{SAGEMAKER_PORT}" for host in hosts]
    return _tasks(SAGEMAKER, {WORKER: addresses}, {"type": WORKER, "index": hosts.index(own)}, {})


def _tasks(source: str, cluster: Json, task: Json, kinds: Mapping[str, str]) -> Tasks:
    example = '\'{"cluster": {"worker": ["HOST:PORT", "HOST:PORT"]}, "task": {"type": "worker", "index": 0}}\''
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise LaunchError(f"{source} to have a cluster and a task", "another value", example)
    tasks: list[Task] = []
    for name, addresses in cluster.items():
        kind = kinds.get(name, name)
        if kind not in (CHIEF, WORKER, SERVER, EVALUATOR):
            raise LaunchError(f"the tasks of {source} to be {CHIEF}, {WORKER}, {SERVER} or {EVALUATOR}", name, example)
        if not isinstance(addresses, list):
            raise LaunchError(f"{source} to list the addresses of {name}", f"{addresses!r}", example)
        tasks += [Task(kind, index, _address(source, name, address)) for index, address in enumerate(addresses)]
    tasks.sort(key=lambda task: ((CHIEF, WORKER, SERVER, EVALUATOR).index(task.kind), task.index))
    listed = ", ".join(map(str, tasks))
    chiefs, workers = ([one for one in tasks if one.kind == kind] for kind in (CHIEF, WORKER))
    refuse(
        (len({one.address for one in tasks}) < len(tasks),
         f"each address of {source} once", "one of them twice", "other ports"),
        (len(chiefs) > 1 or not (chiefs or workers),
         f"{source} to name one chief or none, and a worker where there is none", listed or "no task", example),
        error=LaunchError,
    )  # fmt: skip
    number, named = str(task.get("index", "")), str(task.get("type"))
    kind = kinds.get(named, named)
    own = [one for one in tasks if one.kind == kind and str(one.index) == number]
    if not own and kind == EVALUATOR:
        # Kubeflow leaves evaluators out of the cluster.
        own = [Task(EVALUATOR, int(number) if number.isdecimal() else 0, "")]
    if not own:
        received = f"type {task.get('type')!r} with index {task.get('index')!r}"
        raise LaunchError(f"the task of {source} to be one of {listed}", received, example)
    return Tasks(source, tuple(tasks), own[0])


def _address(source: str, name: str, value: Json) -> str:
    match = ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise LaunchError(f"the addresses of {name} in {source} to be HOST:PORT", f"{value!r}", "127.0.0.1:2222")
    return f"{match[1]}:{match[2]}"


def _parsed(source: str, text: str) -> Json:
    try:
        return json.loads(text)  # type: ignore[no-any-return]
    except ValueError as error:
        instead = "to put it into single quotes, and names within into double ones"
        raise LaunchError(f"{source} to be JSON", f"what is none: {error}", instead) from error
