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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeline.config.schema import ClusterConfig, Json
from pipeline.errors import refuse
from pipeline.launch import Helpers, LaunchError, Line, Seconds, line_to, options_of
from pipeline.launch.agents.agent import Agent
from pipeline.launch.agents.channel import Channel
from pipeline.launch.agents.dialling import DiallingCluster
from pipeline.launch.agents.endpoint import DRIVER, Endpoint
from pipeline.launch.agents.remote import POLL_SECONDS
from pipeline.launch.local import LocalCluster
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
    """All tasks, in TensorFlow's order: the chief, workers, parameter servers; the first drives, `own` is this one."""

    source: str
    tasks: tuple[Task, ...]
    own: Task

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the tasks that train or serve, each once."""
        return tuple(dict.fromkeys(task.host for task in self.tasks if task.kind != EVALUATOR))


@dataclass(frozen=True)
class EnvOptions:
    """`cluster.options` of cluster=env: the seconds for which tasks wait for each other."""

    timeout: Seconds = 600.0


class EnvCluster(DiallingCluster):
    """The tasks of this process's environment."""

    local: LocalCluster

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        self._tasks = tasks_of(environ)
        timeout = self.dial_seconds = self.return_seconds = options_of(config, EnvOptions).timeout
        self._timeout, self.own_name = timeout, str(self._tasks.own)
        self._instead = f"the same command there, or cluster.options.timeout={2 * timeout:g}"
        others = [task for task in self._tasks.tasks if task != self._tasks.own and task.kind != EVALUATOR]
        self._others = {str(task): task.address for task in others}
        names = json.dumps([str(task) for task in self._tasks.tasks])
        super().__init__(config, environ, (environ.get(TOKEN) or hashlib.sha256(names.encode()).hexdigest()).encode())
        self.local, self._drives = LocalCluster(config, environ), False

    def serve(self, say: Callable[[str], None], signalled: Callable[[], int | None]) -> int | None:
        """Serves the task that drives to the end of its command, and returns its exit code; None if this one drives."""
        own, driver = self._tasks.own, self._tasks.tasks[0]
        if own == driver:
            self._drives = True
            return super().serve(say, signalled)
        if own.kind == EVALUATOR:
            say(f"{own} has nothing to do: validation runs where training does.")
            return 0
        say(f"{own} waits for {driver}, which conducts.")
        self.local.warm_up()
        while (code := self._served(say, signalled)) is None:
            say(f"The connection to {driver} was lost. {own} waits for it again.")
        return code

    def _served(self, say: Callable[[str], None], signalled: Callable[[], int | None]) -> int | None:
        """Serves the driver once it has dialled; None where the connection to it was lost. Raises `LaunchError`."""
        own, driver, until = self._tasks.own, self._tasks.tasks[0], time.monotonic() + self._timeout
        endpoint = Endpoint(str(own), self.token)
        try:
            self._listen(own.address, endpoint, f"another port in {self._tasks.source}, the same in all tasks")
            channel = endpoint.channel(DRIVER)
            while not channel.life:
                if (number := signalled()) is not None:
                    return 128 + number
                if time.monotonic() > until:
                    raise LaunchError(f"{driver} to conduct", f"nothing from it for {self._timeout:g} s", self._instead)
                time.sleep(POLL_SECONDS)
            say(f"{driver} has begun.")
            endpoint.stop_listening()
            code = Agent(channel, self.local, self._tasks.tasks.index(own), own.host, _is_gone).serve(signalled)
            if code is not None:
                say(f"{driver} has ended with {code}.")
            return code
        finally:
            endpoint.close(1.0)

    def inventory(self) -> Machine:
        """This machine, as many like it as the tasks have hosts, and the tasks' kinds."""
        kinds = tuple(task.kind for task in self._tasks.tasks if task.kind != EVALUATOR)
        return replace(self.local.inventory(), hosts=len(self._tasks.hosts), tasks=kinds)

    def helpers(self) -> Helpers:
        """This task's host, and those of other tasks that answer within some seconds, each by one of its tasks."""
        self.gather()
        agents, own, agents.tolerates = self.agents, self._tasks.own, True
        others = {task.host: str(task) for task in self._tasks.tasks if task.host != own.host}
        until = time.monotonic() + min(self._timeout, HELPERS_SECONDS)
        while not all(map(agents.is_there, others.values())) and time.monotonic() < until:
            agents.listen_to((), POLL_SECONDS)
        lines = {host: Line(partial(agents.ask, name)) for host, name in others.items() if agents.is_there(name)}
        why = "nobody answers: the same command is to be typed there"
        silent = {host: why for host in others if host not in lines}
        addresses = {host: host for host in self._tasks.hosts}
        return Helpers({own.host: line_to(self.environ), **lines}, addresses, silent, own.host)

    def addresses(self, plan: Plan) -> Sequence[str]:
        """Those of the tasks; what no task is for, such as a data server, runs on this host."""
        tasks, host, count = self._tasks_of(plan), self._tasks.own.host, len(plan.processes)
        beside = iter(self.local.free(count - len(tasks)))
        return [tasks[rank].address if rank in tasks else f"{host}:{next(beside)}" for rank in range(count)]

    def listens_at(self) -> str:
        """Any port of this task's host."""
        return f"{self._tasks.own.host}:0"

    def begin(self, address: str) -> None:
        """Dials the other tasks, which dial this one once a connection is lost."""
        for name, task_address in self._others.items():
            self.agents.endpoint.dial(name, task_address)

    def close(self, code: int) -> None:
        """Tells all tasks what the command ends with."""
        if self._drives:
            self.gather()
            until = time.monotonic() + CLOSE_SECONDS
            while not all(map(self.agents.is_there, self._others)) and time.monotonic() <= until:
                with contextlib.suppress(LaunchError):
                    self.agents.listen_to((), POLL_SECONDS)
        super().close(code)

    def missing(self, names: Sequence[str]) -> str:
        """Says what a user can do about tasks that are not there."""
        expected = f"{' and '.join(names)} to be there"
        return str(LaunchError(expected, f"no answer for {self._timeout:g} s", self._instead))

    def _where(self, plan: Plan) -> dict[int, str]:
        return {rank: str(task) for rank, task in self._tasks_of(plan).items()}

    def _tasks_of(self, plan: Plan) -> dict[int, Task]:
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


def _is_gone(channel: Channel, orphan_timeout: float) -> bool:
    # None takes the driver's place, as the same command is typed again, which starts all anew.
    return channel.refused or (channel.away > 0 and (channel.nobody or channel.away > GONE_SECONDS))


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
