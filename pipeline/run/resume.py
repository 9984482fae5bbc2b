"""Finds the run that a command goes on with: the last one of the same config that did not finish, or the one it names.

A run's folder says all that is needed: its plan, its events, and by a lock whether its conductor still lives.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.analyze import measure
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.plan import plan
from pipeline.plan.plan import Plan
from pipeline.record import events, kept, log
from pipeline.record.events import Checked, Checkpoint, Ended, Event, Profiled, Restarted, Steps
from pipeline.record.tracking import run_id_of
from pipeline.run.lock import LOCK, Lock
from pipeline.run.timing import Measured

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class Earlier:
    """A run to go on with: its folder, locked, its plan's values, and its events."""

    folder: Path
    lock: Lock
    plan: Mapping[str, Any]
    events: Sequence[Event]

    @property
    def status(self) -> str:
        """How its last command ended; "was killed" where nobody was left to say so."""
        last = self.events[-1] if self.events else None
        said = last.status if isinstance(last, Ended) else ""
        return {"PREEMPTED": "preempted", "FAILED": "failed", "KILLED": "interrupted", "FINISHED": "finished"}.get(
            said, "killed"
        )

    @property
    def step(self) -> int:
        """The last step that it told of."""
        return max((event.step for event in self.events if isinstance(event, Steps)), default=0)

    @property
    def saved_step(self) -> int | None:
        """The step of the last checkpoint that it told of."""
        steps = [event.step for event in self.events if isinstance(event, Checkpoint)]
        return steps[-1] if steps else None

    def measured(self, planned: Plan, baseline: Plan | None) -> Measured:
        """What it has measured, as far as that holds for the plan that goes on."""
        made = Measured(step=self.step, saved_step=self.saved_step)
        made.notes = [event.text for event in self.events if isinstance(event, Restarted)]
        made.restarts = len(made.notes)
        for event in self.events:
            if isinstance(event, Checked):
                made.note(event)
        same = plan.identity(self.plan) == plan.identity(json.loads(planned.to_json()))
        same = same and plan.from_values(self.plan).collective == planned.collective
        if not same or self.plan.get("machine") != planned.hardware.machine:
            # What another machine has timed says nothing of this one.
            return made
        made.point = _repeats(self.events, "point", planned.leaders)
        made.baseline = _repeats(self.events, "baseline", baseline.leaders if baseline else (0,))
        profiled = [event.values for event in self.events if isinstance(event, Profiled)]
        made.profile = profiled[-1] if profiled else None
        return made


