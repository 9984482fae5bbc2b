"""The options of a Slurm job in `cluster.options`; conf/cluster/slurm.yaml says what each means."""

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from pipeline.launch import LaunchError
from pipeline.launch.options import option

MOST = 65_536
# The options of sbatch that this program sets.
OURS = (
    "--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--signal", "--output", "--open-mode", "--requeue",
    "--no-requeue", "--parsable",
)  # fmt: skip

Count = Annotated[int, option(f"from 1 to {MOST}", "1", ge=1, le=MOST)]
Amount = Annotated[int, option(f"from 0 to {MOST}", "1", ge=0, le=MOST)]
Line = Annotated[str, option("one line", "null", r"[^\n]*\S[^\n]*")]
# Minutes, minutes:seconds, hours:minutes:seconds, days-hours, and so on.
Time = Annotated[
    str,
    option("as Slurm's --time has it, minutes or H:MM:SS or D-HH:MM", "1:00:00", r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}"),
]
Extra = Annotated[list[Annotated[str, Meta(pattern=r"^-[^\n]*\Z")]], option("options of sbatch", "'[\"--qos=high\"]'")]


@dataclass(frozen=True)
class SlurmOptions:
    """The job to submit; None leaves a choice to Slurm."""

    partition: Line | None = None
    account: Line | None = None
    time: Time | Annotated[int, Meta(ge=0)] | None = None
    nodes: Count = 1
    tasks: Count | None = None
    cpus_per_task: Count = 1
    gpus_per_task: Amount = 0
    constraint: Line | None = None
    container: Line | None = None
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    extra: Extra = field(default_factory=list)
    python: Line | None = None
    requeue: bool = True
    signal_seconds: Amount = 60
    timeout: Annotated[float, option(f"seconds from 1 to {MOST}", "600", ge=1, le=MOST)] = 600.0
    conductor: str | None = None
    folder: str = "outputs/slurm"

    @property
    def tasks_per_node(self) -> int:
        """Devices that train on each node, one a task."""
        return max(1, (self.tasks or 1) // self.nodes)


def check(options: SlurmOptions) -> None:
    """Refuses options that contradict each other or those that this program sets. Raises `LaunchError`."""
    tasks, nodes = options.tasks or 1, options.nodes
    if tasks > 1 and tasks % nodes:
        near = max(1, tasks // nodes) * nodes
        raise LaunchError(f"tasks that divide evenly over {nodes} nodes", tasks, f"cluster.options.tasks={near}")
    for extra in options.extra:
        if extra.split("=")[0].split()[0] in OURS:
            raise LaunchError(
                f"cluster.options.extra to leave {', '.join(OURS)} to the other options",
                extra,
                "cluster.options.nodes, tasks, cpus_per_task, requeue or signal_seconds",
            )
