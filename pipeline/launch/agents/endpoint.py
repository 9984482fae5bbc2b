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
from typing import Any

from pipeline.launch.agents.channel import Channel, Connection, contexts, why_refused
from pipeline.plan.checks import stays_here

# What agents call the other end of their channel.
DRIVER = "driver"
HANDSHAKE_SECONDS = 5.0
# Between two attempts to dial, and two looks at all connections.
REDIAL_SECONDS, TICK_SECONDS = 1.0, 0.25
# A connection that is silent for so long is given up.
SILENT_SECONDS = 10.0
# Seconds for the other end to hang up as well.
HANG_UP_SECONDS = 0.5
# Connections in their handshake, which takes an agent some hundredths of a second; how long one more than these leaves
# the others alone; and between two that are hung up on.
MOST_GREETING, GRACE_SECONDS, PACE_SECONDS = 64, 1.0, 0.002


class Endpoint:
    """The channels of this process by the names of their other ends, and the thread that serves them.

    `name` is its own. `report` hears of connections that were refused. `adopts`: see `Greeting`.
    """

    def __init__(self, name: str, token: bytes, report: Callable[[str], None] = lambda text: None) -> None:
        self.name, self.life, self.adopts = name, secrets.token_hex(8), False
        self.token, self.at, self._report = token, "", report
        self._server, self._client = contexts(token)
        self.channels, self.connections, self.lock = dict[str, Channel](), set[Connection](), threading.RLock()
        # What lets in at each port, and all else that runs; addresses of connections in their handshake, since when.
        self._ports, self._tasks = set[asyncio.Task[None]](), set[asyncio.Task[None]]()
        self._greeting: dict[asyncio.Task[None], tuple[str, float]] = {}
        # Is readable once something has come, until it is heard.
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = False
        self._loop = asyncio.new_event_loop()
        # A connection that breaks is no error of this program.
        self._loop.set_exception_handler(lambda loop, context: None)
        # Room that asyncio keeps for as long as a connection lasts: 256 KiB if not told.
        sslproto.SSLProtocol.max_size = 1 << 16
        self._thread = threading.Thread(target=self._loop.run_forever, name="channels", daemon=True)
        self._thread.start()
        self._begin(self._tick(), self._tasks)

    def hear(self) -> None:
        """Makes `news` wait for what comes from now on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.news)

    def tell(self) -> None:
        """Makes `news` readable."""
        with self.lock:
            if not self._ended:
                os.eventfd_write(self.news, 1)

    def channel(self, name: str) -> Channel:
        """Returns the channel to a name, which may have no connection yet."""
        with self.lock:
            return self.channels.setdefault(name, Channel(self, name))

    def listen(self, address: str) -> str:
        """Listens at HOST:PORT, of which port 0 is any; returns where. Raises `OSError`."""
        host, _, port = address.rpartition(":")
        try:
            listening = socket.create_server((host, int(port)), backlog=1024)
        except OSError:
            if stays_here(address):
                raise
            # The host may be a name that others know this one by.
            listening = socket.create_server(("", int(port)), backlog=1024)
        listening.setblocking(False)
        self.at = f"{host}:{listening.getsockname()[1]}"
        self._begin(self._accept(listening), self._ports)
        return self.at

    def stop_listening(self) -> None:
        """Lets go of the ports that it listens at; connections stay."""
        asyncio.run_coroutine_threadsafe(_end(self._ports), self._loop).result()

    def dial(self, name: str, address: str | Callable[[], socket.socket], after: Connection | None = None) -> Channel:
        """Returns a channel to HOST:PORT or to whom a function connects; dialled if unconnected and `after` is over."""
        channel = self.channel(name)
        self._begin(self._keep_dialling(channel, address, after), self._tasks)
        return channel

    def wake(self, channel: Channel) -> None:
        """Sends what waits in a channel, soon. Under the lock."""
        if channel.connection is not None and not self._ended:
            self._loop.call_soon_threadsafe(channel.connection.write)

    def close(self, seconds: float = 0.0) -> None:
        """Ends all channels, once the ends that are there have what was sent, or the seconds have passed."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(each.kept and each.connection for each in self.channels.values()):
            time.sleep(0.02)
        if self._ended:
            return
        with self.lock:
            self._ended = True
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        os.close(self.news)

    def _begin(self, doing: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        self._loop.call_soon_threadsafe(lambda: tasks.add(self._loop.create_task(doing)))

    async def _accept(self, listening: socket.socket) -> None:
        with listening:
            while True:
                try:
                    connected, (where, *_) = await self._loop.sock_accept(listening)
                except OSError:
                    # Who dialled has gone again, or there is no room for it here.
                    await asyncio.sleep(TICK_SECONDS)
                    continue
                await self._make_room(where)
                self._greeting[asyncio.create_task(self._let_in(connected, where))] = (where, time.monotonic())
                # Else those that are let in would wait for all that dial.
                await asyncio.sleep(0)

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
            if crowds or left <= 0:
                task = secrets.choice(theirs) if crowds else theirs[0]
                del self._greeting[task]
                task.cancel()
                await asyncio.sleep(PACE_SECONDS)
            else:
                await asyncio.wait(self._greeting, timeout=left, return_when=asyncio.FIRST_COMPLETED)

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
            self._report(f"A connection from {where} was refused: {why_refused(error)}.")
        except asyncio.CancelledError:
            connected.close()
            raise
        finally:
            self._greeting.pop(asyncio.current_task(), None)  # type: ignore[arg-type]

    async def _keep_dialling(
        self, channel: Channel, address: str | Callable[[], socket.socket], after: Connection | None = None
    ) -> None:
        if after is not None:
            await asyncio.shield(after.over)
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
                    self.tell()
            await asyncio.sleep(REDIAL_SECONDS)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for connection in list(self.connections):
                connection.write()
                if not connection.paused and time.monotonic() - connection.heard > SILENT_SECONDS:
                    connection.lost(f"it was silent for {SILENT_SECONDS:g} s")

    async def _hang_up(self) -> None:
        await _end(self._ports)
        tasks, connections = {*self._tasks, *self._greeting}, list(self.connections)
        for task in tasks:
            task.cancel()
        for connection in connections:
            connection.write()
            connection.transport.close()
        if waits := [*tasks, *(connection.over for connection in connections)]:
            await asyncio.wait(waits, timeout=HANG_UP_SECONDS)
        for connection in list(self.connections):
            connection.lost("it was closed")
        # asyncio closes what was aborted in its next turns.
        for _ in range(5):
            await asyncio.sleep(0)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    tasks.clear()


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
