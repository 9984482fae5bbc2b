"""Turns the command line into a follower's life or one `sync`, and that into an exit code.

It prepares the process: its signals, its output and what MLflow reads from its environment.
"""

import argparse
import contextlib
import gc
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from pipeline.events import Event
from pipeline.track.follow import NICENESS, follow, niceness
from pipeline.track.stores import logged_in, prepare, sqlite_path, without_password
from pipeline.track.sync import local_uri, sync


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 all sent, 1 something was not, 2 a wrong argument."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.track", description="Sends event logs to MLflow.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("follow", help="started by a run: follows the logs named on standard input")
    later = commands.add_parser("sync", help="send what MLflow does not hold yet; repeating it changes nothing")
    later.add_argument("folders", nargs="*", type=_folder, metavar="FOLDER", help="of a run, or above some")
    later.add_argument(
        "--output-dir", type=Path, default=Path("outputs"), help="where to look without FOLDER: %(default)s"
    )
    later.add_argument("--uri", type=_store_uri, help="of another store than the one that each run was meant for")
    given = parser.parse_args(arguments)
    prepare(os.environ)
    if given.command == "follow":
        # Ctrl-C and a scheduler's signals are for the conductor, whose end this process then sees.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # What a library prints must not come between the answers.
        answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        # While TensorFlow is imported too, and nothing is measured; a failure is told when MLflow is needed.
        # None of it is garbage, which to look for would take a fifth of the time.
        gc.disable()
        with contextlib.suppress(Exception):
            import mlflow.tracking  # noqa: F401
        gc.freeze()
        gc.enable()
        with niceness(NICENESS):
            follow(sys.stdin.buffer, lambda news: _tell(answers, news))
        return 0
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


def _tell(answers: IO[str], news: Event) -> None:
    # A conductor that is gone does not listen.
    with contextlib.suppress(OSError):
        answers.write(json.dumps(news) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.exit(main())
