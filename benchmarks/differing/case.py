"""A case of the differential test: a model, its data and its training as plain data, and as a Keras script.

What is trained is what the script defines, so that the script shows all there is to a difference.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import indent


@dataclass(frozen=True)
class Input:
    """Examples of a shape: "numbers", "words" (class numbers below 7), or "padded" series that end in zeros."""

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """A layer, in Keras's words, of the values with these numbers: inputs first, then layers in their order."""

    layer: str
    of: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """An output of a value by some layers more, its labels' kind and shape, and what is made of both.

    Labels are "classes" (numbers), "one-hot", "binary" or "numbers".
    """

    layers: tuple[str, ...]
    of: int
    labels: str
    shape: tuple[int, ...]
    classes: int
    loss: str
    loss_weight: float
    metrics: tuple[str, ...]
    weighted_metrics: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """All that a training is made of. `weights` are None, "drawn" or "many zero"; `data` "arrays" or "dataset"."""

    inputs: tuple[Input, ...]
    layers: tuple[Layer, ...]
    outputs: tuple[Output, ...]
    optimizer: str
    callbacks: tuple[str, ...]
    batch: int
    examples: int
    validation_examples: int
    epochs: int
    steps_per_call: int
    weights: str | None
    data: str
    seed: int

    def to_json(self) -> str:
        """One line for each field."""
        fields = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(self).items())
        return "{\n" + ",\n".join(fields) + "\n}\n"


def from_json(text: str) -> Case:
    """What `to_json` made."""
    plain = json.loads(text)
    made = {
        "inputs": tuple(Input(one["kind"], tuple(one["shape"])) for one in plain["inputs"]),
        "layers": tuple(Layer(one["layer"], tuple(one["of"])) for one in plain["layers"]),
        "outputs": tuple(
            Output(**{name: tuple(value) if isinstance(value, list) else value for name, value in one.items()})
            for one in plain["outputs"]
        ),
        "callbacks": tuple(plain["callbacks"]),
    }
    return Case(**plain | made)


# Layers that take values as a list.
MERGES = tuple(f"keras.layers.{name}(" for name in ("Add", "Average", "Multiply", "Concatenate"))
# What cases name beside Keras, by name.
OWN = {
    "mean_loss": """
        def mean_loss(y, y_pred):
            return ops.mean(ops.square(y - y_pred))
        """,
    "sum_loss": """
        def sum_loss(y, y_pred):
            return ops.sum(ops.square(y - y_pred))
        """,
    "loss_of_each": """
        def loss_of_each(y, y_pred):
            return ops.mean(ops.abs(y - y_pred) ** 1.5, axis=-1)
        """,
    "AddsMean": """
        class AddsMean(keras.layers.Layer):
            def call(self, x):
                self.add_loss(0.1 * ops.mean(ops.square(x)))
                return x
        """,
    "AddsSum": """
        class AddsSum(keras.layers.Layer):
            def call(self, x):
                self.add_loss(0.01 * ops.sum(ops.square(x)))
                return x
        """,
    "furthest": """
        class furthest(keras.metrics.Metric):
            def __init__(self):
                super().__init__(name="furthest")
                self.most = self.add_weight(name="most", initializer="zeros")

            def update_state(self, y, y_pred, sample_weight=None):
                self.most.assign(ops.maximum(self.most, ops.max(ops.abs(y - y_pred))))

            def result(self):
                return self.most
        """,
    "far": """
        def far(y, y_pred):
            return ops.max(ops.abs(y - y_pred), axis=-1)
        """,
    "halved": """
        def halved(epoch, rate):
            return rate * 0.5
        """,
}

_IMPORTS = """import keras
import numpy as np
import tensorflow as tf
from keras import ops

"""
_MAIN = """
import pipeline

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
trained = []
for strategy in (tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])):
    keras.utils.set_random_seed({seed})
    with strategy.scope():
        made = model()
    x, y, weights = data({examples}, 1)
    pipeline.fit(made, x, y, {batch}, {epochs}, sample_weight=weights, callbacks=callbacks(), shuffle=False)
    trained.append(made.get_weights())
for one, two in zip(*trained, strict=True):
    print(one.shape, np.abs(one - two).max(initial=0.0))
"""


def script(case: Case) -> str:
    """A Python module that defines `model()`, compiled; `data(examples, seed)`, arrays (x, y, sample weights or None);
    and `callbacks()`.
    """
    body = _model(case) + _data(case) + _function("callbacks()", [f"return [{', '.join(case.callbacks)}]"])
    own = (_dedented(text) for name, text in OWN.items() if f"{name}" in body)
    return _IMPORTS + "".join(f"\n{text}\n" for text in own) + body


