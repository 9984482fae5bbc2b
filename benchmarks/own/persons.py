"""Three models such as a person brings, and data for them: what `every_strategy.py` trains under every strategy."""

from typing import Any

import keras
import numpy as np


def functional() -> keras.Model:
    """Two inputs and two outputs, with a loss, a weight and a metric for each output."""
    left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
    joined = keras.layers.Concatenate()([keras.layers.Dense(16, activation="relu")(side) for side in (left, right)])
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(joined)
    size = keras.layers.Dense(1, name="size")(joined)
    model = keras.Model({"left": left, "right": right}, {"kind": kind, "size": size})
    model.compile(
        keras.optimizers.Adam(0.01),
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.5},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return model


@keras.saving.register_keras_serializable("persons")
class Gated(keras.Model):
    """A `call` of one's own, and no `train_step`; a loss is added in it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gate = keras.layers.Dense(16, activation="sigmoid")
        self.value = keras.layers.Dense(16)
        self.kind = keras.layers.Dense(3, activation="softmax")

    def call(self, x: Any) -> Any:
        """Probabilities, float32 [batch, 3], of x, float32 [batch, 8]."""
        gate = self.gate(x)
        self.add_loss(1e-3 * keras.ops.mean(gate))
        return self.kind(gate * self.value(x))


def subclassed() -> keras.Model:
    """A `Gated`, compiled."""
    model = Gated()
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def normalised() -> keras.Model:
    """A convolutional net with BatchNormalization, whose statistics are those of the whole batch."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def data(kind: str, examples: int = 256, validation: int = 61) -> tuple[Any, Any]:
    """(training, validation) arrays for the model that `kind` names; the label follows from the input."""
    random = np.random.default_rng(5)
    total = examples + validation
    flat = random.normal(size=(total, 8)).astype("float32")
    label = np.argmax(flat[:, :3] + flat[:, 3:6], axis=1).astype("int32")
    x: Any = flat
    y: Any = label
    if kind == "functional":
        x = {"left": flat[:, :4], "right": flat[:, 4:]}
        y = {"kind": label, "size": flat.sum(axis=1, keepdims=True)}
    elif kind == "normalised":
        x = np.outer(flat.ravel(), np.ones(8, "float32")).reshape(total, 8, 8, 1)
    return _cut(x, y, slice(examples)), _cut(x, y, slice(examples, None))


def _cut(x: Any, y: Any, rows: slice) -> tuple[Any, Any]:
    def cut(leaves: Any) -> Any:
        return {name: leaf[rows] for name, leaf in leaves.items()} if isinstance(leaves, dict) else leaves[rows]

    return cut(x), cut(y)
