"""Turns a plan and the options of cluster=kubernetes into the pods that it needs, and into manifests.

A pod is a host of the plan, the chief the first one; beside parameter servers, which have a pod each, the chief
coordinates. Manifests name what is secret and never hold it. conf/cluster/kubernetes.yaml says what each option means.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from msgspec import Meta

from pipeline.config.schema import Object
from pipeline.launch import ADDRESS, Seconds, option
from pipeline.launch.agents.agent import ABANDONED, UNREACHED
from pipeline.plan.plan import LaunchPart, Plan

JOBSET, JOB = "jobset", "job"
# A name in a cluster (RFC 1123), and one to which "-worker-0-12345-abcde" is added.
NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
SHORT = r"[a-z]([-a-z0-9]{0,34}[a-z0-9])?"
# References without spaces; the registry knows which images there are.
IMAGE = r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?"
FOLDER = r"(?!.*\.\.)/[\w./-]*\w"
UNITS = {
    prefix + suffix: float(base**power)
    for base, suffix, prefixes in ((1000, "", "kMGTP"), (1024, "i", "KMGTP"))
    for power, prefix in enumerate(prefixes, 1)
}

Value = str | int | float | bool
Values = dict[Annotated[str, Meta(min_length=1)], Value]
Variables = dict[Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*\Z")], Value]
Names = Annotated[tuple[Annotated[str, Meta(pattern=rf"^{NAME}\Z")], ...], option("names of Secrets", "[mine]")]
Labels = Annotated[Values, option("names with a value each", "{name: value}")]
Pull = Literal["Always", "IfNotPresent", "Never"]
Url = Annotated[
    str, option("an MLflow server's address without a password", "http://mlflow:5000", r"https?://[^\s/@]+(/\S*)?")
]
Size = Annotated[str, option("a quantity as 4Gi or 500Mi", "4Gi", r"(?=.*[1-9])\d+(\.\d+)?(k|[MGTP]|[KMGTP]i)?")]
CHIEF, WORKER, SERVER = "chief", "worker", "ps"
TEMPLATE = "manifest.yaml.j2"
# Every object of a run has this label, by which its pods are listed.
LABEL = "app.kubernetes.io/instance"
LABELS = {"app.kubernetes.io/name": "keras-pipeline", "app.kubernetes.io/component": "training"}
TOKEN_FOLDER, TOKEN_FILE = "/run/pipeline", "token"
# The port of a pod's loopback interface at which its agent listens, and which the API server's port forwarding reaches.
AGENT_PORT = 2221
# Seconds that a pod has to end beyond those for a last checkpoint.
GRACE_SECONDS = 10
# Volumes alone can be written to, and the image has no name for the user's number.
ENVIRON = {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", "USER": "pipeline"}


@dataclass(frozen=True)
class KubernetesOptions:
    """The pods to make, and how the driver reaches them."""

    image: Annotated[str, option("an image's name", "registry.example/me/pipeline:1", IMAGE)] | None = None
    kind: Annotated[Literal["jobset", "job"], option(f"{JOBSET} or {JOB}", JOBSET)] = "jobset"
    name: Annotated[str, option("up to 36 small letters, digits and '-', a letter first", "mine", SHORT)] | None = None
    namespace: Annotated[str, option("a namespace's name", "training", NAME)] | None = None
    context: Annotated[str, option("a context's name", "null", r".*\S.*")] | None = None
    cpu: Annotated[int, option("whole cores of a pod, from 1", "2", ge=1, le=4096)] = 1
    memory: Size = "4Gi"
    gpus: Annotated[int, option("a pod's GPUs, from 0", "1", ge=0, le=64)] = 0
    gpu_resource: Annotated[
        str, option("a resource's name with its vendor's domain", "nvidia.com/gpu", r"[a-z0-9.-]+/[\w.-]+")
    ] = "nvidia.com/gpu"
    shm: Size = "1Gi"
    claim: Annotated[str, option("the name of a PersistentVolumeClaim", "mine", NAME)] | None = None
    claim_path: Annotated[str, option("a folder of the pods, from / on", "/data", FOLDER)] = "/data"
    workdir: Annotated[str, option("a folder of the image, from / on", "/app", FOLDER)] | None = None
    user: Annotated[int, option("a user's number that is not root's", "1000", ge=1, le=2**31 - 1)] = 1000
    secrets: Names = ()
    env: Annotated[Variables, option("variables with a value each", "{TF_CPP_MIN_LOG_LEVEL: '1'}")] | None = None
    mlflow: Url | None = None
    image_pull_policy: Annotated[Pull, option("Always or IfNotPresent or Never", "IfNotPresent")] | None = None
    image_pull_secrets: Names = ()
    node_selector: Labels | None = None
    tolerations: Annotated[tuple[Values, ...], option("a list of tolerations", "[{key: gpu, operator: Exists}]")] = ()
    priority_class: Annotated[str, option("the name of a PriorityClass", "null", NAME)] | None = None
    labels: Labels | None = None
    annotations: Labels | None = None
    network_policy: bool = True
    conductor: Annotated[str, option("HOST or HOST:PORT at which pods reach this command", "null", ADDRESS)] | None = (
        None
    )
    port: Annotated[int, option("a port from 1024 to 64000", "2222", ge=1024, le=64000)] = 2222
    timeout: Seconds = 600.0
    ttl: Annotated[int, option("seconds from 0", "3600", ge=0, le=10**8)] = 3600

    @property
    def owner_kind(self) -> str:
        """The kind of the object that owns a run's pods."""
        return "Job" if self.kind == JOB else "JobSet"


