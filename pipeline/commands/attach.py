"""The command that takes the place of a run's driver that is gone: `python -m pipeline attach RUN`.

0: the run has finished. 1: it failed. 2: there is nothing to attach to. 75 and 128 + n: as a training.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from pipeline.commands.train import PREEMPTED, code_of, say_left, tell, tell_id
from pipeline.commands.verbs import OUTPUT_DIR, Key, Words, verb
from pipeline.config import config as configs
from pipeline.driver import resume, sweep
from pipeline.driver.requests import devices
from pipeline.driver.run_folders import PLAN, find
from pipeline.driver.session import Session
from pipeline.driver.supervisor import Supervisor
from pipeline.errors import UserError
from pipeline.launch import signals
from pipeline.record.log import from_here
from pipeline.views import terminal as show
from pipeline.views.mlflow import Tracker


@verb(
    "RUN",
    "Takes over a run whose command is gone while its processes train on: after launch.detach=true, or under\n"
    "cluster=hosts, slurm and kubernetes. RUN is a folder, its name, or the first letters of an MLflow id.",
    (OUTPUT_DIR, Key("end", "false", "true: save a checkpoint and end the run, as after a preemption")),
    least=1,
    most=1,
)
def attach(typed: Words) -> int:
    """Takes the place of the run's driver."""
    configs.register(partial(devices, os.environ))
    screen = show.Terminal(show.console_on(sys.stdout), time.time)
    session = Session(search=(os.getcwd(), *sys.path), environ=dict(os.environ), screen=screen, track=Tracker)
    code = 1
    try:
        end, output = typed.is_true("end"), Path(typed["output_dir"])
        folder = find(typed.words[0], output, PLAN, typed="python -m pipeline attach {}")
        with signals.interrupt(session.spares), resume.attach(folder.resolve(), session, end) as supervisor:
            code = _trained(supervisor, session)
        return code
    except UserError:
        code = 2
        raise
    except signals.Interrupted as interrupted:
        code = _left(session, interrupted)
        return code
    finally:
        session.close(code)


def _trained(supervisor: Supervisor, session: Session) -> int:
    """Takes a run to its end, and shows its result; returns the exit code."""
    request, step = supervisor.request, supervisor.run.step
    session.screen.say(f"attached   {from_here(request.folder)}, at step {step:,}")
    session.screen.planned(supervisor.plan, False, None)
    ended = request.ended(supervisor.train())
    sweep.note_alone(request.folder, ended)
    console = show.console_on(sys.stdout)
    tell(ended, False, console)
    unsent, interrupted = session.settle()
    tell_id(ended, console)
    if unsent:
        show.say_error(unsent)
    if interrupted is not None:
        return 128 + interrupted.number
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
