"""Answers `python -m pipeline.VERB`, as verbs were typed once, with what to type now."""

import shlex
import sys
from typing import NoReturn


def answer(verb: str, called: str | None = None) -> NoReturn:
    """Says how a verb is typed now, with the arguments that were given, and ends with 2.

    `called` is the module that was started, where that has another name; a training has no verb.
    """
    now = shlex.join(["python", "-m", "pipeline", *verb.split(), *sys.argv[1:]])
    print(f"pipeline: Expected {now}, received python -m pipeline.{called or verb}. Try {now}.", file=sys.stderr)
    sys.exit(2)
