"""What a person can say of a job in `cluster.options`, checked: the typed shape of conf/cluster/slurm.yaml."""

import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from pipeline.config.json import Json
from pipeline.launch.errors import LaunchError

# Of `--time`: minutes, minutes:seconds, hours:minutes:seconds, days-hours, and so on.
TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+|\d+-\d+:\d+|\d+-\d+:\d+:\d+")
# Options of sbatch that are ours to give.
OURS = (
    "--nodes",
    "--ntasks",
    "--ntasks-per-node",
    "--cpus-per-task",
    "--signal",
    "--output",
    "--open-mode",
    "--requeue",
)
MOST = 65_536
# What each kind of value is called.
WORDS = {int: "a whole number", str: "text", bool: "true or false", tuple: "a list of texts"}


@dataclass(frozen=True)
class SlurmOptions:
    """A job as it is asked for; None leaves it to Slurm, or where `nodes` and `tasks` are None, is 1."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    nodes: int | None = None
    tasks: int | None = None
    cpus_per_task: int = 1
    gpus_per_task: int = 0
    constraint: str | None = None
    container: str | None = None
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    python: str | None = None
    requeue: bool = True
    signal_seconds: int = 60
    timeout: int = 600

    @property
    def hosts(self) -> int:
        """Nodes of the job."""
        return self.nodes or 1

    @property
    def tasks_per_node(self) -> int:
        """Devices that train on each node, one a task."""
        return max(1, (self.tasks or 1) // self.hosts)


def options_of(given: Mapping[str, Json]) -> SlurmOptions:
    """The options of a config. Raises `LaunchError` for one that is unknown or cannot be.

    >>> options_of({"nodes": 2, "tasks": 4, "time": 30}).tasks_per_node
    2
    """
    fields = {field.name: field for field in dataclasses.fields(SlurmOptions)}
    for name in given:
        if name not in fields:
            near = (get_close_matches(str(name), fields, 1) or ["extra"])[0]
            raise LaunchError(
                f"Expected cluster.options to be of {', '.join(fields)}, received {name}. Try cluster.options.{near}=..."
            )
    kinds = typing.get_type_hints(SlurmOptions)
    options = SlurmOptions(**{name: _value(name, kinds[name], value) for name, value in given.items()})
    _check(options)
    return options


def _value(name: str, kind: type, value: Json) -> typing.Any:
    """A value as its field has it."""
    kinds = typing.get_args(kind) if type(None) in typing.get_args(kind) else (kind,)
    if value is None and type(None) in kinds:
        return None
    wanted = typing.get_origin(kinds[0]) or kinds[0]
    if wanted is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if wanted is str and isinstance(value, str | int) and not isinstance(value, bool):
        # A number is a text that YAML has read: time=30.
        return str(value)
    if wanted in (int, bool) and type(value) is wanted:
        return value
    default = SlurmOptions.__dataclass_fields__[name].default
    shown = "[]" if default == () else "null" if default is None else f"{default}".lower()
    raise LaunchError(
        f"Expected cluster.options.{name} to be {WORDS[wanted]}, received {value}. Try cluster.options.{name}={shown}."
    )


def _check(options: SlurmOptions) -> None:
    """Refuses what no job can have."""
    for name, least in (
        ("nodes", 1),
        ("tasks", 1),
        ("cpus_per_task", 1),
        ("gpus_per_task", 0),
        ("signal_seconds", 0),
        ("timeout", 1),
    ):
        value = getattr(options, name)
        if value is not None and not least <= value <= MOST:
            raise LaunchError(
                f"Expected cluster.options.{name} to be from {least} to {MOST}, received {value}. "
                f"Try cluster.options.{name}={max(1, least)}."
            )
    if (options.tasks or 1) % options.hosts and (options.tasks or 1) != 1:
        near = (options.tasks or 1) // options.hosts * options.hosts
        raise LaunchError(
            f"Expected tasks that divide evenly over {options.hosts} nodes, received {options.tasks}. "
            f"Try cluster.options.tasks={max(near, options.hosts)}."
        )
    if options.time is not None and not TIME.fullmatch(options.time):
        raise LaunchError(
            f"Expected cluster.options.time as Slurm's --time has it, minutes or H:MM:SS or D-HH:MM, received "
            f"{options.time}. Try cluster.options.time='\"1:00:00\"'."
        )
    for option in options.extra:
        if not option.startswith("-") or "\n" in option:
            raise LaunchError(
                f"Expected cluster.options.extra to be options of sbatch, received {option!r}. "
                f"Try cluster.options.extra=[--qos=high]."
            )
        if option.split("=")[0].split()[0] in OURS:
            raise LaunchError(
                f"Expected cluster.options.extra to leave {', '.join(OURS)} to the other options, received {option}. "
                f"Try cluster.options.nodes, tasks, cpus_per_task, requeue or signal_seconds."
            )
    for name in ("partition", "account", "constraint", "container", "python"):
        value = getattr(options, name)
        if value is not None and ("\n" in value or not value.strip()):
            raise LaunchError(
                f"Expected cluster.options.{name} to be one line, received {value!r}. Try cluster.options.{name}=null."
            )
