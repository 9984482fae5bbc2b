"""A step of training, or of validation, as a function of the values of variables and a batch, compiled for what comes.

Arrays are those of the whole global batch wherever its parts are, so that a step computes what one device computes. A
loop of steps is worth it on GPUs, in some fixed sizes, as the device would ask the host after each step whether another
comes; and on CPUs for models without convolutions, which XLA's CPU compiler computes on one thread inside a loop.

JAX has only the first process keep programs, though those of another are never the same, as they name its devices. And
it writes a file in place, which a process that is killed meanwhile leaves broken for good. So both are done here.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.plan.estimate import BLOCK_BYTES, LOOPS
from pipeline.private_jax import LRUCache, compilation_cache, compiler
from pipeline.worker.jax.data import ReadBlock
from pipeline.worker.jax.devices import on_cpu
from pipeline.worker.patched import patched
from pipeline.worker.variables import Variable

# What batches take on a CPU that lie ready in one block; fewer than so many lie alone.
CPU_BLOCK_BYTES, FEWEST = 16 << 20, 4
CONVOLUTION = "conv_general_dilated"
CPU = Path("/proc/cpuinfo")
# What the folder of programs holds at most; a large model's take some megabytes.
MOST_BYTES = 1 << 30
# A model's trainable variables, all others that a step may read, the optimizer's and the metrics'.
Variables: TypeAlias = tuple[list[Variable], list[Variable], list[Variable], list[Variable]]
# The values of these.
State: TypeAlias = tuple[list[Any], list[Any], list[Any], list[Any]]
# (state, a batch) -> (state, its loss)
Step: TypeAlias = Callable[[State, Any], tuple[State, Any]]
# What a batch makes of a model: its loss, the gradients, and the values of other and of metrics' variables.
Made: TypeAlias = tuple[Any, list[Any], list[Any], list[Any]]
# (model, its variables, their values, a batch) -> what it makes of the model
MadeOf: TypeAlias = Callable[[keras.Model, Variables, State, Any], Made]


def made_of(model: keras.Model, variables: Variables, state: State, batch: Any) -> Made:
    """Returns what a batch makes of a model, before its weights are updated."""
    scaled = jax.value_and_grad(partial(_forward, model, variables, state[1:], batch, True), has_aux=True)
    (_, (loss, y_pred, after)), gradients = scaled(state[0])
    _, other, _, metrics = _counted(model, variables, (*state[:1], *after[1:]), batch, y_pred)
    return loss, gradients, other, metrics


def train(
    model: keras.Model, variables: Variables, state: State, batch: Any, made_of: MadeOf = made_of
) -> tuple[State, Any]:
    """(state, loss) after the model has been trained on a batch."""
    trainable, _, optimizer, _ = state
    loss, gradients, other, metrics = made_of(model, variables, state, batch)
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    return (list(trainable), list(other), list(optimizer), list(metrics)), loss


def validate(model: keras.Model, variables: Variables, state: State, batch: Any) -> tuple[State, Any]:
    """The same without training: weights and slots stay as they are."""
    _, (loss, y_pred, after) = _forward(model, variables, state[1:], batch, False, state[0])
    _, other, _, metrics = _counted(model, variables, (*state[:1], *after[1:]), batch, y_pred)
    return (state[0], other, state[2], metrics), loss


def variables_of(model: keras.Model, beside: Sequence[Variable] = ()) -> Variables:
    """A model's variables and its optimizer's; those held `beside` them are among the others."""
    return (
        list(model.trainable_variables), [*model.non_trainable_variables, *beside], list(model.optimizer.variables),
        list(model.metrics_variables),
    )  # fmt: skip


def _forward(
    model: keras.Model, variables: Variables, others: Sequence[Any], batch: Any, training: bool, trainable: list[Any]
) -> tuple[Any, tuple[Any, Any, State]]:
    """(the scaled loss, (the loss, what the model returns, the values of all variables after it)) of a batch.

    Keras's own `stateless_call` and `stateless_compute_loss` know of the model's weights alone, and go past `__call__`:
    layers would train only where a model hands `training` on, and of one called twice the last call's losses count.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    with _scope(variables, (trainable, *others), collect_losses=True) as scope:
        y_pred = model(x, **({"training": training} if model._call_has_training_arg else {}))
        added, scope.collect_losses = model.losses, False
        with patched(model, {"_losses_override": added}):
            # One of each example is summed, as under TensorFlow.
            loss = keras.ops.sum(model._compute_loss(x, y, y_pred, sample_weight=weights, training=training))
        scaled = model.optimizer.scale_loss(loss) if training else loss
        return scaled, (loss, y_pred, _values(variables, scope))


