"""Reads what schedulers and MPI launchers put into a process's environment: they differ in names alone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from pipeline.launch import LaunchError

# Slurm's host lists, as n[1-4,7],m[01-03]; see "Node Ranges" in its documentation. Containers have no `scontrol`.
# A comma outside of brackets.
BETWEEN = re.compile(r",(?![^\[]*\])")
BRACKET = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")
# What a plan may have; a list that is broken may name billions.
MOST_HOSTS = 65_536
# How often a count holds, as in 4(x3).
TIMES = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Variables:
    """The names under which one of them says which job, which of its processes, and which of those of a host this is.

    What is in those of `job`, as far as they are set, no other job has, and all processes of one have alike.
    """

    name: str
    job: tuple[str, ...]
    rank: str
    size: str
    local_rank: str
    local_size: str | None = None


# https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"; those of a step, since a job has several.
SLURM = Variables(
    "srun",
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
)
# https://docs.open-mpi.org, "Environment variables set by mpirun"; PMIX_NAMESPACE is of version 4 and later, and may
# come again after a while, unlike the address of mpirun, of version 4.
OPEN_MPI = Variables(
    "mpirun of Open MPI",
    ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"),
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)


@dataclass(frozen=True)
class Place:
    """The rank of this process in its job, and on its host; `local_size` is None where that is not known."""

    job: str
    rank: int
    size: int
    local_rank: int
    local_size: int | None = None


def place_of(variables: Variables, environ: Mapping[str, str]) -> Place | None:
    """Reads `environ`; None if this process was not started by this launcher. Raises `LaunchError`.

    >>> given = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    >>> place_of(SLURM, given)
    Place(job='7', rank=1, size=2, local_rank=0, local_size=None)
    """
    if variables.rank not in environ or variables.size not in environ:
        return None
    numbers = {
        name: environ.get(name)
        for name in (variables.rank, variables.size, variables.local_rank, variables.local_size)
        if name
    }
    for name, value in numbers.items():
        if value is not None and not value.isdecimal():
            raise LaunchError(f"{name} to be a number, as {variables.name} sets it", value, "cluster=local")
    values = {name: int(value) for name, value in numbers.items() if value is not None}
    rank, size = values[variables.rank], values[variables.size]
    local_rank = values.get(variables.local_rank, 0)
    local_size = values.get(variables.local_size) if variables.local_size else None
    _check(rank, size, variables.rank, variables.size)
    if local_size is not None:
        _check(local_rank, local_size, variables.local_rank, variables.local_size)
    job = " ".join(environ[name] for name in variables.job if name in environ)
    return Place(job, rank, size, local_rank, local_size)


def _check(rank: int, size: int, rank_name: str, size_name: str | None) -> None:
    if rank >= size:
        raise LaunchError(f"{rank_name} below {size_name}", f"{rank} and {size}", "cluster=local")


@dataclass(frozen=True)
class Allocation:
    """A job that this command is in: its number, its nodes, the cores and GPUs that it has on the least of them."""

    job: str
    nodes: tuple[str, ...]
    cores: int
    gpus: int
    # Was it a script, which Slurm can start anew?
    batch: bool
    restarts: int


def allocation_of(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation of an environment; None outside of any. Raises `LaunchError`.

    >>> given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    >>> allocation_of(given)
    Allocation(job='7', nodes=('n1', 'n2'), cores=4, gpus=0, batch=False, restarts=0)
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    # Those of the job: SLURM_NODELIST and SLURM_STEP_NODELIST are a step's within one.
    nodes = environ.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    counts = counts_of(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    gpus = environ.get("SLURM_GPUS_ON_NODE", "0").rpartition(":")[2]
    # A script's shell is a task of a node, and is no step's.
    batch = "SLURMD_NODENAME" in environ and "SLURM_STEP_ID" not in environ
    return Allocation(
        job,
        tuple(hosts_of(nodes)),
        min(counts, default=1),
        int(gpus) if gpus.isdecimal() else 0,
        batch,
        int(environ.get("SLURM_RESTART_COUNT") or 0),
    )


def hosts_of(text: str) -> list[str]:
    """The hosts that a list names, in order. Raises `LaunchError` for what is no host list.

    >>> hosts_of("n[1-3,7],m[08-10],login"), hosts_of("a-[1-2]-b[09-10],c")
    (['n1', 'n2', 'n3', 'n7', 'm08', 'm09', 'm10', 'login'], ['a-1-b09', 'a-1-b10', 'a-2-b09', 'a-2-b10', 'c'])
    >>> hosts_of("")
    []
    """
    hosts: list[str] = []
    for part in filter(None, BETWEEN.split(text.strip())):
        # At odd places what stood in brackets.
        pieces = BRACKET.split(part)
        if any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
            raise _unread(text)
        choices = [[piece] if place % 2 == 0 else _numbers(piece, text) for place, piece in enumerate(pieces)]
        for names in product(*choices):
            hosts.append("".join(names))
            if len(hosts) > MOST_HOSTS:
                raise _unread(text)
    return hosts


def counts_of(text: str) -> list[int]:
    """A count for each host, of Slurm's short form, as `SLURM_JOB_CPUS_PER_NODE` has it. Raises `LaunchError`.

    >>> counts_of("4(x2),8")
    [4, 4, 8]
    """
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        read = TIMES.fullmatch(part.strip())
        if read is None:
            raise LaunchError("counts of Slurm's as 4(x2),8", text, "to start the job's command again")
        counts += [int(read[1])] * min(int(read[2] or 1), MOST_HOSTS)
    return counts


def _numbers(inside: str, text: str) -> Sequence[str]:
    """The numbers of a bracket, as wide as they were written."""
    numbers: list[str] = []
    for part in inside.split(","):
        read = RANGE.fullmatch(part.strip())
        if read is None:
            raise _unread(text)
        first, last = int(read[1]), int(read[2] or read[1])
        if last < first or last - first >= MOST_HOSTS:
            raise _unread(text)
        numbers += [f"{number:0{len(read[1])}}" for number in range(first, last + 1)]
    return numbers


def _unread(text: str) -> LaunchError:
    return LaunchError("a host list of Slurm's as n[1-4,7],m[01-03]", text[:200], "to start the job's command again")
