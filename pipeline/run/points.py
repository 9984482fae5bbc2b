"""Turns the command line into points to run: Hydra composes all of them, and each is laid out before any is run.

What cannot be composed or laid out has its result at once, and so has what an earlier command of the same sweep ended.
"""

import argparse
import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import config as configs
from pipeline.config.composing import Composed, Composer
from pipeline.config.schema import COMPOSED, Config, Mode
from pipeline.errors import UserError
from pipeline.launch import AT_ONCE, LaunchError, machine
from pipeline.plan import planning
from pipeline.record.sweeps import Entry
from pipeline.run import beforehand, run
from pipeline.run import sweep as sweeps
from pipeline.run.session import Key, PointRequest, Session
from pipeline.run.views import PointResult

Tell = Callable[[PointResult, bool], None]


@dataclass
class Points:
    """The points of a command: those that are to be run, in order, and the sweep that they belong to, if they do.

    `kept` of the sweep's points were finished by earlier commands.
    """

    many: bool = False
    to_run: dict[Key, PointRequest] = field(default_factory=dict)
    sweep: sweeps.Sweep | None = None
    entries: dict[Key, Entry] = field(default_factory=dict)
    kept: int = 0

    def shown(self, results: Mapping[Key, PointResult]) -> dict[Key, PointResult]:
        """What has become of all points so far, in the order of their numbers, which a sweep's report has as well.

        One that has not ended is there as it was asked for.
        """
        listed = sorted(self.sweep.entries, key=lambda entry: (entry.place, entry.repeat)) if self.sweep else []
        found = {key: results.get(key) or self.to_run[key].asked() for key in sorted({*results, *self.to_run})}
        numbers = {key: place for place, key in enumerate(found)}
        numbers |= {key: listed.index(entry) for key, entry in self.entries.items() if entry in listed}
        numbered = {key: dataclasses.replace(point, number=numbers[key]) for key, point in found.items()}
        return dict(sorted(numbered.items(), key=lambda item: item[1].number or 0))

    def release(self) -> None:
        """Lets other commands work on the sweep."""
        if self.sweep is not None:
            self.sweep.release()


def compose(composer: Composer, given: argparse.Namespace, session: Session, points: Points, tell: Tell) -> None:
    """Composes all points of a command into `points`. The session gets the results that are there without a run.

    A strategy of one device trains on one, whatever `workers` says, and that is told. In a sweep it has one such point,
    the control of the others; another is refused.
    """
    composing = _Composing(session, points, tell)
    for composed in composer.points(given.overrides, given.multirun):
        composing.collect(composed)
    composing.finish()


def devices(environ: Mapping[str, str]) -> int:
    """This machine's GPUs, or the cores where it has none."""
    here = machine.detect(environ)
    return len(here.gpus) or len(here.cores)


