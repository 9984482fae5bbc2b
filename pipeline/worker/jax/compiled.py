"""Compiles a step, alone or in a loop that leaves the host alone, for each shape of batch; keeps programs in a folder.

A loop is worth it on GPUs, in some fixed sizes, as the device would ask the host after each step whether another comes;
and on CPUs for models without convolutions, which XLA's CPU compiler computes on one thread inside a loop.

JAX has only the first process keep programs, though those of another are never the same, as they name its devices. And
it writes a file in place, which a process that is killed meanwhile leaves broken for good. So both are done here.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pipeline.plan.estimate import BLOCK_BYTES, LOOPS
from pipeline.private_jax import LRUCache, compilation_cache, compiler
from pipeline.worker.jax.data import ReadBlock
from pipeline.worker.jax.devices import on_cpu
from pipeline.worker.jax.step import State, Step, everywhere

# What batches take on a CPU that lie ready in one block; fewer than so many lie alone.
CPU_BLOCK_BYTES, FEWEST = 16 << 20, 4
CONVOLUTION = "conv_general_dilated"
CPU = Path("/proc/cpuinfo")
# What the folder holds at most; a large model's programs take some megabytes.
MOST_BYTES = 1 << 30


class CompiledSteps:
    """A step, compiled for what comes, which takes the buffers of the state over."""

    def __init__(self, step: Step, mesh: Mesh, state: State, batch: Any, in_epoch: int, alike: bool = False) -> None:
        """`batch` is an example of those that come, as shapes; with `alike` the same program makes every step."""
        self._step, self._mesh, self._on_cpu = jax.jit(step), mesh, on_cpu(mesh)
        self._places = jax.tree.map(lambda value: value.sharding, state)
        self._compiled: dict[Any, Any] = {}
        # A step holds a thread of XLA's pool for each CPU device of this process until all have met in its sums; two
        # steps under way at once can hold all threads, each for a part of its devices, and neither ends.
        self._waits = self._on_cpu and len(mesh.local_devices) > 1
        # Steps whose batches lie in a block, one after another; None: each alone.
        self.room: int | None = None
        # Seconds spent on compiling so far.
        self.compiling = 0.0
        operations = _equations(self._step.trace(state, batch).jaxpr) if self._on_cpu and not alike else ()
        if not alike and not any(one.primitive.name == CONVOLUTION for one in operations):
            size = sum(np.dtype(leaf.dtype).itemsize * leaf.size for leaf in jax.tree.leaves(batch))
            if self._on_cpu:
                most = min(in_epoch, CPU_BLOCK_BYTES // size)
                self.room = most if most >= FEWEST else None
            else:
                # At least a quarter of a block is read where an epoch ends in it.
                fitting = (loop for loop in LOOPS[:-1] if loop <= 4 * in_epoch and loop * size <= BLOCK_BYTES)
                self.room = next(fitting, None)

    def __call__(self, state: State, block: ReadBlock, first: int, steps: int) -> tuple[State, list[Any]]:
        """Makes steps on a block's batches from `first` on; (state, arrays of losses, whose first `steps` count)."""
        if not block.stacked:
            state, loss = self._made(1, state, block.batches)
            return state, [loss]
        losses, last = [], first + steps
        while first < last:
            size = None if self._on_cpu else next(loop for loop in LOOPS if first + loop <= last)
            state, of_loop = self._made(size, state, block.batches, np.array([first, last], np.int32))
            losses.append(of_loop)
            first += size or steps
        return state, losses

    def _made(self, size: int | None, state: State, batches: Any, *between: Any) -> tuple[State, Any]:
        key = size, len(between), jax.tree.leaves(batches)[0].shape
        if key not in self._compiled:
            # What computes is not to be taken for compiling.
            jax.block_until_ready(state)
            began = time.perf_counter()
            function = partial(_loop, self._step, size) if between else self._step
            self._compiled[key] = lowered(function, self._mesh, self._places, state, batches, *between).compile()
            self.compiling += time.perf_counter() - began
        result: tuple[State, Any] = self._compiled[key](state, batches, *between)
        if self._waits:
            jax.block_until_ready(result)
        return result


def lowered(
    function: Callable[..., tuple[State, Any]], mesh: Mesh, places: State, *arguments: Any
) -> jax.stages.Lowered:
    """A step or loop, to be compiled for a state and batches of the shapes that are given; `places` are the state's."""
    return jax.jit(function, donate_argnums=0, out_shardings=(places, everywhere(mesh))).lower(*arguments)


def _loop(
    step: Callable[[State, Any], tuple[State, Any]], size: int | None, state: State, batches: Any, between: Any
) -> tuple[State, Any]:
    """(state, losses float32 [size]) after the steps on batches [room, batch, ...] from the first to before the last.

    Without a `size` they are as many as that, and losses are [room], of which the first ones count.
    """
    first, last = between

    def body(place: Any, carried: tuple[State, Any]) -> tuple[State, Any]:
        before, losses = carried
        batch = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, first + place, keepdims=False), batches)
        stepped, loss = step(before, batch)
        after = jax.tree.map(lambda new, old: new.astype(old.dtype), stepped, before)
        return after, losses.at[place].set(loss.astype(jnp.float32))

    room = size or jax.tree.leaves(batches)[0].shape[0]
    begin = (state, jnp.zeros(room, jnp.float32))
    return jax.lax.fori_loop(0, size or last - first, body, begin)  # type: ignore[no-any-return]


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _equations(inner)


def keep(folder: Path) -> None:
    """Keeps programs in a folder from now on; called before the first is compiled."""
    # A program for another processor may hold instructions that this one lacks.
    with contextlib.suppress(OSError):
        flags = re.search(r"^(flags|Features)\b.*", CPU.read_text(), re.MULTILINE)
        folder /= sha256(flags[0].encode() if flags else b"").hexdigest()[:12]
    LRUCache.get, LRUCache.put, compiler._cache_write = _get, _put, _write
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))


def _get(cache: LRUCache, key: str) -> bytes | None:
    path = Path(cache.path) / f"{key}-cache"
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return path.read_bytes()
    except OSError:
        return None


def _put(cache: LRUCache, key: str, value: bytes) -> None:
    """Keeps a program, which is whole or missing, and removes those used least recently that are too many."""
    path = Path(cache.path) / f"{key}-cache"
    part = path.with_name(f"{key}.{secrets.token_hex(4)}")
    part.write_bytes(value)
    part.replace(path)
    files = [(one.stat(), one) for one in path.parent.iterdir()]
    total = 0
    for status, one in sorted(files, key=lambda file: file[0].st_atime_ns, reverse=True):
        total += status.st_size
        if total > MOST_BYTES:
            one.unlink(missing_ok=True)


def _write(key: str, seconds: float, name: str, backend: Any, program: Any, callbacks: list[Any]) -> None:
    """Keeps a program that has been compiled in so many seconds; one that calls Python functions ends with them."""
    if not callbacks:
        # What cannot be written, as on a full disk, costs the next start its time, and this run nothing.
        with contextlib.suppress(OSError, jax.errors.JaxRuntimeError):
            compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))