def bytes_of(quantity: str) -> float:
    """The bytes that a quantity of Kubernetes stands for.

    >>> bytes_of("4Gi"), bytes_of("500M"), bytes_of("12")
    (4294967296.0, 500000000.0, 12.0)
    """
    number = quantity.rstrip("kKMGTPi")
    return float(number) * UNITS.get(quantity[len(number) :], 1.0)


@dataclass(frozen=True)
class PodShape:
    """The number of pods of each role."""

    chief: int
    workers: int
    servers: int

    def holds(self, other: "PodShape") -> bool:
        """True if it has at least as many pods of each role as another shape."""
        return self.chief >= other.chief and self.workers >= other.workers and self.servers >= other.servers


def shape_of(plan: Plan) -> PodShape:
    """The pods that a plan needs."""
    more = max((process.host for process in plan.processes if process.devices), default=0)
    servers = len(plan.ranks("parameter server"))
    # A coordinator has a pod of its own; where there is none, the chief is the first host.
    return PodShape(1, more + bool(servers), servers)


@dataclass(frozen=True)
class Pods:
    """The pods of a run: the kind and the name of the object that owns them, a JobSet or a Job, and how many."""

    kind: str
    name: str
    shape: PodShape

    @property
    def roles(self) -> dict[str, list[str]]:
        """The names that Kubernetes gives the hosts of each role's pods, in order."""
        counts = {CHIEF: self.shape.chief, WORKER: self.shape.workers, SERVER: self.shape.servers}
        place, in_row = count(), self.kind == "Job"
        return {
            role: [f"{self.name}-{next(place) if in_row else f'{role}-0-{number}'}" for number in range(pods)]
            for role, pods in counts.items()
        }

    @property
    def hosts(self) -> list[str]:
        """The names of all pods' hosts."""
        return [host for hosts in self.roles.values() for host in hosts]

    @property
    def training(self) -> list[str]:
        """The hosts that train, in the order of a plan's. A chief beside parameter servers only coordinates."""
        roles = self.roles
        return roles[WORKER] if self.shape.servers else roles[CHIEF] + roles[WORKER]

    def ranks(self, plan: Plan, training: Sequence[str] | None = None) -> dict[str, list[int]]:
        """The ranks of a plan's processes by host; its hosts are those of `training`, in order."""
        hosts, roles = training or self.training, self.roles
        servers, ranks = iter(roles[SERVER]), dict[str, list[int]]()
        for process in plan.processes:
            if process.role == "parameter server":
                host = next(servers)
            else:
                host = roles[CHIEF][0] if process.role == "coordinator" else hosts[process.host]
            ranks.setdefault(host, []).append(process.rank)
        return ranks

    def addresses(self, ranks: dict[str, list[int]], port: int) -> list[str]:
        """HOST:PORT of each process by rank: its pod's name under the headless Service, and a port of its own."""
        places = [(rank, host, place) for host, of_host in ranks.items() for place, rank in enumerate(of_host)]
        return [f"{host}.{self.name}:{port + place}" for _, host, place in sorted(places)]


def secret_of(name: str) -> str:
    """The name of the Secret that holds a run's token."""
    return f"{name}-token"


def manifests(
    pods: Pods, options: KubernetesOptions, launch: LaunchPart, dialled: str | None = None, method: str = "forkserver"
) -> list[Object]:
    """The objects to create for a run, the one that owns the rest last; without its Secret. Pods dial `dialled`."""
    folder = FileSystemLoader(Path(__file__).parent)
    # What it makes is YAML, and all that comes in is written as JSON.
    environment = Environment(loader=folder, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    selector = {LABEL: pods.name}
    text = environment.get_template(TEMPLATE).render(
        name=pods.name,
        options=options,
        launch=launch,
        dialled=dialled,
        start_method=method,
        selector=selector,
        labels={**LABELS, **selector, **{key: str(value) for key, value in (options.labels or {}).items()}},
        annotations={key: str(value) for key, value in (options.annotations or {}).items()} or None,
        environ=ENVIRON | ({"MLFLOW_TRACKING_URI": options.mlflow} if options.mlflow else {}) | (options.env or {}),
        roles=list(_roles(pods)),
        secret=secret_of(pods.name),
        token_folder=TOKEN_FOLDER,
        token_file=TOKEN_FILE,
        listens=AGENT_PORT,
        grace_seconds=ceil(launch.preempt_timeout) + GRACE_SECONDS,
        # Of an agent that nobody needs any more.
        not_needed=[UNREACHED, ABANDONED],
    )
    return [_without_null(each) for each in yaml.safe_load_all(text)]


def to_yaml(objects: Sequence[Object]) -> str:
    """The text that `kubectl apply -f` would take."""
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=110) for one in objects)


def _roles(pods: Pods) -> Iterator[Object]:
    """The jobs that the pods are made by: their hosts' names begin with `hosts`, and `first` pods come before."""
    first, training = 0, {*pods.training}
    if pods.kind == "Job":
        yield {"hosts": pods.name, "first": 0, "count": len(pods.hosts), "trains": True}
        return
    for role, hosts in pods.roles.items():
        if hosts:
            trains, prefix = hosts[0] in training, f"{pods.name}-{role}-0"
            yield {"name": role, "hosts": prefix, "first": first, "count": len(hosts), "trains": trains}
        first += len(hosts)


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value
