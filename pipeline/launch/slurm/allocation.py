"""What an allocation says of itself, to a command that was typed inside of one, by its environment alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.launch.slurm.hostlist import counts_of, hosts_of


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
