"""Refuses what a backend cannot do and what a collective cannot add, before anything is started."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from operator import attrgetter

from pipeline.config.schema import Cache, Config
from pipeline.errors import UserError, as_typed, refuse
from pipeline.plan.plan import AUTO, SHARED_MEMORY, TENSORFLOW, Plan

JAX = "jax"
MODEL_PARALLEL = "pipeline.strategies.model_parallel"
# What makes the strategies that JAX's engine has a mesh for.
ON_JAX = (
    *(f"pipeline.strategies.{name}" for name in ("default", "one_device", "mirrored", "multi_worker")), MODEL_PARALLEL
)  # fmt: skip
# The packages that compute, whose versions decide speed; those of a package's own engine are its own.
COMPUTING = {TENSORFLOW: ("tensorflow",), JAX: ("jax", "jaxlib")}
# Keys of which backend=jax takes one value, and why.
ONLY_ON_JAX: dict[str, tuple[object, str]] = {
    "data.service": (None, "whose examples are arrays in memory"),
    "data.profile": (False, "whose examples are arrays in memory"),
    "data.cache": (Cache.auto, "whose examples are arrays in memory"),
    "strategy.collective": (AUTO, "where XLA adds up what replicas computed, or shared memory where it can"),
    "strategy.bucket_bytes": (None, "where XLA adds up what replicas computed"),
    "train.gradient_bits": (32, "where XLA exchanges gradients as they are"),
    "train.batch_statistics": ("global", "whose statistics are those of the global batch"),
    "train.compare_weights_every": (None, "whose processes step as one program"),
    "measure.explain": (False, "whose step cannot be taken apart"),
}
# Data that TensorFlow makes while they are read.
ON_TENSORFLOW = ("pipeline.data.clicks", "pipeline.data.images", "pipeline.data.tfds")
HOROVOD = "horovod"
# Ours, which all replicas are known to have the same sums by.
OURS = (AUTO, TENSORFLOW, SHARED_MEMORY)
# Where another collective adds, in words.
OVER_PROCESSES = {
    HOROVOD: "adds up over processes with a device each",
    SHARED_MEMORY: "adds up over the processes of a host",
}


def check_backend(config: Config) -> None:
    """Refuses what the config's backend cannot do. Raises `UserError`."""
    strategy, data, target = config.strategy, config.data, config.strategy.build.get("_target_")
    if target == MODEL_PARALLEL:
        _check_layout(config)
    elif (strategy.devices_per_replica or 1) > 1:
        key, only = "strategy.devices_per_replica", "strategy=model_parallel"
        raise UserError(f"{key} with {only} only", f"it with {strategy.name}", f"{key}=null, or {only}")
    if config.backend != JAX:
        return
    communication = strategy.build.get("communication", "auto")
    # What is prepared of images are their files, which only TensorFlow decodes.
    prepares = "" if data.build.get("_target_") == "pipeline.data.images" else "`python -m pipeline prepare`, or "
    refuse(
        (strategy.asynchronous or strategy.on_tpu or target not in ON_JAX,
         "a strategy whose replicas make each step together under backend=jax (default, one_device, mirrored, "
         "multi_worker or model_parallel)", f"strategy={strategy.name}", "strategy=mirrored, or backend=tensorflow"),
        (communication != "auto", "strategy.build.communication=auto under backend=jax, where XLA adds up",
         communication, "strategy.build.communication=auto"),
        (data.build.get("_target_") in ON_TENSORFLOW,
         "data as arrays, or prepared files of them, under backend=jax, which reads them without TensorFlow",
         f"data={data.name}, whose examples TensorFlow makes", f"{prepares}backend=tensorflow"),
    )  # fmt: skip
    expect_only(config, ONLY_ON_JAX, "backend=jax,", "backend=tensorflow", Cache.none)
    why = "whose replicas make a step of the whole global batch together, so that nothing is compared"
    expected = f"train.check=true under backend=jax, {why}"
    is_strict = config.train.check.strip().lower() == "strict"
    refuse((is_strict, expected, "strict", "train.check=true, or backend=tensorflow"))


