"""Lines between a driver and its agents: who is let in, and what becomes of messages when connections are lost."""

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from conftest import until

from pipeline.launch.agents import endpoint
from pipeline.launch.agents.channel import HEADER, Channel, Received, contexts, new_token
from pipeline.launch.agents.endpoint import Endpoint

TOKEN = new_token()


def dial(address: str, token: bytes) -> ssl.SSLSocket:
    host, _, port = address.rpartition(":")
    return contexts(token)[1].wrap_socket(socket.create_connection((host, int(port))))


def silent(address: str, name: str) -> ssl.SSLSocket:
    """An end that has the token, and says nothing after its greeting."""
    dialled, greeting = dial(address, TOKEN), b'{"name": "%s", "life": "1"}' % name.encode()
    dialled.sendall(HEADER.pack(len(greeting), 0, 0) + greeting)
    return dialled


def cut(link: Channel) -> None:
    """Breaks a connection off, whatever is under way."""
    if (connection := link.connection) is not None:
        link.endpoint._loop.call_soon_threadsafe(connection.transport.abort)


@pytest.fixture
def hubs() -> Iterator[Callable[..., Endpoint]]:
    with contextlib.ExitStack() as stack:
        yield lambda name, **given: stack.enter_context(contextlib.closing(Endpoint(name, TOKEN, **given)))


def taken(link: Channel, count: int, seconds: float = 20.0) -> list[bytes]:
    """So many messages, each of which is done with."""
    found: list[Received] = []
    until(lambda: found.extend(link.take()) or len(found) >= count, seconds)
    for received in found:
        link.done(received)
    return [received.data for received in found]


@pytest.mark.parametrize("by_function", [False, True])
def test_messages_go_both_ways_and_a_line_that_is_cut_again_and_again_loses_none_and_brings_none_twice(
    hubs, by_function
):
    refused: list[str] = []
    driver, agent = hubs("driver", report=refused.append), hubs("a")
    address = driver.listen("127.0.0.1:0")
    host, _, port = address.rpartition(":")
    refusals = [OSError("there is no way yet")]

    def connect() -> socket.socket:
        if refusals:
            raise refusals.pop()
        return socket.create_connection((host, int(port)))

    here = driver.channel("a")
    here.send(b"before there was a connection")
    there = agent.dial("driver", connect if by_function else address)
    if by_function:
        until(lambda: there.problem == "there is no way yet")
    sent = [b"x" * 3_000_000, *(b"%06d" % number + os.urandom(2000) for number in range(3000))]

    def send_all() -> None:
        for count, data in enumerate(sent):
            there.send(data)
            if count % 50 == 0:
                here.send(b"%d" % count)
                time.sleep(0.03)

    sending = threading.Thread(target=send_all)
    sending.start()
    for end in (here, there, here, there):
        time.sleep(0.4)
        cut(end)
    assert taken(here, len(sent), 60) == sent
    assert taken(there, 62) == [b"before there was a connection", *(b"%d" % count for count in range(0, 3001, 50))]
    sending.join()
    until(lambda: not there.kept and not here.kept)
    assert (there.kept_bytes, here.away, here.life, refused) == (0, 0.0, agent.life, [])
    driver.hear()
    there.send(b"news")
    assert select.select([driver.news], [], [], 10)[0]
    assert taken(here, 1) == [b"news"]


def test_what_an_end_says_last_is_heard_though_it_has_hung_up_before_it_is_read(hubs):
    driver, agent = hubs("driver"), hubs("a")
    there = agent.dial("driver", driver.listen("127.0.0.1:0"))
    here = driver.channel("a")
    here.send(b"end")
    assert taken(there, 1) == [b"end"]
    until(lambda: here.connection and not here.kept)
    here.send(b"end at once")
    until(lambda: there.inbox)
    with driver.lock:
        for received in there.take():
            there.done(received)
        there.send(b"ended")
        agent.close()
    until(lambda: here.away > 0)
    assert [received.data for received in here.take()] == [b"ended"]
    assert not here.kept


def test_an_end_that_is_silent_is_given_up_for_one_started_anew_and_one_that_is_gone_is_noticed_at_once(
    hubs, monkeypatch
):
    monkeypatch.setattr(endpoint, "SILENT_SECONDS", 3.0)
    driver, agent, second = hubs("driver"), hubs("a"), hubs("b")
    address = driver.listen("127.0.0.1:0")
    there, here, other = agent.dial("driver", address), driver.channel("a"), driver.channel("b")
    until(lambda: there.connection)
    # Of a host that was lost nothing comes any more, and nobody hangs up.
    quiet, alone = silent(address, "b"), silent(address, "c")
    until(lambda: other.connection)
    other.send(b"for the first")
    waits = second.dial("driver", address)
    until(lambda: waits.problem == "another of its name is there")
    assert (other.life, waits.refused) == ("1", False)
    until(lambda: driver.channel("c").problem == "it was silent for 3 s", 6.0)
    until(lambda: other.life == second.life)
    other.send(b"for the second")
    assert taken(waits, 1) == [b"for the second"]
    quiet.close()
    alone.close()
    # Those that have had nothing to send were never without each other.
    assert here.away == there.away == 0.0
    began = time.monotonic()
    agent.close()
    until(lambda: here.away > 0)
    assert time.monotonic() - began < 2.5


