"""Where the processes that Horovod joins over Gloo leave each other their addresses: texts by name, over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What Gloo leaves of a process is some hundred bytes.
MOST_BYTES = 1 << 20


@contextmanager
def served(host: str) -> Iterator[int]:
    """The port of one at an address of this machine, and no other, as long as the context lasts."""
    server = _Server((host, 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.kept: dict[str, bytes] = {}


class _Handler(BaseHTTPRequestHandler):
    """What `HTTPStore` of horovod/common/gloo/http_store.cc asks for: GET, PUT and DELETE of /scope/key."""

    server: _Server

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
