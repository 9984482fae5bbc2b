"""What the official client speaks: HTTP with JSON, as the API server of Kubernetes answers it, and its way into pods.

That is a WebSocket whose frames carry what a TCP connection would: channel 0 has the bytes, channel 1 an error, and
each begins with the port's number; `v4.channel.k8s.io` of Kubernetes.
"""

import base64
import contextlib
import hashlib
import json
import select
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import kubernetes_validate
from websocket import ABNF, WebSocketException
from websocket._abnf import frame_buffer

from stand_in.controllers import JOBS, JOBSETS, PODS, SERVICES, Made, Objects, selected
from stand_in.kubelet import Kubelet
from stand_in.network import dial

VERSION = "1.37"
GUID, PROTOCOL = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11", "v4.channel.k8s.io"
SECRETS, POLICIES = "secrets", "networkpolicies"
GROUPS = {
    "/api/v1": (PODS, SERVICES, SECRETS),
    "/apis/batch/v1": (JOBS,),
    "/apis/networking.k8s.io/v1": (POLICIES,),
    "/apis/jobset.x-k8s.io/v1alpha2": (JOBSETS,),
}  # fmt: skip


class Refusal(Exception):
    """What is answered in place of what was asked for: a code, a reason as Kubernetes has it, and a message."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class Api:
    """The server. It refuses who does not have `token`, verbs on kinds in `forbidden`, and kinds in `unknown`."""

    def __init__(self, objects: Objects, kubelet: Kubelet, token: str) -> None:
        self.objects, self.kubelet, self.token = objects, kubelet, token
        self.namespaces = {"default", "training"}
        self.forbidden = set[tuple[str, str]]()
        self.unknown = set[str]()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Nobody reads it."""

            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else {}
                try:
                    do = {"GET": api.get, "POST": api.post, "DELETE": api.delete}[self.command]
                    answer, code = do(self, _Asked(self, body, api)), 201 if self.command == "POST" else 200
                except Refusal as refused:
                    answer, code = _status(refused), refused.code
                if answer is None:
                    self.close_connection = True
                    return
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                with contextlib.suppress(ConnectionError):
                    self.send_response(code)
                    self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_POST = do_DELETE = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def get(self, request: BaseHTTPRequestHandler, asked: "_Asked") -> Any:
        """One object, those of a kind, a pod's log, or a way into a pod."""
        if not asked.name:
            return self._list(asked)
        made = self._found(asked)
        if asked.part == "log":
            return self.kubelet.log(made)
        if asked.part == "portforward":
            running = self.kubelet.running.get(made["metadata"]["uid"])
            if running is None:
                raise Refusal(400, "BadRequest", f"pod {asked.name} is not running")
            return forward(request, int(asked.query["ports"]), partial(dial, running.namespace))
        return made

    def post(self, request: BaseHTTPRequestHandler, asked: "_Asked") -> Any:
        """Makes an object, if its manifest is right."""
        made = asked.body
        try:
            validate(made)
        except (AssertionError, ValueError, kubernetes_validate.ValidationError) as error:
            raise Refusal(422, "Invalid", f"{asked.kind} is invalid: {error}") from error
        try:
            return self.objects.create(asked.kind, asked.namespace, made)
        except KeyError as error:
            raise Refusal(409, "AlreadyExists", f"{asked.kind} {error} already exists") from error

    def delete(self, request: BaseHTTPRequestHandler, asked: "_Asked") -> Any:
        """Removes an object, and with it what it owns; a pod once its process has ended."""
        with self.objects.lock:
            self.objects.delete(asked.kind, self._found(asked))
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _found(self, asked: "_Asked") -> Made:
        made = self.objects.get(asked.kind, asked.namespace, asked.name)
        if made is None:
            raise Refusal(404, "NotFound", f'{asked.kind} "{asked.name}" not found')
        return made

    def _list(self, asked: "_Asked") -> Any:
        labels = asked.query.get("labelSelector", "")
        with self.objects.lock:
            items = [made for made in self.objects.all(asked.kind, asked.namespace) if selected(made, labels)]
            return json.loads(json.dumps({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}))


class _Asked:
    """A request: what it does to which kind, in which namespace, to which object, and to which part of it."""

    def __init__(self, request: BaseHTTPRequestHandler, body: Made, api: Api) -> None:
        url = urlparse(request.path)
        self.body, self.query = body, {name: values[0] for name, values in parse_qs(url.query).items()}
        if request.headers.get("Authorization") != f"Bearer {api.token}":
            raise Refusal(401, "Unauthorized", "Unauthorized")
        group = next((group for group in GROUPS if url.path.startswith(f"{group}/namespaces/")), "")
        parts = url.path.removeprefix(f"{group}/namespaces/").split("/")
        if not group or len(parts) < 2 or parts[1] not in GROUPS[group] or parts[1] in api.unknown:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        self.namespace, self.kind, self.name, self.part = (*parts, "", "")[:4]
        verb = {"GET": "get" if self.name else "list", "POST": "create", "DELETE": "delete"}[request.command]
        if {(verb, self.kind), (verb, f"{self.kind}/{self.part}")} & api.forbidden:
            what = f'{verb} resource "{self.kind}" in the namespace "{self.namespace}"'
            raise Refusal(403, "Forbidden", f'User "ann" cannot {what}')
        if self.namespace not in api.namespaces and verb == "create":
            raise Refusal(404, "NotFound", f'namespaces "{self.namespace}" not found')


def validate(made: Made, *versions: str) -> None:
    """Refuses what the published schemas of some versions, or the newest, do not know."""
    # Four hundred classes, which every process that runs tests would make when it collects them.
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    known = [made]
    if made["kind"] == "JobSet":
        understood = JobsetV1alpha2JobSet.from_dict(made)
        assert understood is not None
        # What its models do not know is not in what they give back.
        assert understood.to_dict() == made, "unknown fields"
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
        known = [job | replicated["template"] for replicated in made["spec"]["replicatedJobs"]]
    for each in known:
        for version in versions or (VERSION,):
            kubernetes_validate.validate(each, version, strict=True)


def _status(refused: Refusal) -> Any:
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": str(refused),
        "reason": refused.reason, "code": refused.code,
    }  # fmt: skip


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
