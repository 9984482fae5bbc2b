"""A process's devices, threads and seeds under JAX, the processes' joining, and the mesh over all of their devices."""

import contextlib
import os
import random
import socket
from functools import partial

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from pipeline.plan.checks import stays_here
from pipeline.plan.plan import BUILDER, Plan, Process
from pipeline.private_jax import _jax, distributed, xla_bridge
from pipeline.private_keras import global_state
from pipeline.worker.model_error import TrainingError

# The axes of the mesh: over which a batch is cut, and over which large variables are.
BATCH, MODEL = "batch", "model"
# XLA merges what is computed twice on a CPU, where it takes the barriers away that `jax.checkpoint` puts between, so
# that nothing is forgotten, in silence. Its pass of that name is left out where blocks are to be computed again.
KEEPS_BARRIERS = "--xla_disable_hlo_passes=cse_barrier_expander"
# Of the driver's patience: it is to hear from the others who is gone before its own is at an end.
HEARTBEAT_SHARE = 0.8


def prepare_devices(plan: Plan, process: Process) -> None:
    """Cores, threads, devices, precision and seeds, as planned; returns once every process has joined."""
    if process.cores:
        os.sched_setaffinity(0, process.cores)
    if process.intra_op_threads:
        # By which XLA sizes the thread pool of its CPU client.
        os.environ["NPROC"] = str(process.intra_op_threads)
    if plan.hardware.kind == "gpu":
        if plan.training.deterministic:
            _tell_xla("--xla_gpu_deterministic_ops=true")
    else:
        if plan.training.remat or process.role == BUILDER:
            _tell_xla(KEEPS_BARRIERS)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", len(process.devices))
        # What waits for a step on the core that this takes waits in the thread that makes it.
        jax.config.update("jax_cpu_enable_async_dispatch", len(process.devices) > 1 or has_core_beside())
    if len(plan.leaders) > 1:
        # Gloo's thread tries for a lock, over and over, that a call holds which it preempted as it woke: 4 ms for each
        # sum, until the kernel takes the core from it. Under this policy no thread preempts another as it wakes; some
        # sandboxes know no other than the usual one.
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
    local = jax.local_devices()
    gpu = plan.hardware.kind == "gpu"
    if gpu and (local[0].platform != "gpu" or len(plan.leaders) == 1):
        indices = [int(name.split(":")[1]) for name in process.devices]
        if local[0].platform != "gpu" or max(indices) >= len(local):
            gpus = len(local) if local[0].platform == "gpu" else 0
            expected = f"{plan.hardware.name} to have {', '.join(process.devices)}"
            raise TrainingError(expected, f"{gpus} GPUs from JAX", "installing jax[cuda12], or hardware.rehearse=true")
        devices = [local[index] for index in indices]
    else:
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices).reshape(plan.workers, -1), (BATCH, MODEL))


def on_cpu(mesh: Mesh) -> bool:
    """True if its devices are those of CPUs."""
    return bool(mesh.devices.flat[0].platform == "cpu")


def has_core_beside() -> bool:
    """True if a thread of this process computes on another core than its steps do."""
    return len(os.sched_getaffinity(0)) > 1


def _tell_xla(flag: str) -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def _is_own(host: str) -> bool:
    """True if this host has that address itself; False where it is reached at one that is translated."""
    try:
        with socket.socket() as tried:
            tried.bind((host, 0))
    except OSError:
        return False
    return True


def _join(plan: Plan, process: Process) -> None:
    """Joins the others, of which the first coordinates; on one machine nobody listens beyond it."""
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
        # Else at the address of this host's own name, at which others need not reach it.
        host = own.rpartition(":")[0]
        hostname = {"hostname": host} if _is_own(host) else {}
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, **hostname)
        client = partial(xla_bridge.make_cpu_client, collectives=collectives)
        xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)
