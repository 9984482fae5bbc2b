"""Folders of runs: those of an output folder, the one that a name means, locks, the next attempt's."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.config import targets
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.plan import plan as plans
from pipeline.record import log, results
from pipeline.record.files import ID_LETTERS, run_id_of

EVENTS, PLAN, LOCK = "events.jsonl", "plan.json", "run.lock"
# Where Hydra writes the composed config, in a run's folder.
HYDRA_S = "hydra"
ONE_RUN, OTHERS = "a run's folder, its name or its id in MLflow", "output_dir=..."


class Lock:
    """Marks a folder as in use for as long as this process lives; the kernel releases it however that ends."""

    def __init__(self, folder: Path, name: str = LOCK) -> None:
        self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise

    def release(self) -> None:
        """Lets others have the folder."""
        os.close(self._file)


def newer_code(config: Config, folder: Path, search: Sequence[str]) -> Path | None:
    """Returns a file of a person's own functions that was written after the run in a folder had begun, if any was."""
    train = config.train
    nodes = (config.model.build, config.data.build, config.strategy.build, train.optimizer, train.loss, train.metrics)
    paths = targets.files(nodes, search) if (folder / PLAN).exists() else ()
    return next((path for path in paths if log.written(path) > began(folder)), None)


def attempts(folder: Path) -> Iterator[Path]:
    """Yields the folders of a run's attempts, from this one on."""
    while folder.is_dir():
        yield folder
        folder = _another(folder)


def make_another(folder: Path) -> Path:
    """Makes a folder for one more attempt, after all that are there."""
    while True:
        folder = _another([folder, *attempts(folder)][-1])
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def _another(folder: Path) -> Path:
    # After `name` comes `name.2`.
    first, _, number = folder.name.rpartition(".")
    name, last = (first, int(number)) if first and number.isdecimal() else (folder.name, 1)
    return folder.with_name(f"{name}.{last + 1}")


def remove(folder: Path, output: Path) -> None:
    """Deletes the folder of a run that starts nothing, and the sweep's when it was the last."""
    remove_empty(folder)
    with suppress(OSError):
        if [path.name for path in folder.parent.iterdir()] == ["multirun.yaml"]:
            shutil.rmtree(folder.parent)
    # Those above it that Hydra has made.
    with suppress(OSError):
        for parent in folder.resolve().parents:
            if not parent.is_relative_to(output.resolve()) or parent == Path.cwd():
                break
            if parent.exists():
                parent.rmdir()


def remove_empty(folder: Path) -> None:
    """Deletes a folder that holds only Hydra's files; one that a person has named may hold a run."""
    if not (folder / EVENTS).exists():
        shutil.rmtree(folder / HYDRA_S, ignore_errors=True)
        with suppress(OSError):
            (folder / results.FILE).unlink(missing_ok=True)
            folder.rmdir()


def began(folder: Path) -> float:
    """The time when the run in a folder began, or was resumed last."""
    return log.written(folder / PLAN)


def find(
    name: str, output: Path, file: str = results.FILE, expected: str = ONE_RUN, typed: str = "{}", instead: str = OTHERS
) -> Path:
    """The one run with a `file` that a folder, a name, or letters of an id in MLflow mean. Raises `UserError`."""
    if (Path(name) / file).is_file():
        return Path(name)
    folders = sorted((path.parent for path in output.glob(f"[rs]*/**/{file}")), key=began)
    ids: dict[Path, str] = {}
    for folder in folders:
        result = results.read(folder)
        ids[folder] = run_id_of(folder) or (result and result.mlflow_run_id) or ""
    matches = [folder for folder in folders if folder.name == name or ids[folder].startswith(name)]
    # What MLflow shows as its name ends in letters of the id.
    ending = name.partition(" (")[0].rpartition("-")[2]
    if not matches and len(ending) >= ID_LETTERS:
        matches = [folder for folder in folders if ids[folder].startswith(ending)]
    if len(matches) == 1:
        return matches[0]
    count = f"{len(matches) or 'no'} run{'s' * (len(matches) != 1)}"
    raise UserError(expected, f"{name}, which is that of {count}", typed.format(folders[-1]) if folders else instead)


def same_identity(plan: plans.Plan, output: Path) -> list[Path]:
    """The folders of runs in the output folder whose plan has, or once had, the identity of this one.

    A plan is read once: the index has a line for each. Folders that it lacks, as those from elsewhere, are read now.
    """
    # An earlier version gave a training this length of which nobody had said how long.
    before = plans.as_long_as(plan, {"steps": plans.STEPS_THEN * plan.concurrent_steps, "usual_length": True})
    identities = {_identity(json.loads(each.to_json())) for each in (plan, before)}
    lines = [(str(line.get("run")), str(line.get("identity"))) for line, _ in log.objects(_index(output))]
    indexed = {folder for folder, _ in lines}
    for folder in set(all_within(output, indexed)) - indexed:
        if values := log.read_whole(output / folder / PLAN):
            lines.append((folder, _append(output, folder, values)))
    return [output / folder for folder, identity in lines if identity in identities]


def note(folder: Path, plan: plans.Plan, output: Path) -> None:
    """Notes in the index of the output folder which plan a run has from now on."""
    with suppress(ValueError):
        _append(output, folder.resolve().relative_to(output.resolve()).as_posix(), json.loads(plan.to_json()))


def _index(output: Path) -> Path:
    """The index of an output folder; another file for a version with other fields in an identity."""
    fields = json.dumps(plans.identity({}), sort_keys=True)
    return output / f".runs-{hashlib.sha256(fields.encode()).hexdigest()[:8]}.jsonl"


def _append(output: Path, folder: str, values: Mapping[str, Any]) -> str:
    identity = _identity(values)
    # In one piece. A line that cannot be written is read from the plan again.
    with suppress(OSError), open(_index(output), "ab", buffering=0) as file:
        file.write(json.dumps({"run": folder, "identity": identity}).encode() + b"\n")
    return identity


def _identity(values: Mapping[str, Any]) -> str:
    text = json.dumps(plans.identity(values))
    # Whole numbers in place of the floats that equal them.
    plain = json.loads(text, parse_float=lambda one: int(float(one)) if float(one).is_integer() else float(one))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def all_within(output: Path, indexed: Container[str] = ()) -> Iterator[str]:
    """Yields the folders of all runs, relative to the output folder: those that are known, and those with a plan."""
    unread = [path.name for path in output.glob("[rs]*")]
    while unread:
        folder = unread.pop()
        with suppress(OSError), os.scandir(output / folder) as entries:
            inner = list(entries)
            if any(entry.name == PLAN for entry in inner):
                yield folder
                continue
            within = [f"{folder}/{entry.name}" for entry in inner if entry.is_dir(follow_symlinks=False)]
            yield from (name for name in within if name in indexed)
            unread += [name for name in within if name not in indexed]
