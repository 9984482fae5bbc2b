"""Ports of this machine that no process listens at."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Ports that nobody else is given. SO_REUSEADDR, which gRPC sets too, lets a server listen beside these sockets."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
        yield [held.getsockname()[1] for held in sockets]
