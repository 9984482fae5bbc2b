"""A follower's life, which a `Tracker` starts: follows the logs named on standard input until that ends.

It prepares the process: its signals, its output and what MLflow reads from its environment.
"""

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import IO

from pipeline.views.mlflow.follow import NICENESS, follow, niceness
from pipeline.views.mlflow.stores import prepare


def main() -> None:
    """Follows until standard input ends."""
    prepare(os.environ)
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


def _tell(answers: IO[str], news: Mapping[str, object]) -> None:
    # A conductor that is gone does not listen.
    with contextlib.suppress(OSError):
        answers.write(json.dumps(news) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
