"""Finds out within seconds whether a TPU's worker or a tf.data service listens at an address, without TensorFlow.

TensorFlow itself waits for minutes where nothing answers. So this asks what TensorFlow asks first when it connects,
which devices the worker has, or which workers the service, and gives up soon. It speaks as much of HTTP/2 (RFC 9113)
and of gRPC as that takes.
"""

import socket
import struct
import threading
import time
from collections.abc import Iterator

CONNECT_SECONDS = 3.0
# From connecting to the whole answer; what no socket's timeout bounds, such as looking up a name, ends a second later.
ANSWER_SECONDS = 4.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Types of frames, and flags: that a SETTINGS or PING is acknowledged is the bit that ends a stream elsewhere.
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK = END_STREAM = 1
END_HEADERS = 4
LARGEST_FRAME = 1 << 14
GET_STATUS = "/tensorflow.WorkerService/GetStatus"
GET_WORKERS = "/tensorflow.data.DispatcherService/GetWorkers"


class NoAnswerError(RuntimeError):
    """Not what was expected answers at an address: the message says what was, what did, and what to type instead."""


class _Instead(Exception):
    """What was found in place of a server that answers."""


def expect_tpu(address: str, key: str = "strategy.build.address") -> None:
    """Returns where a TPU's worker listens at `address`, grpc://HOST:PORT, and raises `NoAnswerError` elsewhere.

    `key` is what a person sets to name another.
    """
    try:
        # The answer lists the worker's devices, among them TPU_SYSTEM, without which TensorFlow finds no TPU.
        if b"TPU" in _ask(address, GET_STATUS, "a gRPC server that is no TensorFlow worker"):
            return
        missing = "a TensorFlow worker without a TPU"
    except _Instead as instead:
        missing = str(instead)
    raise NoAnswerError(
        f"Expected a TPU at {key}={address}, received {missing}. Try the address of a TPU that is running, "
        f"or hardware.rehearse=true to run the same plan on logical CPU devices."
    )


def expect_data_service(address: str) -> None:
    """Returns where a tf.data service with one worker listens at `address`, HOST:PORT. Raises `NoAnswerError`."""
    try:
        workers = _count(_ask(address, GET_WORKERS, "a gRPC server that is no dispatcher of tf.data"))
        missing = f"one with {workers or 'none'}"
    except _Instead as instead:
        workers, missing = 0, str(instead)
    if workers != 1:
        raise NoAnswerError(
            f"Expected a tf.data service with one worker at data.service={address}, received {missing}. "
            f"Try a dispatcher for each worker, and all their addresses with commas between; or data.service=2."
        )


def _ask(address: str, call: str, other: str) -> bytes:
    """The answer to a gRPC call without arguments. Raises `_Instead`, `other` for a server that does not know it."""
    found: list[bytes | str] = []
    # A thread, because looking up a name has no time limit.
    asking = threading.Thread(target=lambda: found.append(_answer(address, call) or other), daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS + 1)
    answer = found[0] if found else f"no answer within {ANSWER_SECONDS + 1:g} s"
    if isinstance(answer, str):
        raise _Instead(answer)
    return answer


def _answer(address: str, call: str) -> bytes | str:
    """The answer, empty where a gRPC server does not know the call; or in words what else was found."""
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
            return _answer_behind(connection, call, deadline)
    except TimeoutError:
        return f"no connection within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return f"no connection: {error.strerror or error}"


def _answer_behind(connection: socket.socket, call: str, deadline: float) -> bytes | str:
    answer, spoke = b"", False
    try:
        connection.sendall(PREFACE + frame(SETTINGS))
        for kind, flags, stream, payload in _frames(connection, deadline):
            # A server's first frame is its settings; anything else is another protocol.
            if not spoke and kind != SETTINGS:
                return "something that does not speak gRPC"
            if not spoke:
                spoke = True
                headers = b"".join(map(_literal, _headers(connection, call)))
                request = frame(HEADERS, headers, END_HEADERS, 1) + frame(DATA, bytes(5), END_STREAM, 1)
                connection.sendall(frame(SETTINGS, flags=ACK) + request)
            elif kind == PING and not flags & ACK:
                connection.sendall(frame(PING, payload, ACK))
            elif kind == DATA and stream == 1:
                answer += payload
            if kind == GOAWAY or (stream == 1 and (kind == RST_STREAM or flags & END_STREAM)):
                break
    except TimeoutError:
        return "a server that did not answer in time" if spoke else "something that connects and says nothing"
    except (OSError, ValueError):
        return "a server that broke off" if spoke else "something that does not speak gRPC"
    return answer


def _count(answer: bytes) -> int:
    """How many of field 1, of less than 128 bytes each, a message in a gRPC answer has (its length comes first).

    >>> _count(bytes(5)), _count(bytes(5) + b"\\x0a\\x02ab" + b"\\x0a\\x01c")
    (0, 2)
    """
    found, place = 0, 5
    while place < len(answer):
        found, place = found + 1, place + 2 + answer[place + 1]
    return found


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """One frame of HTTP/2.

    >>> frame(SETTINGS).hex()
    '000000040000000000'
    """
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _frames(connection: socket.socket, deadline: float) -> Iterator[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of each frame that comes in. Raises TimeoutError, OSError or ValueError."""
    while True:
        head = _read(connection, 9, deadline)
        length = int.from_bytes(head[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        if length > LARGEST_FRAME:
            raise ValueError(f"a frame of {length} bytes")
        yield kind, flags, stream, _read(connection, length, deadline)


def _read(connection: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data


def _headers(connection: socket.socket, call: str) -> tuple[tuple[str, str], ...]:
    host, port = connection.getpeername()[:2]
    return (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", call),
        (":authority", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )


def _literal(header: tuple[str, str]) -> bytes:
    """A header field as HPACK writes it in full, for no table (RFC 7541, 6.2.2).

    >>> _literal(("te", "trailers"))
    b'\\x00\\x02te\\x08trailers'
    """
    name, value = (each.encode() for each in header)
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
