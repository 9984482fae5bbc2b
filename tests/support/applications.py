"""Trains models of `keras.applications` for two steps on two replicas, saves and loads them; prints a line for each.

python tests/support/applications.py [NAME ...]: those named, or one of each family.
"""

import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from pipeline import strategies
from pipeline.worker.artifacts import save
from pipeline.worker.tensorflow import build, custom_steps, step
from pipeline.worker.tensorflow.collective import over

REPLICAS, CLASSES = 2, 10
# Of each family the smallest, and the least pixels on a side that it takes.
FAMILIES = {
    "VGG16": 32, "ResNet50": 32, "ResNet50V2": 32, "Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75,
    "MobileNet": 32, "MobileNetV2": 32, "MobileNetV3Small": 32, "DenseNet121": 32, "NASNetMobile": 32,
    "EfficientNetB0": 32, "EfficientNetV2B0": 32, "ConvNeXtTiny": 32,
}  # fmt: skip


def trained(name: str, pixels: int, strategy: tf.distribute.Strategy) -> tuple[list[float], float]:
    """(the losses of two steps of one example a replica, seconds to save). What is loaded is what was trained."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(2)
    x = random.random((REPLICAS, pixels, pixels, 3)).astype("float32")
    y = random.integers(0, CLASSES, REPLICAS).astype("int32")

    def make() -> keras.Model:
        made = getattr(keras.applications, name)(weights=None, input_shape=x.shape[1:], classes=CLASSES)
        made.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return made

    model = build.model(make, strategy, (tf.constant(x[:1]), tf.constant(y[:1])))
    batches = tuple((x[place : place + 1], y[place : place + 1]) for place in range(REPLICAS))
    data = tf.data.Dataset.from_tensors((np.float32(REPLICAS), batches)).repeat()
    steps = custom_steps.training_steps(model, step.Replicas(strategy, over(strategy), always_fed=True))
    losses, _, _ = steps(iter(data), tf.constant(2))
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        file = Path(folder) / save(model, Path(folder), print)
        seconds = time.monotonic() - began
        loaded = keras.models.load_model(file)
    for ours, theirs in zip(model.variables, loaded.variables, strict=True):
        # Keras saves none of these.
        if ours.path.endswith("seed_generator_state"):
            continue
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(ours), theirs.numpy(), err_msg=ours.path)
    return losses.numpy().ravel().tolist(), seconds


def main() -> None:
    """Prints name, seconds of all and of saving, and losses."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    strategy = strategies.mirrored(tuple(f"CPU:{number}" for number in range(REPLICAS)))
    for name in sys.argv[1:] or FAMILIES:
        began = time.monotonic()
        losses, saving = trained(name, FAMILIES.get(name, 32), strategy)
        assert np.isfinite(losses).all(), f"{name}: {losses}"
        print(name, f"{time.monotonic() - began:.1f} {saving:.1f}", *losses, flush=True)


if __name__ == "__main__":
    main()
