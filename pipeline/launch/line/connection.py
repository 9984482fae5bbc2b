"""Frames over an encrypted connection that never blocks: a kind, a number, what this end is done with, and data."""

import selectors
import ssl
import struct
import time
from collections.abc import Iterator

# Length of the data, kind, number of the message, and number up to which this end is done with the other's.
HEADER = struct.Struct("!IBQQ")
MESSAGE, STATUS, WORD = range(3)
# No message is longer: a plan for the most workers is some megabytes.
MOST_BYTES = 1 << 28
# Read or put together at once.
CHUNK_BYTES, FULL_BYTES = 1 << 16, 1 << 20

Frame = tuple[int, int, int, bytes]


class LinkError(OSError):
    """A line that cannot be had, or has ended."""


class Connection:
    """One connection of a line. One thread reads and writes it."""

    def __init__(self, encrypted: ssl.SSLSocket) -> None:
        self.socket = encrypted
        encrypted.setblocking(False)
        # The next message to be sent over it; what the other end was told that this one is done with.
        self.next, self.said_done = 1, 0
        # When something was read, and when something was said.
        self.heard = self.spoke = time.monotonic()
        # Is the other end not read, since it has sent more than was taken?
        self.paused = False
        # What the selector watches it for.
        self.watched = selectors.EVENT_READ
        self._read, self._unsent = bytearray(), bytearray()

    @property
    def is_full(self) -> bool:
        """Is there enough to be written?"""
        return len(self._unsent) >= FULL_BYTES

    def add(self, kind: int, number: int, done: int, data: bytes) -> None:
        """Puts a frame behind what is to be written."""
        self._unsent += HEADER.pack(len(data), kind, number, done)
        self._unsent += data
        self.said_done = done

    def read(self, room: bool) -> Iterator[Frame]:
        """The frames that are there. Raises `OSError` at the end of the connection, after the last of them."""
        self.paused = not room
        ended: OSError | None = None
        while not self.paused:
            try:
                data = self.socket.recv(CHUNK_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError as error:
                ended = error
                break
            if not data:
                ended = LinkError("it hung up")
                break
            self.heard = time.monotonic()
            self._read += data
            if len(self._read) > FULL_BYTES:
                break
        start = 0
        while len(self._read) - start >= HEADER.size:
            size, kind, number, done = HEADER.unpack_from(self._read, start)
            if size > MOST_BYTES:
                raise LinkError(f"Expected a message of no more than {MOST_BYTES:,} bytes, received {size:,}")
            end = start + HEADER.size + size
            if len(self._read) < end:
                break
            yield kind, number, done, bytes(self._read[start + HEADER.size : end])
            start = end
        del self._read[:start]
        if ended is not None:
            raise ended

    def write(self, done: int) -> int:
        """Writes what can be written; returns what is to be waited for. Raises `OSError`."""
        while self._unsent:
            try:
                count = self.socket.send(memoryview(self._unsent)[:CHUNK_BYTES])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return selectors.EVENT_READ | selectors.EVENT_WRITE
            del self._unsent[:count]
            self.spoke = time.monotonic()
        return selectors.EVENT_READ

    def close(self) -> None:
        """Ends it, without waiting for the other end."""
        self.socket.close()
