"""Turns `cluster.options` of cluster=kubernetes into checked values, or one sentence about the first wrong one.

What each means is written beside it in `conf/cluster/kubernetes.yaml`.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pipeline.config.json import Json, Object
from pipeline.launch.errors import LaunchError

JOBSET, JOB = "jobset", "job"
KINDS = (JOBSET, JOB)
# Of a name in a cluster (RFC 1123), and of one to which "-worker-0-12345-abcde" is added.
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
SHORT_NAME = re.compile(r"[a-z]([-a-z0-9]{0,34}[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# An image is a reference without spaces; which ones there are, its registry knows.
IMAGE = re.compile(r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?")
ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)(:(?P<port>\d{1,5}))?")
QUANTITY = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kKMGTP]i?)?")
UNITS = {None: 1.0} | {
    unit: float(base**power)
    for base, units in ((1000, ("k", "M", "G", "T", "P")), (1024, ("Ki", "Mi", "Gi", "Ti", "Pi")))
    for power, unit in enumerate(units, 1)
}
PULL = ("Always", "IfNotPresent", "Never")


@dataclass(frozen=True)
class Options:
    """What pods are made of, where they are, and how the conductor reaches them."""

    image: str | None = None
    kind: str = JOBSET
    name: str | None = None
    namespace: str | None = None
    context: str | None = None
    cpu: int = 1
    memory: str = "4Gi"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    shm: str = "1Gi"
    claim: str | None = None
    claim_path: str = "/data"
    workdir: str | None = None
    user: int = 1000
    secrets: tuple[str, ...] = ()
    env: Object | None = None
    mlflow: str | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    node_selector: Object | None = None
    tolerations: tuple[Object, ...] = ()
    priority_class: str | None = None
    labels: Object | None = None
    annotations: Object | None = None
    network_policy: bool = True
    conductor: str | None = None
    port: int = 2222
    timeout: float = 600.0
    ttl: int = 3600

    @property
    def memory_gib(self) -> float:
        """The memory of a pod."""
        return bytes_of(self.memory) / 2**30


def bytes_of(quantity: str) -> float:
    """Bytes that a quantity of Kubernetes stands for.

    >>> bytes_of("4Gi"), bytes_of("500M"), bytes_of("12")
    (4294967296.0, 500000000.0, 12.0)
    """
    found = QUANTITY.fullmatch(quantity)
    return math.nan if found is None else float(found["number"]) * UNITS.get(found["unit"], math.nan)


@dataclass(frozen=True)
class _Rule:
    """Whether a value is one, what was expected of it in words, and one that is right."""

    holds: Callable[[Any], bool]
    expected: str
    example: str


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: value in names


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(holds, value))


def _words(value: Any) -> bool:
    """Names with a plain value each, as labels and variables are."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and name and isinstance(item, str | int | float) for name, item in value.items()
    )


def _path(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"/[\w./-]*[\w]", value) is not None and ".." not in value


def _variables(value: Any) -> bool:
    return _words(value) and all(VARIABLE.fullmatch(name) for name in value)


def _web(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"https?://[^\s/@]+(/\S*)?", value) is not None


_NAME = _matches(NAME)
_SIZE = _Rule(lambda value: isinstance(value, str) and bytes_of(value) > 0, "a quantity as 4Gi or 500Mi", "4Gi")
_NAMES = _Rule(_list_of(_NAME), "names of Secrets", "[mine]")
_PLAIN = _Rule(_words, "names with a value each", "{name: value}")

# Those with `None` as default may be null.
RULES = {
    "image": _Rule(_matches(IMAGE), "an image's name", "registry.example/me/pipeline:1"),
    "kind": _Rule(_one_of(*KINDS), f"{JOBSET} or {JOB}", JOBSET),
    "name": _Rule(_matches(SHORT_NAME), "up to 36 small letters, digits and '-', a letter first", "mine"),
    "namespace": _Rule(_NAME, "a namespace's name", "training"),
    "context": _Rule(lambda value: isinstance(value, str) and bool(value.strip()), "a context's name", "null"),
    "cpu": _Rule(_whole(1, 4096), "whole cores of a pod, from 1", "2"),
    "memory": _SIZE,
    "gpus": _Rule(_whole(0, 64), "a pod's GPUs, from 0", "1"),
    "gpu_resource": _Rule(
        _matches(re.compile(r"[a-z0-9.-]+/[\w.-]+")), "a resource's name with its vendor's domain", "nvidia.com/gpu"
    ),
    "shm": _SIZE,
    "claim": _Rule(_NAME, "the name of a PersistentVolumeClaim", "mine"),
    "claim_path": _Rule(_path, "a folder of the pods, from / on", "/data"),
    "workdir": _Rule(_path, "a folder of the image, from / on", "/app"),
    "user": _Rule(_whole(1, 2**31 - 1), "a user's number that is not root's", "1000"),
    "secrets": _NAMES,
    "env": _Rule(_variables, "variables with a value each", "{TF_CPP_MIN_LOG_LEVEL: '1'}"),
    "mlflow": _Rule(_web, "an MLflow server's address without a password", "http://mlflow:5000"),
    "image_pull_policy": _Rule(_one_of(*PULL), " or ".join(PULL), "IfNotPresent"),
    "image_pull_secrets": _NAMES,
    "node_selector": _PLAIN,
    "tolerations": _Rule(_list_of(_words), "a list of tolerations", "[{key: gpu, operator: Exists}]"),
    "priority_class": _Rule(_NAME, "the name of a PriorityClass", "null"),
    "labels": _PLAIN,
    "annotations": _PLAIN,
    "network_policy": _Rule(lambda value: isinstance(value, bool), "true or false", "true"),
    "conductor": _Rule(
        lambda value: (at := ADDRESS.fullmatch(str(value))) is not None and 1 <= int(at["port"] or 1) <= 65535,
        "HOST or HOST:PORT at which pods reach this command",
        "null",
    ),
    "port": _Rule(_whole(1024, 64000), "a port from 1024 to 64000", "2222"),
    "timeout": _Rule(_seconds, "seconds above 0", "600"),
    "ttl": _Rule(_whole(0, 10**8), "seconds from 0", "3600"),
}  # fmt: skip


def options_of(given: Mapping[str, Json]) -> Options:
    """The options of a config. Raises `LaunchError` for one that is not known, or not what it should be."""
    usual = {field.name: field.default for field in fields(Options)}
    for name, value in given.items():
        if name not in usual:
            near = difflib.get_close_matches(str(name), usual, 1) or ["image"]
            raise LaunchError(
                f"options of cluster=kubernetes ({', '.join(usual)})", name, f"cluster.options.{near[0]}=.."
            )
        rule = RULES[name]
        if not (rule.holds(value) or (value is None and usual[name] is None)):
            raise LaunchError(
                f"cluster.options.{name} to be {rule.expected}", _said(value), f"cluster.options.{name}={rule.example}"
            )
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Options(**known)


def _said(value: Json) -> str:
    return "nothing" if value in ("", None) else str(value)
