"""Turns a plan and the options of cluster=kubernetes into what is made in the cluster, as plain values and as YAML.

A pod is a host of the plan, the chief the first one; beside parameter servers, which have a pod each, the chief
coordinates. What is secret is named, never held: the token of a run is in a Secret that is made beside these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import yaml

from pipeline.config.json import Json, Object
from pipeline.launch.kubernetes.options import JOB, Options
from pipeline.plan.plan import LaunchPart, Plan

CHIEF, WORKER, SERVER = "chief", "worker", "ps"
# What every object of a run carries, by which its pods are found.
LABEL = "app.kubernetes.io/instance"
MANAGED = {"app.kubernetes.io/name": "keras-pipeline", "app.kubernetes.io/component": "training"}
TOKEN_FOLDER, TOKEN_FILE = "/run/pipeline", "token"
# What a pod shows to the API server's port forwarding, on its loopback interface alone.
DOOR_PORT = 2221
# Seconds that a pod has to end beyond those for a last checkpoint.
GRACE_SECONDS = 10
# What an agent ends with that nobody needs any more: the conductor has never come, or was given up.
UNREACHED, ABANDONED = 69, 75
NOT_SET = "SET-cluster.options.image"
# A pod of a shape: its kind, and its number among those.
Slot = tuple[str, int]


@dataclass(frozen=True)
class Made:
    """What is the same in all that is made for a command.

    Pods dial the conductor at `dialled`, HOST:PORT, or wait for it where that is None.
    """

    name: str
    options: Options
    launch: LaunchPart
    start_method: str = "forkserver"
    dialled: str | None = None


@dataclass(frozen=True)
class Pod:
    """One pod: its kind, its number among those of its kind, the name of its host, and the processes that run there."""

    kind: str
    index: int
    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """How many pods of each kind there are."""

    chief: int
    workers: int
    servers: int

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """Those that there are, in order."""
        counts = ((CHIEF, self.chief), (WORKER, self.workers), (SERVER, self.servers))
        return tuple((kind, count) for kind, count in counts if count)

    @property
    def pods(self) -> int:
        """All of them."""
        return self.chief + self.workers + self.servers

    @property
    def training(self) -> tuple[Slot, ...]:
        """Those that train, in the order of a plan's hosts."""
        workers = tuple((WORKER, index) for index in range(self.workers))
        return workers if self.coordinates else ((CHIEF, 0), *workers)

    @property
    def coordinates(self) -> bool:
        """Does the chief hand out steps, and trains none itself?"""
        return self.servers > 0

    def holds(self, other: "Shape") -> bool:
        """Are there as many of each as another has, or more?"""
        return self.chief >= other.chief and self.workers >= other.workers and self.servers >= other.servers


def shape_of(plan: Plan) -> Shape:
    """The pods that a plan needs."""
    hosts = 1 + max((process.host for process in plan.processes if process.devices), default=0)
    servers = len(plan.ranks("parameter server"))
    # A coordinator has a pod of its own; where there is none, the chief is the first host.
    return Shape(1, hosts if servers else hosts - 1, servers)


def pods_of(plan: Plan, shape: Shape, name: str, kind: str, training: Sequence[Slot] | None = None) -> tuple[Pod, ...]:
    """The pods of a plan's processes, of a shape that holds it; its hosts are those of `training`, in order."""
    ranks: dict[Slot, list[int]] = {}
    hosts, servers = training or shape.training, 0
    for process in plan.processes:
        where = (CHIEF, 0) if process.role == "coordinator" else hosts[process.host]
        if process.role == "parameter server":
            where = (SERVER, servers)
            servers += 1
        ranks.setdefault(where, []).append(process.rank)
    return tuple(
        Pod(of, index, host_of(shape, name, kind, of, index), tuple(those)) for (of, index), those in ranks.items()
    )


def host_of(shape: Shape, name: str, kind: str, of: str, index: int) -> str:
    """The name of a pod's host, as Kubernetes gives it, under a JobSet or a Job.

    >>> host_of(Shape(1, 2, 0), "mine", "jobset", "worker", 1), host_of(Shape(1, 2, 0), "mine", "job", "worker", 1)
    ('mine-worker-0-1', 'mine-2')
    """
    if kind != JOB:
        return f"{name}-{of}-0-{index}"
    before = {CHIEF: 0, WORKER: shape.chief, SERVER: shape.chief + shape.workers}
    return f"{name}-{before[of] + index}"


def hosts_of(shape: Shape, name: str, kind: str) -> tuple[str, ...]:
    """The names of all pods' hosts."""
    return tuple(host_of(shape, name, kind, of, index) for of, count in shape.counts for index in range(count))


def addresses_of(plan: Plan, pods: Sequence[Pod], name: str, port: int) -> list[str]:
    """HOST:PORT of each process by rank: its pod's name under the headless Service, which has the run's name."""
    found: dict[int, str] = {}
    for pod in pods:
        for place, rank in enumerate(pod.ranks):
            found[rank] = f"{pod.host}.{name}:{port + place}"
    return [found[process.rank] for process in plan.processes]


def manifests(shape: Shape, made: Made) -> list[Object]:
    """What is made for a run, but for its Secret; what owns the rest comes last."""
    objects = [_network_policy(made)] if made.options.network_policy else []
    return (
        [*objects, _service(made), _job(shape, made)] if made.options.kind == JOB else [*objects, _jobset(shape, made)]
    )


def to_yaml(objects: Sequence[Object]) -> str:
    """What `kubectl apply -f` would take."""
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=110) for one in objects)