def expect_only(
    config: Config, table: Mapping[str, tuple[object, str]], under: str, instead: str, *also: object
) -> None:
    """Refuses other values of a table's keys than the one that it has, or `also`, and says why. Raises `UserError`."""
    for key, (only, why) in table.items():
        value = attrgetter(key)(config)
        if value not in (only, *also):
            only = f"{key}={as_typed(only)}"
            raise UserError(f"{only} under {under} {why}", as_typed(value), f"{only}, or {instead}")


def other(backend: str) -> str | None:
    """A backend or a collective that is not TensorFlow's, which goes without saying."""
    return None if backend == TENSORFLOW else backend


def check_installed(backend: str) -> None:
    """Refuses a backend of ours that is not installed, without importing it. Raises `UserError`."""
    expected, instead = f"the package {backend} for backend={backend}", TENSORFLOW if backend == JAX else JAX
    lacks = backend in COMPUTING and find_spec(backend) is None
    refuse((lacks, expected, "a Python without it", f"`pip install {backend}`, or backend={instead}"))


def check_collective(config: Config) -> None:
    """Refuses another collective than TensorFlow's where replicas add nothing up by it. Raises `UserError`."""
    strategy, collective, spans = config.strategy, config.strategy.collective, config.strategy.spans_processes
    adds = OVER_PROCESSES.get(collective)
    refuse(
        (adds and not spans, f"a strategy of several processes for strategy.collective={collective}, which {adds}",
         f"strategy={strategy.name}", "strategy=multi_worker, or strategy.collective=auto"),
        (strategy.bucket_bytes is not None and (collective not in OURS or not spans),
         "strategy.bucket_bytes where TensorFlow adds up over hosts",
         f"it with strategy={strategy.name} and strategy.collective={collective}",
         "strategy.bucket_bytes=null, or strategy=multi_worker strategy.collective=auto"),
        (collective == HOROVOD and config.train.gradient_bits == 16,
         "train.gradient_bits=32 under strategy.collective=horovod, which has no bfloat16", "16",
         "train.gradient_bits=32, or strategy.collective=auto"),
    )  # fmt: skip


def check_laid_out(config: Config, kind: str, per_process: int, on_host: int, hosts: int) -> None:
    """Refuses devices that a collective does not add over: so many of a kind in each process and on each host."""
    collective = config.strategy.collective
    whose = "`make horovod` builds for them alone"
    whose = whose if collective == HOROVOD else "have their gradients in a host's memory"
    refuse(
        (collective == HOROVOD and per_process > 1, "one device in each process under strategy.collective=horovod",
         per_process, "strategy.devices_per_process=1, or strategy.collective=auto"),
        (collective == SHARED_MEMORY and per_process == on_host and on_host * hosts > 1,
         "several processes on each host under strategy.collective=shared_memory",
         "one with every worker of its host",
         f"{'strategy.devices_per_process=1, or ' if on_host > 1 else ''}strategy.collective=auto"),
        (config.strategy.bucket_bytes is not None and kind != "cpu", "strategy.bucket_bytes on CPUs",
         f"{kind.upper()}s, whose gradients leave at the end of a step",
         "strategy.bucket_bytes=null, or hardware.kind=cpu"),
        (collective in OVER_PROCESSES and kind == "gpu",
         f"CPUs under strategy.collective={collective}, which {whose}", "GPUs",
         "hardware.kind=cpu, or strategy.collective=auto, which adds up by NCCL"),
    )  # fmt: skip


