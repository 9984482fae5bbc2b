"""A line between a conductor and an agent on another host: JSON messages over a socket, once both have shown the key.

The key never travels: each proves that it has it, by an HMAC over what the other has just drawn. What is said after is
not encrypted, as TensorFlow's own transport beside it is not.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from pipeline.plan.checks import stays_here

Message = dict[str, Any]
# No message is longer: a plan for the most workers is some megabytes.
MOST_BYTES = 1 << 28
HANDSHAKE_SECONDS = 5.0
NONCE_BYTES = 32
# A peer whose machine is gone is given up after about so many seconds.
IDLE_SECONDS, PROBE_SECONDS, PROBES = 5, 2, 5


class LinkError(OSError):
    """A line that cannot be had, or has ended."""


class Link:
    """One end of a line. Messages are sent whole, from any thread, and taken by one."""

    def __init__(self, connected: socket.socket) -> None:
        self.connection = Connection(connected.detach())
        self._lock = threading.Lock()
        self.open = True

    def send(self, message: Message) -> None:
        """Sends a message; where the other end is gone it is lost, which `take` tells of."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self.connection.send_bytes(json.dumps(message).encode())

    def take(self) -> Message:
        """The next message, waiting for it. Raises `LinkError` at the end of the line."""
        try:
            message: Message = json.loads(self.connection.recv_bytes(MOST_BYTES))
            return message
        except (EOFError, OSError, ValueError) as error:
            self.close()
            raise LinkError(str(error)) from error

    def close(self) -> None:
        """Ends the line."""
        self.open = False
        self.connection.close()


def connect(address: str, key: bytes) -> Link:
    """A line to the agent that listens at HOST:PORT. Raises `LinkError` where none answers, or one with another key."""
    host, _, port = address.rpartition(":")
    try:
        connected = socket.create_connection((host, int(port)), timeout=HANDSHAKE_SECONDS)
    except OSError as error:
        raise LinkError(str(error)) from error
    return _greeted(connected, key, b"conductor", b"agent")


def accept(listening: socket.socket, key: bytes, timeout: float) -> Link | None:
    """The line that a conductor with the key opens; None where none has after `timeout` seconds.

    What others say who find the port is not waited for, and does not keep the conductor away.
    """
    found: list[Link] = []
    arrived = threading.Condition()

    def greet(connected: socket.socket) -> None:
        try:
            link = _greeted(connected, key, b"agent", b"conductor")
        except LinkError:
            return
        with arrived:
            found.append(link)
            arrived.notify()

    until = time.monotonic() + timeout
    listening.settimeout(0.1)
    while not found and time.monotonic() < until:
        with contextlib.suppress(TimeoutError):
            connected, _ = listening.accept()
            connected.settimeout(HANDSHAKE_SECONDS)
            threading.Thread(target=greet, args=(connected,), daemon=True).start()
        with arrived:
            arrived.wait_for(lambda: found, 0.01)
    for late in found[1:]:
        late.close()
    return found[0] if found else None


def listen(address: str) -> socket.socket:
    """A socket that listens at HOST:PORT; on every interface where the host is a name that others know this one by."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host, int(port)))
    except OSError:
        if stays_here(address):
            raise
    return socket.create_server(("", int(port)))


def _greeted(connected: socket.socket, key: bytes, me: bytes, other: bytes) -> Link:
    """The line, once each side has proved to the other that it has the key. Raises `LinkError`, and hangs up."""
    try:
        drawn = secrets.token_bytes(NONCE_BYTES)
        connected.sendall(drawn)
        theirs = _exactly(connected, NONCE_BYTES)
        connected.sendall(hmac.digest(key, me + theirs + drawn, hashlib.sha256))
        if not hmac.compare_digest(
            _exactly(connected, hashlib.sha256().digest_size), hmac.digest(key, other + drawn + theirs, hashlib.sha256)
        ):
            raise LinkError("it has another key")
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, IDLE_SECONDS),
            (socket.TCP_KEEPINTVL, PROBE_SECONDS),
            (socket.TCP_KEEPCNT, PROBES),
            (socket.TCP_USER_TIMEOUT, 1000 * (IDLE_SECONDS + PROBE_SECONDS * PROBES)),
        ):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError as error:
        connected.close()
        raise error if isinstance(error, LinkError) else LinkError(str(error)) from error
    return Link(connected)


def _exactly(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connected.recv(count - len(data))
        if not more:
            raise LinkError("it hung up")
        data += more
    return data
