"""Memory that the processes of one host share and add through, which has no name by which another could open it.

Each process copies what it adds into a slot of its own and tells the others by sockets; each then adds up the slots in
the order of ranks, so that all have the same sums. What is larger than a slot travels in rounds, through two buffers in
turn. Whoever has received a message sees what was written before; where a process dies, the kernel closes its sockets.
"""

import contextlib
import itertools
import math
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import ml_dtypes
import numpy as np

from pipeline.worker.model_error import TrainingError

# Of a process, in each of the two buffers: small enough for a processor's cache, large enough for few rounds.
SLOT_BYTES = 1 << 20
# More than two processes add a part each of so many bytes or more, and then copy the others'.
IN_PARTS = 1 << 15
# How long a process looks out for a message before it sleeps; to wake it takes some 30 microseconds.
LOOKS_SECONDS = 100e-6
# Of a message between processes.
MOST_BYTES = 1 << 17
# What parts a message's head from the rest.
END = b"\0"
# What TensorFlow and JAX take over from NumPy without a copy begins at a multiple of it.
ALIGNED = 64
# Added in 32 bits, and rounded once.
NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

# What a sum's message is called, whether more than two processes add a part each, and, of one that does not and takes a
# single round, for each of the two buffers and each vector the places of all processes.
_Layout: TypeAlias = tuple[str, bool, list[list[tuple[np.ndarray, ...]]]]


class PeerLostError(ConnectionError):
    """A process of this host has gone while others wait for it."""


