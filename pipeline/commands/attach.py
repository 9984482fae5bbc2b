"""The command that takes the place of a run's conductor that is gone: `python -m pipeline attach RUN`.

0: the run has finished. 1: it failed. 2: there is nothing to attach to. 75 and 128 + n: as a training.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipeline.commands.asked import OUTPUT_DIR, Key, Verb, asks_for_help
from pipeline.commands.train import PREEMPTED, code_of, say_left, tell
from pipeline.config import config as configs
from pipeline.errors import UserError
from pipeline.launch import LaunchError, signals
from pipeline.record.log import from_here
from pipeline.run import run, sweep
from pipeline.run.attach import Attached, attach, found
from pipeline.run.point import Point
from pipeline.run.points import devices
from pipeline.run.session import Session
from pipeline.run.views import PointResult
from pipeline.views import terminal as show
from pipeline.views.mlflow import Tracker

VERB = Verb(
    "attach",
    "RUN",
    "Takes the place of a run's command that is gone, whose processes train on: after launch.detach=true, or under\n"
    "cluster=hosts, slurm and kubernetes. RUN is a folder, its name, or the first letters of an MLflow id.",
    (OUTPUT_DIR, Key("end", "false", "true: has the run save a checkpoint and end, as a preemption would")),
)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    if asks_for_help(arguments):
        print(VERB.help())
        return 0
    configs.register(partial(devices, os.environ))
    screen = show.Terminal(show.console_on(sys.stdout), time.time)
    session = Session(search=(os.getcwd(), *sys.path), environ=dict(os.environ), screen=screen, track=Tracker)
    code = 1
    try:
        asked = VERB.asked(arguments)
        if len(asked.words) != 1:
            raise UserError("one run", len(asked.words), f"{VERB.usage}")
        if asked["end"] not in ("true", "false"):
            raise UserError("end to be true or false", asked["end"], "end=true")
        folder = found(asked.words[0], Path(asked["output_dir"]))
        with (
            signals.interrupt(run.leaves_running(session)),
            attach(folder, session, asked["end"] == "true") as attached,
        ):
            code = _gone_on_with(attached, session)
        return code
    except (UserError, LaunchError) as error:
        show.say_error(str(error))
        code = 2
        return code
    except signals.Interrupted as interrupted:
        code = _left(session, interrupted)
        return code
    finally:
        session.close(code)


def _gone_on_with(attached: Attached, session: Session) -> int:
    """Conducts a run to its end, and shows what came of it; returns the exit code."""
    request, step = attached.request, attached.earlier.step
    session.screen.say(f"attached   {from_here(request.folder)}, at step {step:,}")
    session.screen.planned(attached.planned, False, None)
    point = Point(request, attached.planned, session, attached.earlier, attached.under_way.known, attached)
    ended: PointResult = request.ended(point.run(attached.cluster, attached.baseline))
    sweep.note_alone(request.folder, ended)
    tell(ended, False, show.console_on(sys.stdout))
    if ended.result.ending.status == "PREEMPTED":
        return 128 + signal.SIGINT if session.preemption.by_person else PREEMPTED
    return code_of([ended])


def _left(session: Session, interrupted: signals.Interrupted) -> int:
    """Says what becomes of a run whose command a signal has ended; returns the exit code."""
    if session.left is not None:
        say_left(session.left)
    else:
        show.say_error(f"Ended by {interrupted}. The run's own command goes on from its last checkpoint.")
    return PREEMPTED if interrupted.number in signals.PREEMPTING else 128 + interrupted.number
