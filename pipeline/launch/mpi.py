"""Processes of an MPI job, all started with the same command: the first drives, the others are its agents.

MPI itself is not used, only its numbers, in variables whose names alone differ between launchers. Each place trains on
its part of its host's cores and GPUs, which `mpirun --bind-to none` leaves it to choose.
"""

import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import msgspec

from pipeline.config.schema import ClusterConfig
from pipeline.launch import Address, LaunchError, Seconds, options_of, this_machine
from pipeline.launch.agents.agent import Agent
from pipeline.launch.agents.dialling import DiallingCluster, reached_from, with_port
from pipeline.launch.agents.endpoint import DRIVER, Endpoint
from pipeline.launch.agents.remote import POLL_SECONDS
from pipeline.launch.local import LocalCluster
from pipeline.plan.machine import Host, Machine, inventory
from pipeline.plan.plan import Plan
from pipeline.record.log import SECRET, read_json, write_json

# Without its driver, which mpirun ends all others with, an agent goes on for so long.
GONE_SECONDS = 15.0
# A place's name as a host.
RANK = "rank {}"
LAUNCH = "mpirun --bind-to none -n {size} python -m pipeline cluster=mpi ..."


@dataclass(frozen=True)
class Variables:
    """The names under which one says which job, which of its processes, and which of those of a host this is."""

    name: str
    # What is in these, as far as they are set, no other job has, and all processes of one have alike.
    job: tuple[str, ...]
    rank: str
    size: str
    local_rank: str
    local_size: str = ""


# https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"; those of a step, since a job has several.
SLURM = Variables(
    "srun", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
)  # fmt: skip
# https://docs.open-mpi.org, "Environment variables set by mpirun"; PMIX_NAMESPACE is of version 4 and later, and may
# come again after a while, unlike the address of mpirun, of version 4.
OPEN_MPI = Variables(
    "mpirun of Open MPI", ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"), "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """The rank of this process in its job, and on its host; `local_size` is None where that is not known."""

    job: str
    rank: int
    size: int
    local_rank: int
    local_size: int | None = None


@dataclass(frozen=True)
class MpiOptions:
    """`cluster.options` of cluster=mpi; conf/cluster/mpi.yaml says what each means."""

    conductor: Address | None = None
    folder: str = "outputs/mpi"
    timeout: Seconds = 120.0


class Meeting(msgspec.Struct, frozen=True):
    """A note of the driver for the others, in a secret file: its address and token, or its command's exit code."""

    address: str = ""
    token: str = ""
    code: int | None = None


class MpiCluster(DiallingCluster):
    """The places of an MPI job, each of which is laid over as a host."""

    local: LocalCluster
    own_name, return_seconds = RANK.format(0), 0.0

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._options = options_of(config, MpiOptions)
        self.dial_seconds = self._options.timeout
        places = (place_of(variables, environ) for variables in (OPEN_MPI, SLURM))
        self._place: Place | None = next((place for place in places if place is not None), None)
        # All but the driver's own place, which is no agent's.
        self.count = self._place.size - 1 if self._place else 0
        self.waiting = f"Waiting for {self.count} other processes of the MPI job."
        self.local = LocalCluster(config, environ)
        self._drives = False

    def serve(self, say: Callable[[str], None], signalled: Callable[[], int | None]) -> int | None:
        """Drives in the first place; serves in the others, and returns what the driver's command ended with."""
        place = self._place
        if place is None:
            # Refused once a run needs its places.
            return super().serve(say, signalled)
        self.local = LocalCluster(self.config, _share(place, self.environ, say))
        if place.rank == 0:
            self._drives = True
            # Of a job that had the same number.
            self._path.unlink(missing_ok=True)
            return super().serve(say, signalled)
        self.local.warm_up()
        until = time.monotonic() + self._options.timeout
        while time.monotonic() < until:
            if (number := signalled()) is not None:
                return 128 + number
            if (meeting := read_json(Meeting, self._path)) is not None:
                code = self._served(meeting, place, signalled) if meeting.code is None else meeting.code
                if code is not None:
                    return code
            time.sleep(POLL_SECONDS)
        received = f"nothing of it in {self._path} for {self._options.timeout:g} s"
        instead = "an output_dir that all hosts share, or cluster.options.timeout=600"
        raise LaunchError("the first process of the MPI job to conduct", received, instead)

    def listens_at(self) -> str:
        """`cluster.options.conductor`; else loopback if all places are on this host, or its address."""
        place = self._there_is()
        loopback = "127.0.0.1" if place.local_size == place.size else None
        return with_port(self._options.conductor or loopback or reached_from(socket.gethostname()))

    def begin(self, address: str) -> None:
        """Tells the others where they are awaited."""
        self._note(Meeting(address, self.token.decode()))

    def gather(self) -> None:
        """The same; once all have dialled, nothing is left to be read, however this process is ended."""
        super().gather()
        self._path.unlink(missing_ok=True)

    def inventory(self) -> Machine:
        """The places as they are."""
        others = super().inventory().members if self._there_is().size > 1 else ()
        own = self.local.inventory()
        hosts = (replace(own, hostname=RANK.format(0)), *others)
        machines = {name: agent.hello.machine.hostname for name, agent in self.agents.known.items()}
        machines[RANK.format(0)] = own.hostname
        for one, other in combinations(hosts, 2):
            both = set(one.cores) & set(other.cores)
            if machines.get(one.hostname) == machines.get(other.hostname) and len(both) > 1:
                received = f"{one.hostname} and {other.hostname}, which were both bound to {len(both)} of them"
                expected = "each process of the MPI job to have cores of its own"
                raise LaunchError(expected, received, "mpirun --bind-to none")
        return inventory(hosts)

    def hold(self, requests: dict[str, list[int]]) -> dict[str, list[str]]:
        """Those that the agents hold, and this place's own."""
        assert self.address is not None
        host = self.address.rpartition(":")[0]
        own = [f"{host}:{port}" for port in self.local.hold(host, requests.pop(RANK.format(0), []))]
        return super().hold(requests) | {RANK.format(0): own}

    def close(self, code: int) -> None:
        """Tells the others what the command ends with, those too who were not needed."""
        if self._drives and not self._begun:
            self._note(Meeting(code=code))
        super().close(code)

    def end(self) -> None:
        """Leaves nothing to be read."""
        self._path.unlink(missing_ok=True)

    def describe(self, plan: Plan) -> str:
        """The command of an MPI launcher that gives a plan its places."""
        size = plan.hardware.hosts if self._place is None else self._place.size
        return f"Typed once, a process for each place:\n\n{LAUNCH.format(size=size)}"

    def assumed(self) -> Machine:
        """So many places as there are, on this machine."""
        own = this_machine.detect(self.environ)
        size = self._place.size if self._place else 1
        cores = [tuple(part(own.cores, rank, size)) for rank in range(size)]
        return inventory([Host(RANK.format(rank), cores[rank], own.memory_gib, own.cpu) for rank in range(size)])

    @property
    def _path(self) -> Path:
        job = hashlib.sha256(self._there_is().job.encode()).hexdigest()[:16]
        return Path(self._options.folder).resolve() / f"{job}.json"

    def _note(self, meeting: Meeting) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, meeting, SECRET)

    def _there_is(self) -> Place:
        if self._place is None:
            received, instead = "one that has none of its variables", f"`{LAUNCH.format(size=2)}`, or cluster=local"
            raise LaunchError("a process that an MPI launcher has started", received, instead)
        return self._place

    def _served(self, meeting: Meeting, place: Place, signalled: Callable[[], int | None]) -> int | None:
        endpoint = Endpoint(RANK.format(place.rank), meeting.token.encode())
        channel = endpoint.dial(DRIVER, meeting.address)
        host = reached_from(meeting.address.rpartition(":")[0])
        agent = Agent(channel, self.local, place.rank, host, lambda channel, _: channel.away > GONE_SECONDS)
        try:
            code = agent.serve(signalled)
            return 1 if code is None and channel.life else code
        finally:
            endpoint.close(1.0)


