"""Finds out within seconds whether a TPU's worker listens at an address, without importing TensorFlow.

TensorFlow itself waits for minutes where nothing answers. So this asks what TensorFlow asks first when it connects,
which devices the worker has, and gives up soon. It speaks as much of HTTP/2 (RFC 9113) and of gRPC as that takes.
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
CALL = "/tensorflow.WorkerService/GetStatus"


class NoTpuError(RuntimeError):
    """No TPU answers at an address: the message says what was expected, received, and what to type instead."""


def expect_tpu(address: str, key: str = "strategy.build.address") -> None:
    """Returns where a TPU's worker listens at `address`, grpc://HOST:PORT, and raises `NoTpuError` elsewhere.

    `key` is what a person sets to name another.
    """
    found: list[str | None] = []
    # A thread, because looking up a name has no time limit.
    asking = threading.Thread(target=lambda: found.append(_missing(address)), daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS + 1)
    missing = found[0] if found else f"no answer within {ANSWER_SECONDS + 1:g} s"
    if missing:
        raise NoTpuError(
            f"Expected a TPU at {key}={address}, received {missing}. Try the address of a TPU that is running, "
            f"or hardware.rehearse=true to run the same plan on logical CPU devices."
        )


def _missing(address: str) -> str | None:
    """What was found instead of a TPU; None where there is one."""
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
            return _missing_behind(connection, deadline)
    except TimeoutError:
        return f"no connection within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return f"no connection: {error.strerror or error}"


def _missing_behind(connection: socket.socket, deadline: float) -> str | None:
    answer, spoke = b"", False
    try:
        connection.sendall(PREFACE + frame(SETTINGS))
        for kind, flags, stream, payload in _frames(connection, deadline):
            # A server's first frame is its settings; anything else is another protocol.
            if not spoke and kind != SETTINGS:
                return "something that does not speak gRPC"
            if not spoke:
                spoke = True
                headers = b"".join(map(_literal, _headers(connection)))
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
    # The answer lists the worker's devices, among them TPU_SYSTEM, without which TensorFlow finds no TPU.
    if not answer:
        return "a gRPC server that is no TensorFlow worker"
    return None if b"TPU" in answer else "a TensorFlow worker without a TPU"


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


def _headers(connection: socket.socket) -> tuple[tuple[str, str], ...]:
    host, port = connection.getpeername()[:2]
    return (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", CALL),
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
