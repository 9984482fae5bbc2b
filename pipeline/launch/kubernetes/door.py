"""Connects a pod's agent with a driver that pods cannot dial: through the API server, which reaches both.

An agent dials, and the API server only opens connections into a pod. So the pod has a door on its loopback interface:
a connection that comes in by it becomes the agent's once that dials. All traffic is encrypted, and both ends show that
they know the run's token; the door and the API server only carry it.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

LOOPBACK = "127.0.0.1"
PIECE_BYTES = 1 << 16
AGAIN_SECONDS, LOOK_SECONDS = 1.0, 0.5


class Door:
    """In a pod: listens at a port for the driver's connections, and at another, `address`, for the agent's."""

    def __init__(self, port: int) -> None:
        self._lock = threading.Lock()
        # The driver's connections that the agent has not taken.
        self._waiting: list[socket.socket] = []
        self._listening = [socket.create_server((LOOPBACK, number)) for number in (port, 0)]
        self.address = f"{LOOPBACK}:{self._listening[1].getsockname()[1]}"
        for listening, take in zip(self._listening, (self._let_wait, self._join), strict=True):
            threading.Thread(target=_accept, args=(listening, take), daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        for listening in self._listening:
            # Closing does not end a thread that waits for a connection.
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        with self._lock:
            for each in self._waiting:
                each.close()

    def _let_wait(self, came: socket.socket) -> None:
        with self._lock:
            # The driver has given up the one that it had before.
            given_up, self._waiting = self._waiting, [came]
        for each in given_up:
            each.close()

    def _join(self, agent: socket.socket) -> None:
        with self._lock:
            driver = self._waiting.pop() if self._waiting else None
        if driver is None:
            # It dials again.
            agent.close()
        else:
            threading.Thread(target=carry, args=(agent, driver), daemon=True).start()


class Ways:
    """In the driver: a connection into each pod that has a door. `forward` opens one, or raises `OSError`.

    What comes out of a pod is carried to `address`, HOST:PORT, where the driver listens.
    """

    def __init__(self, address: str, forward: Callable[[str], socket.socket]) -> None:
        self._address, self._forward = address, forward
        self._over = threading.Event()
        # The pods' ends of the connections that are open.
        self._pods = set[socket.socket]()
        # Why there is no connection into a pod, by its host.
        self.problems: dict[str, str] = {}

    def keep(self, host: str) -> None:
        """Keeps a connection into a pod open from now on."""
        threading.Thread(target=self._keep, args=(host,), name=f"way to {host}", daemon=True).start()

    def close(self) -> None:
        """Closes all connections."""
        self._over.set()
        for pod in list(self._pods):
            with contextlib.suppress(OSError):
                pod.shutdown(socket.SHUT_RDWR)

    def _keep(self, host: str) -> None:
        while not self._over.is_set():
            try:
                with self._forward(host) as pod:
                    self.problems.pop(host, None)
                    self._pods.add(pod)
                    with contextlib.suppress(OSError):
                        self._join(pod)
                    self._pods.discard(pod)
            except OSError as error:
                self.problems[host] = str(error)
            self._over.wait(AGAIN_SECONDS)

    def _join(self, pod: socket.socket) -> None:
        if first := self._first(pod):
            to, _, port = self._address.rpartition(":")
            with socket.create_connection((to, int(port))) as driver:
                driver.sendall(first)
                carry(pod, driver)

    def _first(self, pod: socket.socket) -> bytes:
        """The first bytes that an agent sends, however late it dials; none if the connection has ended."""
        pod.settimeout(LOOK_SECONDS)
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                first = pod.recv(PIECE_BYTES)
                pod.settimeout(None)
                return first
        return b""


def carry(one: socket.socket, other: socket.socket) -> None:
    """Carries bytes both ways until either end closes, and closes both."""
    back = threading.Thread(target=_bring, args=(other, one), daemon=True)
    back.start()
    _bring(one, other)
    back.join()
    for each in (one, other):
        each.close()


def _bring(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE_BYTES):
            to.sendall(piece)
    for each in (source, to):
        # Which ends what the other direction waits for.
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, take: Callable[[socket.socket], None]) -> None:
    while True:
        try:
            came, _ = listening.accept()
        except OSError:
            if listening.fileno() < 0:
                return
            # Too many files are open, perhaps for a moment.
            time.sleep(AGAIN_SECONDS)
            continue
        take(came)
