"""Removes runs that are old and not among the best, from disk and MLflow together: `python -m pipeline clean`.

It says what it would remove, and with dry=false removes it. 0: said, or removed. 1: something could not be removed.
2: a wrong argument.
"""

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeline.commands.verbs import OUTPUT_DIR, Key, Verb, Words
from pipeline.errors import UserError
from pipeline.run import retention
from pipeline.run.retention import Stored
from pipeline.views import report
from pipeline.views import terminal as show
from pipeline.views.mlflow import stores
from pipeline.views.mlflow.stores import prepare, reason
from pipeline.views.terminal.words import amount, brackets, duration, listed, plural, times

A_DAY = 86_400  # seconds
VERB = Verb(
    "clean",
    "",
    "Says which runs and sweeps it would remove, from disk and MLflow together; with dry=false it removes them.\n"
    "Those go that are older and have none of the best runs: of each model on each data set, those with the highest "
    "speedup.\nA sweep goes whole. What is under way stays, and what is not finished.",
    (
        Key("keep_best", "5", "how many runs of each model on each data set stay, however old they are"),
        Key("older_than", "30d", "only what was last written to so long ago goes: 12h, 30d, 8w"),
        Key("unfinished", "false", "true: also what a command could go on with"),
        Key("dry", "true", "false: remove it"),
        OUTPUT_DIR,
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    return VERB.run(arguments, _clean)


def _clean(typed: Words) -> int:
    rules, dry = _rules(typed), typed.is_true("dry")
    console, now = show.console_on(sys.stdout), time.time()
    folders = retention.gather(Path(typed["output_dir"]))
    why = retention.staying(folders, *rules, now)
    going = [folder for folder in folders if why[folder.folder] is None]
    failed = 0
    prepare(os.environ)
    for folder in going:
        problem = "" if dry else _remove(folder)
        failed += bool(problem)
        what = f"not removed ({problem})" if problem else "would remove" if dry else "removed"
        show.say(console, f"{what}: {_about(folder, now)}")
    stays = Counter(reason for reason in why.values() if reason)
    for line in _sum_up(going, stays, dry, failed):
        show.say(console, line)
    return 1 if failed else 0


def _rules(typed: Words) -> tuple[int, int, bool]:
    """Returns which runs go. Raises `UserError`."""
    best, older_than = typed["keep_best"], typed["older_than"]
    age = retention.seconds_of(older_than)
    if age is None:
        raise UserError("older_than to be an age, as 12h, 30d or 8w", older_than or "nothing", "older_than=30d")
    if not best.isdecimal():
        raise UserError("keep_best to be a whole number", best or "nothing", "keep_best=5")
    return int(best), age, typed.is_true("unfinished")


def _remove(kept: Stored) -> str:
    """Removes it from MLflow, then from disk; returns what was wrong."""
    sent = [*kept.runs, kept.folder / report.FOLDER]
    try:
        for folder in sent:
            if folder.resolve().is_relative_to(kept.folder.resolve()):
                stores.remove(folder)
        shutil.rmtree(kept.folder)
    except OSError as error:
        return f"{error.filename or kept.folder}: {error.strerror or error}"
    except Exception as error:
        # What a store raises is MLflow's affair: it is told in a line, and the folder stays.
        return reason(error, "the store").rstrip(".")
    return ""


def _about(folder: Stored, now: float) -> str:
    """Returns a line about what goes."""
    speedups = [result.speed.speedup for result in folder.results if result and result.speed.speedup]
    age = now - folder.written
    return listed(
        str(folder.folder),
        plural(len(folder.runs), "run") if len(folder.runs) > 1 else "",
        amount(folder.bytes),
        f"{duration(age) if age < A_DAY else plural(int(age / A_DAY), 'day')} old",
        f"{times(max(speedups))} at best" if speedups else "",
    )


def _sum_up(going: Sequence[Stored], stays: Counter[str], dry: bool, failed: int) -> list[str]:
    """Returns lines that say how much goes, and why the rest stays."""
    size = amount(sum(folder.bytes for folder in going))
    why = brackets(listed(*(f"{count} {reason}" for reason, count in stays.items())))
    verb = "would go" if dry else "went"
    lines = [f"{plural(len(going) - failed, 'folder')} {verb}, {size}; {stays.total()} stay{why}."]
    return [*lines, *(["Nothing was removed yet: type it again with dry=false."] if dry and going else [])]
