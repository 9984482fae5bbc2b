"""What is expected of a host, some of what it finds, and the findings that `judge.py` makes of all of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

# In the order in which they are shown. Those of HOST are looked at on each host by itself.
HOST = (
    "python", "packages", "backend", "gpus", "cores", "memory", "shm", "files", "threads", "disk", "ports", "names",
    "proxy",
)  # fmt: skip
CHECKS = (*HOST, "clocks", "link", "store", "plan")
INSTALL = "python -m pip install 'distributed-keras-pipeline{}'"


@dataclass(frozen=True)
class Backend:
    """`alike` are the packages that all hosts have in the same version, `spared` the requirements it does without."""

    name: str
    alike: tuple[str, ...]
    install: str
    install_gpu: str
    extra: str = ""
    spared: tuple[str, ...] = ()


BACKENDS: Mapping[str, Backend] = {
    "tensorflow": Backend(
        "TensorFlow", ("tensorflow", "keras", "numpy"), INSTALL.format(""), INSTALL.format("[gpu]"),
    ),
    "jax": Backend(
        "JAX", ("jax", "jaxlib", "keras", "numpy"), INSTALL.format("[jax]"),
        "python -m pip install 'jax[cuda12]'", "jax", ("tensorflow",),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """The demands on a host: `checks` to look at, version specifiers of `python` and `packages`, GPUs and cores.

    `driver` is the host that drives, with these `versions` of packages. `on_cpu`: GPUs are not to be used. `others` are
    the names of the cluster's hosts, `names` those to find addresses of. `addresses`, HOST:PORT, must be free.
    """

    checks: tuple[str, ...] = HOST
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    python_version: str | None = None
    driver: str = ""
    backend: str = "tensorflow"
    gpus: int = 0
    cores: int = 1
    on_cpu: bool = False
    others: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Accelerator:
    """The devices that the backend sees on this host, and the versions of CUDA that it was built for, if for any."""

    seconds: float = 0.0
    version: str | None = None
    gpus: tuple[str, ...] = ()
    cuda: str | None = None
    cudnn: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Gpus:
    """NVIDIA's GPUs: on the bus, by the driver's own tool, and those that CUDA_VISIBLE_DEVICES leaves.

    Only if the backend sees too few are there the `driver`, its version of CUDA as 12.4, or else `driver_error`, and
    libraries that are `missing`, each with why.
    """

    on_bus: int = 0
    installed: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    setting: str | None = None
    driver: str | None = None
    driver_error: str | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LinkFacts:
    """The link between two hosts: seconds there and back, and (bytes each way, seconds of the fastest exchange)."""

    round_trip: float = 0.0
    exchanges: tuple[tuple[int, float], ...] = ()
    error: str | None = None

    @property
    def gbps(self) -> float:
        """Gbit/s in each direction at once, of the largest size; 0 if nothing was measured."""
        size, seconds = max(self.exchanges, default=(0, 1.0))
        return size * 8e-9 / seconds


class Severity(IntEnum):
    """The severity of a finding; the worst one is the exit code of the command. 2 is a refused command."""

    FINE = 0
    # A training works, and is slower than it need be, or close to a limit.
    WARNING = 1
    # A training fails, or something of it that was asked for does.
    FAULT = 3


@dataclass(frozen=True)
class Finding:
    """One thing on a host, or between two of them: what was found, what was expected, and what to type, if anything."""

    check: str
    host: str
    severity: Severity
    found: str
    expected: str
    remedy: str = ""
    figures: Mapping[str, int | float] = field(default_factory=dict)
