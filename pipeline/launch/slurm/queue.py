"""Asks Slurm's commands: submits a job, says what has become of it, puts it back into the queue, ends it.

Reads `squeue -o` and `-O`, whose columns are the same in all versions, not its JSON; of accounting nothing is needed.
"""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
# Where a run's folder notes its job; for that to end.
FILE = "slurm.json"
END_SECONDS, POLL_SECONDS = 120.0, 0.5


@dataclass(frozen=True)
class JobState:
    """A job's state, why it waits, when it starts, its nodes, how much of its time is left,
    and how often it began anew.
    """

    name: str
    reason: str = ""
    starts: str = ""
    nodes: str = ""
    left: str = ""
    restarts: int = 0

    @property
    def over(self) -> bool:
        """Will it never run again?"""
        return self.name in OVER


def state_of(line: str) -> JobState:
    """Reads a line of `squeue`; GONE where there is none, as some minutes after a job's end.

    >>> state_of("PENDING|Resources|2026-11-25T10:00:00||30:00|0")
    JobState(name='PENDING', reason='Resources', starts='2026-11-25T10:00:00', nodes='', left='30:00', restarts=0)
    >>> state_of("").over
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
            raise LaunchError(
                f"Expected Slurm to take the job of {script}, received: {_last(output.stderr)}. "
                f"Try other cluster.options, of which mode=plan shows the script."
            )
        # Of several clusters, ID;CLUSTER.
        return output.stdout.strip().splitlines()[-1].split(";")[0]

    def look(self, job: str) -> JobState | None:
        """Returns a job's state; None if Slurm does not answer."""
        output = self._ask(
            ["squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format=%T{MARK}%r{MARK}%S{MARK}%N{MARK}%L"]
        )
        if output.returncode and "Invalid job id" not in output.stderr:
            return None
        line = next(iter(output.stdout.splitlines()), "")
        if not line:
            return JobState("GONE")
        more = self._ask(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--Format=restartcnt"])
        return state_of(f"{line}{MARK}{more.stdout.strip()}")

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
                command,
                env=self._environ,
                capture_output=True,
                text=True,
                timeout=ASK_SECONDS,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError as error:
            raise LaunchError(
                f"the command {command[0]}, as a login node of a Slurm cluster has it",
                "none",
                "this command there, mode=plan to see the script here, or cluster=local",
            ) from error
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"no answer for {ASK_SECONDS:g} s")


class Followed:
    """A job that was submitted, looked at now and then; `say` hears of each change of its state."""

    def __init__(self, slurm: Slurm, job: str, say: Callable[[str], None]) -> None:
        self.job, self._slurm, self._say = job, slurm, say
        self.state = JobState("PENDING")
        # When it came into this state, and when it is looked at next, on the monotonic clock.
        self.since = time.monotonic()
        self._next = 0.0
        self._said = ""

    def look(self, now: bool = False) -> JobState:
        """Its state as it was a moment ago, or `now`."""
        if not now and time.monotonic() < self._next:
            return self.state
        state = self._slurm.look(self.job)
        soon = time.monotonic() - self.since < SOON
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
        until, shown = time.monotonic() + END_SECONDS, False
        while (what := self._there(slurm)) is not None and time.monotonic() < until:
            if not shown:
                shown = True
                say(f"Slurm's job {what} is of an earlier command of this run, and is ended.")
                slurm.cancel(what)
            time.sleep(POLL_SECONDS)

    def _there(self, slurm: Slurm) -> str | None:
        """Returns what must be cancelled of it; None if nothing."""
        if self.step:
            return slurm.step(self.job, self.name)
        state = slurm.look(self.job)
        return None if state is None or state.over else self.job


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


def _last(text: str) -> str:
    """The last line that a command said, without its name before it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last_line = lines[-1] if lines else "nothing"
    return last_line.removeprefix("sbatch: error: ").rstrip(".")
