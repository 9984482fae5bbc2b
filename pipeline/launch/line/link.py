"""One end of a line: numbered messages that outlast the connections they travel over, and a status that does not.

Each message is kept until the other end says that it is done with it. Once there is another connection, both say what
they are done with, and the rest is sent again: nothing is lost, and what has come already is passed over. Of a status
only the last counts: it is never kept.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.launch.line.connection import MESSAGE, STATUS, Connection

# What an end keeps for the other is said to be too much from here on, and what it has not taken is no longer read.
WINDOW_BYTES = 32 << 20


@dataclass(frozen=True)
class Greeting:
    """What each end says of itself: its name, its life, which no other process has, and with how many messages it is
    done, of which life of the other. `adopts`: it takes the place of another conductor, and goes on with its processes.
    `refuses`: another of the same name was there after the other end. `busy`: one is there, or was a moment ago.
    """

    name: str
    life: str
    of: str = ""
    done: int = 0
    adopts: bool = False
    refuses: bool = False
    busy: bool = False


@dataclass(frozen=True)
class Received:
    """A message that has come, its number, 0 for a status, and the life that sent it."""

    number: int
    data: bytes
    life: str


class Link:
    """One end of a line, to a name. Any thread may send.

    `own` is the life of this end, `lock` is held while anything is changed, and `wake` has what is kept be sent.
    """

    def __init__(self, name: str, own: str, lock: threading.RLock, wake: Callable[[], None]) -> None:
        self.name, self._own, self._lock, self._wake = name, own, lock, wake
        self.connection: Connection | None = None
        # The other end's life, does it take the place of an earlier one, and those that were before it.
        self.life, self.adopts, self.past = "", False, set[str]()
        # Since when there is no connection, on the monotonic clock, and why there is none.
        self.away_since: float | None = time.monotonic()
        self.problem = ""
        # Does nothing listen any more where it is dialled, though the host is there?
        self.nobody = False
        # Messages that the other end is not done with, by number; the last of this end's, and the other's.
        self.kept: dict[int, bytes] = {}
        self.kept_bytes, self.sent, self.came, self.done_with = 0, 0, 0, 0
        # So much is kept for the other end before this one is to wait.
        self.window = WINDOW_BYTES
        self.status: bytes | None = None
        self.inbox: list[Received] = []
        self.inbox_bytes = 0
        # Of what was taken, by number: is this end done with it?
        self.taken: dict[int, bool] = {}
        self.closed = False
        # Is another in the place of this end?
        self.refused = False

    @property
    def away(self) -> float:
        """Seconds for which there has been no connection; 0 where there is one."""
        since = self.away_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def has_room(self) -> bool:
        """Is what is kept for the other end little enough that more may be sent?"""
        return self.kept_bytes < self.window

    def send(self, data: bytes) -> None:
        """Has a message arrive, now or once there is a connection again."""
        with self._lock:
            self.sent += 1
            self.kept[self.sent] = data
            self.kept_bytes += len(data)
        self._wake()

    def report(self, status: bytes) -> None:
        """Has a status arrive, unless another takes its place before."""
        with self._lock:
            self.status = status
        self._wake()

    def take(self) -> list[Received]:
        """What has come, in order, each message once."""
        with self._lock:
            taken, self.inbox = self.inbox, []
            self.taken |= {received.number: False for received in taken if received.number}
            was_full, self.inbox_bytes = self.inbox_bytes >= WINDOW_BYTES, 0
        if was_full:
            self._wake()
        return taken

    def done(self, received: Received) -> None:
        """Tells the other end, before long, that it need not keep a message, nor those before it once they are done."""
        with self._lock:
            if received.life != self.life or received.number not in self.taken:
                return
            self.taken[received.number] = True
            for number in list(self.taken):
                if not self.taken[number]:
                    break
                self.done_with = number
                del self.taken[number]

    def close(self) -> None:
        """Ends the line. What has not arrived is lost, see `Hub.close`."""
        self.closed = True
        self._wake()

    def is_over(self, life: str) -> bool:
        """Has another come in the place of who calls, which is let in no more?"""
        return life in self.past

    def is_busy(self, life: str) -> bool:
        """Is there a connection to another than who calls, as long as that is not silent?"""
        return self.connection is not None and life != self.life

    def greeted(self, greeting: Greeting, connection: Connection) -> None:
        """Takes another connection to the other end, which has said what it is done with. Under the lock."""
        if greeting.life != self.life:
            # Another process, which counts its messages anew. What was meant for the one before means nothing to it,
            # unless it goes on with that one's work.
            if self.life and not greeting.adopts:
                self.drop(self.sent)
            self.past.add(self.life)
            self.life, self.adopts, self.came, self.done_with = greeting.life, greeting.adopts, 0, 0
            self.inbox, self.inbox_bytes, self.taken = [], 0, {}
        if greeting.of == self._own:
            self.drop(greeting.done)
        connection.next = min(self.kept, default=self.sent + 1)
        connection.said_done = self.done_with
        self.connection, self.away_since, self.problem, self.nobody = connection, None, "", False

    def drop(self, done: int) -> None:
        """Forgets what the other end is done with. Under the lock."""
        for number in list(self.kept):
            if number > done:
                break
            self.kept_bytes -= len(self.kept.pop(number))

    def take_in(self, kind: int, number: int, data: bytes) -> None:
        """Takes in a frame, of which what has come before is passed over. Under the lock."""
        if kind == STATUS:
            self.inbox = [received for received in self.inbox if received.number]
            self.inbox.append(Received(0, data, self.life))
        elif kind == MESSAGE and number > self.came:
            self.came = number
            self.inbox.append(Received(number, data, self.life))
            self.inbox_bytes += len(data)