def join(number: int, on_host: range, tell_all: Callable[[str], list[str]], looks_seconds: float) -> "Memory":
    """Returns the memory that the processes `on_host` share, of which this is `number`. All of all hosts call it.

    Raises `ConnectionRefusedError` in all if one cannot.
    """
    first, count = on_host.start, len(on_host)
    name, problem = f"pipeline-{secrets.token_hex(16)}", ""
    with contextlib.ExitStack() as opened:
        peers: dict[int, socket.socket] = {}
        try:
            # Of no folder: it goes with the process.
            listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"\0{name}")
            listener.listen(count)
            # Of no name, and all of it there.
            file = os.memfd_create("pipeline") if number == first else -1
            if number == first:
                os.posix_fallocate(file, 0, 2 * count * SLOT_BYTES)
        except (OSError, AttributeError) as error:
            problem = str(error)
        names = tell_all("" if problem else name)
        try:
            # To all of lower ranks, which learn who this is.
            for rank in range(first, number if all(names) else first):
                peers[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                peers[rank].connect(f"\0{names[rank]}")
                if not _is_own(peers[rank]):
                    raise PermissionError("it is another user's")
                peers[rank].send(str(number).encode())
        except OSError as error:
            problem = f"rank {rank} is not reached: {error}"
        if problems := [f"rank {rank} says: {text}" for rank, text in enumerate(tell_all(problem)) if text]:
            raise ConnectionRefusedError(problems[0])
        while len(peers) < count - 1:
            peer, _ = listener.accept()
            if _is_own(peer):
                peers[int(peer.recv(MOST_BYTES))] = peer
        if number == first:
            for peer in peers.values():
                socket.send_fds(peer, [b"memory"], [file])
        else:
            _, (file,), _, _ = socket.recv_fds(peers[first], MOST_BYTES, 1)
    shared = mmap.mmap(file, 2 * count * SLOT_BYTES)
    os.close(file)
    return Memory(shared, number, dict(sorted(peers.items())), looks_seconds)


def _is_own(peer: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


class Memory:
    """The memory that the processes of a host share. `peers` are sockets to the others, by their ranks among all."""

    def __init__(self, shared: mmap.mmap, rank: int, peers: Mapping[int, socket.socket], looks_seconds: float) -> None:
        self._number, self._peers, self._count = rank, dict(peers), len(peers) + 1
        # Among those of the host.
        self._rank = sum(peer < rank for peer in peers)
        self._looks_seconds = looks_seconds
        # [buffer, process, byte]
        self._slots = np.frombuffer(shared, np.uint8).reshape(2, self._count, -1)
        self._rounds = self._met = 0
        # Of sums, by the types and sizes of their vectors, of which a training has few.
        self._layouts: dict[tuple[tuple[np.dtype, int], ...], _Layout] = {}
        self._heard = bytearray(MOST_BYTES)

    def sum(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The sums of vectors of all processes, which call it with equal sizes and types."""
        sums = [aligned(array.shape, array.dtype) for array in arrays]
        self.sum_into(sums, arrays)
        return sums

    def sum_into(self, sums: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> None:
        """Writes the sums of vectors of all processes, which call it with equal sizes and types."""
        vectors = tuple([(array.dtype, array.size) for array in arrays])
        if vectors not in self._layouts:
            self._layouts[vectors] = self._layout(arrays)
        description, in_parts, views = self._layouts[vectors]
        with np.errstate(all="ignore"):
            if views:
                self._rounds += 1
                views_of_round = views[self._rounds % 2]
                for parts, array in zip(views_of_round, arrays, strict=True):
                    parts[self._rank][:] = array.reshape(-1)
                self._meet(description)
                for parts, total in zip(views_of_round, sums, strict=True):
                    _add_up(parts, total.reshape(-1))
                return
            for start, end, slots in self._windows(_size(arrays)):
                self._write(slots, arrays, start, end)
                self._meet(description)
                if not in_parts:
                    _add(slots, sums, start, end)
                    continue
                # Adds this process's part, has the others copy it, and copies theirs.
                size, count = end - start, self._count
                edges = [start + size * rank // count // ALIGNED * ALIGNED for rank in range(count)]
                bounds = list(itertools.pairwise([*edges, end]))
                first, last = bounds[self._rank]
                own = slots[:, first - start : last - start]
                _add(own, sums, first, last)
                self._write(own, sums, first, last)
                self._meet(description)
                for rank, (first, last) in enumerate(bounds):
                    for place, piece in _pieces(sums, first, last) if rank != self._rank else ():
                        piece[:] = slots[rank, first - start : last - start][place].view(piece.dtype)

    def _layout(self, arrays: Sequence[np.ndarray]) -> _Layout:
        description = "sums of " + ", ".join(f"{array.dtype}[{array.size}]" for array in arrays)
        in_parts, room = self._count > 2 and sum(array.nbytes for array in arrays) >= IN_PARTS, self._slots.shape[2]
        if in_parts or _size(arrays) > room or not all(array.size for array in arrays):
            return description, in_parts, []
        places = [(place, piece.dtype) for place, piece in _pieces(arrays, 0, room)]
        views = [[tuple(slots[:, place].view(dtype)) for place, dtype in places] for slots in self._slots]
        return description, in_parts, views

    def gather(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """For each array those of all processes, one after another by their ranks, along the first axis."""
        description = "rows of " + ", ".join(f"{array.dtype}{list(array.shape[1:])}" for array in arrays)
        counts = self._meet(description, np.array([len(array) for array in arrays], np.int64).tobytes())
        # [process, array]
        ends = np.cumsum([np.frombuffer(of_one, np.int64) for of_one in counts], axis=0)
        pairs = zip(ends[-1].tolist(), arrays, strict=True)
        of_all = [aligned((end, *array.shape[1:]), array.dtype) for end, array in pairs]
        # [process][array]
        parts = list(zip(*map(np.split, of_all, ends[:-1].T), strict=True))
        for start, end, slots in self._windows(max(map(_size, parts))):
            self._write(slots, arrays, start, end)
            self._meet(description)
            for slot, of_one in zip(slots, parts, strict=True):
                for place, piece in _pieces(of_one, start, end):
                    piece[:] = slot[place].view(piece.dtype)
        return of_all

    def _windows(self, size: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """(first byte, last byte, slots [process, byte]) of each round of a message; there is one at least."""
        room = self._slots.shape[2]
        for start in range(0, max(1, size), room):
            self._rounds += 1
            yield start, min(start + room, size), self._slots[self._rounds % 2]

    def _write(self, slots: np.ndarray, arrays: Sequence[np.ndarray], start: int, end: int) -> None:
        for place, piece in _pieces(arrays, start, end):
            slots[self._rank, place].view(piece.dtype)[:] = piece

    def _meet(self, description: str, own: bytes = b"") -> list[bytes]:
        """Waits for all processes to do the same; returns what they bring, by their ranks. Raises `PeerLostError`."""
        self._met += 1
        head = f"number {self._met}, {description}"
        brought, message = {self._number: own}, head.encode() + END + own
        try:
            for peer in self._peers.values():
                peer.send(message)
            for rank, peer in self._peers.items():
                if not (heard := self._hear(peer)):
                    raise PeerLostError(f"rank {rank} has gone")
                other, _, brought[rank] = heard.partition(END)
                if heard != message and other != head.encode():
                    expected = "processes that add the same in the same order"
                    received = f"{head} on rank {self._number}, and {other.decode()} on rank {rank}"
                    raise TrainingError(expected, received, "strategy.collective=tensorflow")
        except OSError as error:
            raise PeerLostError(f"a process of this host has gone ({error})") from error
        return [brought[rank] for rank in sorted(brought)]

    def _hear(self, peer: socket.socket) -> bytes:
        until = time.perf_counter() + self._looks_seconds
        while time.perf_counter() < until:
            try:
                return bytes(self._heard[: peer.recv_into(self._heard, 0, socket.MSG_DONTWAIT)])
            except BlockingIOError:
                # What else this process does has its core meanwhile.
                os.sched_yield()
        return bytes(self._heard[: peer.recv_into(self._heard)])


def _pieces(arrays: Sequence[np.ndarray], start: int, end: int) -> Iterator[tuple[slice, np.ndarray]]:
    """(bytes, from `start` on; the vector that belongs there) of what arrays have between two bytes of a message."""
    offset = 0
    for array in arrays:
        first, last = max(offset, start), min(offset + array.nbytes, end)
        if first < last:
            width = array.itemsize
            piece = array.reshape(-1)[(first - offset) // width : (last - offset) // width]
            yield slice(first - start, last - start), piece
        offset += -(-array.nbytes // ALIGNED) * ALIGNED


def _size(arrays: Sequence[np.ndarray]) -> int:
    return sum(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns a new array that an engine takes over without a copy."""
    room = np.empty(math.prod(shape) * dtype.itemsize + ALIGNED, np.uint8)
    return np.ndarray(shape, dtype, room, -room.__array_interface__["data"][0] % ALIGNED)


def _add(slots: np.ndarray, sums: Sequence[np.ndarray], start: int, end: int) -> None:
    # Slots are [process, byte], in the order of ranks, and hold a message from `start` to `end`.
    for place, total in _pieces(sums, start, end):
        _add_up(slots[:, place].view(total.dtype), total)


def _add_up(parts: Iterable[np.ndarray], total: np.ndarray) -> None:
    first, second, *others = parts
    is_narrow = total.dtype in NARROW
    sums = np.add(first.astype(np.float32), second) if is_narrow else np.add(first, second, out=total)
    for other in others:
        sums += other
    if is_narrow:
        total[:] = sums
