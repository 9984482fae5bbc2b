"""Starts a plan's processes on a cluster, and returns their events and how they end. One file per kind of cluster.

Here: what a cluster and a job are, and the cluster that a config names, with its options.

Whoever calls sees events (`pipeline.record.events`) and nothing of how they travelled. Besides what processes emit, a
job gives `Started` for each process, `Stopped` while the system says that one is, and, when one ends, `Exited` with its
`code` (negative: minus the signal).
"""

import contextlib
import dataclasses
import difflib
import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from pipeline.config.offered import load_offer
from pipeline.config.parts import typed
from pipeline.config.schema import ClusterConfig, StartMethod
from pipeline.errors import UserError, refuse
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.record.commands import Command
from pipeline.record.events import Event, EventBase

# For an answer that takes no time but that of the way.
ANSWER_SECONDS = 30.0


class LaunchError(UserError):
    """Processes that cannot be started."""


class Cancelled(LaunchError):
    """Hosts that somebody has taken away from a run, for good."""


class Job(Protocol):
    """Processes that were started together."""

    def events(self, timeout: float) -> list[Event]:
        """Returns the events that have come in; waits up to `timeout` seconds for one."""

    def send(self, command: Command[EventBase]) -> None:
        """Gives every process a command, as `Command.to_json` writes it."""

    def restart(self, rank: int) -> None:
        """Ends a process, if it still is one, and starts it anew, at the same address."""

    def dump_stacks(self) -> None:
        """Makes every process that still can write its stack to its log."""

    def stop(self, grace: float) -> None:
        """Ends every process, killing those that have not ended after `grace` seconds. Returns when none is left."""


@dataclass(frozen=True)
class Line:
    """One host's process that answers a doctor: what answers a line in so many seconds, and what ends the process."""

    answer: Callable[[str, float], str]
    close: Callable[[], None] = lambda: None

    def ask(self, question: Mapping[str, Any], timeout: float = ANSWER_SECONDS) -> Any:
        """The answer to a question. Raises `LaunchError`."""
        line, answer = self.answer(json.dumps(question), timeout), None
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
        answer = answer if isinstance(answer, dict) else {}
        if "told" not in answer:
            raise LaunchError(str(answer.get("failed") or f"an answer that is none: {line[:80]!r}"))
        return answer["told"]


