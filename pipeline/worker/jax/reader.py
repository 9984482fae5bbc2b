"""Turns the order of steps into batches on the devices, made ready by a thread of its own while steps compute.

Where steps take the one core that there is, they are made between steps: there a thread would hold Python's lock while
a step needs it to add up over processes, each of which then waits for what the others read as well.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.plan.estimate import READY_BLOCKS
from pipeline.worker.jax.data import DeviceData
from pipeline.worker.jax.devices import BATCH, has_core_beside, on_cpu
from pipeline.worker.layout import BEGINNING, Position
from pipeline.worker.shared_memory import aligned


@dataclass(frozen=True)
class ReadBlock:
    """Batches of `examples` each, on the devices: [room, batch, ...], of which the first `steps` count.

    One that is not `stacked` holds a single batch [batch, ...].
    """

    batches: Any
    steps: int
    examples: int
    stacked: bool


class Reader:
    """The steps of a part of the data, from a position on; of a part that is read once, to its end."""

    def __init__(
        self, data: DeviceData, mesh: Mesh, room: int | None, position: Position = BEGINNING, once: bool = False
    ) -> None:
        """`room` is how many batches a block holds; None: each is alone."""
        self._data, self._mesh, self._room, self._once, self._position = data, mesh, room, once, position
        ahead, self._blocks_left = not on_cpu(mesh) or has_core_beside(), self._blocks()
        # Makes blocks one after another, of which some are ready or under way.
        self._thread, self._ahead = ThreadPoolExecutor(1) if ahead else None, deque[Future[ReadBlock]]()
        self._block, self._next = ReadBlock(None, 0, 0, False), 0
        # Seconds spent on waiting for a block so far.
        self.waited = 0.0

    def take(self, count: int) -> Iterator[tuple[ReadBlock, int, int]]:
        """The next `count` steps as (block, the first of them in it, how many)."""
        while count > 0:
            if self._next == self._block.steps:
                began = time.perf_counter()
                while self._thread is not None and len(self._ahead) < READY_BLOCKS + 2:
                    self._ahead.append(self._thread.submit(next, self._blocks_left))
                self._block = self._ahead.popleft().result() if self._ahead else next(self._blocks_left)
                self.waited, self._next = self.waited + time.perf_counter() - began, 0
            steps = min(count, self._block.steps - self._next)
            yield self._block, self._next, steps
            self._next, count = self._next + steps, count - steps

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _blocks(self) -> Iterator[ReadBlock]:
        steps = self._data.steps(self._position)
        if self._once:
            steps = itertools.islice(steps, self._data.layout.steps)
        whole = self._data.layout.global_batch
        for size, alike in itertools.groupby(steps, len):
            room = self._room if size == whole else None
            while chosen := list(itertools.islice(alike, room or 1)):
                yield self._block_of(chosen, size, room)

    def _block_of(self, chosen: list[np.ndarray], size: int, room: int | None) -> ReadBlock:
        """The batches of some steps, whose rows are `chosen`, with as much room as others have."""
        cut = BATCH if size % self._mesh.shape[BATCH] == 0 else None
        sharding = NamedSharding(self._mesh, PartitionSpec(None, cut) if room else PartitionSpec(cut))
        places = np.stack(chosen) if room else chosen[0]

        def placed(leaf: np.ndarray) -> Any:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)

            def part(index: tuple[slice, ...]) -> np.ndarray:
                """Returns a device's rows where JAX takes them over without a copy; those after the last are unread."""
                own = places[index[: places.ndim]]
                values = aligned((room or len(own), *own.shape[1:], *leaf.shape[1:]), dtype)
                if leaf.flags.c_contiguous and leaf.dtype == dtype and own.max(initial=0) < len(leaf):
                    # Straight to their place; NumPy makes a copy first where places might not be in range.
                    leaf.take(own, 0, values[: len(own)], "clip")
                else:
                    values[: len(own)] = leaf[own]
                return values

            return jax.make_array_from_callback((room, size, *leaf.shape[1:])[not room :], sharding, part)

        return ReadBlock(keras.tree.map_structure(placed, self._data.arrays), len(chosen), size, room is not None)


def of_batch(data: DeviceData, examples: int, sharding: NamedSharding | None = None) -> Any:
    """The shapes of a batch of so many examples on the devices, in the types that JAX makes of theirs."""

    def shape(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((examples, *leaf.shape[1:]), dtype, sharding=sharding)

    return keras.tree.map_structure(shape, data.arrays)
