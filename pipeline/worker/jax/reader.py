"""Turns the order of steps into batches on the devices, made ready by a thread of its own while steps compute."""

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.data.examples import rows
from pipeline.worker.jax.data import DeviceData
from pipeline.worker.jax.devices import BATCH
from pipeline.worker.jax.step import over
from pipeline.worker.layout import BEGINNING, Position

# Blocks that lie ready, and seconds between two looks whether they are wanted still.
READY, LOOK_SECONDS = 2, 0.5


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
        self._ready: queue.Queue[ReadBlock | BaseException] = queue.Queue(READY)
        self._closed, self._thread = threading.Event(), threading.Thread(target=self._fill, daemon=True)
        self._block, self._next = ReadBlock(None, 0, 0, False), 0
        # Seconds spent on waiting for a block so far.
        self.waited = 0.0

    def take(self, count: int) -> Iterator[tuple[ReadBlock, int, int]]:
        """The next `count` steps as (block, the first of them in it, how many)."""
        while count > 0:
            if self._next == self._block.steps:
                self._block, self._next = self._following(), 0
            steps = min(count, self._block.steps - self._next)
            yield self._block, self._next, steps
            self._next, count = self._next + steps, count - steps

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _following(self) -> ReadBlock:
        began = time.perf_counter()
        if self._thread.ident is None:
            self._thread.start()
        block = self._ready.get()
        self.waited += time.perf_counter() - began
        if isinstance(block, BaseException):
            raise block
        return block

    def _fill(self) -> None:
        try:
            for block in self._blocks():
                if not self._put(block):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, block: ReadBlock | BaseException) -> bool:
        """Hands a block over as soon as there is room; says whether any is wanted still."""
        while not self._closed.is_set():
            try:
                self._ready.put(block, timeout=LOOK_SECONDS)
            except queue.Full:
                continue
            return True
        return False

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
        batch = rows(self._data.arrays, np.concatenate(chosen))

        def placed(leaf: np.ndarray) -> Any:
            if room is None:
                return over(leaf, sharding)
            # What is behind the last is never read.
            padded = np.empty((room, size, *leaf.shape[1:]), leaf.dtype)
            padded[: len(chosen)] = leaf.reshape(len(chosen), size, *leaf.shape[1:])
            return over(padded, sharding)

        return ReadBlock(keras.tree.map_structure(placed, batch), len(chosen), size, room is not None)


def of_batch(data: DeviceData) -> Any:
    """The shapes of a whole batch on the devices."""
    return keras.tree.map_structure(
        lambda leaf: jax.ShapeDtypeStruct(
            (data.layout.global_batch, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype)
        ),
        data.arrays,
    )