class _AnsweringProcess:
    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._said, self._unread, pipe = tempfile.TemporaryFile(), b"", subprocess.PIPE  # noqa: SIM115 - closed below
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._said, env=dict(environ), bufsize=0
            )
        except OSError as error:
            self._said.close()
            raise LaunchError(f"{command[0]}: {error.strerror or error}") from error

    def answer(self, question: str, timeout: float) -> str:
        stdin, stdout, until = self._process.stdin, self._process.stdout, time.monotonic() + timeout
        assert stdin is not None, "it is a pipe"
        assert stdout is not None, "it is a pipe"
        try:
            stdin.write(question.encode() + b"\n")
        except OSError as error:
            raise LaunchError(self._last_words()) from error
        while b"\n" not in self._unread:
            if not select.select([stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                self._process.kill()
                raise LaunchError(f"no answer within {timeout:g} s")
            if not (more := os.read(stdout.fileno(), 1 << 16)):
                raise LaunchError(self._last_words())
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with {code} and printed nothing"


def line_to(environ: Mapping[str, str], *command: str) -> Line:
    """A line to a doctor's process that this one starts, on this host, or by a command. Raises `LaunchError`."""
    process = _AnsweringProcess(command or (sys.executable, "-m", "pipeline.doctor"), environ)
    return Line(process.answer, process.close)


@dataclass(frozen=True)
class Helpers:
    """A line to each host of a cluster, by its name, its address as other hosts have it, and why some have no line."""

    lines: Mapping[str, Line]
    addresses: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    # The name of the driver's host, where it is one of them.
    here: str | None = None


class Cluster(Protocol):
    """Hosts that run processes. Methods with a default suit hosts that are there already and stay the same."""

    def serve(self, say: Callable[[str], None], signalled: Callable[[], int | None]) -> int | None:
        """Serves another command as its agent to the end, if the same command was started several times.

        Returns that one's exit code; None, at once, if this one drives. `signalled` returns a scheduler's signal once
        there was one; `say` shows the user what is going on. Raises `LaunchError`.
        """
        return None

    def inventory(self) -> Machine:
        """The hosts, looked at once."""

    def assumed(self) -> Machine:
        """The same where nothing is started: nobody is asked, and what is not known is taken to be as here."""
        return self.inventory()

    def describe(self, plan: Plan) -> str:
        """Returns what is typed or submitted to start a plan's processes; empty where that is nothing."""
        return ""

    def arrived(self) -> bool:
        """True if there are hosts that can be asked; else `inventory` has them come, once a run needs them."""
        return True

    def moved(self) -> bool:
        """True if hosts are others than were laid over last, so that what starts again must be laid out anew."""
        return False

    def returns(self, ends: bool) -> str | None:
        """Says how processes that a scheduler had leave can be started again; None if the command, as asked, `ends`.

        Raises `Cancelled` where somebody has taken the hosts away for good.
        """
        return None

    def helpers(self) -> Helpers:
        """Processes that a doctor asks how their hosts are, one a host, of any version, and which hosts have none."""
        return Helpers({})

    def warm_up(self) -> None:
        """Begins what starting processes will wait for, beside what the driver does next."""

    def addresses(self, plan: Plan) -> Sequence[str]:
        """HOST:PORT for each of several processes of a plan to listen at, by rank. Raises `LaunchError`."""

    def start(self, plan: Plan, group: str, folder: Path) -> Job:
        """Starts the processes of `plan`; `group` names them in events and logs, which go to `folder`."""

    def attach(self, folder: Path) -> bool:
        """Takes the place of the driver of the run in a folder; false where nothing is left. Raises `LaunchError`.

        What is started then, in the same order, goes on where that one left it.
        """
        return False

    def end_earlier(self, folder: Path) -> None:
        """Ends what a killed command has left of the run in a folder: no two train one. Raises `LaunchError`."""
        return

    def leave(self) -> None:
        """Leaves processes to another driver, where they outlive this one: nothing ends them any more."""
        return

    def close(self, code: int) -> None:
        """Lets go of whatever is kept between jobs; `code` is what the command ends with."""


# Where points of a sweep run at once: each in a job of its own, or on devices that the others leave free.
JOBS, DEVICES = "jobs", "devices"
AT_ONCE = {"local": DEVICES, "kubernetes": JOBS, "slurm": JOBS}
# Ours; a package offers others as entry points of the group `pipeline.clusters`, called with the same arguments.
KINDS = ("local", "env", "hosts", "kubernetes", "mpi", "slurm")
CLUSTERS = {kind: f"pipeline.launch.{kind}:{kind.title()}Cluster" for kind in KINDS}
# Those that start nothing on this machine.
ELSEWHERE = {*CLUSTERS} - {"local", "env"}
# Where processes outlive their driver, for another to take its place; under `local` with launch.detach=true alone.
OUTLIVING = ("local", "hosts", "slurm", "kubernetes")
# What a package's cluster must have; what it is without else is `Cluster`'s.
NEEDED = ("serve", "inventory", "warm_up", "addresses", "start", "close")
WORDS = {
    float: "a number", int: "a whole number", bool: "true or false", str: "a text", list: "a list", NoneType: "null",
}  # fmt: skip
Kind = TypeVar("Kind")


def outlives(name: str, detach: bool) -> bool:
    """True if processes of a kind of cluster outlive their driver, so that another can take its place."""
    return name in OUTLIVING and (detach or name != "local")


def cluster_of(
    config: ClusterConfig, environ: Mapping[str, str], detach: bool = False, keep: str | None = None
) -> Cluster:
    """The cluster that a config names, whose processes outlive this command to `detach`, or its fork server to `keep`.

    Raises `UserError` where there is none, `LaunchError` where it is broken.
    """
    ours = CLUSTERS | ({"local": "pipeline.launch.hosts:DetachedCluster"} if detach else {})
    factory = load_offer("clusters", config.name, "cluster", ours, "cluster=local")
    keeps = config.name == "local" and config.start_method is StartMethod.forkserver and not detach
    asks_nobody = config.name in {*CLUSTERS} - {"hosts"} and (config.hosts or config.copy)
    setting = f"cluster.hosts=[{','.join(config.hosts)}]" if config.hosts else "cluster.copy=true"
    refuse(
        (detach and config.name not in OUTLIVING,
         f"a cluster whose processes outlive this command ({', '.join(OUTLIVING)}), for launch.detach=true",
         f"cluster={config.name}", "launch.detach=false"),
        (keep is not None and not keeps,
         "cluster=local cluster.start_method=forkserver launch.detach=false, for launch.keep",
         f"cluster={config.name} cluster.start_method={config.start_method.value} launch.detach={detach}".lower(),
         "launch.keep=null"),
        (asks_nobody, f"{setting.partition('=')[0]} under cluster=hosts alone",
         f"{setting} under cluster={config.name}", f"cluster=hosts {shlex.quote(setting)}"),
        error=LaunchError,
    )  # fmt: skip
    if config.name in CLUSTERS:
        return cast("Cluster", factory(config, environ, *([] if keep is None else [keep])))
    built = _Offered(config.name, factory)(config, environ)
    for part in NEEDED:
        if not callable(getattr(built, part, None)):
            raise LaunchError(f"cluster={config.name} to have {part}()", "one without", "cluster=local")
    return cast("Cluster", _Offered(config.name, built))


class _Offered:
    """Something of another package's, whose errors name it."""

    def __init__(self, name: str, part: Any) -> None:
        self._name, self._made = name, part

    def __getattr__(self, part: str) -> Any:
        lacks = hasattr(Cluster, part) and not hasattr(self._made, part)
        method = partial(getattr(Cluster, part), self._made) if lacks else getattr(self._made, part)
        offered = _Offered(self._name, method)
        return (lambda *arguments: _Offered(self._name, offered(*arguments))) if part == "start" else offered

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._made(*arguments)
        except LaunchError:
            raise
        except Exception as error:
            received = f"{type(error).__name__}: {error}"
            raise LaunchError(f"cluster={self._name} to work", received, "cluster=local") from error


def option(expected: str, example: str, pattern: str | None = None, **limits: Any) -> Meta:
    """The limits of an option's values, as `msgspec.Meta` has them and in words; `example` is a value to type."""
    whole = None if pattern is None else rf"^(?:{pattern})\Z"
    return Meta(description=expected, examples=[example], pattern=whole, **limits)


PORT = r"\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5]"
ADDRESS = rf"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(:({PORT}))?"
# Where others dial, and how long they are waited for.
Address = Annotated[str, option("HOST or HOST:PORT", "null", ADDRESS)]
Seconds = Annotated[float, option("seconds above 0", "600", gt=0, lt=1e9)]


def options_of(config: ClusterConfig, kind: type[Kind]) -> Kind:
    """The options of a config, the others with their defaults. Raises `LaunchError` for the first that is wrong."""
    defaults: Any = kind()
    names = [field.name for field in dataclasses.fields(defaults)]
    for key, value in config.options.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, 1) or names[:1]
            instead = f"cluster.options.{near[0]}, as in conf/cluster/{config.name}.yaml"
            raise LaunchError(f"an option of cluster={config.name} ({', '.join(names)})", key, instead)
        try:
            typed({key: value}, kind)
        except msgspec.ValidationError:
            words, example = _words(get_type_hints(kind, include_extras=True)[key])
            instead = f"cluster.options.{key}={example or json.dumps(getattr(defaults, key)).replace(chr(34), '')}"
            received = "nothing" if value in ("", None) else value if str(value).isprintable() else repr(value)
            raise LaunchError(f"cluster.options.{key} to be {words}", received, instead) from None
    return typed(config.options, kind)


def _words(hint: Any) -> tuple[str, str]:
    """The words for a value of a type, and an example where the type has one.

    >>> _words(float | None), _words(list[str]), _words(Annotated[int, option("1 or more", "2", ge=1)] | None)
    (('a number or null', ''), ('a list', ''), ('1 or more', '2'))
    """
    if get_origin(hint) is Annotated:
        limits = hint.__metadata__[0]
        return (limits.description, limits.examples[0]) if limits.examples else _words(hint.__origin__)
    if get_origin(hint) in (UnionType, Union):
        parts = [_words(part) for part in get_args(hint)]
        with_example = [part for part in parts if part[1]]
        return with_example[0] if with_example else (" or ".join(words for words, _ in parts), "")
    return WORDS.get(get_origin(hint) or hint, "keys with values"), ""