def xla_of(config: Config) -> tuple[str | None, list[str]]:
    """(train.xla as the plan has it: "true", "auto" or None, a note where "auto" has nothing to choose from)."""
    train, strategy, why = config.train, config.strategy, ""
    xla = "null" if train.xla is None else train.xla.strip().lower()
    always = f"backend={JAX}" if config.backend == JAX else f"strategy={strategy.name}" * strategy.on_tpu
    # What keeps XLA from compiling the steps of TensorFlow's engine.
    if train.deterministic:
        why = "train.deterministic=true, since XLA compiles a batch of another size only once that comes again"
    elif strategy.asynchronous:
        why = f"strategy={strategy.name}, whose workers take Keras's own steps"
    elif (strategy.devices_per_replica or 1) > 1:
        why = f"strategy={strategy.name}, whose replicas are laid over several devices"
    instead = "train.deterministic=false" if train.deterministic else "strategy=mirrored"
    refuse(
        (xla not in ("true", "false", "auto", "null"), "train.xla to be true, false or auto", train.xla or "nothing",
         "train.xla=auto"),
        (always and xla == "false", f"train.xla=null under {always}, where XLA compiles every step", xla,
         "train.xla=null"),
        (why and not always and xla == "true", f"train.xla=false under {why}", xla, f"train.xla=false, or {instead}"),
    )  # fmt: skip
    if always or xla in ("false", "null"):
        return None, []
    return (None, [f"XLA compiles no step under {why} (train.xla=auto)."]) if why else (xla, [])


def with_xla(plan: Plan, chosen: bool | None) -> Plan:
    """The plan with what `train.xla=auto` has chosen before, if it chooses and that is known."""
    if plan.training.xla != "auto" or chosen is None:
        return plan
    return replace(plan, training=replace(plan.training, xla="true" if chosen else None))


def shares_memory_under_jax(plan: Plan) -> bool:
    """True if processes of JAX, all on one host's CPUs with a device each, are to share memory."""
    alone = plan.hosts_that_train == 1 and len(plan.leaders) == plan.workers > 1
    return alone and plan.backend == JAX and plan.hardware.kind == "cpu" and plan.strategy.devices_per_replica == 1


def notes_on_sums(plan: Plan) -> list[str]:
    """Returns what decides by itself whether processes of a host that compute on CPUs share memory."""
    if shares_memory_under_jax(plan):
        by = "that travel in one bucket through shared memory, others by Gloo"
        return [f"{len(plan.leaders)} processes add gradients {by}."]
    left = (plan.strategy.collective, plan.collective, plan.backend) == (AUTO, TENSORFLOW, TENSORFLOW)
    by = "by TensorFlow, since they are to communicate by its rings (strategy.collective=auto)"
    several = plan.hardware.kind == "cpu" and len(plan.leaders) > plan.hosts_that_train
    return [f"{len(plan.leaders)} processes add gradients {by}."] * (left and several)


def _check_layout(config: Config) -> None:
    each, on_jax = config.strategy.devices_per_replica or 1, config.backend == JAX
    key, layout = "strategy.build.layout", config.strategy.build.get("layout")
    refuse(
        (config.backend == TENSORFLOW and config.measure.explain,
         "measure.explain=false under strategy=model_parallel, where a replica is on several devices and its step "
         "cannot be taken apart", "true", "measure.explain=false"),
        (layout is not None and not (isinstance(layout, dict) and layout), f"{key} to be null or patterns",
         json.dumps(layout), f"{key}=null"),
    )  # fmt: skip
    for pattern, place in layout.items() if isinstance(layout, dict) else ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"a regular expression in {key}", f"{pattern} ({error})", f"{re.escape(pattern)}") from None
        received = f"{json.dumps(place)} for {pattern}"
        refuse(
            (config.backend == TENSORFLOW and (type(place) is not int or not 0 <= place < each),
             f"{key} to give each pattern the number of a device from 0 to {each - 1} under backend=tensorflow, which "
             f"lays whole layers over strategy.devices_per_replica={each}", received,
             f"{key}=null, or backend=jax to cut the axes of variables"),
            (on_jax and not isinstance(place, list),
             f"{key} to give each pattern the axes of a variable under backend=jax, as [null, model]", received,
             f"{key}=null, or backend=tensorflow for whole layers"),
        )  # fmt: skip
