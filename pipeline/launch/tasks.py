"""Reads from the environment which of several tasks this process is, where something else started one command each.

TensorFlow's `TF_CONFIG` (Vertex AI, Kubeflow's TFJob), Vertex AI's `CLUSTER_SPEC` for its other containers, and
SageMaker's `SM_HOSTS` with `SM_CURRENT_HOST`. Sources: the guide "Distributed training with TensorFlow", Vertex AI's
"Distributed training structure", and the README of sagemaker-training-toolkit.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeline.config.schema import Json, Object
from pipeline.launch import LaunchError

CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
# What Vertex AI calls its pools of machines, and what each is for.
POOLS = {"workerpool0": CHIEF, "workerpool1": WORKER, "workerpool2": SERVER, "workerpool3": EVALUATOR}
# SageMaker names hosts and no ports; this one is of its own TensorFlow container.
SAGEMAKER_PORT = 2222
ADDRESS = re.compile(r"(?:grpc://)?([A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5})")


@dataclass(frozen=True)
class Task:
    """One of the processes that were started: its kind, its number among those of its kind, and HOST:PORT.

    An evaluator that the cluster does not name has no address.
    """

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

    def of(self, kind: str) -> tuple[Task, ...]:
        """The tasks of a kind."""
        return tuple(task for task in self.tasks if task.kind == kind)

    @property
    def driver(self) -> Task:
        """The task whose command drives: the chief, or else the first worker."""
        return (self.of(CHIEF) or self.of(WORKER))[0]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the tasks that train or serve, each once."""
        return tuple(dict.fromkeys(task.host for task in self.tasks if task.kind != EVALUATOR))


def tasks_of(environ: Mapping[str, str]) -> Tasks:
    """Reads the tasks of an environment. Raises `LaunchError` where it has none that make sense."""
    for source, read in (
        ("TF_CONFIG", _of_tensorflow),
        ("CLUSTER_SPEC", _of_vertex),
        ("SM_HOSTS", _of_sagemaker),
    ):
        if environ.get(source, "").strip():
            return read(source, environ)
    raise LaunchError(
        "TF_CONFIG (or CLUSTER_SPEC, or SM_HOSTS) to say which task this process is, since cluster=env",
        "none of them",
        "cluster=local for this machine alone",
    )


def _of_tensorflow(source: str, environ: Mapping[str, str]) -> Tasks:
    values = _json(source, environ[source])
    return _tasks(source, values.get("cluster"), values.get("task"), lambda kind: CHIEF if kind == "master" else kind)


def _of_vertex(source: str, environ: Mapping[str, str]) -> Tasks:
    values = _json(source, environ[source])
    return _tasks(source, values.get("cluster"), values.get("task"), lambda kind: POOLS.get(kind, kind))


def _of_sagemaker(source: str, environ: Mapping[str, str]) -> Tasks:
    hosts, own = _parsed(source, environ[source]), environ.get("SM_CURRENT_HOST", "").strip('"')
    if not isinstance(hosts, list) or own not in hosts:
        raise LaunchError(
            "SM_HOSTS to be a list with SM_CURRENT_HOST in it",
            f"{hosts} and {own or 'none'}",
            "SM_HOSTS='[\"algo-1\"]' SM_CURRENT_HOST=algo-1",
        )
    # In one order on all hosts.
    hosts = sorted(hosts)
    addresses = [f"{host}:{SAGEMAKER_PORT}" for host in hosts]
    return _tasks(source, {WORKER: addresses}, {"type": WORKER, "index": hosts.index(own)}, lambda kind: kind)


def _tasks(source: str, cluster: Json, task: Json, kind_of: Callable[[str], str]) -> Tasks:
    example = '\'{"cluster": {"worker": ["HOST:PORT", "HOST:PORT"]}, "task": {"type": "worker", "index": 0}}\''
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise LaunchError(f"{source} to have a cluster and a task", "another value", f"{example}")
    tasks: list[Task] = []
    for name, addresses in cluster.items():
        kind = kind_of(name)
        if kind not in (CHIEF, WORKER, SERVER, EVALUATOR):
            raise LaunchError(
                f"the tasks of {source} to be {CHIEF}, {WORKER}, {SERVER} or {EVALUATOR}", name, f"{example}"
            )
        if not isinstance(addresses, list):
            raise LaunchError(f"{source} to list the addresses of {name}", f"{addresses!r}", f"{example}")
        tasks += [Task(kind, index, _address(source, name, address)) for index, address in enumerate(addresses)]
    tasks.sort(key=lambda task: ((CHIEF, WORKER, SERVER, EVALUATOR).index(task.kind), task.index))
    if len({one.address for one in tasks}) < len(tasks):
        raise LaunchError(f"each address of {source} once", "one of them twice", "other ports")
    kinds = [one.kind for one in tasks]
    if kinds.count(CHIEF) > 1 or not {CHIEF, WORKER} & {*kinds}:
        raise LaunchError(
            f"{source} to name one chief or none, and a worker where there is none",
            ", ".join(map(str, tasks)) or "no task",
            f"{example}",
        )
    number, kind = str(task.get("index", "")), kind_of(str(task.get("type")))
    own = [one for one in tasks if one.kind == kind and str(one.index) == number]
    if not own and kind == EVALUATOR:
        # Kubeflow leaves evaluators out of the cluster.
        own = [Task(EVALUATOR, int(number) if number.isdecimal() else 0, "")]
    if not own:
        raise LaunchError(
            f"the task of {source} to be one of {', '.join(map(str, tasks))}",
            f"type {task.get('type')!r} with index {task.get('index')!r}",
            f"{example}",
        )
    return Tasks(source, tuple(tasks), own[0])


def _address(source: str, name: str, value: Json) -> str:
    match = ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise LaunchError(f"the addresses of {name} in {source} to be HOST:PORT", f"{value!r}", "127.0.0.1:2222")
    return f"{match[1]}:{match[2]}"


def _json(source: str, text: str) -> Object:
    values = _parsed(source, text)
    return values if isinstance(values, dict) else {}


def _parsed(source: str, text: str) -> Json:
    try:
        parsed: Json = json.loads(text)
    except ValueError as error:
        raise LaunchError(
            f"{source} to be JSON",
            f"what is none: {error}",
            "to put it into single quotes, and names within into double ones",
        ) from error
    return parsed
