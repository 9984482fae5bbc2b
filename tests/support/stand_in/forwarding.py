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

from websocket import ABNF, WebSocketException
from websocket._abnf import frame_buffer

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
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
        client.sendall(framed(b"", ABNF.OPCODE_CLOSE))
        return
    with pod, contextlib.suppress(OSError, EOFError, WebSocketException):
        _carry(client, request, pod)
    with contextlib.suppress(OSError):
        client.sendall(framed(b"", ABNF.OPCODE_CLOSE))


def _carry(client: socket.socket, request: BaseHTTPRequestHandler, pod: socket.socket) -> None:
    def receive(count: int) -> bytes:
        if not (data := request.rfile.read(count)):
            raise EOFError
        return data

    frames = frame_buffer(receive, skip_utf8_validation=True)
    while True:
        ready, _, _ = select.select([client, pod], [], [])
        if pod in ready:
            data = pod.recv(1 << 16)
            if not data:
                return
            client.sendall(framed(b"\x00" + data))
        if client in ready:
            frame = frames.recv_frame()
            if frame.opcode == ABNF.OPCODE_CLOSE:
                return
            if frame.opcode == ABNF.OPCODE_PING:
                client.sendall(framed(frame.data, ABNF.OPCODE_PONG))
            if frame.opcode == ABNF.OPCODE_BINARY and frame.data[:1] == b"\x00":
                pod.sendall(frame.data[1:])


def framed(payload: bytes, opcode: int = ABNF.OPCODE_BINARY) -> bytes:
    """A frame of the server's, which is not masked."""
    frame: bytes = ABNF(1, 0, 0, 0, opcode, 0, payload).format()
    return frame
