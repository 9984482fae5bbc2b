"""Looks at the host that it is started on, for a doctor elsewhere: a line of JSON for each request and response.

    {"do": "look", "asked": {...}}                              {"told": the `Facts`}
    {"do": "clock"}                                             {"told": seconds since 1970}
    {"do": "answer", "host": HOST, "token": HEX}                {"told": the port}
    {"do": "measure", "host": HOST, "port": P, "token": HEX}    {"told": the `LinkFacts`}

A request that fails gets {"failed": why}. It ends with its standard input.
"""

import json
import os
import sys
import time
from typing import Any

import msgspec

from pipeline.doctor.facts import Look
from pipeline.doctor.link import listen, measure
from pipeline.doctor.look import look


def respond(request: dict[str, Any]) -> Any:
    """The response to one request. Raises `OSError`, and what a wrong request does."""
    match request["do"]:
        case "look":
            return msgspec.to_builtins(look(msgspec.convert(request["asked"], Look), os.environ))
        case "clock":
            return time.time()
        case "answer":
            return listen(request["host"], bytes.fromhex(request["token"]))
        case "measure":
            return msgspec.to_builtins(measure(request["host"], request["port"], bytes.fromhex(request["token"])))
    raise ValueError(f"Expected a request that is known, received {request['do']!r:.80}.")


def main() -> None:
    """Responds until there are no more requests."""
    # What libraries print is no response.
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            response = {"told": respond(json.loads(line))}
        except (OSError, ValueError, KeyError, TypeError) as error:
            response = {"failed": (error.strerror if isinstance(error, OSError) else None) or str(error)}
        responses.write(json.dumps(response) + "\n")
        responses.flush()


if __name__ == "__main__":
    main()