def test_who_comes_in_place_of_another_gets_nothing_that_was_meant_for_that_which_is_not_let_in_again(hubs):
    driver, first, second = hubs("driver"), hubs("a"), hubs("a")
    address = driver.listen("127.0.0.1:0")
    there = first.dial("driver", address)
    here = driver.channel("a")
    until(lambda: here.connection)
    here.send(b"for the first, which does not say that it is done with it")
    # As long as the first is there, no other is.
    waits = second.dial("driver", address)
    until(lambda: waits.problem == "another of its name is there")
    second.close()
    cut(here)
    third = hubs("a")
    third.dial("driver", address)
    until(lambda: here.life == third.life)
    here.send(b"for the third")
    assert taken(third.channel("driver"), 1) == [b"for the third"]
    until(lambda: there.refused)
    assert here.life == third.life
    assert here.away == 0.0


def test_who_takes_the_place_of_a_conductor_gets_all_that_it_was_not_done_with(hubs):
    driver, agent = hubs("driver"), hubs("a")
    address = driver.listen("127.0.0.1:0")
    there = agent.dial("driver", address)
    for number in range(10):
        there.send(b"%d" % number)
    here = driver.channel("a")
    found: list = []
    until(lambda: found.extend(here.take()) or len(found) == 10)
    # Also where one that came later is done before.
    for number in (1, 0, 3, 2, 7):
        here.done(found[number])
    until(lambda: len(there.kept) == 6)
    driver.close()
    until(lambda: there.away > 0)
    there.send(b"meanwhile")
    after = hubs("driver")
    after.adopts = True
    after.listen(address)
    assert taken(after.channel("a"), 7) == [b"4", b"5", b"6", b"7", b"8", b"9", b"meanwhile"]
    after.channel("a").send(b"go on")
    assert taken(there, 1) == [b"go on"]


def takes_a_gigabyte(connected: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        for _ in range(1024):
            connected.sendall(bytes(1 << 20))
        return True
    return False


def tokenless() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_who_does_not_show_the_token_is_refused_said_so_and_changes_nothing(hubs):
    refused: list[str] = []
    driver, agent = hubs("driver", report=refused.append), hubs("a")
    address = driver.listen("127.0.0.1:0")
    there = agent.dial("driver", address)
    until(lambda: there.connection)
    where = ("127.0.0.1", int(address.rpartition(":")[2]))

    silent, garbage, hasty, plain = (socket.create_connection(where) for _ in range(4))
    garbage.sendall(os.urandom(100_000))
    hasty.close()
    with pytest.raises(ssl.SSLCertVerificationError):
        dial(address, b"wrong")
    # A gigabyte, in the clear and encrypted.
    assert not takes_a_gigabyte(plain)
    context = tokenless()
    with context.wrap_socket(socket.create_connection(where)) as encrypted:
        assert not takes_a_gigabyte(encrypted)
    # Nobody speaks an earlier TLS.
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        context.wrap_socket(socket.create_connection(where))
    until(lambda: len(refused) >= 7, 15)
    for why in ("it does not speak TLS 1.3", "it has another token", "it shows no token", "nothing of use"):
        assert any(why in text for text in refused), refused
    assert all(text.startswith("A connection from 127.0.0.1 was refused: ") for text in refused)

    there.send(b"still here")
    assert taken(driver.channel("a"), 1) == [b"still here"]
    assert list(driver.channels) == ["a"]
    for left in (silent, garbage, plain):
        left.close()


# The beginning of a TLS record.
BEGINNING = b"\x16\x03\x01\x02" + bytes(200)


def flood(to: str, source: str, over: threading.Event) -> None:
    """Connects from an address without ever showing the token, anew as soon as it is hung up on."""
    while not over.is_set():
        with contextlib.suppress(OSError), socket.socket() as connected:
            connected.settimeout(0.2)
            connected.bind((source, 0))
            connected.connect(("127.0.0.1", int(to.rpartition(":")[2])))
            for byte in BEGINNING:
                connected.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    if over.is_set() or not connected.recv(1):
                        break


@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.1"])
def test_connections_that_say_little_hold_out_no_agent_whether_from_elsewhere_or_from_its_own_host(hubs, source):
    driver = hubs("driver")
    address = driver.listen("127.0.0.1:0")
    over = threading.Event()
    threads = [threading.Thread(target=flood, args=(address, source, over), daemon=True) for _ in range(90)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        for name in ("a", "b", "c"):
            there = hubs(name).dial("driver", address)
            until(lambda there=there: there.connection, 4)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_connection_that_says_little_is_hung_up_on_in_time_while_it_speaks(hubs, monkeypatch):
    monkeypatch.setattr(endpoint, "HANDSHAKE_SECONDS", 1.0)
    where = ("127.0.0.1", int(hubs("driver").listen("127.0.0.1:0").rpartition(":")[2]))
    began = time.monotonic()
    with socket.create_connection(where) as connected, contextlib.suppress(OSError):
        for byte in BEGINNING:
            connected.sendall(bytes([byte]))
            time.sleep(0.05)
    # Encrypted, and then silent.
    with tokenless().wrap_socket(socket.create_connection(where)) as encrypted:
        assert encrypted.recv(1) == b""
    assert time.monotonic() - began < 10


def test_many_agents_that_dial_at_once_are_all_let_in(hubs):
    driver = hubs("driver")
    address = driver.listen("127.0.0.1:0")
    links = [hubs(f"{number}").dial("driver", address) for number in range(120)]
    until(lambda: all(link.connection for link in links))
