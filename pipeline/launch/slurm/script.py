"""Writes the batch script of a job from its options, and the `srun` line that starts its agents, one on each node.

It is made without Slurm, so that `mode=plan` can print it anywhere. conf/cluster/slurm.yaml says what options mean.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from pipeline.launch import Address, LaunchError, option

MOST = 65_536
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
# What NCCL may catch is USR1. Without "B:", which is for the batch shell alone, it reaches all that srun has started.
SIGNAL = "USR2"
# Of `srun`, in a job that is submitted from within a step: they bind to cores that the new job has not.
STALE = (
    "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE", "SLURM_MEM_BIND",
    "SLURM_MEM_BIND_LIST", "SLURM_MEM_BIND_PREFER", "SLURM_MEM_BIND_SORT", "SLURM_MEM_BIND_TYPE",
    "SLURM_MEM_BIND_VERBOSE", "SLURM_DISTRIBUTION", "SLURM_GPU_BIND", "SLURM_EXACT", "SLURM_OVERLAP", "SLURM_WHOLE",
)  # fmt: skip


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
    conductor: Address | None = None
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
            expected = f"cluster.options.extra to leave {', '.join(OURS)} to the other options"
            raise LaunchError(expected, extra, "cluster.options.nodes, tasks, cpus_per_task, requeue or signal_seconds")


def batch_script(options: SlurmOptions, agent: Sequence[str], folder: Path, name: str) -> str:
    """The script that is submitted; `agent` is the command of one, logs go to `folder`."""
    chosen = [(key, getattr(options, key)) for key in ("partition", "account", "time", "constraint")]
    directives = [
        f"--job-name={shlex.quote(name)}",
        *(f"--{key}={shlex.quote(str(value))}" for key, value in chosen if value is not None),
        *_shape(options),
        # What a requeued job says is added to what it has said.
        "--open-mode=append",
        f"--output={shlex.quote(str(folder / 'slurm-%j.log'))}",
        "--requeue" if options.requeue else "--no-requeue",
        *([f"--signal={SIGNAL}@{options.signal_seconds}"] if options.signal_seconds else []),
        *options.extra,
    ]
    lines = [
        "#!/bin/bash",
        "# Starts an agent on each node, which dials the command that has submitted this, and does what that says.",
        *(f"#SBATCH {directive}" for directive in directives),
        "",
        "# This shell outlives what Slurm's signals tell the agents: they write a checkpoint meanwhile.",
        "ended=",
        "trap 'ended=1' TERM",
        "trap : USR1 USR2",
        "# Of a step that this was submitted from.",
        f"unset {' '.join(STALE)}",
        "# gRPC would ask a proxy for a port of this node.",
        *(f'export {name}="${{{name}:+${name},}}localhost,127.0.0.1"' for name in ("no_proxy", "NO_PROXY")),
        *([f"module load {shlex.join(options.modules)}"] if options.modules else []),
        *options.setup,
        "",
        # Where one agent was killed, Slurm has ended the others with it.
        "for attempt in $(seq 4); do",
        f"  {shlex.join(srun(options, agent, folder))}",
        "  code=$?",
        "  # What was killed is started again; what has ended was told to.",
        '  [ -z "$ended" ] && [ $code -gt 128 ] || break',
        "  sleep 1",
        "done",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def srun(options: SlurmOptions, agent: Sequence[str], folder: Path) -> list[str]:
    """The command that starts an agent on each node; the first to die takes the others with it."""
    inside: list[str] = []
    if options.container and options.container.endswith(".sif"):
        nvidia = ["--nv"] if options.gpus_per_task else []
        inside = ["apptainer", "exec", *nvidia, f"--bind={folder}", options.container]
    elif options.container:
        mounts = ",".join(f"{path}:{path}" for path in dict.fromkeys((str(Path.cwd()), str(folder))))
        # Of pyxis, NVIDIA's plugin.
        pyxis = {"image": options.container, "mounts": mounts, "workdir": Path.cwd()}
        inside = [f"--container-{name}={value}" for name, value in pyxis.items()]
    # Slurm from 22.05 to 23.11 does not hand --cpus-per-task on from the job to its steps.
    # The step has the name of the folder, by which it is found where its command is gone.
    named = [f"--job-name={folder.name}", "--kill-on-bad-exit=1"]
    return ["srun", f"--ntasks={options.nodes}", *_shape(options), *named, *inside, *agent]


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a step has bound, for a job or a step that is asked for from within.

    >>> clean({"HOME": "/root", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1"})
    {'HOME': '/root'}
    """
    return {name: value for name, value in environ.items() if name not in STALE}


def _shape(options: SlurmOptions) -> list[str]:
    # A node has the cores and GPUs of its tasks together: its agent starts them all.
    gpus = options.tasks_per_node * options.gpus_per_task
    return [
        f"--nodes={options.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={options.tasks_per_node * options.cpus_per_task}",
        *([f"--gres=gpu:{gpus}"] if gpus else []),
    ]
