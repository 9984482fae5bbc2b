"""Adds over processes through memory that those of one host share, which has no name by which another could open it.

Each process copies what it adds into a slot of its own and tells the others. Each then adds up the slots in the order
of ranks, so that all have the same sums. What is larger than a slot travels in rounds, through two buffers in turn:
before a process writes into one again, it has heard from all that they are done with it.

Of several hosts, the first process of each adds its host's sums to those of others by TensorFlow's ring, and hands on
what that comes to. Gradients leave in buckets, while backpropagation makes others.

Processes tell each other by sockets. Whoever has received a message sees what was written before it was sent, on any
processor; and where a process dies, the kernel closes its sockets, which ends the wait of the others.
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
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
import tensorflow as tf

from pipeline.plan.plan import Plan, Process
from pipeline.worker.collective import Collective
from pipeline.worker.model_error import TrainingError
from pipeline.worker.tensorflow import agreement
from pipeline.worker.tensorflow.collective import (
    Addend,
    PeerLostError,
    TensorFlowCollective,
    in_buckets,
    of_no_variables,
    over,
)
from pipeline.worker.tensorflow.host_ring import HostRing

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
# What TensorFlow takes over from NumPy without a copy begins at a multiple of it.
ALIGNED = 64
# Added in 32 bits, and rounded once.
NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def of_plan(plan: Plan, process: Process, strategy: tf.distribute.Strategy) -> Collective[Addend]:
    """Returns what a plan's processes add by, all of which call it: TensorFlow where they cannot share memory."""
    number, count, local = plan.leaders.index(process.rank), len(plan.leaders), len(process.replicas)
    hosts = [plan.processes[rank].host for rank in plan.leaders]
    first, own = hosts.index(process.host), over(strategy)

    def told(text: str) -> list[str]:
        return agreement.texts(strategy, own, text, number, count, local)

    try:
        looks_seconds = 0 if plan.hardware.oversubscribed else LOOKS_SECONDS
        memory = join(number, range(first, first + hosts.count(process.host)), told, looks_seconds)
    except ConnectionRefusedError as error:
        note = f"TensorFlow adds, in place of shared memory: {error}."
        return TensorFlowCollective(plan.workers, note, plan.bucket_bytes)
    of_hosts = list(dict.fromkeys(hosts))
    is_first = number == first and len(of_hosts) > 1
    ring = HostRing(strategy, of_hosts.index(process.host), len(of_hosts)) if is_first else None
    return SharedMemoryCollective(plan.workers, local, memory, len(of_hosts), ring, plan.bucket_bytes)


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
            file = _file(count) if number == first else -1
        except (OSError, AttributeError) as error:
            problem = str(error)
        names = tell_all("" if problem else name)
        try:
            # To all of lower ranks.
            for rank in range(first, number if all(names) else first):
                peers[rank] = _reached(names[rank], number)
        except OSError as error:
            problem = f"rank {first + len(peers)} is not reached: {error}"
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


def _file(count: int) -> int:
    """Returns memory for so many processes, all of it there, as a file without a name."""
    file = os.memfd_create("pipeline")
    os.posix_fallocate(file, 0, 2 * count * SLOT_BYTES)
    return file


def _reached(name: str, number: int) -> socket.socket:
    """Returns a socket to the process that listens by that name, which learns by it who this one is."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(f"\0{name}")
    if not _is_own(peer):
        raise PermissionError("it is another user's")
    peer.send(str(number).encode())
    return peer


def _is_own(peer: socket.socket) -> bool:
    """True if the other end is a process of this user, as the kernel says."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