def whole_script(case: Case) -> str:
    """The script, which also trains on one device and on two, and prints how far apart the weights are."""
    settings = f"batch_size={case.batch}", f"epochs={case.epochs}"
    return script(case) + _MAIN.format(seed=case.seed, examples=case.examples, batch=settings[0], epochs=settings[1])


def _model(case: Case) -> str:
    lines = []
    for number, one in enumerate(case.inputs):
        kind = ', dtype="int32"' if one.kind == "words" else ""
        lines.append(f'v{number} = keras.Input({one.shape}, name="input_{number}"{kind})')
    for number, layer in enumerate(case.layers, len(case.inputs)):
        values = ", ".join(f"v{value}" for value in layer.of)
        several = layer.layer.startswith(MERGES)
        lines.append(f"v{number} = {layer.layer}({f'[{values}]' if several else values})")
    for number, output in enumerate(case.outputs):
        made = f"v{output.of}"
        for layer_of_output in output.layers:
            made = f"{layer_of_output}({made})"
        lines.append(f'y{number} = keras.layers.Identity(name="output_{number}")({made})')
    lines.append(f"made = keras.Model({_several('v', len(case.inputs), 'input')}, {_outputs(case, 'y{}')})")
    lines += [
        "made.compile(",
        f"    {case.optimizer},",
        f"    loss={_of_outputs(case, [output.loss for output in case.outputs])},",
        f"    loss_weights={_of_outputs(case, [str(output.loss_weight) for output in case.outputs], True)},",
        f"    metrics={_of_outputs(case, [_listed(output.metrics) for output in case.outputs])},",
        f"    weighted_metrics={_of_outputs(case, [_listed(output.weighted_metrics) for output in case.outputs])},",
        ")",
        "return made",
    ]
    return _function("model()", lines)


def _data(case: Case) -> str:
    lines = ["random = np.random.default_rng(seed)"]
    for number, one in enumerate(case.inputs):
        shape = _drawn_shape(one.shape)
        if one.kind == "words":
            lines.append(f'x{number} = random.integers(0, 7, {shape}).astype("int32")')
            continue
        lines.append(f'x{number} = random.normal(size={shape}).astype("float32")')
        if one.kind == "padded":
            lines.append(f"lengths = random.integers(1, {one.shape[0] + 1}, (examples, 1))")
            lines.append(f"x{number} *= (np.arange({one.shape[0]}) < lengths)[..., None]")
    for number, output in enumerate(case.outputs):
        shape = _drawn_shape(output.shape)
        lines.append(f"y{number} = " + {
            "classes": f"random.integers(0, {output.classes}, {shape})",
            "one-hot": f'np.eye({output.classes}, dtype="float32")[random.integers(0, {output.classes}, examples)]',
            "binary": f'random.integers(0, 2, {shape}).astype("float32")',
            "numbers": f'random.normal(size={shape}).astype("float32")',
        }[output.labels])  # fmt: skip
    weights = "None"
    if case.weights is not None:
        for number, output in enumerate(case.outputs):
            # Each step of a series has a weight of its own.
            shape = _drawn_shape(output.shape if output.labels == "classes" else output.shape[:-1])
            lines.append(f'w{number} = random.uniform(0.5, 2.0, {shape}).astype("float32")')
            if case.weights == "many zero":
                lines.append(f'w{number} *= random.integers(0, 2, {shape}).astype("float32")')
        weights = _outputs(case, "w{}")
    lines.append(f"return {_several('x', len(case.inputs), 'input')}, {_outputs(case, 'y{}')}, {weights}")
    return _function("data(examples, seed)", lines)


def _drawn_shape(shape: Sequence[int]) -> str:
    return f"(examples, {', '.join(map(str, shape))})"


def _several(letter: str, count: int, name: str) -> str:
    if count == 1:
        return f"{letter}0"
    return "{" + ", ".join(f'"{name}_{number}": {letter}{number}' for number in range(count)) + "}"


def _outputs(case: Case, named: str) -> str:
    return _several(named[0], len(case.outputs), "output")


def _of_outputs(case: Case, parts: Sequence[str], is_weight: bool = False) -> str:
    if len(case.outputs) == 1:
        return f"[{parts[0]}]" if is_weight else parts[0]
    return "{" + ", ".join(f'"output_{number}": {part}' for number, part in enumerate(parts)) + "}"


def _listed(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]"


def _function(head: str, lines: Sequence[str]) -> str:
    return f"\n\ndef {head}:\n" + indent("\n".join(lines), "    ") + "\n"


def _dedented(text: str) -> str:
    lines = text.strip("\n").rstrip().splitlines()
    return "\n".join(line[8:] for line in lines) + "\n"