class Served(BaseException):
    """This command was another's agent, whose exit code is its own."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def most_at_once(points: Points, session: Session) -> int:
    """How many points of a command may run at once; says so where that is one although more were asked for."""
    first = next(iter(points.to_run.values()), None)
    if first is None or not points.many or first.config.sweep.parallel == 1:
        return 1
    if any(request.config.mode is not Mode.run for request in points.to_run.values()):
        return 1  # Planning and predicting take too little to be worth processes of their own.
    names = {request.config.cluster.name for request in points.to_run.values()}
    in_turn = sorted(name for name in names if name not in AT_ONCE)
    if in_turn:
        session.screen.say(f"Points run one after the other: all of cluster={in_turn[0]} is each one's.")
        return 1
    return first.config.sweep.parallel


class _Composing:
    """Points in Hydra's order, None for one whose result is there."""

    def __init__(self, session: Session, points: Points, tell: Tell) -> None:
        self._session, self._points, self._tell = session, points, tell
        self._asked: list[PointRequest | None] = []
        # What was typed twice is two points.
        self._seen: Counter[str] = Counter()
        # Folders of points of which nothing stays, and their output folders.
        self._of_nothing: list[tuple[Path, Path]] = []
        # Strategies of which it was told that they train on one device.
        self._told: set[str] = set()
        # Where Hydra has put the points.
        self._folder: Path | None = None

    def collect(self, point: Composed) -> None:
        """Takes the next point."""
        composed, overrides, many = point.config, point.overrides, point.sweep is not None
        self._points.many = many
        self._folder = point.folder.parent
        sweep = point.sweep.name if point.sweep is not None else None
        place = len(self._asked)
        self._asked.append(None)
        try:
            config = configs.typed(composed, overrides)
            _check_sweep(config, many)
        except UserError as error:
            request = PointRequest(Config(mode=_mode(composed)), point.folder, overrides, sweep)
            about = sweeps.fingerprint_of_words(overrides)
            request = self._in_sweep(place, request, point.sweep or point.folder, about, "unread")
            self._end(place, request.ended(beforehand.unread(str(error), request.folder)))
            # What is refused leaves nothing but its place in a sweep.
            if request.config.mode is not Mode.run or not many:
                self._of_nothing.append((request.folder, _output(composed)))
            return
        if config.mode is Mode.run:
            self._serve(config, point.folder)
        request = PointRequest(config, point.folder, overrides, sweep)
        self._asked[place] = request
        one = planning.on_one_device(config)
        if one is config:
            self._look_over(place, request)
        elif not many:
            self._look_over(place, self._as_one(request, one))

    def _serve(self, config: Config, folder: Path) -> None:
        """Raises `Served` once this process has served a conductor elsewhere, to which the points are left."""
        with suppress(UserError, LaunchError):
            # One that is not there, or broken, is refused when the point is looked over.
            self._session.cluster(config)
            try:
                code = self._session.serve(config)
            except LaunchError as error:
                self._session.screen.say(str(error))
                code = 2
            if code is not None:
                run.remove(folder, Path(config.output_dir))
                raise Served(code)

    def finish(self) -> None:
        """Makes what trains on one device a point of its own, once all others are known, and adds the repeats."""
        for place, request in enumerate(self._asked):
            one = None if request is None or request.sweep is None else planning.on_one_device(request.config)
            if request is None or one is None or one is request.config:
                continue
            if any(other is not None and other.config == one for other in self._asked):
                self._refuse(place, request)
            else:
                self._asked[place] = self._as_one(request, one)
                self._look_over(place, self._as_one(request, one))
        for folder, output in self._of_nothing:
            run.remove(folder, output)
        there = {place: request for place, request in enumerate(self._asked) if request is not None}
        for place, request in there.items():
            # Of what starts nothing there is no entry.
            if first := self._points.entries.get((place, 0)):
                for repeat in range(1, request.config.sweep.repeats):
                    self._add(place, repeat, self._named(place, repeat, request, first.fingerprint))
        for key, point in self._points.shown(self._session.results).items():
            if key in self._session.results and point.result.ending.status == "REFUSED":
                self._tell(point, self._points.many)
        if not self._asked:
            return
        (order, repeats) = next(
            ((request.config.sweep.order, request.config.sweep.repeats) for request in there.values()), (None, 1)
        )
        keys = sweeps.ordered(len(self._asked), repeats, order) if order else []
        self._points.to_run = {key: self._points.to_run[key] for key in keys if key in self._points.to_run}
        if self._points.sweep is not None:
            self._points.sweep.write()
        elif self._folder is not None and self._folder.name == COMPOSED:
            shutil.rmtree(self._folder, ignore_errors=True)
            run.remove(self._folder, self._folder.parents[2])

    def _as_one(self, request: PointRequest, one: Config) -> PointRequest:
        """The point on the one device of its strategy, which is told once."""
        name, workers = one.strategy.name, request.config.workers
        if name not in self._told:
            self._told.add(name)
            self._session.screen.say(f"{name} trains on one device: workers={workers} is taken as workers=1.")
        return dataclasses.replace(request, config=one)

    def _refuse(self, place: int, request: PointRequest) -> None:
        """Refuses a second point of a strategy that trains on one device."""
        config = request.config
        name, about = config.strategy.name, sweeps.fingerprint(config)
        request = self._in_sweep(place, request, request.folder.parent, about, name)
        error = (
            f"Expected one point of {name}, which trains on one device whatever workers says, received another with "
            f"workers={config.workers}. Try workers=1."
        )
        self._end(place, request.ended(beforehand.refused(error, config, request.folder)))
        if config.mode is not Mode.run:
            self._of_nothing.append((request.folder, Path(config.output_dir)))

    def _look_over(self, place: int, request: PointRequest) -> None:
        request = self._in_sweep(
            place, request, request.folder.parent, sweeps.fingerprint(request.config), request.config.strategy.name
        )
        self._asked[place] = request
        if self._is_kept(place, 0, request):
            return
        looked_over = run.look_over(request, self._session)
        if isinstance(looked_over, PointRequest):
            self._asked[place] = self._points.to_run[place, 0] = looked_over
        else:
            self._end(place, looked_over)
            if request.sweep is None or request.config.mode is not Mode.run:
                self._of_nothing.append((request.folder, Path(request.config.output_dir)))

    def _in_sweep(self, place: int, request: PointRequest, folder: Path, about: str, name: str) -> PointRequest:
        """The point in the folder that it has in its sweep; as it is where it is not of one that is run."""
        if request.sweep is None or request.config.mode is not Mode.run:
            return request
        if folder.name == COMPOSED:
            folder = folder.parent
        if self._points.sweep is None:
            self._points.sweep = sweeps.Sweep(folder)
        self._seen[about] += 1
        about = about if self._seen[about] == 1 else f"{about}-{self._seen[about]}"
        return self._named(place, 0, request, about, name)

    def _named(
        self, place: int, repeat: int, request: PointRequest, about: str, name: str | None = None
    ) -> PointRequest:
        made = self._points.sweep
        assert made is not None
        name = name or request.config.strategy.name
        entry = made.point(place, name, about, request.overrides, repeat, None if repeat else request.folder)
        self._points.entries[place, repeat] = entry
        own = request.config.sweep.name is not None or request.config.sweep.repeats > 1
        return dataclasses.replace(request, folder=made.folder / entry.folder, own=own)

    def _add(self, place: int, repeat: int, request: PointRequest) -> None:
        if not self._is_kept(place, repeat, request):
            self._points.to_run[place, repeat] = request

    def _is_kept(self, place: int, repeat: int, request: PointRequest) -> bool:
        """Has an earlier command finished it? Then the session has its result."""
        made, entry = self._points.sweep, self._points.entries.get((place, repeat))
        result = None if made is None or entry is None else made.kept(entry)
        if result is None or made is None or entry is None:
            return False
        self._session.results[place, repeat] = request.ended(result)
        self._points.kept += 1
        entry.status, entry.error = "FINISHED", None
        return True

    def _end(self, place: int, result: PointResult) -> None:
        self._asked[place] = None
        self._session.results[place, 0] = result
        if (made := self._points.sweep) is not None:
            made.note(self._points.entries[place, 0], result)


def _mode(composed: DictConfig) -> Mode:
    """What was asked for, also where the rest of it cannot be read."""
    with suppress(OmegaConfBaseException, KeyError):
        mode = OmegaConf.select(composed, "mode")
        return mode if isinstance(mode, Mode) else Mode[str(mode)]
    return Mode.run


def _output(composed: DictConfig) -> Path:
    """The output folder, also where the rest of it cannot be read."""
    with suppress(OmegaConfBaseException):
        return Path(str(OmegaConf.select(composed, "output_dir")))
    return Path(Config.output_dir)


def _check_sweep(config: Config, many: bool) -> None:
    """Refuses what only a sweep can have. Raises `UserError`."""
    request = config.sweep
    if many and config.launch.detach:
        raise UserError(
            "one run with launch.detach=true",
            "a sweep, which needs its command",
            "launch.detach=false: killed, the same command with sweep.name=mine goes on",
        )
    if many:
        return
    for key, given in (
        (f"sweep.name={request.name}", request.name is not None),
        (f"sweep.repeats={request.repeats}", request.repeats > 1),
        (f"sweep.parallel={request.parallel}", request.parallel > 1),
    ):
        if given:
            raise UserError(f"a sweep with {key}", "one run", f"python -m pipeline -m {key}")
