"""Turns composed configs into requests for runs, each of which is validated before any run starts.

A run that is refused has its result at once, and so has one that an earlier command of the same sweep finished.
"""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import config as configs
from pipeline.config.composing import Composed
from pipeline.config.schema import COMPOSED, Config, Mode, Order
from pipeline.driver import RunResult, run_folders, start
from pipeline.driver import sweep as sweeps
from pipeline.driver.session import Key, RunRequest, Session, write_unstarted
from pipeline.errors import UserError
from pipeline.launch import AT_ONCE, LaunchError, this_machine
from pipeline.plan import planning
from pipeline.record.files import Entry
from pipeline.record.log import from_here
from pipeline.record.results import Ending, Result


class Requests:
    """The runs of a command, each validated: those to start, in order, and their sweep if they have one.

    `finished` of the sweep's runs were finished by earlier commands. `show` shows a result, of several or of the only
    one.
    """

    def __init__(self, session: Session, show: Callable[[RunResult, bool], None] = lambda point, many: None) -> None:
        self._session, self._show = session, show
        self.many, self.finished = False, 0
        self.to_run: dict[Key, RunRequest] = {}
        self.sweep: sweeps.Sweep | None = None
        self.entries: dict[Key, Entry] = {}
        # In Hydra's order, None for one that has its result.
        self._all: list[RunRequest | None] = []
        # Times that a config came: typed twice, it is two runs.
        self._times: Counter[str] = Counter()
        self._to_delete: list[RunRequest] = []
        # Strategies that the terminal has said train on one device.
        self._on_one_device: set[str] = set()
        # Files of code that the terminal has said are newer than runs that are kept.
        self._newer: set[Path] = set()
        # Hydra's folder of all runs.
        self._folder: Path | None = None

    def accept(self, composed: Iterable[Composed]) -> int | None:
        """Accepts all runs of a command. The session gets the results that need no run.

        Returns the exit code if this command was a driver's agent instead, which has the runs. A strategy of one device
        trains on one, whatever `workers` says, and the terminal says so. In a sweep it has one such run, the control of
        the others; another is refused.
        """
        for point in composed:
            if (code := self._read(point)) is not None:
                return code
        for place, request in enumerate(self._all):
            if request is not None:
                self._accept(place, request)
        self._finish()
        return None

    def shown(self, results: Mapping[Key, RunResult]) -> dict[Key, RunResult]:
        """The results of all runs so far, in the order of their numbers, which a sweep's report has as well."""
        listed = sorted(self.sweep.entries, key=lambda entry: (entry.place, entry.repeat)) if self.sweep else []
        so_far = {key: results.get(key) or self.to_run[key].unended() for key in sorted({*results, *self.to_run})}
        numbers = {key: place for place, key in enumerate(so_far)}
        number_of = {id(entry): number for number, entry in enumerate(listed)}
        numbers |= {key: number_of[id(entry)] for key, entry in self.entries.items()}
        numbered = {key: dataclasses.replace(point, number=numbers[key]) for key, point in so_far.items()}
        return dict(sorted(numbered.items(), key=lambda item: item[1].number))

    def release(self) -> None:
        """Lets other commands work on the sweep."""
        if self.sweep is not None:
            self.sweep.release()

    def _read(self, point: Composed) -> int | None:
        composed, overrides = point.config, point.overrides
        self.many, self._folder = point.sweep is not None, point.folder.parent
        sweep = point.sweep.name if point.sweep is not None else None
        place = len(self._all)
        self._all.append(None)
        try:
            config = point.checked or configs.typed(composed, overrides)
            _check_sweep(config, self.many)
        except UserError as error:
            unread = Config(mode=_mode(composed), output_dir=_output(composed))
            request = RunRequest(unread, point.folder, overrides, sweep)
            request = self._in_sweep(place, request, sweeps.digest(list(overrides)), "unread")
            result = write_unstarted(Result(Ending("REFUSED", str(error))), request.folder)
            self._end(place, request, request.ended(result))
            return None
        if config.mode is Mode.run and (code := self._serve(config, point.folder)) is not None:
            return code
        self._all[place] = RunRequest(config, point.folder, overrides, sweep)
        return None

    def _accept(self, place: int, request: RunRequest) -> None:
        config = request.config
        one, name = planning.on_one_device(config), config.strategy.name
        if one is not config:
            if request.sweep is not None and any(other is not None and other.config == one for other in self._all):
                expected = f"one point of {name}, which trains on one device whatever workers says"
                error = UserError(expected, f"another with workers={config.workers}", "workers=1")
                request = self._in_sweep(place, request)
                self._end(place, request, request.unstarted("REFUSED", str(error)))
                return
            if name not in self._on_one_device:
                self._on_one_device.add(name)
                text = f"{name} trains on one device: workers={config.workers} is taken as workers=1."
                self._session.screen.say(text)
        self._validate(place, dataclasses.replace(request, config=one))

    def _serve(self, config: Config, folder: Path) -> int | None:
        with suppress(UserError):
            # A cluster that is missing, or broken, is refused when the run is validated.
            self._session.cluster(config)
            try:
                code = self._session.serve(config)
            except LaunchError as error:
                self._session.screen.say(str(error))
                code = 2
            if code is not None:
                run_folders.remove(folder, Path(config.output_dir))
            return code
        return None

    def _finish(self) -> None:
        for request in self._to_delete:
            run_folders.remove(request.folder, request.output)
        order, repeats = self._repeat()
        for key, point in self.shown(self._session.results).items():
            if key in self._session.results and point.result.ending.status == "REFUSED":
                self._show(point, self.many)
        keys = sweeps.ordered(len(self._all), repeats, order) if order else []
        self.to_run = {key: self.to_run[key] for key in keys if key in self.to_run}
        if self.sweep is not None:
            self.sweep.write()
        elif self._folder is not None and self._folder.name == COMPOSED:
            shutil.rmtree(self._folder, ignore_errors=True)
            run_folders.remove(self._folder, self._folder.parents[2])

    def _repeat(self) -> tuple[Order | None, int]:
        """Adds the repeats of each run; returns (the sweep's order, its repeats)."""
        accepted = {place: request for place, request in enumerate(self._all) if request is not None}
        for place, request in accepted.items():
            # One that starts nothing has no entry.
            if first := self.entries.get((place, 0)):
                for repeat in range(1, request.config.sweep.repeats):
                    named = self._named(place, repeat, request, first.fingerprint, request.config.strategy.name)
                    if not self._is_finished(place, repeat, named):
                        self.to_run[place, repeat] = named
        sweep = next((request.config.sweep for request in accepted.values()), None)
        return (None, 1) if sweep is None else (sweep.order, sweep.repeats)

    def _validate(self, place: int, request: RunRequest) -> None:
        self._all[place] = request = self._in_sweep(place, request)
        if self._is_finished(place, 0, request):
            return
        validated = start.validate(request, self._session)
        if isinstance(validated, RunRequest):
            self._all[place] = self.to_run[place, 0] = validated
        else:
            self._end(place, request, validated)

    def _in_sweep(self, place: int, request: RunRequest, about: str = "", name: str = "") -> RunRequest:
        """The request in the folder that it has in its sweep; as it is if it has no sweep that trains."""
        if request.sweep is None or request.config.mode is not Mode.run:
            return request
        about, name = about or sweeps.fingerprint(request.config), name or request.config.strategy.name
        folder = request.folder.parent
        if self.sweep is None:
            self.sweep = sweeps.Sweep(folder.parent if folder.name == COMPOSED else folder)
        self._times[about] += 1
        about = about if self._times[about] == 1 else f"{about}-{self._times[about]}"
        return self._named(place, 0, request, about, name)

    def _named(self, place: int, repeat: int, request: RunRequest, about: str, name: str) -> RunRequest:
        sweep = self.sweep
        assert sweep is not None
        entry = sweep.entry(place, name, about, request.overrides, repeat, None if repeat else request.folder)
        self.entries[place, repeat] = entry
        own = request.config.sweep.name is not None or request.config.sweep.repeats > 1
        return dataclasses.replace(request, folder=sweep.folder / entry.folder, own=own)

    def _is_finished(self, place: int, repeat: int, request: RunRequest) -> bool:
        """True if an earlier command has finished it; the session then has its result."""
        sweep, entry = self.sweep, self.entries.get((place, repeat))
        result = None if sweep is None or entry is None else sweep.finished(entry)
        if result is None or entry is None:
            return False
        path = run_folders.newer_code(request.config, request.folder, self._session.search)
        if path is not None and path not in self._newer:
            self._newer.add(path)
            about = "was written after points of this sweep had begun that are kept. Another sweep.name runs them anew."
            self._session.screen.say(f"{from_here(path)} {about}")
        self._session.results[place, repeat] = request.ended(result)
        self.finished += 1
        entry.status, entry.error = "FINISHED", None
        return True

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
    first = next(iter(requests.to_run.values()), None)
    if first is None or not requests.many or first.config.sweep.parallel == 1:
        return 1
    if any(request.config.mode is not Mode.run for request in requests.to_run.values()):
        return 1  # Planning and predicting take too little to be worth processes of their own.
    names = {request.config.cluster.name for request in requests.to_run.values()}
    in_turn = sorted(name for name in names if name not in AT_ONCE)
    if in_turn:
        session.screen.say(f"Points run one after the other: all of cluster={in_turn[0]} is each one's.")
        return 1
    return first.config.sweep.parallel


def _mode(composed: DictConfig) -> Mode:
    """The mode, even of a config that cannot be read."""
    with suppress(OmegaConfBaseException, KeyError):
        mode = OmegaConf.select(composed, "mode")
        return mode if isinstance(mode, Mode) else Mode[str(mode)]
    return Mode.run


def _output(composed: DictConfig) -> str:
    """The output folder, even of a config that cannot be read."""
    with suppress(OmegaConfBaseException):
        return str(OmegaConf.select(composed, "output_dir"))
    return Config.output_dir


def _check_sweep(config: Config, many: bool) -> None:
    """Refuses keys that only a sweep can have, or only one run. Raises `UserError`."""
    if many and config.launch.detach:
        instead = "launch.detach=false: killed, the same command with sweep.name=mine goes on"
        raise UserError("one run with launch.detach=true", "a sweep, which needs its command", instead)
    for key in () if many else ("name", "repeats", "parallel"):
        value = getattr(config.sweep, key)
        if isinstance(value, str) or (value or 0) > 1:
            typed = f"sweep.{key}={value}"
            raise UserError(f"a sweep with {typed}", "one run", f"python -m pipeline -m {typed}")
