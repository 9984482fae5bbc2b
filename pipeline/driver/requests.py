"""Turns composed configs into requests for runs, each validated before any starts; a sweep keeps those that ended."""

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import config as configs
from pipeline.config.composing import Composed
from pipeline.config.parts import Part, asked
from pipeline.config.schema import COMPOSED, Config, Mode, Order, StrategyConfig
from pipeline.driver import RunResult, run_folders, start
from pipeline.driver.run_folders import EVENTS, Lock, attempts
from pipeline.driver.session import Key, RunRequest, Session
from pipeline.errors import UserError
from pipeline.launch import AT_ONCE, LaunchError, this_machine
from pipeline.plan import planning
from pipeline.record import log, results
from pipeline.record.events import Ended
from pipeline.record.files import SWEEP, Entry, read_sweep, write_sweep


class Requests:
    """The runs of a command: those to start, in order, and their sweep, of whose runs some had `finished` before."""

    def __init__(self, session: Session, show: Callable[[RunResult, bool], None] = lambda point, many: None) -> None:
        self._session, self._show = session, show
        self.many, self.finished = False, 0
        self.to_run: dict[Key, RunRequest] = {}
        self.sweep: Sweep | None = None
        self.entries: dict[Key, Entry] = {}
        # In Hydra's order, None for one that has its result.
        self._all: list[RunRequest | None] = []
        # Times that a config came: typed twice, it is two runs.
        self._times: Counter[str] = Counter()
        self._to_delete: list[RunRequest] = []
        # Strategies on one device, and files of code newer than runs that are kept, that the terminal has told of.
        self._shown: set[str | Path] = set()
        # Hydra's folder of all runs.
        self._folder: Path | None = None

    def accept(self, composed: Iterable[Composed]) -> int | None:
        """Accepts all runs of a command; the session gets the results that need no run.

        Returns the exit code if this command was a driver's agent instead, which has the runs.
        """
        for point in composed:
            if (code := self._read(point)) is not None:
                return code
        for place, request in enumerate(self._all):
            if request is not None:
                self._accept(place, request)
        for request in self._to_delete:
            run_folders.remove(request.folder, request.output)
        self._order()
        if self.sweep is not None:
            self.sweep.write()
        elif self._folder is not None and self._folder.name == COMPOSED:
            shutil.rmtree(self._folder, ignore_errors=True)
            run_folders.remove(self._folder, self._folder.parents[2])
        return None

    def shown(self, results: Mapping[Key, RunResult]) -> dict[Key, RunResult]:
        """The results of all runs so far, in the order of their numbers, which a sweep's report has as well."""
        listed = sorted(self.sweep.entries, key=lambda entry: (entry.place, entry.repeat)) if self.sweep else []
        number_of = {id(entry): number for number, entry in enumerate(listed)}
        numbers = {key: number for number, key in enumerate(sorted({*results, *self.to_run}))}
        own = {key: number_of[id(entry)] for key, entry in self.entries.items()}
        points = {key: results.get(key) or self.to_run[key].unended() for key in numbers}
        numbered = {key: replace(point, number=own.get(key, numbers[key])) for key, point in points.items()}
        return dict(sorted(numbered.items(), key=lambda item: item[1].number))

    def release(self) -> None:
        """Lets other commands work on the sweep."""
        if self.sweep is not None:
            self.sweep.release()

    def _read(self, point: Composed) -> int | None:
        self.many, self._folder = point.sweep is not None, point.folder.parent
        sweep, place, session = point.sweep.name if point.sweep is not None else None, len(self._all), self._session
        self._all.append(None)
        try:
            config = point.checked or configs.typed_as(Config, point.config, point.overrides)
            if self.many and config.launch.detach:
                instead = "launch.detach=false: killed, the same command with sweep.name=mine goes on"
                raise UserError("one run with launch.detach=true", "a sweep, which needs its command", instead)
            for key in () if self.many else ("name", "repeats", "parallel"):
                value = getattr(config.sweep, key)
                if isinstance(value, str) or (value or 0) > 1:
                    raise UserError(
                        f"a sweep with sweep.{key}={value}", "one run", f"python -m pipeline -m sweep.{key}={value}"
                    )
        except UserError as error:
            # It has the mode and the output folder of one that cannot be read, as far as these can.
            config = Config()
            with suppress(OmegaConfBaseException, KeyError):
                mode = OmegaConf.select(point.config, "mode")
                config.mode = mode if isinstance(mode, Mode) else Mode[str(mode)]
            with suppress(OmegaConfBaseException):
                config.output_dir = str(OmegaConf.select(point.config, "output_dir"))
            request = RunRequest(config, point.folder, point.overrides, sweep)
            request = self._in_sweep(place, request, digest(list(point.overrides)), "unread")
            self._end(place, request, request.unstarted("REFUSED", str(error), is_read=False))
            return None
        code = None
        # A cluster that is missing, or broken, is refused when the run is validated.
        with suppress(UserError):
            if config.mode is Mode.run:
                session.cluster(config)
                try:
                    code = session.serve(config)
                except LaunchError as error:
                    session.screen.say(str(error))
                    code = 2
        if code is not None:
            run_folders.remove(point.folder, Path(config.output_dir))
            return code
        self._all[place] = RunRequest(config, point.folder, point.overrides, sweep)
        return None

    def _accept(self, place: int, request: RunRequest) -> None:
        # A strategy of one device trains on one; of a sweep's such runs, all but the first are refused.
        config, name = request.config, request.config.strategy.name
        one = planning.on_one_device(config)
        if one is not config and request.sweep and any(other and other.config == one for other in self._all):
            expected = f"one point of {name}, which trains on one device whatever workers says"
            error = UserError(expected, f"another with workers={config.workers}", "workers=1")
            request = self._in_sweep(place, request)
            self._end(place, request, request.unstarted("REFUSED", str(error)))
            return
        if one is not config:
            self._say_once(name, f"{name} trains on one device: workers={config.workers} is taken as workers=1.")
        self._all[place] = request = self._in_sweep(place, replace(request, config=one))
        if self._is_finished((place, 0), request):
            return
        validated = start.validate(request, self._session)
        if isinstance(validated, RunRequest):
            self._all[place] = self.to_run[place, 0] = validated
        else:
            self._end(place, request, validated)

    def _order(self) -> None:
        """Adds the repeats of each run, shows those that are refused, and puts those to run in the sweep's order."""
        accepted = {place: request for place, request in enumerate(self._all) if request is not None}
        for place, request in accepted.items():
            # One that starts nothing has no entry.
            if first := self.entries.get((place, 0)):
                for repeat in range(1, request.config.sweep.repeats):
                    key = place, repeat
                    named = self._named(key, request, first.fingerprint, request.config.strategy.name)
                    if not self._is_finished(key, named):
                        self.to_run[key] = named
        for key, point in self.shown(self._session.results).items():
            if key in self._session.results and point.result.ending.status == "REFUSED":
                self._show(point, self.many)
        sweep = next((request.config.sweep for request in accepted.values()), None)
        keys = ordered(len(self._all), sweep.repeats, sweep.order) if sweep else []
        self.to_run = {key: self.to_run[key] for key in keys if key in self.to_run}

    def _in_sweep(self, place: int, request: RunRequest, about: str = "", name: str = "") -> RunRequest:
        """The request in the folder that it has in its sweep; as it is if it has no sweep that trains."""
        if request.sweep is None or request.config.mode is not Mode.run:
            return request
        about, folder = about or fingerprint(request.config), request.folder.parent
        self.sweep = self.sweep or Sweep(folder.parent if folder.name == COMPOSED else folder)
        self._times[about] += 1
        about = about if self._times[about] == 1 else f"{about}-{self._times[about]}"
        return self._named((place, 0), request, about, name or request.config.strategy.name)

    def _named(self, key: Key, request: RunRequest, about: str, name: str) -> RunRequest:
        assert self.sweep is not None
        (place, repeat), sweep, config = key, self.sweep, request.config.sweep
        entry = sweep.entry(place, name, about, request.overrides, repeat, None if repeat else request.folder)
        self.entries[key] = entry
        return replace(request, folder=sweep.folder / entry.folder, own=config.name is not None or config.repeats > 1)

    def _is_finished(self, key: Key, request: RunRequest) -> bool:
        """True if an earlier command has finished it; the session then has its result."""
        entry = self.entries.get(key)
        if self.sweep is None or entry is None or (result := self.sweep.finished(entry)) is None:
            return False
        path = run_folders.newer_code(request.config, request.folder, self._session.search)
        if path is not None:
            about = "was written after points of this sweep had begun that are kept. Another sweep.name runs them anew."
            self._say_once(path, f"{log.from_here(path)} {about}")
        self._session.results[key] = request.ended(result)
        self.finished += 1
        entry.status, entry.error = "FINISHED", None
        return True

    def _say_once(self, what: str | Path, text: str) -> None:
        if what not in self._shown:
            self._shown.add(what)
            self._session.screen.say(text)

    def _end(self, place: int, request: RunRequest, result: RunResult) -> None:
        self._all[place] = None
        self._session.results[place, 0] = result
        if self.sweep is not None and (entry := self.entries.get((place, 0))):
            self.sweep.note(entry, result)
        # A refused run leaves only its entry in a sweep.
        if request.sweep is None or request.config.mode is not Mode.run:
            self._to_delete.append(request)


