"""Measures the link between two hosts: one number there and back, then vectors that both add up, as a ring of two does.

Each sends half of its vector, adds the half that it gets to its own, and sends the sum back: 2 (n - 1) / n of the bytes
in each direction (Patarasuk & Yuan, 2009), which for two is all of them. Both directions are busy at once, as in
training. Whoever connects shows a token that was drawn for this exchange alone; others are hung up on.
"""

import contextlib
import hmac
import socket
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pipeline.doctor.facts import Exchanged, Trip

# Bytes of the vectors: a layer's bias, a small layer, and what tells the link's speed from its latency.
SIZES = (64 << 10, 1 << 20, 16 << 20)
# Of each size so many exchanges, or for so long; a size that would take longer than this once is left out.
REPEATS, SECONDS, PATIENCE_SECONDS = 9, 1.0, 4.0
ROUND_TRIPS = 25
CONNECT_SECONDS, MESSAGE_SECONDS = 5.0, 30.0
# The numbers that open a step: of a size to exchange, or the end.
HEADER, PING = 8, 0

Vector = NDArray[np.float32]


class Answering:
    """The side that waits for the other one at a port of its own."""

    def __init__(self, host: str, token: bytes) -> None:
        """Listens at an address of this host. Raises `OSError`."""
        self._token = token
        self._listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._answering = threading.Thread(target=self._answer, daemon=True)
        self._answering.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._answering.join(1.0)

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listening.accept()
                with connected, contextlib.suppress(OSError):
                    connected.settimeout(CONNECT_SECONDS)
                    if not hmac.compare_digest(_exactly(connected, len(self._token)), self._token):
                        continue
                    _prepare(connected)
                    connected.sendall(self._token)
                    _serve(connected)
                    return


def measure(host: str, port: int, token: bytes, clock: Callable[[], float] = time.perf_counter) -> Exchanged:
    """What the link to the side that answers at HOST:PORT can do."""
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connected:
            _prepare(connected)
            connected.sendall(token)
            _exactly(connected, len(token))
            round_trips = [_timed(clock, lambda: _ask(connected, PING)) for _ in range(ROUND_TRIPS)]
            trips: list[Trip] = []
            for size in SIZES:
                # As long as the last one lets expect.
                if trips and trips[-1].seconds * size / trips[-1].size > PATIENCE_SECONDS:
                    break
                trips.append(Trip(size, _exchanging(connected, size, clock)))
    except OSError as error:
        return Exchanged(error=error.strerror or str(error))
    return Exchanged(statistics.median(round_trips), tuple(trips))


def _exchanging(connected: socket.socket, size: int, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of some exchanges of a size: what else hosts do meanwhile only makes them slower."""
    vectors = _Vectors(size)
    taken: list[float] = []
    while len(taken) < REPEATS and sum(taken) < SECONDS:
        _ask(connected, size)
        taken.append(_timed(clock, lambda: vectors.add_up(connected)))
    return min(taken)


def _serve(connected: socket.socket) -> None:
    """Does what the other side asks for, until it hangs up. Raises `OSError`."""
    vectors = _Vectors(PING)
    while True:
        size = int.from_bytes(_exactly(connected, HEADER))
        if size > max(SIZES):
            return
        if size != vectors.size:
            vectors = _Vectors(size)
        connected.sendall(size.to_bytes(HEADER))
        if size:
            vectors.add_up(connected)


class _Vectors:
    """This side's vector of so many bytes, and room for the half that comes in, made once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._own: Vector = np.ones(size // 4, np.float32)
        self._theirs: Vector = np.zeros(size // 8, np.float32)

    def add_up(self, connected: socket.socket) -> None:
        """Each side adds up one half, and gives the other the sum. Raises `OSError`."""
        half = len(self._theirs)
        self._swap(connected, self._own[:half])
        np.add(self._theirs, self._own[:half], out=self._theirs)
        self._swap(connected, self._own[half : 2 * half])

    def _swap(self, connected: socket.socket, ours: Vector) -> None:
        """Sends a vector while one of the same size comes in."""
        failed: list[OSError] = []

        def send() -> None:
            try:
                connected.sendall(ours.view(np.uint8).data)
            except OSError as error:
                failed.append(error)

        sending = threading.Thread(target=send)
        sending.start()
        try:
            _fill(connected, self._theirs.view(np.uint8).data)
        finally:
            sending.join()
        if failed:
            raise failed[0]


def _ask(connected: socket.socket, size: int) -> None:
    connected.sendall(size.to_bytes(HEADER))
    _exactly(connected, HEADER)


def _timed(clock: Callable[[], float], act: Callable[[], None]) -> float:
    began = clock()
    act()
    return clock() - began


def _prepare(connected: socket.socket) -> None:
    connected.settimeout(MESSAGE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connected: socket.socket, count: int) -> bytearray:
    """So many bytes. Raises `OSError` where the other side hangs up before."""
    data = bytearray(count)
    _fill(connected, memoryview(data))
    return data


def _fill(connected: socket.socket, view: memoryview) -> None:
    place = 0
    while place < len(view):
        more = connected.recv_into(view[place:])
        if not more:
            raise ConnectionError("the other host hung up")
        place += more
