"""Asks this host for a free port, and for the addresses of another one by its name."""

import socket
import threading
import time

from pipeline.doctor.facts import Name, Port
from pipeline.launch.ports import holder

# A resolver that nobody answers takes its own time, which nothing limits.
NAME_SECONDS = 5.0


def port(address: str) -> Port:
    """Can this host listen at HOST:PORT, as TensorFlow would? PORT 0 is any."""
    host, _, number = address.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listening:
            # Of a process that has just ended, connections that linger are in nobody's way.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host.strip("[]"), int(number)))
            listening.listen()
    except OSError as error:
        return Port(address, error.strerror or str(error), holder(int(number)))
    return Port(address)


def name(given: str, seconds: float = NAME_SECONDS) -> Name:
    """The addresses of a host by its name."""
    found: list[tuple[str, ...] | OSError] = []

    def ask() -> None:
        try:
            told = socket.getaddrinfo(given, None, type=socket.SOCK_STREAM)
            found.append(tuple(dict.fromkeys(str(address[0]) for *_, address in told)))
        except OSError as error:
            found.append(error)

    asking, began = threading.Thread(target=ask, daemon=True), time.monotonic()
    asking.start()
    asking.join(seconds)
    took = time.monotonic() - began
    if not found:
        return Name(given, seconds=took, error=f"no answer within {seconds:g} s")
    if isinstance(found[0], OSError):
        return Name(given, seconds=took, error=found[0].strerror or str(found[0]))
    return Name(given, found[0], took)
