"""The API server's way to a port of a pod: a WebSocket whose frames carry what a TCP connection would.

Channel 0 has the bytes, channel 1 an error, and each begins with the port's number; `v4.channel.k8s.io` of Kubernetes.
"""

import base64
import contextlib
import hashlib
import select
import socket
import struct
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10
PROTOCOL = "v4.channel.k8s.io"


def forward(request: BaseHTTPRequestHandler, port: int, dial: Callable[[int], socket.socket]) -> None:
    """Answers a request for a port, and carries bytes both ways until either end closes."""
    key = request.headers["Sec-WebSocket-Key"]
    accept = base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()
    request.send_response(101)
    for name, value in (
        ("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept),
        ("Sec-WebSocket-Protocol", PROTOCOL),
    ):  # fmt: skip
        request.send_header(name, value)
    request.end_headers()
    client: socket.socket = request.connection
    for channel in (0, 1):
        client.sendall(framed(bytes([channel]) + struct.pack("<H", port)))
    try:
        pod = dial(port)
    except OSError as error:
        client.sendall(framed(b"\x01" + f"error forwarding port {port} to pod: {error}".encode()))
        client.sendall(framed(b"", CLOSE))
        return
    with pod, contextlib.suppress(OSError, EOFError):
        _carry(client, request, pod)
    with contextlib.suppress(OSError):
        client.sendall(framed(b"", CLOSE))


def _carry(client: socket.socket, request: BaseHTTPRequestHandler, pod: socket.socket) -> None:
    while True:
        ready, _, _ = select.select([client, pod], [], [])
        if pod in ready:
            data = pod.recv(1 << 16)
            if not data:
                return
            client.sendall(framed(b"\x00" + data))
        if client in ready:
            code, payload = _frame(request.rfile.read)
            if code == CLOSE:
                return
            if code == PING:
                client.sendall(framed(payload, PONG))
            if code == BINARY and payload[:1] == b"\x00":
                pod.sendall(payload[1:])


def _frame(read: Callable[[int], bytes]) -> tuple[int, bytes]:
    """A frame of the client's, which are masked and not cut. Raises `EOFError`."""
    first, second = _exactly(read, 2)
    size = second & 0x7F
    if size > 125:
        wide = size == 127
        (size,) = struct.unpack(">Q" if wide else ">H", _exactly(read, 8 if wide else 2))
    mask = _exactly(read, 4)
    data = _exactly(read, size)
    whole = int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
    return first & 0x0F, whole.to_bytes(size, "big")


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    data = read(count)
    if len(data) < count:
        raise EOFError
    return data


def framed(payload: bytes, code: int = BINARY) -> bytes:
    """A frame of the server's."""
    size = len(payload)
    if size < 126:
        head = struct.pack(">BB", 0x80 | code, size)
    elif size < 1 << 16:
        head = struct.pack(">BBH", 0x80 | code, 126, size)
    else:
        head = struct.pack(">BBQ", 0x80 | code, 127, size)
    return head + payload
