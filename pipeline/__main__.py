"""The command: `python -m pipeline [-m] key=value ...`. Hydra composes, `run` runs, the exit code says how it went.

0: all finished. 1: a run failed. 2: the config was refused and nothing was started. 75: preempted by SIGTERM or
SIGUSR1, and the same command goes on. 128 + n: ended by another signal n.
"""

import dataclasses
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from pipeline import config as configs
from pipeline import plan, run, show, signals
from pipeline.events import PREEMPTING

# Lines shown of a failed process's log.
LOG_LINES = 8
# Hydra's options that take their value as a word of its own.
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
VALUED = {"--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--package", "-p", "--cfg", "-c"}


def main() -> None:
    """Runs the command and exits with its code."""
    sys.argv[1:] = options_first(sys.argv[1:])
    if "--version" in sys.argv:
        print(f"pipeline {_version()}")
        sys.exit(0)
    wrong = wrong_options(sys.argv[1:])
    sys.exit(_refuse(wrong) if wrong else command())


def command() -> int:
    """Composes all points, then runs one after the other and shows what came of them; returns the exit code."""
    console = show.console_on(sys.stdout)
    session = run.Session(search=(os.getcwd(), *sys.path), environ=dict(os.environ), console=console)
    many = bool({"-m", "--multirun"} & set(sys.argv[1:]))
    try:
        with signals.interrupt(run.spares(session)):
            points = _points(session)
            for place, point in enumerate(points):
                if isinstance(point, run.Asked):
                    if many:
                        console.print(f"\n-- {' '.join(point.overrides) or 'defaults'}", markup=False, highlight=False)
                    session.results[place] = run.run(point, session)
                    _tell(session.results[place], many, console)
                    if session.preemption.asked:
                        break
    except signals.Interrupted as interrupted:
        if many and session.results:
            console.print(show.sweep_table(_done(session)))
        print(show.error_text(f"Ended by {interrupted}."), file=sys.stderr)
        return PREEMPTED if interrupted.number in PREEMPTING else 128 + interrupted.number
    except Exception as error:
        if configs.is_ours(error):
            return _refuse(configs.explain(error))
        if isinstance(error, OSError):
            return _refuse(
                f"Expected to be able to write {error.filename or 'the output folder'}, received: "
                f"{error.strerror or error}. Try output_dir=..."
            )
        raise
    finally:
        session.close()
    if many and session.results:
        console.print(show.sweep_table(_done(session)))
    # A point that had finished before it heard of the signal has finished, and so has a command of that alone.
    if session.preemption.asked and (many or _done(session)[-1]["status"] == "PREEMPTED"):
        return PREEMPTED
    return _code(_done(session))


def _points(session: run.Session) -> list[run.Asked | None]:
    """Every point of the command in Hydra's order, None for one that is refused, whose result the session has.

    In a sweep, a strategy of one device is the control of the others: it has a point, on its one device, also where all
    points of the sweep ask for more.
    """
    points: list[run.Asked | None] = []

    def look_over(place: int, asked: run.Asked) -> None:
        if result := run.look_over(asked, session):
            session.results[place], points[place] = result, None
            _tell(result, asked.sweep is not None, session.console)

    def collect(composed: DictConfig) -> None:
        where = HydraConfig.get()
        many = where.mode is RunMode.MULTIRUN
        folder = Path(where.runtime.output_dir)
        # As they were typed: what they refer to may not exist, which `typed` puts into words.
        overrides = [str(each) for each in OmegaConf.to_container(where.overrides.task, resolve=False) or ()]
        place = len(points)
        try:
            config = configs.typed(composed, overrides)
        except configs.ConfigError as error:
            points.append(None)
            session.results[place] = run.unread(str(error), folder, {}) | {"overrides": overrides}
            _tell(session.results[place], many, session.console)
        else:
            asked = run.Asked(config, folder, overrides, Path(where.sweep.dir).name if many else None)
            points.append(asked)
            if not many or plan.on_one_device(config) is config:
                look_over(place, asked)

    configs.register()
    with _errors_as_they_are(), configs.refused_unread():
        hydra.main(version_base="1.3", config_path=str(configs.folder()), config_name="config")(collect)()
    for place, asked in enumerate(points):
        one = None if asked is None or asked.sweep is None else plan.on_one_device(asked.config)
        if asked is None or one is None or one is asked.config:
            continue
        if all(each is None or each.config != one for each in points):
            asked = points[place] = dataclasses.replace(asked, config=one)
            name = one.strategy.name
            session.console.print(f"Point {place} trains on one device, as {name} does.", markup=False, highlight=False)
        look_over(place, asked)
    return points


def _done(session: run.Session) -> list[run.Result]:
    return [session.results[place] for place in sorted(session.results)]


def options_first(arguments: list[str]) -> list[str]:
    """The arguments with Hydra's options before the overrides, as its parser wants them.

    >>> options_first(["workers=2", "--config-dir", "mine", "model=own", "-m"])
    ['--config-dir', 'mine', '-m', 'workers=2', 'model=own']
    """
    options: list[str] = []
    overrides: list[str] = []
    takes_value = False
    for argument in arguments:
        if takes_value or argument.startswith("-"):
            takes_value = not takes_value and argument in VALUED
            options.append(argument)
        else:
            overrides.append(argument)
    return options + overrides


def wrong_options(arguments: list[str]) -> str | None:
    """What is wrong with Hydra's options, which its own parser answers with a page of usage; None if nothing is.

    >>> wrong_options(["--nonsense"])
    'Expected options that exist, with their values, received: unrecognized arguments: --nonsense. Try --hydra-help.'
    """
    said = io.StringIO()
    with redirect_stderr(said), suppress(SystemExit):
        get_args_parser().parse_args(arguments)
        return None
    problem = said.getvalue().rpartition("error: ")[2].strip()
    return f"Expected options that exist, with their values, received: {problem}. Try --hydra-help."


def _version() -> str:
    try:
        return metadata.version("distributed-keras-pipeline")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _tell(result: run.Result, many: bool, console: Console) -> None:
    if result["status"] == "REFUSED":
        print(show.error_text(("Skipped: " if many else "") + str(result["error"])), file=sys.stderr)
    elif result["status"] not in ("PLANNED", "PREDICTED"):
        if result["error"]:
            _show_log(result["log"], console)
            print(show.error_text(f"{result['error']} See {result['folder']}."), file=sys.stderr)
        elif not many:
            console.print(show.result_table(result))


def _show_log(log: str | None, console: Console) -> None:
    if log is None or not Path(log).exists():
        return
    lines = [line for line in Path(log).read_text(errors="replace").splitlines() if line.strip()][-LOG_LINES:]
    for line in [f"The last lines of {log}:", *(f"    {line}" for line in lines)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _refuse(message: str) -> int:
    print(show.error_text(message), file=sys.stderr)
    return 2


def _code(results: list[dict[str, Any]]) -> int:
    statuses = {result["status"] for result in results}
    if "FAILED" in statuses:
        return 1
    return 2 if statuses == {"REFUSED"} else 0


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


if __name__ == "__main__":
    main()