class SharedMemoryCollective:
    """Adds over the processes of so many hosts, with `local` replicas in each. The first of each of several hosts has
    the ring of these.
    """

    def __init__(
        self, replicas: int, local: int, memory: "Memory", hosts: int = 1, ring: HostRing | None = None,
        bucket_bytes: int | None = 0,
    ) -> None:  # fmt: skip
        self.replicas, self._local, self._memory, self._hosts, self._ring = replicas, local, memory, hosts, ring
        self._bucket_bytes = bucket_bytes

    def sum(self, arrays: Sequence[Addend]) -> list[Addend]:
        """The sums, those of dense arrays in one message or in buckets, and as their gradients those of gradients."""
        summed = dict[int, Addend]()
        for join, are_rows in ((self._total, False), (self._rows, True)):
            places = [place for place, array in enumerate(arrays) if isinstance(array, tf.IndexedSlices) is are_rows]
            if places:
                summed |= zip(places, join([arrays[place] for place in places]), strict=True)
        return [summed[place] for place in range(len(arrays))]

    def sent_bytes(self, size: int) -> int:
        """Returns what its process adds first, and shares of what its host's p processes read of each other, 2 (p - 1)
        / p of the bytes, of what its host sends in a ring of h, 2 (h - 1) / h, and of what that hands on.
        """
        on_host = self.replicas // self._hosts
        processes = on_host // self._local
        between = (2 * (self._hosts - 1) * size // self._hosts + (processes - 1) * size) if self._hosts > 1 else 0
        return 2 * (self._local - 1) * size // self._local + (2 * (processes - 1) * size + between) // on_host

    def _total(self, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def total(*local: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
            return self._joined(self._added, local), lambda *gradients: self._total(gradients)

        with of_no_variables():
            added: list[tf.Tensor] = total(*arrays)
            return added

    def _rows(self, slices: Sequence[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
        """The rows of the first replica, of the second, and so on, as one device has them for the global batch."""
        flat = [tensor for one in slices for tensor in (one.values, one.indices)]
        of_all = self._joined(self._gathered, flat)
        return [
            tf.IndexedSlices(values, indices, one.dense_shape)
            for values, indices, one in zip(of_all[::2], of_all[1::2], slices, strict=True)
        ]

    def _joined(
        self, join: Callable[[Sequence[Sequence[tf.Tensor]]], list[tf.Tensor]], local: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns what `join` makes of [array, replica] of all replicas of this process, for each of them."""
        if self._local == 1:
            return join([[one] for one in local])

        def merged(strategy: tf.distribute.Strategy, *of_replicas: tf.Tensor) -> list[tf.Tensor]:
            return join([strategy.experimental_local_results(values) for values in of_replicas])

        joined: list[tf.Tensor] = tf.distribute.get_replica_context().merge_call(merged, args=tuple(local))
        return joined

    def _added(self, by_replica: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """The sums. Those of one type are packed by TensorFlow, to which an array costs less than to Python."""
        with tf.device("CPU:0"):
            local = [one[0] if len(one) == 1 else tf.add_n(one) for one in by_replica]
            places, messages = list[list[int]](), list[list[tf.Tensor]]()
            for bucket in in_buckets(dict(enumerate(local)), self._bucket_bytes):
                types = dict.fromkeys(local[place].dtype for place in bucket)
                alike = [[place for place in bucket if local[place].dtype == dtype] for dtype in types]
                messages.append([tf.concat([tf.reshape(local[place], [-1]) for place in of], 0) for of in alike])
                places += alike
            summed = dict[int, tf.Tensor]()
            for of_type, total in zip(places, self._call(self._memory.sum, HostRing.sum, messages), strict=True):
                parts = tf.split(total, [tf.size(local[place]) for place in of_type])
                summed |= zip(of_type, parts, strict=True)
            return [
                tf.ensure_shape(tf.reshape(summed[place], tf.shape(one)), one.shape) for place, one in enumerate(local)
            ]

    def _gathered(self, by_replica: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            rows = [tf.concat(one, 0) for one in by_replica]
            return self._call(self._memory.gather, HostRing.gather, [rows])

    def _call(
        self,
        join: Callable[..., list[np.ndarray]],
        over_hosts: Callable[[HostRing, Sequence[tf.Tensor]], list[tf.Tensor]],
        messages: Sequence[Sequence[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Joins arrays of this host's processes, message by message, then those of all hosts, which are handed on at
        the end, so that nobody waits for them while there is more to join.
        """
        joined = [_called(join, arrays) for arrays in messages]
        if self._hosts > 1:
            # To hand on is to gather what the others add nothing to.
            ring = self._ring
            own = [[one[:0] for one in arrays] if ring is None else over_hosts(ring, arrays) for arrays in joined]
            joined = [_called(self._memory.gather, list(itertools.chain(*own)))]
        return list(itertools.chain(*joined))


def _called(join: Callable[..., list[np.ndarray]], arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls `join` in the order of the program, which all processes share, as it has an effect."""
    results = tf.numpy_function(join, arrays, [array.dtype for array in arrays])
    # Outside a graph it has no list around a single one.
    results = results if isinstance(results, list) else [results]
    return [tf.ensure_shape(one, [None, *like.shape[1:]]) for one, like in zip(results, arrays, strict=True)]


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
        self._heard = bytearray(MOST_BYTES)

    def sum(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The sums of vectors of all processes, which call it with equal sizes and types."""
        sums = [_new(array.shape, array.dtype) for array in arrays]
        description = "sums of " + ", ".join(f"{array.dtype}[{array.size}]" for array in arrays)
        in_parts = self._count > 2 and sum(array.nbytes for array in arrays) >= IN_PARTS
        with np.errstate(all="ignore"):
            for start, end, slots in self._windows(_size(arrays)):
                self._write(slots, arrays, start, end)
                self._meet(description)
                if in_parts:
                    self._add_in_parts(slots, sums, start, end, description)
                else:
                    _add(slots, sums, start, end)
        return sums

    def gather(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """For each array those of all processes, one after another by their ranks, along the first axis."""
        description = "rows of " + ", ".join(f"{array.dtype}{list(array.shape[1:])}" for array in arrays)
        counts = self._meet(description, struct.pack(f"{len(arrays)}q", *map(len, arrays)))
        # [process, array]
        rows = np.array([struct.unpack(f"{len(arrays)}q", of_one) for of_one in counts])
        ends = np.cumsum(rows, axis=0)
        of_all = [_new((int(end), *array.shape[1:]), array.dtype) for end, array in zip(ends[-1], arrays, strict=True)]
        parts = [
            [whole[end - count : end] for whole, end, count in zip(of_all, ends[rank], rows[rank], strict=True)]
            for rank in range(self._count)
        ]
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

    def _add_in_parts(
        self, slots: np.ndarray, sums: Sequence[np.ndarray], start: int, end: int, description: str
    ) -> None:
        """Adds this process's part, has the others copy it, and copies theirs."""
        edges = [start + (end - start) * rank // self._count // ALIGNED * ALIGNED for rank in range(self._count)]
        parts = list(itertools.pairwise([*edges, end]))
        first, last = parts[self._rank]
        own = slots[:, first - start : last - start]
        _add(own, sums, first, last)
        self._write(own, sums, first, last)
        self._meet(description)
        for rank, (first, last) in enumerate(parts):
            if rank != self._rank:
                for place, piece in _pieces(sums, first, last):
                    piece[:] = slots[rank, first - start : last - start][place].view(piece.dtype)

    def _meet(self, description: str, own: bytes = b"") -> list[bytes]:
        """Waits for all processes to do the same; returns what they bring, by their ranks. Raises `PeerLostError`."""
        self._met += 1
        head = f"number {self._met}, {description}"
        brought = {self._number: own}
        try:
            for peer in self._peers.values():
                peer.send(head.encode() + END + own)
            for rank, peer in self._peers.items():
                heard = self._hear(peer)
                head_there, _, brought[rank] = heard.partition(END)
                if heard and head_there != head.encode():
                    raise TrainingError(
                        "processes that add the same in the same order",
                        f"{head} on rank {self._number}, and {head_there.decode()} on rank {rank}",
                        "strategy.collective=tensorflow",
                    )
                if not heard:
                    raise PeerLostError(f"rank {rank} has gone")
        except OSError as error:
            raise PeerLostError(f"a process of this host has gone ({error})") from error
        return [brought[rank] for rank in sorted(brought)]

    def _hear(self, peer: socket.socket) -> bytes:
        """The next message of a process; none where it has gone."""
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
        offset += _padded(array)


def _size(arrays: Sequence[np.ndarray]) -> int:
    """Bytes of a message."""
    return sum(map(_padded, arrays))


def _padded(array: np.ndarray) -> int:
    return -(-array.nbytes // ALIGNED) * ALIGNED


def _new(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    room = np.empty(math.prod(shape) * dtype.itemsize + ALIGNED, np.uint8)
    return np.ndarray(shape, dtype, room, -room.__array_interface__["data"][0] % ALIGNED)


def _add(slots: np.ndarray, sums: Sequence[np.ndarray], start: int, end: int) -> None:
    """Adds up slots [process, byte], in the order of ranks, which hold a message from `start` to `end`."""
    for place, total in _pieces(sums, start, end):
        first, second, *others = slots[:, place].view(total.dtype)
        if total.dtype in NARROW:
            wide = first.astype(np.float32) + second
            for other in others:
                wide += other
            total[:] = wide
            continue
        np.add(first, second, out=total)
        for other in others:
            np.add(total, other, out=total)
