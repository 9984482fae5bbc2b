"""The way of a line through the API server: a pod's door, and the conductor's ways into pods."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from pipeline.launch.kubernetes.door import Door, Ways


@pytest.fixture
def between() -> Iterator[tuple[socket.socket, Door, list[socket.socket]]]:
    """Where the conductor listens, a door, and the connections into the pod that were opened."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    door, opened = Door(port), list[socket.socket]()

    def forward(host: str) -> socket.socket:
        opened.append(socket.create_connection(("127.0.0.1", port)))
        return opened[-1]

    with socket.create_server(("127.0.0.1", 0)) as conductor:
        conductor.settimeout(10.0)
        ways = Ways(f"127.0.0.1:{conductor.getsockname()[1]}", forward)
        ways.keep("a pod")
        yield conductor, door, opened
        ways.close()
        door.close()
        # Until the threads have let go of what they held.
        time.sleep(0.7)


def dialled(door: Door) -> socket.socket:
    """An agent's connection, which is dialled again until there is a way."""
    host, _, port = door.address.rpartition(":")
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        agent = socket.create_connection((host, int(port)))
        agent.settimeout(10.0)
        with contextlib.suppress(OSError):
            agent.sendall(b"hello")
            agent.setblocking(False)
            time.sleep(0.1)
            try:
                if agent.recv(1) == b"":
                    raise OSError("nobody is there yet")
            except BlockingIOError:
                agent.settimeout(10.0)
                return agent
        agent.close()
    raise AssertionError("there was never a way")


def exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := source.recv(count - len(data))):
        data += piece
    return data


def test_what_an_agent_says_comes_to_the_conductor_and_back_and_a_way_that_is_lost_is_opened_again(between):
    conductor, door, opened = between
    ends = (lambda agent, here: agent, lambda agent, here: here, lambda agent, here: opened[-1])
    for lost in ends:
        agent = dialled(door)
        here, _ = conductor.accept()
        here.settimeout(10.0)
        assert exactly(here, 5) == b"hello"
        there = bytes(range(256)) * 4_000
        here.sendall(there)
        assert exactly(agent, len(there)) == there
        lost(agent, here).shutdown(socket.SHUT_RDWR)
        for end in (agent, here):
            with contextlib.suppress(OSError):
                assert end.recv(1) == b""
            end.close()


def test_the_conductor_is_not_dialled_before_an_agent_says_something(between):
    conductor, _, opened = between
    until = time.monotonic() + 5.0
    while not opened and time.monotonic() < until:
        time.sleep(0.02)
    conductor.settimeout(0.5)
    with pytest.raises(TimeoutError):
        conductor.accept()
