"""A process's devices, threads and seeds, its strategy, or the server that it is to others."""

import os
from typing import Any

import keras
import tensorflow as tf

from pipeline.config import targets
from pipeline.errors import UserError
from pipeline.plan.checks import stays_here
from pipeline.plan.plan import DATA_SERVER, Plan, Process
from pipeline.private import context, coordination_config_pb2
from pipeline.record.events import Warned
from pipeline.strategies import serve
from pipeline.worker.data import reading
from pipeline.worker.engine import Emit
from pipeline.worker.model_error import TrainingError
from pipeline.worker.tensorflow import loopback

# Of the driver's patience: it is to hear from the others who is gone before its own is at an end.
HEARTBEAT_SHARE = 0.8
# Without a heartbeat for so long, TensorFlow parts processes unless it is told otherwise.
TF_HEARTBEAT_SECONDS = 10.0


def prepare_devices(plan: Plan, process: Process) -> None:
    """Cores, threads, devices, precision and seeds, as planned; before anything lists devices."""
    if process.cores:
        os.sched_setaffinity(0, process.cores)
    tf.config.threading.set_intra_op_parallelism_threads(process.intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(process.inter_op_threads)
    gpus, on_gpu = tf.config.list_physical_devices("GPU"), plan.hardware.kind == "gpu" and process.devices
    indices = [int(name.split(":")[1]) for name in process.devices] if on_gpu else []
    if max(indices, default=-1) >= len(gpus):
        expected = f"{plan.hardware.name} to have {', '.join(process.devices)}"
        instead = "installing tensorflow[and-cuda], or hardware.rehearse=true"
        raise TrainingError(expected, f"{len(gpus)} GPUs from TensorFlow", instead)
    visible = [gpus[index] for index in indices]
    tf.config.set_visible_devices(visible, "GPU")
    for gpu in visible:
        # The baseline has its turn on the same GPU.
        tf.config.experimental.set_memory_growth(gpu, True)
    # A TPU is found when the strategy connects to it.
    if not on_gpu and plan.hardware.kind != "tpu":
        parts = [tf.config.LogicalDeviceConfiguration()] * max(1, len(process.devices))
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
        optimize_graphs_once()
        # Of threads that share a core, one that looks out for work before it sleeps takes it from those that have some.
        context.context()._config.experimental.disable_thread_spinning = len(process.cores) == 1
    set_policy(plan)
    if plan.training.deterministic:
        tf.config.experimental.enable_op_determinism()


def optimize_graphs_once() -> None:
    """Leaves out, for CPUs, what TensorFlow spends most of a deep model's first call on and gains nothing by."""
    # Its optimizers go over a graph twice: the second time takes out a hundredth of the operations at most. Layouts and
    # memory are optimized for GPUs alone, and branches, into which others move operations, are lowered by then.
    config = tf.compat.v1.ConfigProto()
    options = config.graph_options.rewrite_options
    options.meta_optimizer_iterations = options.ONE
    options.memory_optimization = options.NO_MEM_OPT
    options.layout_optimizer = options.OFF
    options.disable_tfg_optimizer = True
    context.context()._config = config


def set_policy(plan: Plan) -> None:
    """The seed and the precision, which Keras keeps for the process."""
    keras.utils.set_random_seed(plan.training.seed)
    keras.config.set_dtype_policy(plan.training.precision)


def make_strategy(plan: Plan, process: Process, emit: Emit) -> tf.distribute.Strategy:
    """The plan's strategy over this process's devices; returns once every process has joined. Raises `UserError`."""
    _stay_on_loopback(plan, process, emit)
    _outlast_stalls(plan)
    strategy: tf.distribute.Strategy = targets.call(
        plan.strategy.build,
        "strategy.build",
        devices=tuple(names[0] for names in devices_by_replica(plan, process)),
        addresses=tuple(process.address for process in plan.processes if process.address and process.devices),
        rank=process.rank,
        **addresses_by_role(plan),
    )
    if not plan.strategy.asynchronous and (replicas := strategy.num_replicas_in_sync) != plan.workers:
        expected, received = f"strategy.build to make a strategy of {plan.workers} replicas", f"one of {replicas}"
        raise UserError(expected, received, "strategy.spans_devices and strategy.spans_processes as it spans them")
    return strategy


def devices_by_replica(plan: Plan, process: Process) -> list[tuple[str, ...]]:
    """The names that TensorFlow has for a process's devices, those of each replica together: [replica, device]."""
    each = plan.strategy.devices_per_replica
    names = [f"{plan.hardware.kind.upper()}:{index}" for index in range(len(process.devices))]
    return [tuple(names[first : first + each]) for first in range(0, len(names), each)]


def start_server(plan: Plan, process: Process, emit: Emit) -> object:
    """The server by which the coordinator uses this process's device, or keeps variables here; or that of batches."""
    _stay_on_loopback(plan, process, emit)
    if process.role == DATA_SERVER:
        return reading.serve(str(process.address))
    on_gpu = plan.hardware.kind == "gpu" and process.devices
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=process.intra_op_threads,
        inter_op_parallelism_threads=process.inter_op_threads,
        device_count={} if on_gpu else {"GPU": 0},
    )
    if on_gpu:
        config.gpu_options.visible_device_list = ",".join(name.split(":")[1] for name in process.devices)
        config.gpu_options.allow_growth = True
    return serve(**addresses_by_role(plan), address=str(process.address), config=config)


def addresses_by_role(plan: Plan) -> dict[str, Any]:
    """HOST:PORT of each process of an asynchronous training; none of another."""
    if not plan.strategy.asynchronous:
        return {}
    address = {process.rank: str(process.address) for process in plan.processes}
    workers, servers = (tuple(map(address.get, plan.ranks(role))) for role in ("worker", "parameter server"))
    return {"coordinator": address[0], "workers": workers, "parameter_servers": servers}


def _outlast_stalls(plan: Plan) -> None:
    """Lets processes outlast a cut of their link, or a machine that stood still, that the driver is patient with."""
    # Left to itself TensorFlow ends them after `TF_HEARTBEAT_SECONDS`, which stays where the driver's patience is less:
    # the driver ends them then. TensorFlow takes what is configured before the strategy is made.
    addresses = [process.address for process in plan.processes if process.devices]
    patience = HEARTBEAT_SHARE * plan.launch.heartbeat_timeout
    needs_none = plan.hardware.hosts < 2 and patience < TF_HEARTBEAT_SECONDS
    if plan.strategy.asynchronous or len(addresses) < 2 or needs_none:
        return
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=int(1000 * patience),
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=len(addresses))],
    )


def _stay_on_loopback(plan: Plan, process: Process, emit: Emit) -> None:
    addresses = [process.address for process in plan.processes if process.address]
    if addresses and all(map(stays_here, addresses)) and not loopback.listen_on_loopback_only():
        emit(Warned(f"TensorFlow listens on every network interface of this machine at {process.address}."))