def _jobset(shape: Shape, made: Made) -> Object:
    replicated: list[Json] = []
    first = 0
    for kind, count in shape.counts:
        container = _container(made, f"{made.name}-{kind}-0", first, gpus=_has_gpus(kind, shape))
        replicated.append(
            {"name": kind, "replicas": 1, "template": {"spec": _job_spec(made, count, _pod(made, container))}}
        )
        first += count
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(made, made.options.annotations),
        "spec": {
            # Names that others can look up before a pod is ready: processes wait for each other.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            # Where the pods of a job failed too often, all jobs begin anew; where nobody needs them, none does.
            "failurePolicy": {
                "maxRestarts": made.launch.max_restarts,
                "rules": [{"name": "notNeeded", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "ttlSecondsAfterFinished": made.options.ttl,
            "replicatedJobs": replicated,
        },
    }


def _job(shape: Shape, made: Made) -> Object:
    pod = _pod(made, _container(made, made.name, 0, gpus=True), subdomain=made.name)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(made, made.options.annotations),
        "spec": _job_spec(made, shape.pods, pod) | {"ttlSecondsAfterFinished": made.options.ttl},
    }


def _service(made: Made) -> Object:
    """The headless Service by which the pods of a Job find each other; a JobSet makes one by itself."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(made),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: made.name}},
    }


def _network_policy(made: Made) -> Object:
    """Lets nobody but the run's own pods reach them; the API server's port forwarding begins inside of a pod."""
    own: Object = {"podSelector": {"matchLabels": {LABEL: made.name}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(made),
        "spec": own | {"policyTypes": ["Ingress"], "ingress": [{"from": [own]}]},
    }


def _job_spec(made: Made, count: int, pod: Object) -> Object:
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": made.launch.max_restarts,
        # A pod that was evicted or preempted is made anew, however often; one that failed counts.
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [UNREACHED, ABANDONED]}},
            ]
        },
        "template": pod,
    }


def _pod(made: Made, container: Object, subdomain: str | None = None) -> Object:
    options = made.options
    spec: Object = {
        # The conductor starts processes again within a pod; what ends a pod ends what it holds.
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": ceil(made.launch.preempt_timeout) + GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "fsGroup": options.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": list(_volumes(made)),
    }
    optional: Object = {
        "subdomain": subdomain,
        "nodeSelector": options.node_selector or None,
        "tolerations": list(options.tolerations) or None,
        "priorityClassName": options.priority_class,
        "imagePullSecrets": [{"name": secret} for secret in options.image_pull_secrets] or None,
    }
    spec |= {key: value for key, value in optional.items() if value is not None}
    return {"metadata": {"labels": _labels(made)}, "spec": spec}


def _container(made: Made, hosts: str, first: int, gpus: bool) -> Object:
    """The agent, whose host's name is `hosts` and its number; the first of these is number `first` of all."""
    options, host = made.options, f"{hosts}-$(JOB_COMPLETION_INDEX)"
    amounts: Object = {"cpu": str(options.cpu), "memory": options.memory}
    if gpus and options.gpus:
        amounts[options.gpu_resource] = str(options.gpus)
    environ: Object = {
        # Volumes alone can be written to.
        "HOME": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        # The image knows no name for the user's number.
        "USER": "pipeline",
        **({"MLFLOW_TRACKING_URI": options.mlflow} if options.mlflow else {}),
        **(options.env or {}),
    }
    container: Object = {
        "name": "agent",
        "image": options.image or NOT_SET,
        "command": ["python", "-m", "pipeline.launch.kubernetes.pod"],
        "args": [
            f"--name={host}",
            f"--address={host}.{made.name}",
            f"--first={first}",
            f"--token-file={TOKEN_FOLDER}/{TOKEN_FILE}",
            f"--start-method={made.start_method}",
            f"--dial={made.dialled}" if made.dialled else f"--door={DOOR_PORT}",
        ],
        "env": [{"name": variable, "value": str(value)} for variable, value in environ.items()],
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *([{"name": "data", "mountPath": options.claim_path}] if options.claim else []),
        ],
    }
    optional: Object = {
        "imagePullPolicy": options.image_pull_policy,
        "workingDir": options.workdir,
        "envFrom": [{"secretRef": {"name": secret}} for secret in options.secrets] or None,
    }
    return container | {key: value for key, value in optional.items() if value is not None}


def _volumes(made: Made) -> Iterator[Json]:
    # Readable by the pod's group alone, which is what fsGroup makes of it.
    yield {"name": "token", "secret": {"secretName": secret_of(made.name), "defaultMode": 0o440}}
    yield {"name": "tmp", "emptyDir": {}}
    yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": made.options.shm}}
    if made.options.claim:
        yield {"name": "data", "persistentVolumeClaim": {"claimName": made.options.claim}}


def secret_of(name: str) -> str:
    """The Secret that holds a run's token."""
    return f"{name}-token"


def _has_gpus(kind: str, shape: Shape) -> bool:
    """Does a kind of pod train? A chief beside parameter servers only coordinates."""
    return kind == WORKER or (kind == CHIEF and not shape.coordinates)


def _labels(made: Made) -> Object:
    return {**MANAGED, LABEL: made.name, **{key: str(value) for key, value in (made.options.labels or {}).items()}}


def _metadata(made: Made, annotations: Object | None = None) -> Object:
    metadata: Object = {"name": made.name, "labels": _labels(made)}
    if made.options.namespace:
        metadata["namespace"] = made.options.namespace
    if annotations:
        metadata["annotations"] = {key: str(value) for key, value in annotations.items()}
    return metadata