def find(
    config: Config,
    planned: Plan,
    output: Path,
    only: Path | None = None,
    also: Sequence[Path] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Earlier | None:
    """The run to go on with, locked; None where a new one begins. Raises `UserError`.

    By itself it goes on with the last run of the same config, in the output folder or in the folders `also`, or, with
    `only`, with the one in that folder. `say` is told where another command still works on that.
    """
    if config.resume == NEVER:
        return None
    if config.resume == AUTO:
        if only is not None:
            _expect_at_rest(only)
            return _same(planned, [only], say)
        return _same(planned, sorted({*_indexed(planned, output), *also}, key=_planned), say)
    folder = only_named(config.resume, output)
    values = log.read_whole(folder / "plan.json")
    wanted = json.loads(plan.as_long_as(planned, values).to_json())
    changed = [key for key in plan.changed(values, wanted) if not _is_in(key, config.resume_changes)]
    if changed:
        raise UserError(
            f"the config of {folder}, whose training goes on",
            f"another {', '.join(changed)}",
            f"the same, or resume_changes=[{','.join(changed)}] to go on with what is different, or resume=never",
        )
    try:
        earlier = Earlier(folder, Lock(folder), values, _events(folder))
    except OSError:
        raise UserError(
            "a run that has ended", f"{folder}, whose conductor still works on it", "resume=never, or wait for it"
        ) from None
    _expect_no_processes(earlier)
    if earlier.status == "finished" and not config.resume_changes:
        earlier.lock.release()
        raise UserError(
            "a run that did not finish",
            f"{folder}, which did",
            "resume=never to train anew, or more with train.epochs=... resume_changes=[train.epochs]",
        )
    return earlier


def in_the_way(planned: Plan, base_port: int | None, output: Path) -> Iterator[Path]:
    """The runs, each locked meanwhile, whose command is gone and whose processes may have the ports that are asked for.

    They save and end by themselves, but only after a while. Not those that are meant to train on without a command.
    """
    wanted = set() if base_port is None else {base_port + process.rank for process in planned.processes}
    hosts = set(planned.hardware.host_names)
    for folder in sorted(output / within for within in _folders(output)):
        if not (folder / kept.FILE).exists():
            continue
        values = log.read_whole(folder / "plan.json")
        addresses = [str(process.get("address")) for process in values.get("processes", ())]
        ports = {int(port) for address in addresses if (port := address.rpartition(":")[2]).isdecimal()}
        there = set(values.get("host_names", ()))
        apart = hosts and there and not hosts & there
        if not ports & wanted or apart or kept.trains_on(folder, time.time()):
            continue
        try:
            lock = Lock(folder)
        except OSError:
            continue
        try:
            yield folder
        finally:
            lock.release()


def _same(planned: Plan, folders: Sequence[Path], say: Callable[[str], None]) -> Earlier | None:
    """The last run of the same config, if it did not finish and there is something to go on with."""
    for folder in reversed(folders):
        values = log.read_whole(folder / "plan.json")
        wanted = json.loads(plan.as_long_as(planned, values).to_json())
        if not values or plan.identity(values) != plan.identity(wanted):
            continue
        try:
            earlier = Earlier(folder, Lock(folder), values, _events(folder))
        except BlockingIOError:
            # What was left before that one began was not meant to be gone on with then, and is not now.
            say(f"{log.from_here(folder)}, of the same config, is still under way: another run begins.")
            return None
        except OSError:
            # It is somebody else's.
            continue
        nothing = earlier.status == "failed" and earlier.saved_step is None
        if earlier.status != "finished" and earlier.events and not nothing:
            _expect_no_processes(earlier)
            return earlier
        earlier.lock.release()
        return None
    return None


def _indexed(planned: Plan, output: Path) -> list[Path]:
    """The folders of the runs in the output folder whose plan has, or once had, the same identity.

    A plan is read once: the index, a file in the output folder, has a line for each that was. Folders that it lacks, as
    those of an earlier version or from elsewhere, are read now, and all of them once it is deleted.
    """
    index = _index(output)
    wanted = {_digest(json.loads(then.to_json())) for then in (planned, plan.as_long_as_before(planned))}
    lines = [(str(line.get("run")), str(line.get("identity"))) for line, _ in log.objects(index)]
    known = {folder for folder, _ in lines}
    for folder in set(_folders(output, known)) - known:
        if values := log.read_whole(output / folder / "plan.json"):
            lines.append((folder, _digest(values)))
            _append(index, *lines[-1])
    return [output / folder for folder, digest in lines if digest in wanted]


def note(folder: Path, planned: Plan, output: Path) -> None:
    """Notes in the index of the output folder which plan the run in a folder of it has from now on."""
    with suppress(ValueError):
        within = folder.resolve().relative_to(output.resolve()).as_posix()
        _append(_index(output), within, _digest(json.loads(planned.to_json())))


def _index(output: Path) -> Path:
    """The index of the runs in an output folder; another one for a version with other fields in an identity."""
    fields = json.dumps(plan.identity({}), sort_keys=True)
    return output / f".runs-{hashlib.sha256(fields.encode()).hexdigest()[:8]}.jsonl"


def _append(index: Path, folder: str, digest: str) -> None:
    """Adds a line to the index, in one piece. What cannot be written is read from the plan again."""
    with suppress(OSError), open(index, "ab", buffering=0) as file:
        file.write(json.dumps({"run": folder, "identity": digest}).encode() + b"\n")


def _digest(values: Mapping[str, Any]) -> str:
    """A text that plans of the same identity share."""
    return hashlib.sha256(json.dumps(_whole(plan.identity(values)), sort_keys=True).encode()).hexdigest()[:16]


def _whole(value: object) -> object:
    """The value with whole numbers in place of their floats, which are equal to them."""
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _folders(output: Path, known: Container[str] = ()) -> Iterator[str]:
    """The folders of all runs, from the output folder: those that are known, and those that have a plan."""
    unread = [path.name for path in output.glob("[rs]*")]
    while unread:
        folder = unread.pop()
        with suppress(OSError), os.scandir(output / folder) as entries:
            inner = list(entries)
            if any(entry.name == "plan.json" for entry in inner):
                yield folder
                continue
            for entry in inner:
                if entry.is_dir(follow_symlinks=False):
                    within = f"{folder}/{entry.name}"
                    if within in known:
                        yield within
                    else:
                        unread.append(within)


def all_folders(output: Path) -> list[Path]:
    """The folders of all runs in the output folder, in the order in which they began, or were gone on with."""
    return sorted((output / folder for folder in _folders(output)), key=_planned)


def _planned(folder: Path) -> float:
    return log.written(folder / "plan.json")


def _expect_at_rest(folder: Path) -> None:
    """Refuses a point on which another command works, as one that has attached to it: it is not to be run twice."""
    try:
        if (folder / LOCK).exists():
            Lock(folder).release()
    except BlockingIOError:
        raise UserError(
            "a point that no command works on",
            f"{log.from_here(folder)}, on which another one does",
            "again once that has ended",
        ) from None


def _expect_no_processes(earlier: Earlier) -> None:
    """Refuses a run whose processes may train on without a conductor: two trainings would write the same files."""
    if kept.trains_on(earlier.folder, time.time()):
        earlier.lock.release()
        folder = log.from_here(earlier.folder)
        raise UserError(
            "a run that has ended",
            f"{folder}, whose processes train on without a conductor",
            f"python -m pipeline attach {folder}, or resume=never for another run",
        )


def named(name: str, output: Path) -> list[Path]:
    """The folders of runs that a name may mean: a folder, its name, or an id in MLflow."""
    if (Path(name) / "plan.json").is_file():
        return [Path(name)]
    there = all_folders(output)
    return [folder for folder in there if folder.name == name or (run_id_of(folder) or "").startswith(name)]


def only_named(name: str, output: Path) -> Path:
    """Returns the folder of the one run that is called so. Raises `UserError`."""
    found = named(name, output)
    if len(found) == 1:
        return found[0]
    there = all_folders(output)
    instead = f"Try resume={there[-1]}, resume=auto or resume=never." if there else "Try resume=auto or resume=never."
    raise UserError(
        f"Expected resume to be auto, never, or a run's folder, name or id in MLflow, received {name}, which is that "
        f"of {len(found) or 'no'} run{'s' * (len(found) != 1)}. {instead}"
    )


def _is_in(key: str, allowed: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in allowed)


def _repeats(told: Sequence[Event], group: str, ranks: Sequence[int]) -> list[measure.Repeat]:
    """The repeats, from the first on, that every process of a group has told of."""
    by_repeat: dict[int, dict[int, events.Measured]] = {}
    for event in told:
        if isinstance(event, events.Measured) and event.group == group:
            by_repeat.setdefault(event.repeat, {})[event.rank] = event
    made: list[measure.Repeat] = []
    while by_repeat.get(len(made), {}).keys() >= set(ranks):
        made.append(measure.slowest(by_repeat[len(made)]))
    return made


def _events(folder: Path) -> list[Event]:
    return [event for event, _ in log.read(folder / "events.jsonl")]
