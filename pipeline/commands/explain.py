"""Says again what a run's lost efficiency was made of: `python -m pipeline explain RUN`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.analyze.history import find, load
from pipeline.commands.asked import Verb, asks_for_help
from pipeline.errors import UserError
from pipeline.views import terminal as show
from pipeline.views.terminal.result import explained_lines

VERB = Verb(
    "explain",
    "RUN",
    "Says what a run's lost efficiency was made of; RUN is a folder, its name, or the first letters of an MLflow id.\n"
    "With key=value in place of RUN it trains first: python -m pipeline explain strategy=mirrored workers=2",
)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code: 0 told, 2 the run cannot be found, or was not explained."""
    if asks_for_help(arguments):
        print(VERB.help())
        return 0
    try:
        asked = VERB.asked(arguments)
        if len(asked.words) != 1:
            raise UserError("one run", len(asked.words), f"{VERB.usage}")
        run = load(find(asked.words[0], Path(asked["output_dir"])))
        lines = explained_lines(run.result.explained, run.result.speed.efficiency)
        if not lines:
            raise UserError(
                "a run that was explained",
                f"{run.folder}, which was not",
                "python -m pipeline explain strategy=... to train and explain",
            )
    except UserError as error:
        show.say_error(str(error))
        return 2
    console = show.console_on(sys.stdout)
    for line in lines:
        show.say(console, line)
    return 0
