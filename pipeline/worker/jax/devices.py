"""A process's devices, threads and seeds under JAX, the mesh over all processes' devices, and how it cuts variables.

Large kernels are cut by column and the one that follows by row, so that nothing is exchanged between the two; attention
by heads; embeddings by rows. What does not divide evenly is left whole.
"""

import contextlib
import math
import os
import random
import socket
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.errors import refuse
from pipeline.plan.checks import stays_here
from pipeline.plan.division import matched
from pipeline.plan.plan import BUILDER, Plan, Process
from pipeline.private_jax import _jax, distributed, xla_bridge
from pipeline.private_keras import global_state
from pipeline.worker.model_error import TrainingError
from pipeline.worker.variables import slots_of

# The axes of the mesh: over which a batch is cut, and over which large variables are.
BATCH, MODEL = "batch", "model"
# XLA merges what is computed twice on a CPU, where it takes the barriers away that `jax.checkpoint` puts between, so
# that nothing is forgotten, in silence. Its pass of that name is left out where blocks are to be computed again.
KEEPS_BARRIERS = "--xla_disable_hlo_passes=cse_barrier_expander"
# Of the driver's patience: it is to hear from the others who is gone before its own is at an end.
HEARTBEAT_SHARE = 0.8
# Numbers of a variable from which on it is cut: smaller ones cost more to exchange than they take.
LARGE = 1024
# Kernels of attention that are cut by their heads where these leave them, and the one that takes the heads together.
BY_HEAD, FROM_HEADS = ("query", "key", "value"), ("projection", "attention_output", "output")
HEADS = ("heads", "num_heads", "_num_heads", "num_query_heads")

# The axes of the mesh that a variable's axes are cut over; None for one that is whole.
Axes = tuple[str | None, ...]


def prepare_devices(plan: Plan, process: Process) -> None:
    """Cores, threads, devices, precision and seeds, as planned; returns once every process has joined."""
    if process.cores:
        os.sched_setaffinity(0, process.cores)
    if process.intra_op_threads:
        # By which XLA sizes the thread pool of its CPU client.
        os.environ["NPROC"] = str(process.intra_op_threads)
    on_gpu, flags = plan.hardware.kind == "gpu", os.environ.get("XLA_FLAGS", "")
    if on_gpu and plan.training.deterministic:
        flags += " --xla_gpu_deterministic_ops=true"
    elif not on_gpu:
        flags += f" {KEEPS_BARRIERS}" * (plan.training.remat or process.role == BUILDER)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", len(process.devices))
        # What waits for a step on the core that this takes waits in the thread that makes it.
        jax.config.update("jax_cpu_enable_async_dispatch", len(process.devices) > 1 or has_core_beside())
    os.environ["XLA_FLAGS"] = flags.strip()
    if len(plan.leaders) > 1:
        # Gloo's thread tries for a lock, over and over, that a call holds which it preempted as it woke: 4 ms a sum.
        # Under this policy no thread preempts another as it wakes; some sandboxes know only the usual one.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        _join(plan, process)
    keras.config.set_dtype_policy(plan.training.precision)
    seed_all(plan.training.seed)


def seed_all(seed: int) -> None:
    """Seeds Python, NumPy and Keras. Keras's own function imports TensorFlow where that is installed."""
    random.seed(seed)
    np.random.seed(seed)
    global_state.set_global_attribute("global_random_seed", seed)
    global_state.set_global_attribute("global_seed_generator", None)


def mesh_of(plan: Plan, process: Process) -> Mesh:
    """All devices of the run, [replica, device of a replica], as the axes `BATCH` and `MODEL`."""
    local, devices = jax.local_devices(), sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    gpus = len(local) if local[0].platform == "gpu" else 0
    if plan.hardware.kind == "gpu" and (not gpus or len(plan.leaders) == 1):
        indices = [int(name.split(":")[1]) for name in process.devices]
        expected = f"{plan.hardware.name} to have {', '.join(process.devices)}"
        instead = "installing jax[cuda12], or hardware.rehearse=true"
        refuse((max(indices) >= gpus, expected, f"{gpus} GPUs from JAX", instead), error=TrainingError)
        devices = [local[index] for index in indices]
    return Mesh(np.array(devices).reshape(plan.workers, -1), (BATCH, MODEL))


def on_cpu(mesh: Mesh) -> bool:
    """True if its devices are those of CPUs."""
    return bool(mesh.devices.flat[0].platform == "cpu")


def has_core_beside() -> bool:
    """True if a thread of this process computes on another core than its steps do."""
    return len(os.sched_getaffinity(0)) > 1