def devices(environ: Mapping[str, str]) -> int:
    """The number of this machine's GPUs, or of its cores if it has none."""
    inventory = this_machine.detect(environ)
    return len(inventory.gpus) or len(inventory.cores)


def most_at_once(requests: Requests, session: Session) -> int:
    """The number of runs that may train at once; says so if that is one though sweep.parallel is more."""
    to_run = [request.config for request in requests.to_run.values()] if requests.many else []
    # Planning and predicting take too little to be worth processes of their own.
    if not to_run or to_run[0].sweep.parallel == 1 or any(config.mode is not Mode.run for config in to_run):
        return 1
    if in_turn := sorted({config.cluster.name for config in to_run} - AT_ONCE.keys()):
        session.screen.say(f"Points run one after the other: all of cluster={in_turn[0]} is each one's.")
        return 1
    return to_run[0].sweep.parallel


def fingerprint(config: Config) -> str:
    """Identifies a run: two configs with the same fingerprint are the same run."""
    # As 0.1.0 had them: no workers and one host where none are named, one engine and collective, no hosts of a cluster.
    hardware = replace(config.hardware, hosts=config.hardware.hosts or 1)
    values: dict[str, Any] = asked(replace(config, hardware=hardware), Part.POINT)
    for part, key, usual in (
        ("strategy", "devices_per_replica", None),
        ("strategy", "collective", StrategyConfig.collective),
        ("cluster", "hosts", []),
        ("cluster", "copy", False),
    ):
        if values[part][key] == usual:
            del values[part][key]
    return digest({key: value for key, value in values.items() if value not in (None, Config.backend)})


