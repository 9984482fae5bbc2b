"""The thread that serves the channels of a process: it listens and dials, reads and writes, all over TLS."""

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import time
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from pipeline.launch.agents.channel import WINDOW_BYTES, Channel, Connection, Greeting, contexts, why_refused
from pipeline.plan.checks import stays_here

HANDSHAKE_SECONDS = 5.0
# Between two attempts to dial, and two looks at all connections.
REDIAL_SECONDS, TICK_SECONDS = 1.0, 0.25
# A connection that is silent for so long is given up; one that has nothing to send gives a sign of life so often.
SILENT_SECONDS, WORD_SECONDS = 10.0, 2.0
# Seconds for the other end to hang up as well.
HANG_UP_SECONDS = 0.5
# Connections in their handshake, which takes an agent some hundredths of a second; how long one more than these leaves
# the others alone; and between two that are hung up on.
MOST_GREETING, GRACE_SECONDS, PACE_SECONDS = 64, 1.0, 0.002
REPLACED, OCCUPIED = "another has taken its place", "another of its name is there"


class Endpoint:
    """The channels of this process by the names of their other ends, and the thread that serves them.

    `name` is its own. `report` hears of connections that were refused. `adopts`: see `Greeting`.
    """

    def __init__(self, name: str, token: bytes, report: Callable[[str], None] = lambda text: None) -> None:
        self.name, self.life, self.adopts = name, secrets.token_hex(8), False
        self.channels: dict[str, Channel] = {}
        self.lock = threading.RLock()
        self.token, self._said, self._at = token, report, ""
        self._server, self._client = contexts(token)
        self._connections = set[Connection]()
        # The tasks that let in, by their sockets; of each connection in its handshake the address and since when.
        self._listening: dict[socket.socket, asyncio.Task[None]] = {}
        self._greeting: dict[asyncio.Task[None], tuple[str, float]] = {}
        self._tasks = set[asyncio.Task[None]]()
        # Is readable once something has come, until it is heard.
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._has_news = self._ended = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="channels", daemon=True)
        self._thread.start()
        self._in_loop(self._begin(self._tick()))

    def hear(self) -> None:
        """Makes `news` wait for what comes from now on."""
        with self.lock:
            self._has_news = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.news)

    def channel(self, name: str) -> Channel:
        """Returns the channel to a name, which may have no connection yet."""
        with self.lock:
            return self.channels.setdefault(name, Channel(self, name))

    def listen(self, address: str) -> str:
        """Listens at HOST:PORT, of which port 0 is any; returns where. Raises `OSError`."""
        listening = listen(address)
        listening.setblocking(False)
        self._at = f"{address.rpartition(':')[0]}:{listening.getsockname()[1]}"
        self._in_loop(self._open(listening))
        return self._at

    def stop_listening(self) -> None:
        """Lets go of the ports that it listens at; connections stay."""
        self._in_loop(self._close_ports())

    def dial(self, name: str, address: str | Callable[[], socket.socket]) -> Channel:
        """Returns a channel to HOST:PORT, or to whom a function connects; dialled whenever it has no connection."""
        channel = self.channel(name)
        self._in_loop(self._begin(self._keep_dialling(channel, address)))
        return channel

    def wake(self, channel: Channel) -> None:
        """Sends what waits in a channel, soon."""
        with self.lock, contextlib.suppress(RuntimeError):
            if channel.connection is not None:
                self._loop.call_soon_threadsafe(self.write, channel.connection)

    def close(self, seconds: float = 0.0) -> None:
        """Ends all channels, once the ends that are there have what was sent, or the seconds have passed."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(each.kept and each.connection for each in self.channels.values()):
            time.sleep(0.02)
        if self._ended:
            return
        self._ended = True
        self._in_loop(self._hang_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        os.close(self.news)

    # What follows is called in the thread.

    def opened(self, connection: Connection) -> None:
        """Takes in a connection that is encrypted, whose other end has shown the token."""
        self._connections.add(connection)
        if connection.channel is not None:
            self._greet(connection, connection.channel)

    def take_in(self, connection: Connection, number: int, done: int, data: bytes) -> None:
        """Takes in a frame."""
        with self.lock:
            if not connection.greeted:
                self._meet(connection, data)
            elif connection.channel is not None and connection is connection.channel.connection:
                connection.channel.drop(done)
                if data:
                    connection.channel.take_in(number, data)
                    self._tell()
                self._pause(connection, connection.channel)

    def write(self, connection: Connection) -> None:
        """Writes what waits, as far as there is room."""
        with self.lock:
            channel = connection.channel
            if channel is None or connection is not channel.connection:
                return
            while not connection.full and connection.next in channel.kept:
                connection.put(connection.next, channel.done_with, channel.kept[connection.next])
                connection.next += 1
            late = time.monotonic() - connection.spoke > WORD_SECONDS
            if not connection.full and (late or channel.done_with > connection.said_done):
                connection.put(0, channel.done_with, b"")
            self._pause(connection, channel)

    def lost(self, connection: Connection, why: str) -> None:
        """Gives a connection up."""
        if connection.over.done():
            return
        connection.over.set_result(None)
        self._connections.discard(connection)
        connection.transport.abort()
        with self.lock:
            channel = connection.channel
            if channel is not None and channel.connection is connection:
                channel.connection, channel.away_since = None, connection.heard
            if channel is not None and channel.connection is None:
                channel.problem = channel.problem if connection.dialled and not connection.greeted else why
                self._tell()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # Room that asyncio keeps for as long as a connection lasts: 256 KiB if not told.
        sslproto.SSLProtocol.max_size = 1 << 16
        # A connection that breaks is no error of this program.
        self._loop.set_exception_handler(lambda loop, context: None)
        self._loop.run_forever()

    def _in_loop(self, doing: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(doing, self._loop).result()

    async def _begin(self, doing: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(doing))

    async def _open(self, listening: socket.socket) -> None:
        self._listening[listening] = asyncio.create_task(self._accept(listening))

    async def _close_ports(self) -> None:
        for listening, task in self._listening.items():
            task.cancel()
            await asyncio.wait([task])
            listening.close()
        self._listening.clear()

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connected, (where, *_) = await self._loop.sock_accept(listening)
            except OSError:
                # Who dialled has gone again, or there is no room for it here.
                await asyncio.sleep(TICK_SECONDS)
                continue
            await self._make_room(where)
            task = asyncio.create_task(self._let_in(connected, where))
            self._greeting[task] = (where, time.monotonic())
            task.add_done_callback(partial(self._let_go, connected))
            # Else those that are let in would wait for all that dial.
            await asyncio.sleep(0)

    def _let_go(self, connected: socket.socket, task: asyncio.Task[None]) -> None:
        self._greeting.pop(task, None)
        if task.cancelled():
            connected.close()

    async def _make_room(self, where: str) -> None:
        """Hangs up on a connection that is in the way of one from an address, or waits until one is done.

        An address that has more places than this one, or most of all, loses any of them: no rate of dialling keeps the
        others out. Where none has, the oldest goes, once it has had its time.
        """
        while len(self._greeting) >= MOST_GREETING:
            held = Counter(address for address, _ in self._greeting.values())
            busiest, places = held.most_common(1)[0]
            theirs = [task for task, (address, _) in self._greeting.items() if address == busiest]
            crowds = places > min(held[where] + 1, MOST_GREETING // 2)
            left = self._greeting[theirs[0]][1] + GRACE_SECONDS - time.monotonic()
            if not crowds and left > 0:
                await asyncio.wait(self._greeting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)
                continue
            task = secrets.choice(theirs) if crowds else theirs[0]
            self._greeting.pop(task)
            task.cancel()
            await asyncio.sleep(PACE_SECONDS)

    async def _let_in(self, connected: socket.socket, where: str) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: Connection(self),
                connected,
                ssl=self._server,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=HANG_UP_SECONDS,
            )
        except OSError as error:
            self._said(f"A connection from {where} was refused: {why_refused(error)}.")

    async def _keep_dialling(self, channel: Channel, address: str | Callable[[], socket.socket]) -> None:
        while not channel.refused:
            try:
                target: dict[str, Any]
                if isinstance(address, str):
                    host, _, port = address.rpartition(":")
                    target = {"host": host, "port": int(port)}
                else:
                    target = {"sock": await _opened(address)}
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    _, connection = await self._loop.create_connection(
                        lambda: Connection(self, channel),
                        **target,
                        ssl=self._client,
                        server_hostname="pipeline",
                        ssl_shutdown_timeout=HANG_UP_SECONDS,
                    )
                await asyncio.shield(connection.over)
            except (OSError, ValueError) as error:
                if channel.connection is None:
                    channel.problem, channel.nobody = why_refused(error), isinstance(error, ConnectionRefusedError)
                    self._tell()
            await asyncio.sleep(REDIAL_SECONDS)

    def _greet(self, connection: Connection, channel: Channel, refuses: str = "") -> None:
        at = self._at if connection.dialled else ""
        greeting = Greeting(self.name, self.life, channel.life, channel.done_with, self.adopts, at, refuses)
        connection.put(0, channel.done_with, msgspec.json.encode(greeting))

    def _meet(self, connection: Connection, data: bytes) -> None:
        try:
            theirs = msgspec.json.decode(data, type=Greeting)
        except msgspec.MsgspecError as error:
            self.lost(connection, f"it has another version: {error}")
            return
        channel = connection.channel = connection.channel or self.channel(theirs.name)
        occupied = channel.connection is not None and theirs.life != channel.life
        refuses = REPLACED if theirs.life in channel.past else OCCUPIED if occupied else ""
        if not connection.dialled:
            self._greet(connection, channel, refuses)
        channel.refused = channel.refused or theirs.refuses == REPLACED
        if theirs.refuses or refuses:
            channel.problem = theirs.refuses or channel.problem
            # What was written, as why, is sent before.
            connection.transport.close()
            return
        if channel.connection is not None:
            self.lost(channel.connection, "another connection has taken its place")
        connection.greeted = True
        channel.greeted(theirs, connection)
        if theirs.dial:
            self._tasks.add(asyncio.create_task(self._dial_back(connection, channel, theirs.dial)))
        self._tell()
        self.write(connection)

    async def _dial_back(self, connection: Connection, channel: Channel, address: str) -> None:
        await asyncio.shield(connection.over)
        await self._keep_dialling(channel, address)

    def _pause(self, connection: Connection, channel: Channel) -> None:
        full = channel.inbox_bytes >= WINDOW_BYTES
        if full and not connection.paused:
            connection.transport.pause_reading()
        elif connection.paused and not full:
            connection.heard = time.monotonic()
            connection.transport.resume_reading()
        connection.paused = full

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for connection in list(self._connections):
                self.write(connection)
                if not connection.paused and time.monotonic() - connection.heard > SILENT_SECONDS:
                    self.lost(connection, f"it was silent for {SILENT_SECONDS:g} s")

    async def _hang_up(self) -> None:
        await self._close_ports()
        tasks = [*self._tasks, *self._greeting]
        for task in tasks:
            task.cancel()
        connections = list(self._connections)
        for connection in connections:
            self.write(connection)
            connection.transport.close()
        if waits := [*tasks, *(connection.over for connection in connections)]:
            await asyncio.wait(waits, timeout=HANG_UP_SECONDS)
        for connection in list(self._connections):
            self.lost(connection, "it was closed")
        # asyncio closes what was aborted in its next turns.
        for _ in range(5):
            await asyncio.sleep(0)

    def _tell(self) -> None:
        with self.lock:
            if not (self._has_news or self._ended):
                self._has_news = True
                os.eventfd_write(self.news, 1)


async def _opened(connect: Callable[[], socket.socket]) -> socket.socket:
    """Returns a connection that a thread opens, for which nobody waits at the end."""
    opened = Future[socket.socket]()
    opened.set_running_or_notify_cancel()

    def act() -> None:
        try:
            opened.set_result(connect())
        except OSError as error:
            opened.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    return await asyncio.wrap_future(opened)


def listen(address: str) -> socket.socket:
    """A socket that listens at HOST:PORT; on every interface where the host is a name that others know this one by."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host, int(port)), backlog=1024)
    except OSError:
        if stays_here(address):
            raise
    return socket.create_server(("", int(port)), backlog=1024)
