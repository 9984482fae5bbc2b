"""Turns the command line of `python -m pipeline sync` into what MLflow lacked, and that into an exit code."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.views.mlflow.stores import logged_in, prepare, sqlite_path, without_password
from pipeline.views.mlflow.sync import local_uri, sync


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 all sent, 1 something was not, 2 a wrong argument."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline sync",
        description="Sends what MLflow does not hold yet of the runs' event logs; repeating it changes nothing.",
    )
    parser.add_argument("folders", nargs="*", type=_folder, metavar="FOLDER", help="of a run, or above some")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs"), help="where to look without FOLDER: %(default)s"
    )
    parser.add_argument("--uri", type=_store_uri, help="of another store than the one that each run was meant for")
    given = parser.parse_args(arguments)
    prepare(os.environ)
    uri = given.uri and logged_in(given.uri, os.environ)
    try:
        return 0 if sync(given.folders, given.output_dir, uri, lambda line: print(line, flush=True)) else 1
    except KeyboardInterrupt:
        return 130


def _store_uri(text: str) -> str:
    """An argument as the URI of a store, with an absolute path in it."""
    if not re.match(r"https?://|(sqlite|postgresql|mysql|mssql)(\+\w+)?://", text):
        raise argparse.ArgumentTypeError(
            f"expected an MLflow store, received {without_password(text)!r}. "
            f"Try http://127.0.0.1:5000, or {local_uri(Path('outputs'))}"
        )
    path = sqlite_path(text)
    return text if path is None else f"sqlite:///{path.resolve()}"


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a run's folder, or one that holds some, received {text}")
    return Path(text)
