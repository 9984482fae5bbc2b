"""Turns ports that are wanted into sockets that keep them from others, or into who has them."""

import contextlib
import errno
import socket
import time

from pipeline.launch.errors import LaunchError

# For which a port is waited for whose process, as that of a command that was just killed, is about to end.
FREE_SECONDS, LOOK_SECONDS = 3.0, 0.1


def reserve(host: str, port: int, until: float) -> socket.socket:
    """A socket bound to a free port, or to `port`, that does not listen, by a time on the monotonic clock.

    With SO_REUSEADDR set, TensorFlow's server may bind it too, while nobody is given it by chance meanwhile.
    """
    while True:
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind((host, port))
            return reserved
        except OSError as error:
            reserved.close()
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
                continue
            by = holder(port) if error.errno == errno.EADDRINUSE else None
            instead = "cluster.base_port=null for free ports" if port else "cluster.host=127.0.0.1"
            raise LaunchError(
                f"Expected to be able to listen on {host}:{port}, received: {error.strerror or error}"
                f"{f', by {by}' if by else ''}. Try {instead}."
            ) from error


def holder(port: int) -> str | None:
    """Which process listens at a port, as far as this one may know."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} ({connection.pid})"
    return None