def _join(plan: Plan, process: Process) -> None:
    # The first coordinates; on one machine nobody listens beyond it.
    first, own = str(plan.processes[plan.leaders[0]].address), str(process.address)
    gpus = [int(name.split(":")[1]) for name in process.devices] if plan.hardware.kind == "gpu" else None
    # A scheduler's signals are the driver's to handle.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=first,
        num_processes=len(plan.leaders),
        process_id=plan.leaders.index(process.rank),
        local_device_ids=gpus,
        initialization_timeout=max(1, int(plan.launch.startup_timeout)),
        heartbeat_timeout_seconds=max(1, int(HEARTBEAT_SHARE * plan.launch.heartbeat_timeout)),
        coordinator_bind_address=first if stays_here(first) else None,
    )
    if gpus is None:
        # Else at the address of this host's own name, at which others need not reach it; one that is translated is not
        # the host's own.
        host, hostname = own.rpartition(":")[0], {}
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind((host, 0))
            hostname = {"hostname": host}
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, **hostname)
        client = partial(xla_bridge.make_cpu_client, collectives=collectives)
        xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def derived_layout(model: keras.Model, parts: int) -> dict[str, Axes]:
    """The axes of each variable that is cut over `parts` devices, by its path."""
    axes, heads, owners = dict[str, Axes](), dict[int, int](), dict[int, keras.layers.Layer]()
    for layer in model._flatten_layers():
        # Of the attention that a layer belongs to.
        number = next((value for name in HEADS if isinstance(value := getattr(layer, name, None), int)), None)
        if number is not None:
            heads |= {id(inner): number for inner in layer._flatten_layers(include_self=False)}
        owners |= {id(one): layer for one in layer._trainable_variables}
    # By the layer that has them, in the order in which they were made.
    layers: dict[int, tuple[keras.layers.Layer, dict[str, keras.Variable]]] = {}
    for variable in model.trainable_variables:
        if (layer := owners.get(id(variable))) is not None:
            layers.setdefault(id(layer), (layer, {}))[1][variable.name] = variable
    # How many numbers the last kernel that was cut by column gives.
    width: int | None = None
    for layer_id, (layer, own) in layers.items():
        if (table := own.get("embeddings")) is not None and len(table.shape) == 2:
            _cut(axes, table, 0, parts)
        if (kernel := own.get("kernel")) is None or len(kernel.shape) < 2:
            continue
        if layer_id in heads and layer.name in (*BY_HEAD, *FROM_HEADS):
            # By its heads: [width, width], or Keras's [width, heads, width of a head].
            leaves, bias = layer.name in BY_HEAD, own.get("bias")
            if heads[layer_id] % parts == 0 and _cut(axes, kernel, int(leaves), parts) and leaves and bias is not None:
                _cut(axes, bias, 0, parts, least=1)
            continue
        # By row after one that was cut by column, else by column.
        takes, gives = len(kernel.shape) - 2, len(kernel.shape) - 1
        if (width == kernel.shape[takes] and _cut(axes, kernel, takes, parts)) or not _cut(axes, kernel, gives, parts):
            width = None
            continue
        width = int(kernel.shape[gives])
        if (bias := own.get("bias")) is not None:
            _cut(axes, bias, len(bias.shape) - 1, parts, least=1)
    return axes


def written_layout(model: keras.Model, patterns: Mapping[str, Sequence[str | None]], mesh: Mesh) -> dict[str, Axes]:
    """Returns the axes of variables that patterns match, by path; refuses one without a match, and a path with two."""
    shapes = {variable.path: tuple(variable.shape) for variable in model.trainable_variables}
    layout, sizes = dict[str, Axes](), ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    for path, pattern in matched(patterns, list(shapes), "a variable's whole path").items():
        shape, axes = shapes[path], patterns[pattern]
        named = [axis for axis in axes if axis is not None]
        fits = len(axes) == len(shape) and len(set(named)) == len(named) and set(named) <= set(mesh.axis_names)
        if not fits or any(length % mesh.shape[axis] for length, axis in zip(shape, axes, strict=True) if axis):
            raise TrainingError(
                f"Expected axes of the mesh ({sizes}) or null, one for each axis of {path} {list(shape)}, that divide "
                f"it evenly, received {list(axes)}. "
                f"Try {[None] * (len(shape) - 1) + [MODEL]}.".replace("None", "null").replace("'", "")
            )
        layout[path] = tuple(axes)
    return layout


def shardings(model: keras.Model, layout: Mapping[str, Axes], mesh: Mesh) -> dict[int, NamedSharding]:
    """Returns where each variable of a model and its optimizer is, by its id; the slots of one are where it is."""
    whole = NamedSharding(mesh, PartitionSpec())
    placed = {id(variable): whole for variable in (*model.variables, *model.optimizer.variables)}
    slots = slots_of((model.optimizer,))
    for variable in model.trainable_variables:
        if variable.path in layout:
            alike = [slot for slot in slots.get(id(variable), ()) if slot.shape == variable.shape]
            cut = NamedSharding(mesh, PartitionSpec(*layout[variable.path]))
            placed |= dict.fromkeys(map(id, (variable, *alike)), cut)
    return placed


def _cut(axes_of: dict[str, Axes], variable: keras.Variable, axis: int, parts: int, least: int = LARGE) -> bool:
    shape = tuple(variable.shape)
    if math.prod(shape) < least or shape[axis] % parts:
        return False
    axes_of[variable.path] = tuple(MODEL if place == axis else None for place in range(len(shape)))
    return True