def place_of(variables: Variables, environ: Mapping[str, str]) -> Place | None:
    """Reads `environ`; None if this process was not started by this launcher. Raises `LaunchError`."""
    if variables.rank not in environ or variables.size not in environ:
        return None
    names = (variables.rank, variables.size, variables.local_rank, variables.local_size)
    numbers: dict[str, int] = {}
    for name in [name for name in names if name in environ]:
        if not environ[name].isdecimal():
            raise LaunchError(f"{name} to be a number, as {variables.name} sets it", environ[name], "cluster=local")
        numbers[name] = int(environ[name])
    for below, limit in (names[:2], names[2:]):
        if limit in numbers and (number := numbers.get(below, 0)) >= numbers[limit]:
            raise LaunchError(f"{below} below {limit}", f"{number} and {numbers[limit]}", "cluster=local")
    job = " ".join(environ[name] for name in variables.job if name in environ)
    local_rank, local_size = numbers.get(variables.local_rank, 0), numbers.get(variables.local_size)
    return Place(job, numbers[variables.rank], numbers[variables.size], local_rank, local_size)


def _share(place: Place, environ: Mapping[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """Keeps this process to its part of its host's cores, unless it is bound, and of its GPUs; its environment then."""
    size, changed = place.local_size or 1, dict(environ)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == os.cpu_count():
        os.sched_setaffinity(0, part(cores, place.local_rank, size))
    elif place.rank == 0:
        text = f"Each process of the MPI job is bound to {len(cores)} of {os.cpu_count()} cores"
        say(f"{text}: `mpirun --bind-to none` leaves all of them to be dealt out.")
    gpus = this_machine.installed_gpus()
    if gpus and size > 1 and "CUDA_VISIBLE_DEVICES" not in environ:
        indexes = part(range(len(gpus)), place.local_rank, size) if len(gpus) >= size else []
        changed["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indexes))
    return changed


def part(items: Sequence[int], number: int, parts: int) -> list[int]:
    """The items of a part, all parts as large as each other; where there are too few items, one that it shares.

    >>> part([0, 1, 2, 3], 1, 2), part([0, 1], 3, 4)
    ([2, 3], [1])
    """
    if len(items) < parts:
        return [items[number % len(items)]]
    each = len(items) // parts
    return list(items[number * each : (number + 1) * each])
