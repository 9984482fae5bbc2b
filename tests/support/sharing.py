"""What processes that share memory come to, as JSON on the standard output: `python sharing.py WHAT`.

They are forked from this one, which has imported JAX, and uses nothing of it.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from itertools import product
from pathlib import Path
from threading import Timer

import ml_dtypes
import numpy as np

from pipeline.worker.shared_memory import NARROW, PeerLostError, join

TYPES = ["float32", "float64", "float16", "int8", "int32", "int64", "uint16", "complex64", "complex128"]
TYPES = [*map(np.dtype, TYPES), np.dtype(ml_dtypes.bfloat16)]
FORK = multiprocessing.get_context("fork")
# Elements: none, a few, what processes add in parts, and several rounds.
SIZES = (0, 1, 17, 40_001, 300_003)


def together(count, work, before=lambda rank: None, looks_seconds=0.0):
    """What `work(memory, rank, told)` gives in each of so many processes; the error's text where they cannot join, and
    None of one that was killed.
    """
    pipes = {pair: FORK.Pipe(duplex=False) for pair in product(range(count), repeat=2)}
    ends = [FORK.Pipe(duplex=False) for _ in range(count)]

    def one(rank):
        def told(text):
            """Tells all processes what each says."""
            for other in range(count):
                pipes[rank, other][1].send(text)
            return [pipes[other, rank][0].recv() for other in range(count)]

        before(rank)
        try:
            made = work(join(rank, range(count), told, looks_seconds), rank, told)
        except Exception as error:
            made = f"{type(error).__name__}: {error}"
        ends[rank][1].send(made)

    processes = [FORK.Process(target=one, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [end.recv() if end.poll() else None for end, _ in ends]


def drawn(rank, size, dtype):
    """Numbers of a process, the sum of which depends on the order in which they are added."""
    numbers = np.random.default_rng(rank).normal(size=size) * 10.0 ** (rank % 3)
    return (numbers * 50).astype(dtype) if dtype.kind in "iu" else numbers.astype(dtype)


def in_order(count, size, dtype):
    """The sum in the order of ranks; of narrow types as the sum of wide ones."""
    wide = np.float32 if dtype in NARROW else dtype
    total = drawn(0, size, dtype).astype(wide)
    for rank in range(1, count):
        total = total + drawn(rank, size, dtype).astype(wide)
    return total.astype(dtype)


def sums(count):
    """[differences from the sum in order] of all types and sizes, and of all types in one message, twice."""

    def work(memory, rank, told):
        found = []
        for size in SIZES:
            here = [drawn(rank, size, dtype) for dtype in TYPES]
            wanted = [in_order(count, size, dtype) for dtype in TYPES]
            # Each in a message, all in one, and all once more.
            made = [*(memory.sum(one)[0] for one in here), *memory.sum(*here), *memory.sum(*here)]
            found += [
                str(one.dtype) for one, two in zip(made, 3 * wanted, strict=True) if one.tobytes() != two.tobytes()
            ]
        return found

    return together(count, work)


def gathered():
    """Do all have the rows of all, of none to several rounds of them?"""

    def rows(rank, step):
        number = [0, 3, 60_000, 0][(rank + step) % 4] if step < 4 else 0
        return np.full((number, 8), rank, np.float32), np.arange(number) + 1000 * rank

    def work(memory, rank, told):
        right = []
        for step in range(5):
            wanted = [np.concatenate(of_all) for of_all in zip(*(rows(other, step) for other in range(3)), strict=True)]
            right += [np.array_equal(*pair) for pair in zip(memory.gather(*rows(rank, step)), wanted, strict=True)]
        return all(right)

    return together(3, work)


def mismatched():
    """What is said where processes add other things, or in another order."""

    def sizes(memory, rank, told):
        return memory.sum(np.ones(3 + rank, np.float32))

    def order(memory, rank, told):
        memory.sum(np.ones(2, np.float32))
        memory.sum(np.ones(2, np.int32 if rank else np.float32))

    return [*together(2, sizes), *together(2, order)]


def at_meeting(memory, number, number_of_signal):
    """Sends this process a signal as it is about to meet the others for that time, in whatever it adds then."""
    meet = memory._meet

    def met(*given):
        if memory._met + 1 == number:
            os.kill(os.getpid(), number_of_signal)
        return meet(*given)

    memory._meet = met


def killed(meeting, by_jax=False):
    """(error, is it known for a lost peer, seconds until it comes) in processes of which one is killed as it is to meet
    the others for that time.

    The second is the first of a sum of many rounds.
    """

    def work(memory, rank, told):
        add, is_known = memory.sum, lambda error: isinstance(error, PeerLostError)
        if by_jax:
            jax, engine, in_graph = compiling(memory)
            compiled, is_known = jax.jit(lambda vector: in_graph([vector])[0]), engine._lost_a_peer
            add = lambda vector: compiled(vector).block_until_ready()  # noqa: E731
        add(np.ones(10, np.float32))
        if rank == 1:
            at_meeting(memory, meeting, signal.SIGKILL)
        started = time.monotonic()
        try:
            add(np.ones(10**6, np.float32))
        except Exception as error:
            return str(error), is_known(error), time.monotonic() - started
        return None

    return together(3, work, looks_seconds=1e-4)


def stopped():
    """(seconds, processor seconds, sum) of processes of which one is stopped for a second in the middle of a sum."""

    def work(memory, rank, told):
        pids = [int(said) for said in told(str(os.getpid()))]
        if rank == 1:
            at_meeting(memory, 4, signal.SIGSTOP)
        if rank == 2:
            Timer(1, os.kill, (pids[1], signal.SIGCONT)).start()
        started, busy = time.monotonic(), time.process_time()
        (total,) = memory.sum(np.ones(10**6))
        return time.monotonic() - started, time.process_time() - busy, float(total.sum())

    return together(3, work, looks_seconds=1e-4)


def compiled(count):
    """Sizes of which the sums that a compiled loop of JAX makes differ from those in order."""

    def work(memory, rank, told):
        jax, _, add = compiling(memory)
        loop = jax.jit(lambda vector: jax.lax.map(lambda turn: add([vector * turn])[0], np.float32([1, 2, 0.5, 1])))
        found = []
        for size in SIZES[1:]:
            made, wanted = np.asarray(loop(drawn(rank, size, TYPES[0]))), in_order(count, size, TYPES[0])
            found += [
                size
                for one, turn in zip(made, (1, 2, 0.5, 1), strict=True)
                if one.tobytes() != (wanted * turn).tobytes()
            ]
        return found

    return together(count, work)


def compiling(memory=None):
    """(JAX, its engine, what adds in its compiled functions), once they are imported."""
    os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    import jax

    from pipeline.worker.jax.bucket import adding
    from pipeline.worker.jax.engine import JaxEngine

    return jax, JaxEngine, memory and adding(memory)


def unable():
    """What all say where the first may not have so much memory."""

    def bounded(rank):
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    return together(3, lambda memory, rank, told: "joined", bounded)


def another_user():
    """What is said where one of the processes is another user's."""

    def another(rank):
        if rank == 1:
            os.setgid(65534)
            os.setuid(65534)

    return together(2, lambda memory, rank, told: "joined", another)


def left():
    """Files in /dev/shm and bytes of it that are there more while processes share memory, and how it is open."""
    free = os.statvfs("/dev/shm").f_bfree
    before = set(os.listdir("/dev/shm"))

    def work(memory, rank, told):
        memory.sum(np.ones(10**6))
        taken = (free - os.statvfs("/dev/shm").f_bfree) * os.statvfs("/dev/shm").f_bsize
        opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists() or path.is_symlink()]
        return sorted(set(os.listdir("/dev/shm")) - before), taken, [path for path in opened if "memfd" in path]

    return together(2, work)


if __name__ == "__main__":
    asked = [(what, *what.split(":")) for what in sys.argv[1:]]
    compiling()
    print(json.dumps({what: globals()[name](*map(int, given)) for what, name, *given in asked}))