def _counted(model: keras.Model, variables: Variables, state: State, batch: Any, y_pred: Any) -> State:
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    with _scope(variables, state) as scope:
        model.compute_metrics(x, y, y_pred, weights)
        return _values(variables, scope)


def _scope(variables: Variables, state: Sequence[Any], collect_losses: bool = False) -> keras.StatelessScope:
    pairs = [pair for group, values in zip(variables, state, strict=True) for pair in zip(group, values, strict=True)]
    return keras.StatelessScope(state_mapping=pairs, collect_losses=collect_losses)


def _values(variables: Variables, scope: keras.StatelessScope) -> State:
    first, second, third, fourth = ([scope.get_current_value(one) for one in group] for group in variables)
    return first, second, third, fourth


def results(model: keras.Model) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Returns a function from the values of the metrics' variables to the metrics."""

    def made(values: Sequence[Any]) -> dict[str, Any]:
        with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, values, strict=True))):
            return model.get_metrics_result()  # type: ignore[no-any-return]

    return jax.jit(made)  # type: ignore[no-any-return]


def over(value: Any, sharding: NamedSharding) -> Any:
    """An array over all devices, of which each process, which has all of it, gives its own devices their parts."""
    # What is there already is not copied.
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def everywhere(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


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
        # Steps whose batches lie in a block, one after another, None: each alone; and seconds of compiling so far.
        self.room: int | None = None
        self.compiling = 0.0
        operations = _equations(self._step.trace(state, batch).jaxpr) if self._on_cpu and not alike else ()
        if not alike and not any(one.primitive.name == CONVOLUTION for one in operations):
            size = sum(np.dtype(leaf.dtype).itemsize * leaf.size for leaf in jax.tree.leaves(batch))
            most = min(in_epoch, CPU_BLOCK_BYTES // size)
            # At least a quarter of a block is read where an epoch ends in it.
            fitting = (loop for loop in LOOPS[:-1] if loop <= 4 * in_epoch and loop * size <= BLOCK_BYTES)
            self.room = next(fitting, None) if not self._on_cpu else most if most >= FEWEST else None

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


def lowered(function: Callable[..., Any], mesh: Mesh, places: State, *arguments: Any) -> jax.stages.Lowered:
    """A step or loop, to be compiled for a state and batches of the shapes that are given; `places` are the state's."""
    return jax.jit(function, donate_argnums=0, out_shardings=(places, everywhere(mesh))).lower(*arguments)


def _loop(step: Step, size: int | None, state: State, batches: Any, between: Any) -> tuple[State, Any]:
    """(state, losses float32 [size]) after steps on batches [room, batch, ...]; without a size any number, [room]."""
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
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return path.read_bytes()
    return None


def _put(cache: LRUCache, key: str, value: bytes) -> None:
    """Keeps a program, which is whole or missing, and removes those used least recently that are too many."""
    path = Path(cache.path) / f"{key}-cache"
    part = path.with_name(f"{key}.{secrets.token_hex(4)}")
    part.write_bytes(value)
    part.replace(path)
    files, total = [(one.stat(), one) for one in path.parent.iterdir()], 0
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
