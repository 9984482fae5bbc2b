"""All lines of a process, and the thread that reads and writes them: who dials is dialled again, who listens lets in.

Whoever dialled a line dials again whenever its connection is lost; `link.py` sees to it that nothing is.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

from pipeline.launch.line.connection import MESSAGE, MOST_BYTES, STATUS, WORD, Connection, LinkError
from pipeline.launch.line.handshake import HANDSHAKE_SECONDS, Identity, dial, greet_dialler
from pipeline.launch.line.link import WINDOW_BYTES, Greeting, Link
from pipeline.plan.checks import stays_here

# Between two attempts to dial, and two looks at all connections.
REDIAL_SECONDS, TICK_SECONDS = 1.0, 0.25
# After so long without a word a connection is given up, and a word is said where there is nothing else to say.
SILENT_SECONDS, WORD_SECONDS = 10.0, 2.0
# Connections that have not shown the token yet, and for how long one more than these leaves the others alone: a
# handshake takes an agent some hundredths of a second.
MOST_GREETING, GRACE_SECONDS = 64, 1.0
LENGTH = struct.Struct("!I")


class Hub:
    """The lines of this process, by the names of the other ends. `name` is its own.

    `said` is told, in words, of connections that were refused. `adopts`: see `Greeting`.
    """

    def __init__(self, name: str, token: bytes, said: Callable[[str], None] = lambda text: None) -> None:
        self.name, self.token, self.life, self.adopts = name, token, secrets.token_hex(8), False
        self.links: dict[str, Link] = {}
        self.lock = threading.RLock()
        self._said = said
        self._listening: list[socket.socket] = []
        # The connections that have not shown the token yet, with their addresses and since when, oldest first.
        self._greeting: dict[socket.socket, tuple[str, float]] = {}
        self._greeted = threading.Condition()
        self._selector = selectors.DefaultSelector()
        # One end wakes the thread; the other says to who waits, until it is heard, that something has come.
        self._woken, self._news = _signal(), _signal()
        self._has_news, self._ending, self._ended = False, False, False
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    @property
    def news(self) -> int:
        """A descriptor that is ready, for who waits, when something has come or a connection was lost."""
        return self._news

    def hear(self) -> None:
        """Makes `news` wait for what comes from now on."""
        with self.lock:
            self._has_news = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._news)

    def listen(self, address: str, identity: Identity | None = None) -> str:
        """Listens at HOST:PORT, of which port 0 is any; returns where. Raises `OSError`."""
        listening = listen(address)
        self._listening.append(listening)
        threading.Thread(target=self._accept, args=(listening, identity or Identity()), daemon=True).start()
        return f"{address.rpartition(':')[0]}:{listening.getsockname()[1]}"

    def stop_listening(self) -> None:
        """Lets go of the ports that it listens at; connections stay."""
        for listening in self._listening:
            # Closing does not end a thread that waits for a connection.
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        self._listening = []

    def link(self, name: str) -> Link:
        """The line to a name, of which there may be no connection yet."""
        with self.lock:
            return self.links.setdefault(name, Link(name, self.life, self.lock, self.wake))

    def dial(self, name: str, address: str) -> Link:
        """A line to who listens at HOST:PORT, dialled again whenever the connection is lost."""
        link = self.link(name)
        threading.Thread(target=self._keep_dialling, args=(link, address), daemon=True).start()
        return link

    def dial_once(self, name: str, address: str) -> bool:
        """The same, once: is there a connection now?"""
        try:
            self._dial(self.link(name), address)
        except OSError as error:
            self.link(name).problem = str(error)
            return False
        return True

    def wake(self) -> None:
        """Has the thread look for what is to be sent."""
        with self.lock:
            if not self._ended:
                os.eventfd_write(self._woken, 1)

    def close(self, seconds: float = 0.0) -> None:
        """Ends all lines, once the other ends have what was sent, or the seconds have passed."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(link.kept and not link.closed for link in self.links.values()):
            time.sleep(0.02)
        self.stop_listening()
        self._ending = True
        self.wake()
        self._thread.join()
        with self.lock:
            if not self._ended:
                self._ended = True
                os.close(self._woken)
                os.close(self._news)

    # What follows happens in threads of its own.

    def _accept(self, listening: socket.socket, identity: Identity) -> None:
        while listening in self._listening:
            try:
                connected, (where, *_) = listening.accept()
            except OSError:
                # Who dialled has gone again, there is no room for it here, or `stop_listening` has come.
                time.sleep(TICK_SECONDS)
                continue
            self._make_room(where)
            # TLS takes the socket itself: by this one it is hung up on from another thread.
            handle = connected.dup()
            with self._greeted:
                self._greeting[handle] = (where, time.monotonic())
            threading.Thread(target=self._greet, args=(connected, handle, where, identity), daemon=True).start()

    def _make_room(self, where: str) -> None:
        """Hangs up on a connection that is in the way of one from an address, or waits until one is done.

        An address that has more places than this one, or most of all, loses any of them: no rate of dialling keeps the
        others out. Where none has, the oldest goes, once it has had its time.
        """
        with self._greeted:
            while len(self._greeting) >= MOST_GREETING:
                held = Counter(address for address, _ in self._greeting.values())
                busiest, most = held.most_common(1)[0]
                theirs = [handle for handle, (address, _) in self._greeting.items() if address == busiest]
                crowds = most > min(held[where] + 1, MOST_GREETING // 2)
                left = self._greeting[theirs[0]][1] + GRACE_SECONDS - time.monotonic()
                if not crowds and left > 0:
                    self._greeted.wait(left)
                    continue
                hung_up = secrets.choice(theirs) if crowds else theirs[0]
                self._greeting.pop(hung_up)
                with contextlib.suppress(OSError):
                    hung_up.shutdown(socket.SHUT_RDWR)

    def _greet(self, connected: socket.socket, handle: socket.socket, where: str, identity: Identity) -> None:
        try:
            encrypted = greet_dialler(connected, identity, self.token)
            encrypted.settimeout(HANDSHAKE_SECONDS)
            try:
                theirs = _read_greeting(encrypted)
                link = self.link(theirs.name)
                encrypted.sendall(_greeting(self._own(link, theirs.life)))
            except OSError:
                # It has the token, and went away.
                encrypted.close()
                return
            self._attach(link, theirs, Connection(encrypted))
        except OSError as error:
            self._said(f"A connection from {where} was refused: {error}.")
        finally:
            with self._greeted:
                self._greeting.pop(handle, None)
                self._greeted.notify()
            handle.close()

    def _keep_dialling(self, link: Link, address: str) -> None:
        while not (link.closed or link.refused or self._ending):
            if link.connection is None:
                try:
                    self._dial(link, address)
                except OSError as error:
                    link.problem, link.nobody = str(error), isinstance(error, ConnectionRefusedError)
                    self._tell()
            time.sleep(REDIAL_SECONDS)

    def _dial(self, link: Link, address: str) -> None:
        encrypted = dial(address, self.token)
        try:
            encrypted.settimeout(HANDSHAKE_SECONDS)
            encrypted.sendall(_greeting(self._own(link, link.life)))
            theirs = _read_greeting(encrypted)
            if theirs.refuses:
                link.refused = True
                raise LinkError("another has taken its place")
            if theirs.busy:
                # Whose host was lost may seem to be there until it is silent for too long.
                raise LinkError(f"another that is called {self.name} is there")
        except OSError:
            encrypted.close()
            raise
        self._attach(link, theirs, Connection(encrypted))

    def _own(self, link: Link, life: str) -> Greeting:
        """What is said of this end to one of that life."""
        with self.lock:
            over, busy = link.is_over(life), link.is_busy(life)
            return Greeting(self.name, self.life, link.life, link.done_with, self.adopts, over, busy)

    def _attach(self, link: Link, theirs: Greeting, connection: Connection) -> None:
        with self.lock:
            if link.closed or self._ending or link.is_over(theirs.life) or link.is_busy(theirs.life):
                connection.close()
                return
            if link.connection is not None:
                self._lose(link, "another connection has taken its place")
            link.greeted(theirs, connection)
            self._selector.register(connection.socket, selectors.EVENT_READ, link)
        self.wake()
        self._tell()

    def _run(self) -> None:
        next_tick = time.monotonic()
        while not self._ending:
            ready = self._selector.select(max(0.0, next_tick - time.monotonic()))
            woken = False
            for key, events in ready:
                if key.data is None:
                    woken = True
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._woken)
                else:
                    self._serve(key.data, bool(events & selectors.EVENT_READ))
            if woken or time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                for link in list(self.links.values()):
                    self._serve(link, False)
        with self.lock:
            for link in self.links.values():
                self._serve(link, False)
                self._lose(link, "it was closed")
            self._selector.close()

    def _serve(self, link: Link, readable: bool) -> None:
        """Reads and writes what can be read and written of a line, and gives up a connection that is silent."""
        came = False
        with self.lock:
            connection = link.connection
            if connection is None:
                return
            try:
                if readable or connection.paused:
                    for kind, number, done, data in connection.read(link.inbox_bytes < WINDOW_BYTES):
                        link.drop(done)
                        link.take_in(kind, number, data)
                        came = came or kind != WORD
                self._write(link, connection)
                if link.closed:
                    raise LinkError("it was closed")
                if time.monotonic() - connection.heard > SILENT_SECONDS:
                    raise LinkError(f"it was silent for {SILENT_SECONDS:g} s")
            except (OSError, ValueError) as error:
                self._lose(link, str(error))
                came = True
        if came:
            self._tell()

    def _write(self, link: Link, connection: Connection) -> None:
        while not connection.is_full and connection.next in link.kept:
            connection.add(MESSAGE, connection.next, link.done_with, link.kept[connection.next])
            connection.next += 1
        if link.status is not None and not connection.is_full:
            connection.add(STATUS, 0, link.done_with, link.status)
            link.status = None
        late = time.monotonic() - connection.spoke > WORD_SECONDS
        if not connection.is_full and (late or link.done_with > connection.said_done):
            connection.add(WORD, 0, link.done_with, b"")
        wanted = connection.write(link.done_with)
        if connection.paused:
            wanted &= ~selectors.EVENT_READ
        if wanted != connection.watched:
            if connection.watched:
                self._selector.unregister(connection.socket)
            if wanted:
                self._selector.register(connection.socket, wanted, link)
            connection.watched = wanted

    def _lose(self, link: Link, why: str) -> None:
        connection, link.connection = link.connection, None
        if connection is None:
            return
        if connection.watched:
            self._selector.unregister(connection.socket)
        connection.close()
        link.away_since, link.problem = connection.heard, why

    def _tell(self) -> None:
        with self.lock:
            if not (self._has_news or self._ended):
                self._has_news = True
                os.eventfd_write(self._news, 1)


def listen(address: str) -> socket.socket:
    """A socket that listens at HOST:PORT; on every interface where the host is a name that others know this one by."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host, int(port)), backlog=1024)
    except OSError:
        if stays_here(address):
            raise
    return socket.create_server(("", int(port)), backlog=1024)


def _signal() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _greeting(greeting: Greeting) -> bytes:
    data = json.dumps(asdict(greeting)).encode()
    return LENGTH.pack(len(data)) + data


def _read_greeting(connected: socket.socket) -> Greeting:
    """The other end's. Raises `LinkError`."""
    try:
        (size,) = LENGTH.unpack(_exactly(connected, LENGTH.size))
        return Greeting(**json.loads(_exactly(connected, min(size, MOST_BYTES))))
    except (ValueError, TypeError) as error:
        raise LinkError(f"Expected an end of a line of the same version, received another: {error}") from error


def _exactly(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connected.recv(count - len(data))
        if not more:
            raise LinkError("it hung up")
        data += more
    return data