def ordered(points: int, repeats: int, how: Order) -> list[Key]:
    """(run, repeat) in the order in which they start; in turns, so that a machine that slows down favours none of them.

    >>> ordered(3, 2, Order.interleaved), ordered(2, 2, Order.typed)
    ([(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)], [(0, 0), (0, 1), (1, 0), (1, 1)])
    """
    if how is Order.typed:
        return [(point, repeat) for point in range(points) for repeat in range(repeats)]
    rounds = [range(points)[:: 1 if repeat % 2 == 0 else -1] for repeat in range(repeats)]
    return [(point, repeat) for repeat, order in enumerate(rounds) for point in order]


class Sweep:
    """The runs of a sweep's folder, locked: the same command keeps those that have finished, and adds new ones.

    Raises `UserError` if another command works on it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = Lock(folder, "sweep.lock")
        except BlockingIOError:
            received, instead = "one that another command works on", "again when that has ended, or another sweep.name"
            raise UserError(f"the sweep {folder.name} to be at rest", received, instead) from None
        self.entries = read_sweep(folder)
        # By run and repeat; and the number of each run.
        self._entry_of = {(entry.fingerprint, entry.repeat): entry for entry in reversed(self.entries)}
        self._number_of = {entry.fingerprint: entry.place for entry in self.entries}
        # What sweep.json does not list, as where it was lost, may be a run of another config.
        prefixes = (path.parent.name.partition("_")[0] for path in folder.glob(f"*_*/{EVENTS}"))
        self._numbers = {*self._number_of.values(), *(int(number) for number in prefixes if number.isdecimal())}

    def entry(
        self, place: int, name: str, about: str, overrides: Sequence[str], repeat: int, composed: Path | None
    ) -> Entry:
        """The entry of the run with the fingerprint `about`, a new one if there is none; `place` is in the command.

        Hydra's files are moved to its folder, named by `name`, from the one where it `composed` the run.
        """
        if (entry := self._entry_of.get((about, repeat))) is None:
            # That of the run's other repeats, or that of its place, or the next.
            number = self._number_of.get(about, max(self._numbers) + 1 if place in self._numbers else place)
            self._number_of[about] = number
            self._numbers.add(number)
            folder = f"{number}_{re.sub(r'[^A-Za-z0-9_-]', '_', name)}" + f"_{repeat + 1}" * (repeat > 0)
            entry = self._entry_of[about, repeat] = Entry(number, repeat, about, folder, ())
            self.entries.append(entry)
        entry.overrides = tuple(overrides)
        # That of the last attempt.
        entry.folder = self._name([self.folder / entry.folder, *attempts(self.folder / entry.folder)][-1])
        target = self.folder / entry.folder
        target.mkdir(exist_ok=True)
        if composed is not None and composed.resolve() != target.resolve():
            for path in composed.iterdir():
                if not (target / path.name).exists():
                    path.replace(target / path.name)
            shutil.rmtree(composed)
        return entry

    def finished(self, entry: Entry) -> results.Result | None:
        """The result of a run that has finished; None for one that is still to run."""
        folder = self.folder / entry.folder
        result = results.read(folder)
        # One that was killed in between has no end that could be tracked.
        ended = result and result.finished and any(isinstance(event, Ended) for event, _ in log.read(folder / EVENTS))
        return result if ended else None

    def note(self, entry: Entry, point: RunResult, seconds: float | None = None) -> None:
        """Takes in the result of a run."""
        entry.status, entry.error = point.result.ending.status, point.result.ending.error
        entry.folder = self._name(point.folder)
        entry.seconds = seconds if seconds is not None else entry.seconds
        self.write()

    def write(self) -> None:
        """Writes `sweep.json`."""
        write_sweep(self.folder, self.entries)

    def release(self) -> None:
        """Lets other commands work on it."""
        shutil.rmtree(self.folder / COMPOSED, ignore_errors=True)
        self._lock.release()

    def _name(self, folder: Path) -> str:
        """The folder relative to the sweep's; it is another sweep's if the run resumed an earlier one there."""
        return os.path.relpath(folder.resolve(), self.folder.resolve())


def note_alone(folder: Path, point: RunResult) -> None:
    """Notes the result of a run in its sweep, if it has one, when another command than the sweep's has ended it."""
    if not (folder.parent / SWEEP).exists():
        return
    # If a command works on the sweep meanwhile, the next one looks into the run's folder.
    with suppress(UserError, OSError):
        sweep = Sweep(folder.parent)
        try:
            for entry in sweep.entries:
                if folder.resolve() in [path.resolve() for path in attempts(sweep.folder / entry.folder)]:
                    sweep.note(entry, point)
        finally:
            sweep.release()


def digest(value: object) -> str:
    """A short text that equal values share, as JSON has them."""
    # Once through JSON, after which keys of different types are texts that can be sorted.
    plain = json.loads(json.dumps(value, default=str))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
