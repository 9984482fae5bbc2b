"""What is asked of a host, and what was seen there: facts alone, of which `judge.py` says whether they are right."""

from dataclasses import dataclass, field

# In the order in which they are told. Those of HOST are looked at on each host by itself.
HOST = (
    "python",
    "packages",
    "backend",
    "gpus",
    "cores",
    "memory",
    "shm",
    "files",
    "threads",
    "disk",
    "ports",
    "names",
    "proxy",
)
BETWEEN = ("clocks", "link")
CHECKS = (*HOST, *BETWEEN, "store", "plan")


@dataclass(frozen=True)
class Look:
    """What is to be looked at on a host: which checks, the backend that is to compute, packages by name, folders that
    are written to, HOST:PORT that are to be free, and the names of others that are to be found."""

    checks: tuple[str, ...] = HOST
    backend: str = "tensorflow"
    packages: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Accelerator:
    """What the backend, imported in a process of its own, made of this host; `error` where that failed.

    `cuda` and `cudnn` are the versions that it was built for, None where it was built for none.
    """

    seconds: float = 0.0
    version: str | None = None
    gpus: tuple[str, ...] = ()
    cuda: str | None = None
    cudnn: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Gpus:
    """NVIDIA's GPUs: on the bus, by the driver's own tool, and those that CUDA_VISIBLE_DEVICES leaves.

    `driver` is the version of CUDA that the driver can do, as 12.4, or None with `driver_error`; `missing` are
    libraries that could not be loaded, each with why. Both are looked at only where the backend sees too few.
    """

    on_bus: int = 0
    installed: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    setting: str | None = None
    driver: str | None = None
    driver_error: str | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Space:
    """Bytes of something, all of them and those that are left; None where there is no such thing."""

    total: int
    left: int


@dataclass(frozen=True)
class Disk:
    """A folder that is written to: bytes and files that still fit, and how fast it took some, or why it did not."""

    folder: str
    left: int = 0
    files_left: int | None = None
    write_mbps: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Port:
    """An address that is to be free: why it is not, and who has it, as far as that can be told."""

    address: str
    error: str | None = None
    holder: str | None = None


@dataclass(frozen=True)
class Name:
    """A host's name, its addresses as this host finds them, or why it finds none."""

    name: str
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """What was seen on a host. What was not asked for is None, or empty."""

    hostname: str
    python: str | None = None
    packages: dict[str, str | None] = field(default_factory=dict)
    backend: Accelerator | None = None
    gpus: Gpus | None = None
    cores_usable: int | None = None
    cores_installed: int | None = None
    memory: Space | None = None
    shm: Space | None = None
    open_files: tuple[int, int] | None = None
    threads: int | None = None
    disks: tuple[Disk, ...] = ()
    ports: tuple[Port, ...] = ()
    names: tuple[Name, ...] = ()
    # Variables that name a proxy, and the hosts that none is used for.
    proxies: tuple[str, ...] | None = None
    no_proxy: str = ""


@dataclass(frozen=True)
class Trip:
    """One size of an exchange between two hosts: bytes that each sent and received, and the seconds of the fastest."""

    size: int
    seconds: float


@dataclass(frozen=True)
class Exchanged:
    """What two hosts measured of the link between them: seconds there and back, and of exchanges of some sizes.

    `error` says why they could not.
    """

    round_trip: float = 0.0
    trips: tuple[Trip, ...] = ()
    error: str | None = None

    @property
    def gbps(self) -> float:
        """Gbit/s in each direction at once, of the largest size; 0 where nothing was measured.

        >>> Exchanged(1e-4, (Trip(1000, 1e-3), Trip(10**9, 8.0))).gbps
        1.0
        """
        if not self.trips:
            return 0.0
        largest = max(self.trips, key=lambda trip: trip.size)
        return largest.size * 8e-9 / largest.seconds
