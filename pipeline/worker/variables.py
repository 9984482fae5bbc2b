"""What a built model holds whatever its batch: its variables, and what its optimizers keep beside each."""

import itertools
import math
from collections.abc import Mapping, Sequence

import keras

from pipeline.plan.size import ONLY_TABLES, Variable, bytes_each
from pipeline.worker.rates import updating


def listed(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    cut: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[tuple[Variable, ...], int]:
    """(the variables of a built model, bytes of its optimizers that belong to none of them).

    `cut` has, by their paths, numbers of devices over which variables are cut.
    """
    embeddings = [
        layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding) and layer.built
    ]
    tables = {id(variable): layer for layer in embeddings for variable in layer.weights}
    slots = {of: sum(map(bytes_of, own)) for of, own in slots_of(optimizers).items()}
    variables = tuple(
        Variable(
            path=variable.path,
            shape=tuple(variable.shape),
            dtype=keras.backend.standardize_dtype(variable.dtype),
            trainable=bool(variable.trainable),
            slot_bytes=slots.get(id(variable), 0),
            rows_per_example=_rows_per_example(tables.get(id(variable))),
            whole=_why_whole(tables.get(id(variable))),
            cut=(cut or {}).get(variable.path, ()),
        )
        for variable in model.variables
    )
    apart = sum(bytes_of(one) for optimizer in optimizers for one in optimizer.variables) - sum(slots.values())
    return variables, apart


def slots_of(optimizers: Sequence[keras.optimizers.Optimizer]) -> dict[int, list[keras.Variable]]:
    """What optimizers keep beside each trainable variable, by its id.

    Keras's optimizers hold slots in lists as long as that of the variables they train.
    """
    found = dict[int, list[keras.Variable]]()
    for optimizer in itertools.chain.from_iterable(map(updating, optimizers)):
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


def state_bytes(model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]) -> int:
    """Bytes of what a step of a compiled model goes through whatever its batch: weights, gradients, slots."""
    slots = [variable for optimizer in optimizers for variable in optimizer.variables]
    return sum(map(bytes_of, (*model.variables, *model.trainable_variables, *slots)))


def bytes_of(variable: keras.Variable) -> int:
    """Bytes of a variable, as one device holds it."""
    return int(math.prod(variable.shape)) * bytes_each(keras.backend.standardize_dtype(variable.dtype))


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
