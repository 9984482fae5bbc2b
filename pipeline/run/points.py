"""Turns the command line into points to run: Hydra composes all of them, and each is laid out before any is run.

What cannot be composed or laid out has its result at once, and so has what an earlier command of the same sweep ended.
"""

import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import config as configs
from pipeline.config.schema import COMPOSED, Config, Mode
from pipeline.launch import machine
from pipeline.plan import plan
from pipeline.run import run
from pipeline.run import sweep as sweeps

# The point's place in the command, and which repeat of it this is.
Key = tuple[int, int]
Tell = Callable[[run.Result, bool], None]


@dataclass
class Points:
    """The points of a command: those that are to be run, in order, and the sweep that they belong to, if they do.

    `kept` of the sweep's points were finished by earlier commands.
    """

    many: bool = False
    to_run: dict[Key, run.Asked] = field(default_factory=dict)
    sweep: sweeps.Sweep | None = None
    entries: dict[Key, sweeps.Entry] = field(default_factory=dict)
    kept: int = 0

    def release(self) -> None:
        """Lets other commands work on the sweep."""
        if self.sweep is not None:
            self.sweep.release()


def compose(session: run.Session, points: Points, tell: Tell) -> None:
    """Composes all points of the command into `points`. The session gets the results that are there without a run.

    In a sweep, a strategy of one device is the control of the others: it has a point, on its one device, also where all
    points of the sweep ask for more.
    """
    composing = _Composing(session, points, tell)
    configs.register(partial(_devices, session.environ))
    with _errors_as_they_are(), configs.refused_unread():
        hydra.main(version_base="1.3", config_path=str(configs.folder()), config_name="config")(composing.collect)()
    composing.finish()


def _devices(environ: Mapping[str, str]) -> int:
    """This machine's GPUs, or the cores where it has none."""
    here = machine.detect(environ)
    return len(here.gpus) or len(here.cores)


