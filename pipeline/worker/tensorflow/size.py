"""Reads a model's size from the built model, and what a step keeps from the graph that was compiled of it."""

import math
from collections.abc import Hashable
from typing import TypeAlias

import keras
import tensorflow as tf

from pipeline.data.examples import Examples
from pipeline.plan.size import ONLY_TABLES, Size, Variable
from pipeline.worker.input.part import Part
from pipeline.worker.rates import innermost
from pipeline.worker.tensorflow.exact import normalization
from pipeline.worker.tensorflow.own.step import optimizers

# Operations whose result is what came in, in the same memory.
ALIASES = ("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient")
# What reads only a tensor's shape lets go of it at once.
SHAPES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs")
BACKWARD = "gradient_tape/"

# What tells one tensor from another, as `tf.Tensor.ref` has it.
Ref: TypeAlias = Hashable


def of(model: keras.Model, graph: tf.Graph, replicas: int, part: Part) -> Size:
    """The size of a built model.

    `graph` is that of its compiled loop, of a step on each of `replicas` devices; `part` is the data it trains on.
    """
    embeddings = [
        layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding) and layer.built
    ]
    tables = {id(variable): layer for layer in embeddings for variable in layer.weights}
    slots = {of: sum(map(bytes_of, own)) for of, own in slots_of(model).items()}
    variables = tuple(
        Variable(
            path=variable.path,
            shape=tuple(variable.shape),
            dtype=keras.backend.standardize_dtype(variable.dtype),
            trainable=bool(variable.trainable),
            slot_bytes=slots.get(id(variable), 0),
            rows_per_example=_rows_per_example(tables.get(id(variable))),
            whole=_why_whole(tables.get(id(variable))),
        )
        for variable in model.variables
    )
    per_example = None
    if not (isinstance(part, tf.data.Dataset) or (isinstance(part, Examples) and part.in_files)):
        leaves = tf.nest.flatten(part.raw if isinstance(part, Examples) else part)
        per_example = sum(leaf.nbytes for leaf in leaves) // len(leaves[0])
    apart = sum(bytes_of(one) for optimizer in optimizers(model) for one in optimizer.variables) - sum(slots.values())
    normalizations = len(normalization.layers(model))
    try:
        fixed, growing, largest = kept(graph)
    except _Unknown as unknown:
        return Size(variables, apart, None, None, None, per_example, str(unknown), normalizations)
    kept_bytes = (fixed // replicas, growing // replicas, largest)
    return Size(variables, apart, *kept_bytes, per_example, normalizations=normalizations)


def kept(graph: tf.Graph) -> tuple[int, int, int]:
    """(bytes of a fixed size, bytes for each example) that the forward pass makes and the backward pass reads, and
    the bytes for each example of the largest tensor among them.

    `graph` is that of a compiled loop of steps. A tensor counts once, whatever aliases it has; variables do not count.
    Raises where a size cannot be told from the graph, as with what a loop inside the model keeps.
    """
    body = body_of(graph)
    backward: set[str] = set()
    read: dict[Ref, tf.Tensor] = {}
    for operation in body.get_operations():
        if BACKWARD in operation.name or any(tensor.op.name in backward for tensor in operation.inputs):
            backward.add(operation.name)
        if BACKWARD in operation.name and operation.type not in SHAPES:
            for tensor in map(_source, operation.inputs):
                if tensor.op.name not in backward and tensor.op.type not in ("ReadVariableOp", "Const"):
                    read[tensor.ref()] = tensor
    if any(tensor.dtype == tf.variant for tensor in read.values()):
        raise _Unknown("the model has a loop, and what that keeps is not in its graph")
    fixed, growing, largest = 0, 0, 0
    for tensor in read.values():
        if tensor.dtype == tf.resource:
            continue
        shape = None if tensor.shape.rank is None else tensor.shape.as_list()
        if shape is None or shape.count(None) > 1:
            raise _Unknown(f"the graph does not tell the shape of {tensor.op.name.removeprefix('while/')}")
        known = math.prod(size for size in shape if size is not None) * tensor.dtype.size
        if None in shape:
            growing, largest = growing + known, max(largest, known)
        else:
            fixed += known
    return fixed, growing, largest


class _Unknown(Exception):
    """A graph that does not tell what is kept."""


def body_of(graph: tf.Graph) -> tf.Graph:
    """The graph of one step in that of the compiled loop over steps."""
    loop = next(operation for operation in graph.get_operations() if operation.type in ("While", "StatelessWhile"))
    return graph._get_function(loop.get_attr("body").name).graph


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that this one is another name of."""
    while tensor.op.type in ALIASES:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def slots_of(model: keras.Model) -> dict[int, list[keras.Variable]]:
    """What optimizers keep beside each trainable variable, by its id.

    Keras's optimizers hold slots in lists as long as that of the variables they train.
    """
    found = dict[int, list[keras.Variable]]()
    for optimizer in map(innermost, optimizers(model)):
        trained = optimizer._trainable_variables
        for variable in trained:
            found.setdefault(id(variable), [])
        for name, slots in vars(optimizer).items():
            own = name in ("_trainable_variables", "_variables")
            if own or not isinstance(slots, list) or len(slots) != len(trained):
                continue
            for variable, slot in zip(trained, slots, strict=True):
                found[id(variable)] += [slot] if isinstance(slot, keras.Variable) else []
    return found


def state_bytes(model: keras.Model) -> int:
    """Bytes of what a step of a compiled model goes through whatever its batch: weights, gradients, slots."""
    slots = [variable for optimizer in optimizers(model) for variable in optimizer.variables]
    return sum(map(bytes_of, (*model.variables, *model.trainable_variables, *slots)))


def bytes_of(variable: keras.Variable) -> int:
    """Bytes of a variable, as one device holds it."""
    return int(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size)


def _rows_per_example(layer: keras.layers.Layer | None) -> int | None:
    """Rows of an embedding's table that an example looks up, over all places where the model calls the layer.

    None where a step reads or changes the whole table, as it does for a regularizer or in a layer of another kind.
    """
    if layer is None or not _is_plain(layer) or layer.embeddings_regularizer is not None:
        return None
    called = [tensor.shape for node in layer._inbound_nodes for tensor in node.input_tensors]
    shapes = called or [(layer.get_build_config() or {}).get("input_shape") or (None,)]
    return sum(math.prod(size or 1 for size in shape[1:]) for shape in shapes)


def _why_whole(layer: keras.layers.Layer | None) -> str | None:
    if layer is None:
        return ONLY_TABLES
    if not _is_plain(layer):
        return "its layer is not a plain Embedding"
    for name in ("embeddings_constraint", "embeddings_regularizer"):
        if getattr(layer, name) is not None:
            return f"its layer has an {name}, which needs the whole of it"
    return None


def _is_plain(layer: keras.layers.Layer) -> bool:
    return type(layer) is keras.layers.Embedding and not layer.lora_rank and not layer.quantization_mode
