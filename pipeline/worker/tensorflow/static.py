"""Finds what a TPU could not compile, before training: sizes that data or a model leave open until a step is run.

Data are asked for their shapes. A model's forward pass is traced on a batch of known shape, after which no operation's
may be open; then one replica's step is lowered by XLA as for a TPU, which on CPUs pads some shapes that are open.
"""

import contextlib
import re
from collections.abc import Iterator

import keras
import tensorflow as tf

from pipeline.errors import refuse
from pipeline.worker.data.reading import Batch, Part
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import custom_steps
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow import step as steps
from pipeline.worker.tensorflow.collective import ALONE
from pipeline.worker.tensorflow.custom_steps import watched
from pipeline.worker.variables import updating

# What to write in place of the operations that most often leave a shape open.
INSTEAD = {
    "Where": "tf.where(condition, x, 0.0), which keeps the shape, in place of tf.boolean_mask or tf.where(condition)",
    "Unique": "tf.math.unsorted_segment_sum with a fixed number of segments, or unique values in the data set",
    "UniqueV2": "tf.math.unsorted_segment_sum with a fixed number of segments, or unique values in the data set",
    "Reshape": "sizes from x.shape, which are numbers, in place of computed ones",
    "StridedSlice": "a slice of a fixed size, or a mask",
}
# What no input of known shape gives a known shape.
ALWAYS_OPEN = ("Where", "Unique", "UniqueV2")


def check_data(part: Part | None, name: str) -> None:
    """Refuses a `tf.data.Dataset` whose examples differ in size, or hold text; `name` is which part it is."""
    if not isinstance(part, tf.data.Dataset):
        return
    for leaf in tf.nest.flatten(part.element_spec):
        is_open = not isinstance(leaf, tf.TensorSpec) or not leaf.shape.is_fully_defined()
        of_shape = f"of shape {_written(getattr(leaf, 'shape', None))}"
        is_text = not is_open and leaf.dtype == tf.string
        refuse(
            (is_open, f"{name} examples of one size, as the static shapes of a TPU need",
             f"a {type(leaf).__name__} {of_shape}",
             "padding or cutting them to a fixed length in data.build, and tf.ensure_shape"),
            (is_text, f"{name} examples of numbers, since a TPU takes no text", f"tf.string {of_shape}",
             "turning text into numbers in data.build, with keras.layers.StringLookup"),
            error=ModelError,
        )  # fmt: skip


def check_model(model: keras.Model, sample: Batch, replica_batch: int, gradient_bits: int) -> str:
    """Refuses a model, built without a strategy, whose training no TPU could compile; returns a note on another."""
    leaves = [tf.TensorSpec((replica_batch, *leaf.shape[1:]), leaf.dtype) for leaf in tf.nest.flatten(sample)]
    if (own := custom_steps.of(model)) is None:
        _check_shapes(model, sample, leaves)
        model.optimizer.build(model.trainable_variables)
    replicas = steps.Replicas(tf.distribute.get_strategy(), ALONE, gradient_bits, always_fed=True, static=True)
    step = custom_steps.replica_step(model, replicas)

    def one(*flat: tf.Tensor) -> tf.Tensor:
        return step(tf.constant(float(replica_batch)), tf.nest.pack_sequence_as(sample, flat))

    with losses.without_keras_scaling(), contextlib.nullcontext() if own is None else watched():
        compiled = tf.function(one, autograph=False, jit_compile=True)
        compiled.get_concrete_function(*leaves)
        try:
            # The part of XLA's work that is the same for every kind of device.
            compiled.experimental_get_compiler_ir(*leaves)(stage="hlo")
        except (ValueError, tf.errors.OpError) as error:
            raise ModelError(_explain(model, str(error))) from error
    return (
        f"The check for TPUs passed: all operations of a step on {replica_batch} examples have static shapes, and XLA "
        f"compiles it. No TPU has run it yet."
    )


def updated_otherwise(model: keras.Model) -> str | None:
    """Returns a note on tables of which a TPU sums a row's gradients, where that differs from Keras's one by one."""
    plain = [layer for layer in model._flatten_layers() if type(layer) is keras.layers.Embedding and layer.trainable]
    tables = [layer.path for layer in plain if not layer.embeddings_regularizer]
    applied = [one for optimizer in steps.optimizers(model) for one in updating(optimizer)]
    clipping = [one for one in applied if one.clipnorm or one.global_clipnorm or one.clipvalue]
    if not tables or (not clipping and all(isinstance(one, keras.optimizers.SGD) for one in applied)):
        return None
    return (
        f"A TPU adds up a row's gradients where a batch names it more than once ({tables[0]}); by "
        f"{type(model.optimizer).__name__} it updates the row otherwise than Keras on one device, which takes each by "
        f"itself. SGD updates both alike."
    )


