"""One contestant of `gpu.py`: trains a model on one device under JAX, so many steps whenever it is told to.

    python benchmarks/on_gpu.py ours 'transformer 100m' bfloat16

It reads numbers of steps from its input, a line each, and prints what it came to as a line of JSON, before which it
says what the model is. `checks` in place of a contestant compares the engine on this device with itself on a CPU;
`device` says what there is.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
# Several contestants wait beside each other.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from pipeline import models
from pipeline.models.transformer import SIZES
from pipeline.worker.artifacts import save
from pipeline.worker.jax.data import DeviceData
from pipeline.worker.jax.devices import BATCH, MODEL, seed_all
from pipeline.worker.jax.loop import JaxLoop
from pipeline.worker.layout import BatchLayout

PRECISIONS = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
VOCABULARY, CLASSES = 256, 1000
# Multiply-adds of a picture through ResNet-50 (He et al., 2015, table 1); backward takes twice as many as forward.
RESNET50_MULTIPLY_ADDS = 3.8e9
# What the checks train, and how often.
CHECKED, CHECKED_STEPS = ("mlp", "cnn", "transformer"), 20


@dataclass(frozen=True)
class Work:
    """A model, batches for it, and the floating-point operations of a step, None where nobody counted them.

    `units` are what throughput counts of an example: one, or its tokens.
    """

    model: keras.Model
    x: np.ndarray
    y: np.ndarray
    batch: int
    units: int
    flops: float | None


def work(name: str, tiny: bool) -> Work:
    """What is trained by that name; `tiny` stands for it where a program is only to be tried."""
    rng = np.random.default_rng(0)
    if name.startswith("transformer"):
        size, length, batch = name.split()[1], 16 if tiny else 1024, 4 if name.endswith("1b") or tiny else 16
        own = {"blocks": 1, "width": 32, "heads": 2} if tiny else {}
        model = models.transformer(input_shape=(length,), num_classes=VOCABULARY, size=size, **own)
        tokens = rng.integers(0, VOCABULARY, (64 * batch, length + 1), np.int32)
        blocks, width = (1, 32) if tiny else (SIZES[size]["blocks"], SIZES[size]["width"])
        # Chowdhery et al., 2022 (PaLM), appendix B: 6 N and 12 L d s operations a token.
        flops = batch * length * (6 * model.count_params() + 12 * blocks * width * length)
        return Work(model, tokens[:, :-1], tokens[:, 1:], batch, length, flops)
    if tiny:
        model, batch, flops = models.resnet20(input_shape=(16, 16, 3), num_classes=CLASSES, blocks_per_stage=1), 4, None
    else:
        model, batch = keras.applications.ResNet50(weights=None, classes=CLASSES), 256
        flops = batch * 3 * 2 * RESNET50_MULTIPLY_ADDS
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    x = rng.random((4 * batch, *model.input_shape[1:]), np.float32)
    return Work(model, x, rng.integers(0, CLASSES, len(x), np.int32), batch, 1, flops)


def ours(made: Work) -> Callable[[int], float]:
    """The engine's loop: seconds of so many steps."""
    loop = _loop(made.model, (made.x, made.y), made.batch, jax.devices()[0])

    def train(steps: int) -> float:
        call = loop.call(steps)
        began = time.perf_counter()
        loop.metrics()
        return call.seconds + time.perf_counter() - began

    return train


def fit(made: Work) -> Callable[[int], float]:
    """Keras's own, on as many examples as steps take."""

    def train(steps: int) -> float:
        chosen = np.arange(steps * made.batch) % len(made.x)
        x, y = made.x[chosen], made.y[chosen]
        began = time.perf_counter()
        made.model.fit(x, y, batch_size=made.batch, verbose=0)
        return time.perf_counter() - began

    return train


