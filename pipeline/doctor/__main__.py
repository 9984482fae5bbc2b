"""Answers, on the host that it is started on, what a doctor elsewhere asks: a line of JSON for each on standard input.

    {"do": "look", "asked": {...}}                              {"told": the `Facts`}
    {"do": "clock"}                                             {"told": seconds since 1970}
    {"do": "answer", "host": HOST, "token": HEX}                {"told": the port}
    {"do": "measure", "host": HOST, "port": P, "token": HEX}    {"told": the `Exchanged`}

What cannot be done is {"failed": why}. It ends with its input.
"""

import json
import os
import sys
import time
from typing import Any

from pipeline.doctor.exchange import Answering, measure
from pipeline.doctor.facts import Look
from pipeline.doctor.look import look
from pipeline.record import plain


class Helper:
    """What is kept between two questions: the side of an exchange that waits."""

    def __init__(self) -> None:
        self._answering: Answering | None = None

    def told(self, asked: dict[str, Any]) -> Any:
        """What one question comes to. Raises `OSError`, and what a wrong question does."""
        match asked["do"]:
            case "look":
                return plain.to_plain(look(plain.made_of(Look, asked["asked"]), os.environ))
            case "clock":
                return time.time()
            case "answer":
                self.close()
                self._answering = Answering(asked["host"], bytes.fromhex(asked["token"]))
                return self._answering.port
            case "measure":
                return plain.to_plain(measure(asked["host"], asked["port"], bytes.fromhex(asked["token"])))
        raise ValueError(f"Expected a question that is known, received {asked['do']!r:.80}.")

    def close(self) -> None:
        """Waits no more."""
        if self._answering is not None:
            self._answering.close()
            self._answering = None


def main() -> None:
    """Answers until there are no more questions."""
    # What libraries print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    helper = Helper()
    for line in sys.stdin:
        try:
            answer = {"told": helper.told(json.loads(line))}
        except (OSError, ValueError, KeyError, TypeError) as error:
            answer = {"failed": (error.strerror if isinstance(error, OSError) else None) or str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    helper.close()


if __name__ == "__main__":
    main()
