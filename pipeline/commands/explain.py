"""Says again what a run's lost efficiency was made of: `python -m pipeline explain RUN`."""

import sys
from pathlib import Path

from pipeline.analyze.history import load
from pipeline.commands.verbs import OUTPUT_DIR, Verb, Words
from pipeline.driver.run_folders import find
from pipeline.errors import UserError
from pipeline.views import terminal as show
from pipeline.views.terminal.result import explained_lines

VERB = Verb(
    "explain",
    "RUN",
    "Explains a run's lost efficiency; RUN is a folder, its name, or the first letters of an MLflow id.\n"
    "With key=value in place of RUN it trains first: python -m pipeline explain strategy=mirrored workers=2",
    (OUTPUT_DIR,),
    least=1,
    most=1,
)


@VERB
def main(typed: Words) -> int:
    """Shows a run's lost efficiency. 0: shown. 2: the run cannot be found, or was not explained."""
    run = load(find(typed.words[0], Path(typed["output_dir"])))
    lines = explained_lines(run.result.explained, run.result.speed.efficiency)
    if not lines:
        raise UserError(
            "a run that was explained",
            f"{run.folder}, which was not",
            "python -m pipeline explain strategy=... to train and explain",
        )
    console = show.console_on(sys.stdout)
    for line in lines:
        show.say(console, line)
    return 0