def by_hand(made: Work) -> Callable[[int], float]:
    """A loop as Keras's guide to JAX writes it: one compiled step, whose state is handed on."""
    model = made.model
    model.optimizer.build(model.trainable_variables)
    state = tuple(
        [variable.value for variable in group]
        for group in (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
    )
    # The model's own variables stay as they were: what is handed on would be theirs.
    held = [jax.tree.map(lambda value: value.copy(), state)]
    loss_of = keras.losses.get(model.loss)

    def loss(trained: Any, other: Any, x: Any, y: Any) -> Any:
        predicted, other = model.stateless_call(trained, other, x, training=True)
        return loss_of(y, predicted), other

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: Any, y: Any) -> Any:
        trained, other, slots = state
        (value, other), gradients = jax.value_and_grad(loss, has_aux=True)(trained, other, x, y)
        trained, slots = model.optimizer.stateless_apply(slots, gradients, trained)
        return (trained, other, slots), value

    def train(steps: int) -> float:
        began = time.perf_counter()
        for place in range(steps):
            first = place * made.batch % len(made.x)
            part = slice(first, first + made.batch)
            held[0], value = step(held[0], made.x[part], made.y[part])
        value.block_until_ready()
        return time.perf_counter() - began

    return train


CONTESTANTS = {"ours": ours, "fit": fit, "by hand": by_hand}


def checks() -> Iterator[tuple[str, float]]:
    """How far the engine on this device is from itself on a CPU, and from steps without a loop, and a model that was
    saved and loaded from the one that was saved: the largest difference of losses, or of predictions.
    """
    jax.config.update("jax_default_matmul_precision", "highest")
    here, cpu = jax.devices()[0], jax.devices("cpu")[0]
    for name in CHECKED:
        model, arrays = _checked(name)
        loop = _loop(model, arrays, 16, here)
        losses = loop.call(CHECKED_STEPS).losses
        for than, device, alike in (("on a CPU", cpu, False), ("of single steps", here, True)):
            other = _loop(_checked(name)[0], arrays, 16, device, alike).call(CHECKED_STEPS).losses
            yield f"{name}: losses here / {than}", float(np.abs(losses - other).max())
        saved = loop.whole_model()
        with tempfile.TemporaryDirectory() as folder:
            loaded = keras.saving.load_model(Path(folder) / save(saved, Path(folder), lambda event: None))
        apart = np.abs(saved.predict(arrays[0], verbose=0) - loaded.predict(arrays[0], verbose=0)).max()
        yield f"{name}: predictions as saved / as loaded", float(apart)


def _checked(name: str) -> tuple[keras.Model, tuple[np.ndarray, np.ndarray]]:
    """A small model with weights of a seed, and its data."""
    seed_all(0)
    rng = np.random.default_rng(1)
    if name == "transformer":
        tokens = rng.integers(0, 64, (640, 17), np.int32)
        return models.transformer(input_shape=(16,), num_classes=64, blocks=2, width=64, heads=4), (
            tokens[:, :-1], tokens[:, 1:],
        )  # fmt: skip
    build = {"mlp": models.mlp, "cnn": partial(models.cnn, filters=(8, 16), dense_units=32)}[name]
    model = build(input_shape=(8, 8, 1), num_classes=10)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, (rng.random((640, 8, 8, 1), np.float32), rng.integers(0, 10, 640, np.int32))


def _loop(
    model: keras.Model, arrays: tuple[np.ndarray, np.ndarray], batch: int, device: jax.Device, alike: bool = False
) -> JaxLoop:
    model._symbolic_build(data_batch=tuple(array[:2] for array in arrays))
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    mesh = Mesh(np.array([[device]]), (BATCH, MODEL))
    data = DeviceData(arrays, BatchLayout(batch, 1, 0, 1, (len(arrays[1]),)), True, 0)
    return JaxLoop(model, mesh, data, None, alike=alike)


def main(contestant: str, name: str = "", precision: str = "float32", tiny: str = "") -> None:
    """Prints a line for what there is, and one for each line of input."""
    device = jax.devices()[0]
    if contestant == "device":
        _say({"platform": device.platform, "kind": device.device_kind, "jax": jax.__version__})
        return
    if contestant == "checks":
        _say(dict(checks()))
        return
    keras.config.set_dtype_policy(PRECISIONS[precision])
    seed_all(0)
    made = work(name, bool(tiny))
    train = CONTESTANTS[contestant](made)
    _say({"per_step": made.batch * made.units, "flops": made.flops, "parameters": made.model.count_params()})
    for line in sys.stdin:
        seconds = train(int(line))
        _say({"seconds": seconds, "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use")})


def _say(told: object) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