class _Composing:
    """Points in Hydra's order, None for one whose result is there."""

    def __init__(self, session: run.Session, points: Points, tell: Tell) -> None:
        self._session, self._points, self._tell = session, points, tell
        self._asked: list[run.Asked | None] = []
        # What was typed twice is two points.
        self._seen: Counter[str] = Counter()
        # Folders of points of which nothing stays, and their output folders.
        self._of_nothing: list[tuple[Path, Path]] = []
        # Where Hydra has put the points.
        self._folder: Path | None = None

    def collect(self, composed: DictConfig) -> None:
        """Takes the next point."""
        where = HydraConfig.get()
        self._points.many = many = where.mode is RunMode.MULTIRUN
        folder = Path(where.runtime.output_dir)
        self._folder = folder.parent
        # As they were typed: what they refer to may not exist, which `typed` puts into words.
        overrides = [str(each) for each in OmegaConf.to_container(where.overrides.task, resolve=False) or ()]
        place = len(self._asked)
        self._asked.append(None)
        try:
            config = configs.typed(composed, overrides)
            _check_sweep(config, many)
        except (configs.ConfigError, sweeps.SweepError) as error:
            asked = run.Asked(
                Config(mode=_mode(composed)), folder, overrides, Path(where.sweep.dir).name if many else None
            )
            asked = self._in_sweep(
                place, asked, Path(where.sweep.dir), sweeps.fingerprint_of_words(overrides), "unread"
            )
            self._end(place, run.unread(str(error), asked.folder, {}) | asked.about())
            if asked.config.mode is not Mode.run:
                self._of_nothing.append((asked.folder, _output(composed)))
            return
        asked = run.Asked(config, folder, overrides, Path(where.sweep.dir).name if many else None)
        self._asked[place] = asked
        if not many or plan.on_one_device(config) is config:
            self._look_over(place, asked)

    def finish(self) -> None:
        """Makes what trains on one device a point of its own, once all others are known, and adds the repeats."""
        for place, asked in enumerate(self._asked):
            one = None if asked is None or asked.sweep is None else plan.on_one_device(asked.config)
            if asked is None or one is None or one is asked.config:
                continue
            if all(each is None or each.config != one for each in self._asked):
                asked = self._asked[place] = dataclasses.replace(asked, config=one)
                say = f"Point {place} trains on one device, as {one.strategy.name} does."
                self._session.screen.say(say)
            self._look_over(place, asked)
        for folder, output in self._of_nothing:
            run.remove(folder, output)
        there = {place: asked for place, asked in enumerate(self._asked) if asked is not None}
        for place, asked in there.items():
            # Of what starts nothing there is no entry.
            if first := self._points.entries.get((place, 0)):
                for repeat in range(1, asked.config.sweep.repeats):
                    self._add(place, repeat, self._named(place, repeat, asked, first.fingerprint))
        if not self._asked:
            return
        (order, repeats) = next(
            ((each.config.sweep.order, each.config.sweep.repeats) for each in there.values()), (None, 1)
        )
        keys = sweeps.ordered(len(self._asked), repeats, order) if order else []
        self._points.to_run = {key: self._points.to_run[key] for key in keys if key in self._points.to_run}
        if self._points.sweep is not None:
            self._points.sweep.write()
        elif self._folder is not None and self._folder.name == COMPOSED:
            shutil.rmtree(self._folder, ignore_errors=True)
            run.remove(self._folder, self._folder.parents[2])

    def _look_over(self, place: int, asked: run.Asked) -> None:
        asked = self._in_sweep(
            place, asked, asked.folder.parent, sweeps.fingerprint(asked.config), asked.config.strategy.name
        )
        self._asked[place] = asked
        if self._is_kept(place, 0, asked):
            return
        looked_over = run.look_over(asked, self._session)
        if isinstance(looked_over, run.Asked):
            self._asked[place] = self._points.to_run[place, 0] = looked_over
        else:
            self._end(place, looked_over)

    def _in_sweep(self, place: int, asked: run.Asked, folder: Path, about: str, name: str) -> run.Asked:
        """The point in the folder that it has in its sweep; as it is where it is not of one that is run."""
        if asked.sweep is None or asked.config.mode is not Mode.run:
            return asked
        if folder.name == COMPOSED:
            folder = folder.parent
        if self._points.sweep is None:
            self._points.sweep = sweeps.Sweep(folder)
        self._seen[about] += 1
        about = about if self._seen[about] == 1 else f"{about}-{self._seen[about]}"
        return self._named(place, 0, asked, about, name)

    def _named(self, place: int, repeat: int, asked: run.Asked, about: str, name: str | None = None) -> run.Asked:
        made = self._points.sweep
        assert made is not None
        name = name or asked.config.strategy.name
        entry = made.point(place, name, about, asked.overrides, repeat, None if repeat else asked.folder)
        self._points.entries[place, repeat] = entry
        own = asked.config.sweep.name is not None or asked.config.sweep.repeats > 1
        return dataclasses.replace(asked, folder=made.folder / entry.folder, own=own)

    def _add(self, place: int, repeat: int, asked: run.Asked) -> None:
        if not self._is_kept(place, repeat, asked):
            self._points.to_run[place, repeat] = asked

    def _is_kept(self, place: int, repeat: int, asked: run.Asked) -> bool:
        """Has an earlier command finished it? Then the session has its result."""
        made, entry = self._points.sweep, self._points.entries.get((place, repeat))
        result = None if made is None or entry is None else made.kept(entry)
        if result is None or made is None or entry is None:
            return False
        self._session.results[place, repeat] = result | asked.about()
        self._points.kept += 1
        entry.status, entry.error = "FINISHED", None
        return True

    def _end(self, place: int, result: run.Result) -> None:
        self._asked[place] = None
        self._session.results[place, 0] = result
        if (made := self._points.sweep) is not None:
            made.note(self._points.entries[place, 0], result)
        self._tell(result, self._points.many)


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
    """Refuses what only a sweep can have. Raises `SweepError`."""
    asked = config.sweep
    if not many and (asked.name is not None or asked.repeats > 1):
        key = f"sweep.repeats={asked.repeats}" if asked.name is None else f"sweep.name={asked.name}"
        raise sweeps.SweepError(f"Expected a sweep with {key}, received one run. Try python -m pipeline -m {key}.")


@contextmanager
def _errors_as_they_are() -> Iterator[None]:
    """Inside, Hydra raises what went wrong, for us to put into words, instead of printing it and exiting."""
    kept = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if kept is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = kept
