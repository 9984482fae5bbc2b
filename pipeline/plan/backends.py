"""Refuses what a backend cannot do, before anything is started."""

import json
import re
from importlib.util import find_spec

from pipeline.config.schema import Cache, Config
from pipeline.plan.errors import PlanError
from pipeline.plan.plan import AUTO, TENSORFLOW

JAX = "jax"
MODEL_PARALLEL = "pipeline.strategies.model_parallel"
# What makes the strategies that JAX's engine has a mesh for.
ON_JAX = (
    "pipeline.strategies.default",
    "pipeline.strategies.one_device",
    "pipeline.strategies.mirrored",
    "pipeline.strategies.multi_worker",
    MODEL_PARALLEL,
)
# The packages that compute, whose versions decide speed; those of a package's own engine are its own.
COMPUTING = {TENSORFLOW: ("tensorflow",), JAX: ("jax", "jaxlib")}
# Data that TensorFlow makes while they are read.
ON_TENSORFLOW = ("pipeline.data.clicks", "pipeline.data.images", "pipeline.data.tfds")


def check_backend(config: Config) -> None:
    """Refuses what the config's backend cannot do. Raises `PlanError`."""
    strategy = config.strategy
    if strategy.build.get("_target_") == MODEL_PARALLEL:
        _check_layout(config)
    if (strategy.devices_per_replica or 1) > 1 and strategy.build.get("_target_") != MODEL_PARALLEL:
        raise PlanError(
            f"Expected strategy.devices_per_replica with strategy=model_parallel only, received it with "
            f"{strategy.name}. Try strategy.devices_per_replica=null, or strategy=model_parallel."
        )
    if config.backend == JAX:
        _check_strategy(config)
        _check_data(config)
        _check_settings(config)


def other(backend: str) -> str | None:
    """A backend or a collective that is not TensorFlow's, which goes without saying.

    >>> other("jax"), other("tensorflow")
    ('jax', None)
    """
    return None if backend == TENSORFLOW else backend


def check_installed(backend: str) -> None:
    """Refuses a backend of ours that is not installed, without importing it. Raises `PlanError`."""
    if backend in COMPUTING and find_spec(backend) is None:
        another = TENSORFLOW if backend == JAX else JAX
        raise PlanError(
            f"Expected the package {backend} for backend={backend}, received a Python without it. "
            f"Try `pip install {backend}`, or backend={another}."
        )


def _check_layout(config: Config) -> None:
    """Refuses what the backend cannot make of a written layout, and explaining what is lost under it."""
    each = config.strategy.devices_per_replica or 1
    layout = config.strategy.build.get("layout")
    key = "strategy.build.layout"
    if config.backend == TENSORFLOW and config.measure.explain:
        raise PlanError(
            "Expected measure.explain=false under strategy=model_parallel, where a replica is on several devices and "
            "its step cannot be taken apart, received true. Try measure.explain=false."
        )
    if layout is None:
        return
    if not isinstance(layout, dict) or not layout:
        raise PlanError(f"Expected {key} to be null or patterns, received {json.dumps(layout)}. Try {key}=null.")
    for pattern, place in layout.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise PlanError(
                f"Expected a regular expression in {key}, received {pattern} ({error}). Try {re.escape(pattern)}."
            ) from None
        if config.backend == TENSORFLOW and (type(place) is not int or not 0 <= place < each):
            raise PlanError(
                f"Expected {key} to give each pattern the number of a device from 0 to {each - 1} under "
                f"backend=tensorflow, which lays whole layers over strategy.devices_per_replica={each}, received "
                f"{json.dumps(place)} for {pattern}. Try {key}=null, or backend=jax to cut the axes of variables."
            )
        if config.backend == JAX and not isinstance(place, list):
            raise PlanError(
                f"Expected {key} to give each pattern the axes of a variable under backend=jax, as [null, model], "
                f"received {json.dumps(place)} for {pattern}. Try {key}=null, or backend=tensorflow for whole layers."
            )


def _check_strategy(config: Config) -> None:
    strategy = config.strategy
    if strategy.asynchronous or strategy.on_tpu or strategy.build.get("_target_") not in ON_JAX:
        raise PlanError(
            f"Expected a strategy whose replicas make each step together under backend=jax (default, one_device, "
            f"mirrored, multi_worker or model_parallel), received strategy={strategy.name}. "
            f"Try strategy=mirrored, or backend=tensorflow."
        )
    asked = strategy.build.get("communication", "auto")
    if asked != "auto":
        raise PlanError(
            f"Expected strategy.build.communication=auto under backend=jax, where XLA adds up, received {asked}. "
            f"Try strategy.build.communication=auto."
        )


def _check_data(config: Config) -> None:
    data = config.data
    if data.build.get("_target_") in ON_TENSORFLOW:
        raise PlanError(
            f"Expected data as arrays, or prepared files of them, under backend=jax, which reads them without "
            f"TensorFlow, received data={data.name}, whose examples TensorFlow makes. "
            f"Try `python -m pipeline prepare`, or backend=tensorflow."
        )
    for key, received, instead in (
        ("service", data.service, "null"),
        ("profile", data.profile or None, "false"),
        ("cache", data.cache.value if data.cache is not Cache.none else None, "none"),
    ):
        if received is not None:
            raise PlanError(
                f"Expected data.{key}={instead} under backend=jax, whose examples are arrays in memory, received "
                f"{str(received).lower()}. Try data.{key}={instead}, or backend=tensorflow."
            )


def _check_settings(config: Config) -> None:
    train = config.train
    for key, received, usual, why in (
        ("strategy.collective", config.strategy.collective, AUTO, "where XLA adds up what replicas computed"),
        ("train.gradient_bits", train.gradient_bits, 32, "where XLA exchanges gradients as they are"),
        ("train.batch_statistics", train.batch_statistics, "global", "whose statistics are those of the global batch"),
        ("train.compare_weights_every", train.compare_weights_every, None, "whose processes step as one program"),
        ("measure.explain", config.measure.explain, False, "whose step cannot be taken apart"),
        ("train.check", train.check.strip().lower() if train.check.strip().lower() == "strict" else "true", "true",
         "whose replicas make a step of the whole global batch together, so that nothing is compared"),
    ):  # fmt: skip
        if received != usual:
            raise PlanError(
                f"Expected {key}={_typed(usual)} under backend=jax, {why}, received {_typed(received)}. "
                f"Try {key}={_typed(usual)}, or backend=tensorflow."
            )


def _typed(value: object) -> str:
    return "null" if value is None else str(value).lower()
