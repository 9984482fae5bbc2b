"""Asks Slurm's commands: submits a job, says what has become of it, puts it back into the queue, ends it.

It reads `squeue -o` and `-O`, whose columns are the same in all versions. The environment says which job this is in.
"""

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from subprocess import DEVNULL

from pipeline.launch import LaunchError
from pipeline.launch.slurm.script import clean

ASK_SECONDS = 30.0
# How often a job is looked at: often while it may change soon, later as rarely as administrators like it.
SOON_SECONDS, LATER_SECONDS, SOON = 1.0, 10.0, 60.0
# https://slurm.schedmd.com/squeue.html, "JOB STATE CODES".
RUNNING, COMPLETING = "RUNNING", "COMPLETING"
CANCELLED = "CANCELLED"
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
OVER = (
    CANCELLED, "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    "REVOKED", "GONE",
)  # fmt: skip
# What says of a job that time alone has ended it, or a node, or another job: it may be submitted anew.
AGAIN = ("TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL")
# What is left of a job's time once it is up.
UP = ("0:00", "INVALID")
MARK = "|"
# What sbatch says of a job: with several clusters, ID;CLUSTER. A site's own sbatch may not take --parsable.
NUMBER = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;.*| on cluster .*)?$", re.M)
# Where a run's folder notes its job; for that to end.
FILE = "slurm.json"
END_SECONDS, POLL_SECONDS = 120.0, 0.5
# Slurm's host lists, as n[1-4,7],m[01-03]; see "Node Ranges" in its documentation. Containers have no `scontrol`.
# What a plan may have; a list that is broken may name billions.
MOST_HOSTS = 65_536


@dataclass(frozen=True)
class JobState:
    """A job's state, why it waits, when it starts, its nodes, its time left, and how often it began anew."""

    name: str
    reason: str = ""
    starts: str = ""
    nodes: str = ""
    left: str = ""
    restarts: int = 0


def state_of(line: str) -> JobState:
    """Reads a line of `squeue`; GONE where there is none, as some minutes after a job's end.

    >>> state_of("PENDING|Resources|2026-11-25T10:00:00||30:00|0")
    JobState(name='PENDING', reason='Resources', starts='2026-11-25T10:00:00', nodes='', left='30:00', restarts=0)
    >>> state_of("").name in OVER
    True
    """
    parts = [part.strip() for part in line.strip().split(MARK)]
    if len(parts) < 6 or not parts[0]:
        return JobState("GONE")
    name, reason, starts, nodes, left = ("" if part in ("None", "N/A", "(null)") else part for part in parts[:5])
    return JobState(name, reason, starts, nodes, left, int(parts[5]) if parts[5].isdecimal() else 0)


class Slurm:
    """Slurm's commands, as this machine has them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = clean(environ)

    def submit(self, script: Path) -> str:
        """The number of a job made of a script. Raises `LaunchError`."""
        output = self._ask(["sbatch", "--parsable", str(script)])
        if output.returncode:
            last_line = (output.stderr.strip() or "nothing").splitlines()[-1].strip()
            why = last_line.removeprefix("sbatch: error: ").rstrip(".")
            instead = "other cluster.options, of which mode=plan shows the script"
            raise LaunchError(f"Slurm to take the job of {script}", why, instead)
        if not (numbers := NUMBER.findall(output.stdout)):
            instead = "squeue --me, and scancel if the job is there: this machine's sbatch says something else"
            raise LaunchError("sbatch --parsable to print a job's number", output.stdout.strip() or "nothing", instead)
        return str(numbers[-1])

    def look(self, job: str) -> JobState | None:
        """Returns a job's state; None if Slurm does not answer."""
        squeue = ["squeue", "--noheader", "--states=all", f"--jobs={job}"]
        output = self._ask([*squeue, f"--format={MARK.join(('%T', '%r', '%S', '%N', '%L'))}"])
        if output.returncode and "Invalid job id" not in output.stderr:
            return None
        if not (line := next(iter(output.stdout.splitlines()), "")):
            return JobState("GONE")
        return state_of(f"{line}{MARK}{self._ask([*squeue, '--Format=restartcnt']).stdout.strip()}")

    def requeue(self, job: str) -> bool:
        """Puts a job that runs back into the queue; false where that cannot be done."""
        return self._ask(["scontrol", "requeue", job]).returncode == 0

    def cancel(self, job: str) -> None:
        """Ends a job, if it is one."""
        self._ask(["scancel", job])

    def step(self, job: str, name: str) -> str | None:
        """The number of a job's step of that name; None where there is none."""
        output = self._ask(["squeue", "--steps", "--noheader", f"--jobs={job}", f"--format=%i{MARK}%j"])
        steps = [line.strip().partition(MARK) for line in output.stdout.splitlines()]
        return next((number for number, _, called in steps if called == name), None)

    def addresses(self, partition: str | None) -> list[str]:
        """Returns the addresses of nodes, as Slurm has them; empty if it does not answer."""
        chosen = [f"--partition={partition}"] if partition else []
        return self._ask(["sinfo", "--noheader", "--Node", "--format=%o", *chosen]).stdout.split()

    def _ask(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        try:
            return subprocess.run(
                command, env=self._environ, capture_output=True, text=True, timeout=ASK_SECONDS, stdin=DEVNULL
            )
        except OSError as error:
            expected = f"the command {command[0]}, as a login node of a Slurm cluster has it"
            received = "none" if isinstance(error, FileNotFoundError) else error.strerror
            instead = "this command there, mode=plan to see the script here, or cluster=local"
            raise LaunchError(expected, received, instead) from error
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"no answer for {ASK_SECONDS:g} s")