def _check_shapes(model: keras.Model, sample: Batch, leaves: list[tf.TensorSpec]) -> None:
    call = steps.caller(model)

    def forward(*flat: tf.Tensor) -> tf.Tensor:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(tf.nest.pack_sequence_as(sample, flat))
        y_pred = call(x, training=True)
        return losses.weighted(model, x, y, y_pred, weights, tf.constant(1.0), training=True)

    with losses.without_keras_scaling():
        traced = tf.function(forward, autograph=False).get_concrete_function(*leaves)
    for operation in _operations(traced.graph, set()):
        for output in filter(_open, operation.outputs):
            expected = "operations of static shapes, without which XLA compiles nothing for a TPU"
            received = f"{operation.type} of shape {_written(output.shape)} {_where(model, operation.name)}"
            raise ModelError(expected, received, INSTEAD.get(operation.type, "a fixed size and a mask"))


def _explain(model: keras.Model, message: str) -> str:
    """XLA's message in one sentence.

    >>> said = "Failed getting HLO text: 'Input 1 to node `net/odd/Reshape` with op Reshape must be constant.\\n\\nMore"
    >>> _explain(keras.Sequential([keras.layers.ReLU(name="odd")]), said)[:78]
    'Expected a training step that XLA compiles, received Reshape in layer odd: Inp'
    """
    line = next((line for line in message.splitlines() if line.strip()), "nothing")
    # What it says of an operation without a compiler starts with a list of the operations, then a list of places.
    missing = re.search(r": (\w+) \(No registered '\w+' OpKernel[^)]*\)+\{\{node ([^}]*)\}\}", message)
    named = re.search(r"node `([^`]*)` with op (\w+)", message)
    kind, path = missing.groups() if missing else (named.group(2), named.group(1)) if named else ("an operation", "")
    why = "XLA has no compiler for it" if missing else line.removeprefix("Failed getting HLO text: ").strip("'\" .")
    return (
        f"Expected a training step that XLA compiles, received {kind} {_where(model, path)}: {why}. "
        f"Try {INSTEAD.get(kind, 'doing that in data.build, or with other operations')}."
    )


def _operations(graph: tf.Graph, visited: set[str]) -> Iterator[tf.Operation]:
    """Operations of a graph and of the functions that it calls, such as the bodies of loops."""
    # A function traced for any shape shows open ones that XLA knows; of its operations those come that are always open.
    operations = graph.get_operations()
    vague = bool(visited) and any(_open(one.outputs[0]) for one in operations if one.type == "Placeholder")
    for operation in operations:
        if not vague or operation.type in ALWAYS_OPEN:
            yield operation
        for attribute in operation.op_def.attr:
            if attribute.type not in ("func", "list(func)"):
                continue
            called = operation.get_attr(attribute.name)
            for function in called if isinstance(called, list) else [called]:
                # What TensorFlow makes of its older functions, as of CTC's loss, has no graph to look at: XLA does.
                inner = getattr(graph._get_function(function.name), "graph", None)
                if inner is not None and function.name not in visited:
                    visited.add(function.name)
                    yield from _operations(inner, visited)


def _open(tensor: tf.Tensor) -> bool:
    return tensor.dtype not in (tf.resource, tf.variant) and not tensor.shape.is_fully_defined()


def _where(model: keras.Model, path: str) -> str:
    """The innermost layer in an operation's name, in which TensorFlow numbers what is repeated."""
    inner = [*model._flatten_layers(include_self=False), *getattr(model, "operations", [])]
    layers = {operation.name for operation in inner}
    parts = ((part, re.sub(r"_\d+$", "", part)) for part in reversed(path.split("/")[:-1]))
    names = (name for both in parts for name in both if name in layers)
    return next((f"in layer {name}" for name in names), f"at {path}" if path else "somewhere")


def _written(shape: tf.TensorShape | None) -> str:
    return "unknown" if shape is None or shape.rank is None else str(list(shape))
