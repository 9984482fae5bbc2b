"""Compiles a step: alone, and in loops of some sizes that leave the host alone, for each shape of batch that comes.

Such a loop is worth it on GPUs, and on CPUs for models without convolutions: inside a loop XLA's CPU compiler computes
those on one thread, some fifty times slower, so that they take a call a step.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pipeline.worker.jax.reader import ReadBlock
from pipeline.worker.jax.step import State, Step, everywhere

# Steps of the loops that are compiled; any number of steps is made of these.
LOOPS = (32, 4, 1)
# What batches take that lie ready in one block.
BLOCK_BYTES = 64 << 20
CONVOLUTION = "conv_general_dilated"


class CompiledSteps:
    """A step, compiled for what comes, which takes the buffers of the state over."""

    def __init__(self, step: Step, mesh: Mesh, state: State, batch: Any, in_epoch: int, alike: bool = False) -> None:
        """`batch` is an example of those that come, as shapes; with `alike` the same program makes every step."""
        self._step, self._mesh = jax.jit(step), mesh
        self._places = jax.tree.map(lambda value: value.sharding, state)
        self._compiled: dict[Any, Any] = {}
        # A step holds a thread of XLA's pool for each CPU device of this process until all have met in its sums; two
        # steps under way at once can hold all threads, each for a part of its devices, and neither ends.
        self._waits = on_cpu(mesh) and len(mesh.local_devices) > 1
        # Steps whose batches lie in a block, one after another; None: each alone.
        self.room: int | None = None
        # Seconds spent on compiling so far.
        self.compiling = 0.0
        if not alike and (not on_cpu(mesh) or not _has(self._step.trace(state, batch).jaxpr, CONVOLUTION)):
            size = sum(np.dtype(leaf.dtype).itemsize * leaf.size for leaf in jax.tree.leaves(batch))
            # At least a quarter of a block is read where an epoch ends in it.
            self.room = next((loop for loop in LOOPS[:-1] if loop <= 4 * in_epoch and loop * size <= BLOCK_BYTES), None)

    def __call__(self, state: State, block: ReadBlock, first: int, steps: int) -> tuple[State, list[Any]]:
        """(state, losses, arrays of one or several steps) after so many steps on a block's batches from `first` on."""
        if not block.stacked:
            state, loss = self._made(1, state, block.batches)
            return state, [loss]
        losses, last = [], first + steps
        while first < last:
            size = next(loop for loop in LOOPS if first + loop <= last)
            state, of_loop = self._made(size, state, block.batches, np.int32(first))
            losses.append(of_loop)
            first += size
        return state, losses

    def _made(self, size: int, state: State, batches: Any, *first: Any) -> tuple[State, Any]:
        key = size, len(first), jax.tree.leaves(batches)[0].shape
        if key not in self._compiled:
            # What computes is not to be taken for compiling.
            jax.block_until_ready(state)
            began = time.perf_counter()
            function = partial(_loop, self._step, size) if first else self._step
            self._compiled[key] = lowered(function, self._mesh, self._places, state, batches, *first).compile()
            self.compiling += time.perf_counter() - began
        result: tuple[State, Any] = self._compiled[key](state, batches, *first)
        if self._waits:
            jax.block_until_ready(result)
        return result


def lowered(
    function: Callable[..., tuple[State, Any]], mesh: Mesh, places: State, *arguments: Any
) -> jax.stages.Lowered:
    """A step or loop, to be compiled for a state and batches of the shapes that are given; `places` are the state's."""
    return jax.jit(function, donate_argnums=0, out_shardings=(places, everywhere(mesh))).lower(*arguments)


def on_cpu(mesh: Mesh) -> bool:
    """True if its devices are those of CPUs."""
    cpu: bool = mesh.devices.flat[0].platform == "cpu"
    return cpu


def _loop(step: Callable[[State, Any], tuple[State, Any]], size: int, state: State, batches: Any, first: Any) -> Any:
    """(state, losses float32 [size]) after so many steps on batches [room, batch, ...] from `first` on."""

    def body(carried: State, place: Any) -> tuple[State, Any]:
        batch = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), batches)
        stepped, loss = step(carried, batch)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), stepped, carried), loss.astype(jnp.float32)

    return jax.lax.scan(body, state, first + jnp.arange(size))


def _has(jaxpr: Any, name: str) -> bool:
    """True if a program uses a primitive, anywhere within."""
    return any(one.primitive.name == name for one in _equations(jaxpr))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _equations(inner)
