"""Runs what was composed, or takes the place of a driver that is gone; shows what became of it, as does the exit code.

0: all finished. 1: a run failed. 2: the config was refused and nothing was started. 75: preempted by SIGTERM,
SIGUSR1 or SIGUSR2, and the same command goes on. 128 + n: ended by another signal n,
143 also where somebody cancelled a scheduler's job.
"""

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.train import refused
from pipeline.commands.verbs import is_true, verb
from pipeline.config import config as configs
from pipeline.config.composing import Composed
from pipeline.driver import Ahead, RunResult, Screen, start
from pipeline.driver.requests import Requests, devices, most_at_once, note_alone
from pipeline.driver.run_folders import PLAN, find
from pipeline.driver.session import CLOSE_SECONDS, Key, Preemption, RunRequest, Session
from pipeline.errors import UserError
from pipeline.launch import signals
from pipeline.launch.signals import PREEMPTING
from pipeline.record.files import run_id_of
from pipeline.record.log import from_here
from pipeline.views.mlflow import Tracker
from pipeline.views.terminal import console_on, say, say_error

if TYPE_CHECKING:
    from pipeline.views.report import WrittenReport
    from pipeline.views.terminal.live import Terminal

# Lines shown of a failed process's log.
LOG_LINES = 8
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
# Of a run whose job was cancelled: 128 and the number of SIGTERM, with which that begins.
KILLED = 143


def run_all(composed: Iterator[Composed], options: Sequence[str]) -> int:
    """Runs all points, shows their results and returns the exit code. `options`: where configs are, to type again."""
    session = Session((os.getcwd(), *sys.path), dict(os.environ), _terminal, Tracker, tuple(options))
    points = Requests(session, _tell)

    def run() -> int:
        try:
            if (served := points.accept(composed)) is not None:
                return served
            _run(points, session)
            ended_by = _conclude(points, session)
        except OSError as error:
            return refused(error)
        finally:
            points.release()
        if ended_by is not None:
            return 128 + ended_by.number
        done = _done(points, session)
        # A point that had finished before it heard of the signal has finished, and so has a command of that alone.
        ends = session.preemption.asked and (points.many or done[-1].result.ending.status == "PREEMPTED")
        return _code_of(done, session.preemption if ends else None)

    def interrupted() -> tuple[str, int]:
        if points.many and session.results:
            _show_table(points, session)
        # Run again, a command whose runs had all ended would train anew.
        if points.to_run and points.to_run.keys() <= session.results.keys():
            return "All that was to run had ended.", _code_of(_done(points, session))
        return _how_to_go_on(points, session), PREEMPTED

    return _ended(session, run, interrupted)


def _ended(session: Session, run: Callable[[], int], interrupted: Callable[[], tuple[str, int]]) -> int:
    """Returns the exit code of `run`, or what `interrupted` says of a scheduler's signal, and closes the session."""
    code = 1
    try:
        with signals.interrupt(session.spares):
            code = run()
    except signals.Interrupted as by:
        code = 128 + by.number
        if session.left is not None:
            from pipeline.driver import resume

            say_error(f"{from_here(session.left)} trains on: {resume.how(session.left)}")
        else:
            words, preempted = interrupted()
            say_error(f"Ended by {by}. {words}")
            code = preempted if by.number in PREEMPTING else code
    except UserError as error:
        code = refused(error)
    finally:
        session.close(code)
    return code


def _code_of(done: Sequence[RunResult], preemption: Preemption | None = None) -> int:
    """The exit code of what has become of all points, which a `preemption` has ended."""
    statuses = {point.result.ending.status for point in done}
    codes = {"FAILED": 1, "KILLED": KILLED, "PREEMPTED": PREEMPTED}
    code = next((code for status, code in codes.items() if status in statuses), 2 if statuses == {"REFUSED"} else 0)
    if preemption is None:
        return code
    return 128 + signal.SIGINT if preemption.by_person else KILLED if code == KILLED else PREEMPTED


def _terminal() -> "Terminal":
    # What draws takes a moment to import.
    from pipeline.views.terminal.live import Terminal

    return Terminal(console_on(sys.stdout), time.time)


