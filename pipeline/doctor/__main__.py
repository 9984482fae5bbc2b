"""Looks at the host that it is started on, for a doctor elsewhere: a line of JSON for each request and response.

    {"do": "look", "host": NAME, "expected": {...}}             {"told": the `Finding`s}
    {"do": "clock"}                                             {"told": seconds since 1970}
    {"do": "answer", "host": HOST, "token": HEX}                {"told": the port}
    {"do": "measure", "host": HOST, "port": P, "token": HEX}    {"told": the `LinkFacts`}

A request that fails gets {"failed": why}. It ends with its standard input.

A link is measured by a number there and back, then by vectors that both sides add up, as a ring of two does: each sends
half of its vector, adds the half that it gets to its own, and sends the sum back, in both directions at once.
"""

import contextlib
import hmac
import json
import os
import socket
import statistics
import sys
import threading
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np

from pipeline.doctor.judge import Expected, LinkFacts
from pipeline.doctor.look import look

# Bytes of the vectors: a layer's bias, a small layer, and what tells the link's speed from its latency.
SIZES = (64 << 10, 1 << 20, 16 << 20)
# Exchanges of each size, or seconds of them; a size that would take longer than the last once is left out.
REPEATS, SECONDS, PATIENCE_SECONDS = 9, 1.0, 4.0
ROUND_TRIPS = 25
CONNECT_SECONDS, MESSAGE_SECONDS, ANSWER_SECONDS = 5.0, 30.0, 60.0
# Bytes of the number that opens a step: a size to exchange, or 0 for nothing but the number itself.
HEADER = 8


def main() -> None:
    """Responds until there are no more requests."""
    # What libraries print is no response.
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            match request := json.loads(line):
                case {"do": "look", "host": host, "expected": expected}:
                    response: Any = look(host, msgspec.convert(expected, Expected), os.environ)
                case {"do": "clock"}:
                    response = time.time()
                case {"do": "answer", "host": host, "token": token}:
                    response = listen(host, bytes.fromhex(token))
                case {"do": "measure", "host": host, "port": port, "token": token}:
                    response = measure(host, port, bytes.fromhex(token))
                case _:
                    raise ValueError(f"Expected a request that is known, received {request!r:.80}.")
            answer = {"told": response}
        except (OSError, ValueError, TypeError) as error:
            answer = {"failed": (error.strerror if isinstance(error, OSError) else None) or str(error)}
        # In ASCII alone, since the name of a folder may hold bytes that are no text.
        responses.write(json.dumps(answer, default=msgspec.to_builtins).encode() + b"\n")
        responses.flush()


def listen(host: str, token: bytes) -> int:
    """Listens at an address of this host for one exchange, in a thread; returns the port. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    listening.settimeout(ANSWER_SECONDS)
    threading.Thread(target=_serve, args=(listening, token), daemon=True).start()
    return int(listening.getsockname()[1])


def _serve(listening: socket.socket, token: bytes) -> None:
    """Serves the side that has the token until it hangs up; hangs up on others."""
    with listening, contextlib.suppress(OSError):
        while True:
            connected = listening.accept()[0]
            connected.settimeout(CONNECT_SECONDS)
            with contextlib.closing(_Side(connected)) as side, contextlib.suppress(OSError):
                if not hmac.compare_digest(side.receive(len(token)), token):
                    continue
                connected.settimeout(MESSAGE_SECONDS)
                connected.sendall(token)
                while (size := int.from_bytes(side.receive(HEADER))) <= max(SIZES):
                    connected.sendall(size.to_bytes(HEADER))
                    if size:
                        side.add_up(size)
                return


def measure(host: str, port: int, token: bytes) -> LinkFacts:
    """The round trip to the side that listens at HOST:PORT, and the exchanges with it; or why there are none."""
    try:
        connected = socket.create_connection((host, port), CONNECT_SECONDS)
        connected.settimeout(MESSAGE_SECONDS)
        with contextlib.closing(_Side(connected)) as side:
            connected.sendall(token)
            side.receive(len(token))
            round_trips = timeit.repeat(partial(side.request, 0), number=1, repeat=ROUND_TRIPS)
            exchanges: list[tuple[int, float]] = []
            for size in SIZES:
                # As long as the last one lets expect.
                if exchanges and exchanges[-1][1] * size / exchanges[-1][0] > PATIENCE_SECONDS:
                    break
                # The fastest counts: whatever else hosts do meanwhile only makes them slower.
                seconds: list[float] = []
                while len(seconds) < REPEATS and sum(seconds) < SECONDS:
                    side.request(size)
                    seconds += timeit.repeat(partial(side.add_up, size), number=1, repeat=1)
                exchanges.append((size, min(seconds)))
    except OSError as error:
        return LinkFacts(error=error.strerror or str(error))
    return LinkFacts(statistics.median(round_trips), tuple(exchanges))


class _Side:
    """One side of an exchange, with its vector and room for the half that comes in. All of it raises `OSError`."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connected, self._incoming, self._threads = connected, connected.makefile("rb"), ThreadPoolExecutor(1)
        self._vector = np.zeros(0, np.float32)

    def close(self) -> None:
        self._incoming.close()
        self._connected.close()
        self._threads.shutdown(wait=False)

    def request(self, size: int) -> None:
        """Opens a step and waits until the other side is ready for it."""
        self._connected.sendall(size.to_bytes(HEADER))
        self.receive(HEADER)

    def receive(self, count: int) -> bytes:
        data = self._incoming.read(count)
        if len(data) < count:
            raise ConnectionError("the other host hung up")
        return data

    def add_up(self, size: int) -> None:
        """Adds up half of a vector of so many bytes, gives the other side the sum, and gets that of the other half."""
        if self._vector.nbytes != size:
            self._vector, self._received = np.ones(size // 4, np.float32), np.zeros(size // 8, np.float32)
        first, second = np.split(self._vector, 2)
        self._swap(first)
        np.add(self._received, first, out=self._received)
        self._swap(second)

    def _swap(self, half: np.ndarray) -> None:
        room = self._received.view(np.uint8).data
        sending = self._threads.submit(self._connected.sendall, half.view(np.uint8).data)
        # Until the room is full, or the other side has hung up.
        complete = self._incoming.readinto(room) == len(room)  # type: ignore[attr-defined]
        sending.result()
        if not complete:
            raise ConnectionError("the other host hung up")


if __name__ == "__main__":
    main()
