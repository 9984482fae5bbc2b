"""Turns the command line of `python -m pipeline sync` into what MLflow lacked, and that into an exit code."""

import os
import re
from pathlib import Path

from pipeline.commands.compare import MANY
from pipeline.commands.verbs import OUTPUT_DIR, Key, Verb, Words
from pipeline.errors import UserError
from pipeline.views.mlflow.stores import logged_in, prepare, sqlite_path, without_password
from pipeline.views.mlflow.sync_runs import local_uri, sync

VERB = Verb(
    "sync",
    "[FOLDER ...]",
    "Uploads to MLflow what it lacks of the runs' event logs; repeating it changes nothing.\n"
    "A FOLDER is a run's, or holds some; without one, all runs are uploaded.",
    (OUTPUT_DIR, Key("uri", None, "another MLflow store than each run's own")),
    most=MANY,
)


@VERB
def main(typed: Words) -> int:
    """Uploads what MLflow lacks. 0: all of it. 1: not all. 2: a wrong argument."""
    folders, uri = [*map(_folder, typed.words)], typed["uri"] and _store_uri(typed["uri"])
    prepare(os.environ)
    uri = uri and logged_in(uri, os.environ)
    try:
        return 0 if sync(folders, Path(typed["output_dir"]), uri or None, lambda line: print(line, flush=True)) else 1
    except KeyboardInterrupt:
        return 130


def _store_uri(text: str) -> str:
    """The URI of a store, with an absolute path in it. Raises `UserError`."""
    if not re.match(r"https?://|(sqlite|postgresql|mysql|mssql)(\+\w+)?://", text):
        raise UserError(
            "uri to be an MLflow store",
            without_password(text),
            f"uri=http://127.0.0.1:5000, or uri={local_uri(Path('outputs'))}",
        )
    path = sqlite_path(text)
    return text if path is None else f"sqlite:///{path.resolve()}"


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise UserError("a run's folder, or one that holds some", text, VERB.usage)
    return Path(text)