@verb("RUN", end="true: save a checkpoint and end the run, as after a preemption")
def attach(name: str, *, output_dir: str = "outputs", end: str = "false") -> int:
    """Takes over a run whose command is gone while its processes train on: after launch.detach=true, or under
    cluster=hosts, slurm and kubernetes. RUN is a folder, its name, or the first letters of an MLflow id.
    """
    from pipeline.driver import resume

    configs.register(partial(devices, os.environ))
    ends = is_true("end", end)
    folder = find(name, Path(output_dir), PLAN, typed="python -m pipeline attach {}")
    session = Session((os.getcwd(), *sys.path), dict(os.environ), _terminal, Tracker)

    def train() -> int:
        with resume.attach(folder.resolve(), session, ends) as supervisor:
            request, step = supervisor.request, supervisor.run.step
            session.screen.say(f"attached   {from_here(request.folder)}, at step {step:,}")
            session.screen.planned(supervisor.plan, False, None)
            ended = session.results[0, 0] = request.ended(supervisor.train())
            note_alone(request.folder, ended)
            _tell(ended, False)
            unsent, interrupted = session.settle()
        _show_ids(unsent, [ended])
        if interrupted is not None:
            return 128 + interrupted.number
        return _code_of([ended], session.preemption if ended.result.ending.status == "PREEMPTED" else None)

    def interrupted() -> tuple[str, int]:
        if session.results:
            return "The run had ended.", _code_of([*session.results.values()])
        return "The run's own command goes on from its last checkpoint.", PREEMPTED

    return _ended(session, train, interrupted)


def _how_to_go_on(points: Requests, session: Session) -> str:
    from pipeline.views.terminal.verdict_text import enumerated

    configs_of = [request.config for request in points.to_run.values()]
    named = any(config.sweep.name is not None for config in configs_of)
    steps = {from_here(ended.folder): ended.result.survival.checkpoint_step for ended in session.ended_early}
    if not steps:
        return "The same command goes on with the sweep." if named else "Nothing was under way."
    has = {folder: f"a checkpoint of step {step:,}" if step else "no checkpoint yet" for folder, step in steps.items()}
    checkpoints = enumerated([f"{folder} has {has[folder]}" for folder in sorted(has)])
    how = "from there" if any(steps.values()) else f"from {'its' if len(steps) == 1 else 'their'} beginning"
    if any(config.resume == start.NEVER for config in configs_of):
        return f"{checkpoints}: {' and '.join(f'resume={folder}' for folder in sorted(steps))} goes on {how}."
    others = "; with sweep.name=mine it would keep other points too"
    others = ", and keeps the points that have finished" if named else others
    return f"{checkpoints}: the same command goes on {how}{others * points.many}."


def _run(points: Requests, session: Session) -> None:
    if points.finished and points.sweep is not None:
        count = points.finished + len(points.to_run)
        kept = f"Sweep {points.sweep.folder.name}: {points.finished} of {count} points have finished and are kept."
        session.screen.say(kept if points.to_run else f"{kept} Another sweep.name runs them anew.")
    if (count_at_once := most_at_once(points, session)) > 1:
        _run_at_once(points, session, count_at_once)
        return
    count, took = len(points.to_run), list[float]()
    if points.many and points.to_run:
        _terminal().shares([*points.shown(session.results).values()])
    if points.sweep is not None and points.to_run:
        # While processes import TensorFlow, and nothing is timed.
        from pipeline.views import report

        report.warm_up()
    keys = [*points.to_run]
    for done, key in enumerate(keys):
        point, began = points.to_run[key], time.monotonic()
        if points.many:
            left = statistics.fmean(took) * (count - done) if took else None
            shown = points.shown(session.results)
            session.ahead = Ahead(shown[key].number, tuple(shown.values()), left)
            _terminal().begins(session.ahead)
        if key[1] != keys[max(0, done - 1)][1]:
            # Another round of the sweep: what the machine could do in the last one may not hold for it.
            session.baselines.clear()
        ended = start.run(point, session)
        took.append(time.monotonic() - began)
        _end(points, session, key, ended, took[-1])
        session.note_uploads()
        if session.preemption.asked:
            break
        session.release(point.config, [points.to_run[other].config for other in keys[done + 1 :]])


