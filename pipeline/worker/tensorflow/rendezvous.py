"""Where the processes that Horovod joins over Gloo leave each other their addresses: texts by name, over HTTP.

Horovod's client has no token to show, but it asks for "http://HOST:PORT/scope/key" with whatever it is given as the
host: that is an address here which ends in a token, as the beginning of the path.
"""

import hmac
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What Gloo leaves of a process is some hundred bytes.
MOST_BYTES = 1 << 20
TOKEN_BYTES = 16


@contextmanager
def served(host: str) -> Iterator[tuple[int, str]]:
    """The port and the token of one at an address of this machine, and no other, as long as the context lasts."""
    server = _Server((host, 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1], server.token
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def address(host: str, port: int, token: str) -> str:
    """The address of one as Horovod is to be given it.

    >>> address("10.0.0.1", 4000, "secret")
    '10.0.0.1:4000/secret'
    """
    return f"{host}:{port}/{token}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.kept: dict[str, bytes] = {}
        self.token = secrets.token_hex(TOKEN_BYTES)


class _Handler(BaseHTTPRequestHandler):
    """What `HTTPStore` of horovod/common/gloo/http_store.cc asks for: GET, PUT and DELETE of /scope/key."""

    server: _Server

    def parse_request(self) -> bool:
        """Refuses who does not know the token, before anything of it is read."""
        if not super().parse_request():
            return False
        token = f"/{self.server.token}"
        if hmac.compare_digest(self.path[: len(token)].encode(), token.encode()):
            return True
        self._answer(403)
        return False

    def do_GET(self) -> None:
        """What is kept, or 404 where nothing is yet, which Horovod asks for again."""
        kept = self.server.kept.get(self.path)
        self._answer(200 if kept is not None else 404, kept or b"")

    def do_PUT(self) -> None:
        """Keeps it."""
        size = int(self.headers.get("Content-Length", 0))
        if size > MOST_BYTES:
            self._answer(413)
            return
        self.server.kept[self.path] = self.rfile.read(size)
        self._answer(200)

    def do_DELETE(self) -> None:
        """Forgets it. A process that has met all others takes back what it never left."""
        self.server.kept.pop(self.path, None)
        self._answer(200)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: Horovod asks a hundred times a second until all are there."""

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
