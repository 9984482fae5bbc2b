"""What a person can say of a job in `cluster.options`, checked; conf/cluster/slurm.yaml says what each means."""

import re
from dataclasses import dataclass, field

from pipeline.launch.errors import LaunchError

# Of `--time`: minutes, minutes:seconds, hours:minutes:seconds, days-hours, and so on.
TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+|\d+-\d+:\d+|\d+-\d+:\d+:\d+")
# Options of sbatch that are ours to give.
OURS = (
    "--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--signal", "--output", "--open-mode", "--requeue",
    "--no-requeue", "--parsable",
)  # fmt: skip
MOST = 65_536


@dataclass(frozen=True)
class Options:
    """A job as it is asked for; None leaves it to Slurm."""

    partition: str | None = None
    account: str | None = None
    time: str | int | None = None
    nodes: int = 1
    tasks: int | None = None
    cpus_per_task: int = 1
    gpus_per_task: int = 0
    constraint: str | None = None
    container: str | None = None
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    python: str | None = None
    requeue: bool = True
    signal_seconds: int = 60
    timeout: float = 600.0
    conductor: str | None = None
    folder: str = "outputs/slurm"

    @property
    def tasks_per_node(self) -> int:
        """Devices that train on each node, one a task."""
        return max(1, (self.tasks or 1) // self.nodes)


def check(options: Options) -> None:
    """Refuses what no job can have. Raises `LaunchError`."""
    for name, least in (
        ("nodes", 1), ("tasks", 1), ("cpus_per_task", 1), ("gpus_per_task", 0), ("signal_seconds", 0), ("timeout", 1),
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None and not least <= value <= MOST:
            raise LaunchError(
                f"cluster.options.{name} to be from {least} to {MOST}", value, f"cluster.options.{name}={max(1, least)}"
            )
    tasks, nodes = options.tasks or 1, options.nodes
    if tasks > 1 and tasks % nodes:
        raise LaunchError(
            f"tasks that divide evenly over {nodes} nodes",
            tasks,
            f"cluster.options.tasks={max(1, tasks // nodes) * nodes}",
        )
    if options.time is not None and not TIME.fullmatch(str(options.time)):
        raise LaunchError(
            "cluster.options.time as Slurm's --time has it, minutes or H:MM:SS or D-HH:MM",
            options.time,
            "cluster.options.time=1:00:00",
        )
    _check_texts(options)


def _check_texts(options: Options) -> None:
    for option in options.extra:
        if not option.startswith("-") or "\n" in option:
            raise LaunchError(
                "cluster.options.extra to be options of sbatch",
                f"{option!r}",
                "'cluster.options.extra=[\"--qos=high\"]'",
            )
        if option.split("=")[0].split()[0] in OURS:
            raise LaunchError(
                f"cluster.options.extra to leave {', '.join(OURS)} to the other options",
                option,
                "cluster.options.nodes, tasks, cpus_per_task, requeue or signal_seconds",
            )
    for name in ("partition", "account", "constraint", "container", "python"):
        value = getattr(options, name)
        if value is not None and ("\n" in value or not value.strip()):
            raise LaunchError(f"cluster.options.{name} to be one line", f"{value!r}", f"cluster.options.{name}=null")