def _run_at_once(points: Requests, session: Session, count: int) -> None:
    from pipeline.driver.parallel import Parallel
    from pipeline.views.terminal.live import Terminal, board

    rows = points.shown(session.results | {key: one.unended("WAITING") for key, one in points.to_run.items()})

    def begun(key: Key, request: RunRequest) -> None:
        rows[key] = replace(request.unended("RUNNING"), number=rows[key].number)
        _terminal().begins(Ahead(rows[key].number, tuple(rows.values()), None))

    def ended(key: Key, point: RunResult, seconds: float) -> None:
        rows[key] = replace(point, number=rows[key].number)
        _end(points, session, key, point, seconds)

    @contextmanager
    def opened(path: Path) -> Iterator[Screen]:
        with path.open("a", encoding="utf-8") as file:
            yield Terminal(console_on(file))

    with board(console_on(sys.stdout), rows):
        Parallel(points, session, count, opened, begun, ended).run()


def _end(points: Requests, session: Session, key: Key, ended: RunResult, seconds: float) -> None:
    session.results[key], status = ended, ended.result.ending.status
    if points.sweep is not None and status != "PLANNED":
        points.sweep.note(points.entries[key], ended, seconds)
    shown = points.shown(session.results)[key]
    _tell(shown, points.many)
    if points.many and status not in ("PLANNED", "PREDICTED"):
        _terminal().ended(shown, seconds)


def _conclude(points: Requests, session: Session) -> signals.Interrupted | None:
    """Writes the sweep's report or shows its table, and waits for MLflow; returns the signal that ended that."""
    written: WrittenReport | None = None
    try:
        if points.sweep is not None and not session.preemption.asked:
            from pipeline.commands import results
            from pipeline.views import report

            written = report.write(points.sweep.folder)
    except (UserError, OSError) as error:
        say_error(f"The report of the sweep was not written: {error}")
    if written is not None:
        session.screen.say("")
        results.show_written(written)
    elif points.many and session.results:
        _show_table(points, session)
    unsent, interrupted = session.settle()
    if written is not None and interrupted is None:
        try:
            if sent := results.send(written, session.tracker(written.sweep.folder.parents[1])):
                session.pending[sent] = CLOSE_SECONDS
        except OSError as error:
            say_error(f"The report of the sweep was not written: {error}")
        unsent, interrupted = session.settle()
    _show_ids(unsent, () if points.many else _done(points, session))
    return interrupted


def _show_table(points: Requests, session: Session) -> None:
    from pipeline.views.terminal.sweep_table import sweep_table

    session.screen.say("")
    console = console_on(sys.stdout)
    console.print(sweep_table(_done(points, session), console.width), soft_wrap=True)


def _done(points: Requests, session: Session) -> list[RunResult]:
    return [point for key, point in points.shown(session.results).items() if key in session.results]


def _tell(point: RunResult, many: bool) -> None:
    ending = point.result.ending
    if ending.status == "REFUSED":
        say_error((f"Point {point.number} refused: " if many else "") + str(ending.error))
    elif point.foreseen is not None:
        from pipeline.views.terminal.result import predicted_lines

        say(console_on(sys.stdout), "", *predicted_lines(point.result, point.foreseen))
    elif ending.error and ending.status != "PLANNED":
        say(console_on(sys.stdout), *_of_log(ending.log, ending.error))
        say_error(f"{ending.error} See {point.folder}.")
    elif not many and ending.status != "PLANNED":
        from pipeline.views.terminal.result import result_table

        console = console_on(sys.stdout)
        console.print(result_table(point, console.width), soft_wrap=True)


def _show_ids(unsent: str | None, points: Sequence[RunResult]) -> None:
    """Shows finished runs' ids in MLflow that were not known when their results were shown, and what MLflow lacks."""
    for point in points:
        known = point.result.mlflow_run_id is not None
        if point.result.finished and not known and (run_id := run_id_of(point.folder)):
            from pipeline.views.terminal.result import tracked

            say(console_on(sys.stdout), f"MLflow      {tracked(run_id)}")
    if unsent:
        say_error(unsent)


def _of_log(log: str | None, error: str) -> list[str]:
    """The frames of a user's own functions in a failed process's log, or else its last lines."""
    if log is None or not Path(log).exists():
        return []
    from pipeline.worker.model_error import own_frames

    text = Path(log).read_text(errors="replace")
    if (frames := own_frames(text, error)) is not None:
        # What it failed with was told when it did.
        return [*(f"    {line}" for line in frames), f"Full traceback: {log}."]
    lines = [line for line in text.splitlines() if line.strip()][-LOG_LINES:]
    return [f"The last lines of {log}:", *(f"    {line}" for line in lines)]