class Followed:
    """A job that was submitted, looked at now and then; `say` hears of each change of its state."""

    def __init__(self, slurm: Slurm, job: str, say: Callable[[str], None]) -> None:
        self.job, self._slurm, self._say = job, slurm, say
        self.state, self._said = JobState("PENDING"), ""
        # When it came into this state, and when it is looked at next, on the monotonic clock.
        self.since, self._next = time.monotonic(), 0.0

    def look(self, now: bool = False) -> JobState:
        """Its state as it was a moment ago, or `now`."""
        if not now and time.monotonic() < self._next:
            return self.state
        state, soon = self._slurm.look(self.job), time.monotonic() - self.since < SOON
        self._next = time.monotonic() + (SOON_SECONDS if soon else LATER_SECONDS)
        if state is None:
            return self.state
        if state.name != self.state.name:
            self.since = time.monotonic()
        self.state = state
        if (text := told(self.job, state)) != self._said:
            self._said = text
            self._say(text)
        return state

    def settled(self, seconds: float) -> JobState:
        """Its state once it is neither running nor about to end, or after so many seconds."""
        until = time.monotonic() + seconds
        while (state := self.look(now=True)).name in (RUNNING, COMPLETING) and time.monotonic() < until:
            time.sleep(SOON_SECONDS / 2)
        return state


@dataclass(frozen=True)
class Earlier:
    """A job, the name of its agents' folder, and whether they are a step of an allocation that others go on with."""

    job: str
    name: str
    step: bool

    def end(self, slurm: Slurm, say: Callable[[str], None]) -> None:
        """Ends it, if it still runs, and waits until it has: two that train one run would write each other's files."""
        until, ended = time.monotonic() + END_SECONDS, None
        while time.monotonic() < until:
            left = slurm.step(self.job, self.name) if self.step else self.job
            if left is None or (not self.step and ((state := slurm.look(left)) is None or state.name in OVER)):
                return
            if ended is None:
                ended = left
                say(f"Slurm's job {left} is of an earlier command of this run, and is ended.")
                slurm.cancel(left)
            time.sleep(POLL_SECONDS)


def told(job: str, state: JobState) -> str:
    """A job's state in words.

    >>> told("7", JobState("PENDING", "Resources"))
    "Slurm's job 7 is pending (Resources)."
    >>> told("7", JobState("RUNNING", nodes="n[1-2]"))
    "Slurm's job 7 is running on n[1-2]."
    """
    what = state.name.lower().replace("_", " ")
    if state.name == "GONE":
        return f"Slurm knows job {job} no more."
    where = f" on {state.nodes}" if state.name == RUNNING and state.nodes else ""
    why = f" ({state.reason})" if state.reason and state.name in WAITING else ""
    when = f", and starts about {state.starts}" if state.starts and state.name in WAITING else ""
    return f"Slurm's job {job} is {what}{where}{why}{when}."


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
    """The allocation of an environment; None outside of any. Raises `LaunchError`."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    # Those of the job: SLURM_NODELIST and SLURM_STEP_NODELIST are a step's within one.
    nodes = environ.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    cores = min(counts_of(environ.get("SLURM_JOB_CPUS_PER_NODE", "")), default=1)
    gpus = environ.get("SLURM_GPUS_ON_NODE", "0").rpartition(":")[2]
    # A script's shell is a task of a node, and is no step's.
    batch = "SLURMD_NODENAME" in environ and "SLURM_STEP_ID" not in environ
    restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
    return Allocation(job, tuple(hosts_of(nodes)), cores, int(gpus) if gpus.isdecimal() else 0, batch, restarts)


def hosts_of(text: str) -> list[str]:
    """The hosts that a list names, in order. Raises `LaunchError` for what is no host list.

    >>> hosts_of("n[1-3,7],m[08-10],login"), hosts_of("a-[1-2]-b[09-10],c")
    (['n1', 'n2', 'n3', 'n7', 'm08', 'm09', 'm10', 'login'], ['a-1-b09', 'a-1-b10', 'a-2-b09', 'a-2-b10', 'c'])
    >>> hosts_of("")
    []
    """
    hosts: list[str] = []
    try:
        for part in filter(None, re.split(r",(?![^\[]*\])", text.strip())):
            # At odd places what stood in brackets.
            pieces = re.split(r"\[([^\[\]]*)\]", part)
            choices = [[piece] if place % 2 == 0 else _numbers(piece) for place, piece in enumerate(pieces)]
            hosts += map("".join, islice(product(*choices), MOST_HOSTS + 1))
            if len(hosts) > MOST_HOSTS or {*"[]"} & {*"".join(pieces[::2])}:
                raise ValueError(part)
    except ValueError:
        example = "a host list of Slurm's as n[1-4,7],m[01-03]"
        raise LaunchError(example, text[:200], "to start the job's command again") from None
    return hosts


def counts_of(text: str) -> list[int]:
    """A count for each host, of Slurm's short form, as `SLURM_JOB_CPUS_PER_NODE` has it. Raises `LaunchError`.

    >>> counts_of("4(x2),8")
    [4, 4, 8]
    """
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        if (read := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())) is None:
            raise LaunchError("counts of Slurm's as 4(x2),8", text, "to start the job's command again")
        counts += [int(read[1])] * min(int(read[2] or 1), MOST_HOSTS)
    return counts


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        first, dash, last = map(str.strip, part.partition("-"))
        count = int(last if dash else first) - int(first) + 1
        if not ((first + last).isdecimal() and 0 < count <= MOST_HOSTS):
            raise ValueError(part)
        numbers += [f"{int(first) + number:0{len(first)}}" for number in range(count)]
    return numbers
