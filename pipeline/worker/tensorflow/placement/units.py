"""The layers of a model that are placed as a whole, in the order in which it calls them, and what each costs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import keras

from pipeline.plan.size import Layer
from pipeline.worker.tensorflow.step import optimizers
from pipeline.worker.variables import bytes_of, slots_of


@dataclass(frozen=True)
class Unit:
    """A layer, or an operation of `keras.ops` that a functional model calls, with the variables that are its own."""

    operation: keras.Operation
    variables: tuple[keras.Variable, ...]
    layer: Layer


def units(model: keras.Model) -> list[Unit]:
    """All of a built model, but for the models within it, whose layers stand for themselves.

    A layer that is called twice is placed where it comes first; so is a variable that two layers share.
    """
    slots, all_units, placed = slots_of(optimizers(model)), list[Unit](), set[int]()
    for name, operation in _operations(model, ""):
        if id(operation) in placed:
            continue
        own = [one for one in getattr(operation, "variables", ()) if id(one) not in placed]
        placed |= {id(operation), *map(id, own)}
        held = sum(bytes_of(one) for own_one in own for one in (own_one, *slots.get(id(own_one), ())))
        # A gradient is as large as its weight.
        held += sum(bytes_of(one) for one in own if one.trainable)
        begins = any(len(one.shape) > 1 for one in own if one.trainable)
        paths = tuple(one.path for one in own)
        all_units.append(Unit(operation, tuple(own), Layer(name, held, _work(operation, own), begins, paths)))
    return all_units


def _operations(model: keras.Model, prefix: str) -> Iterator[tuple[str, keras.Operation]]:
    """(name, operation) in the order of calls, as far as that is known: else as the model was given its layers."""
    graph = getattr(model, "_functional", model)
    inner = graph.operations if isinstance(graph, keras.Model) and hasattr(graph, "operations") else None
    for operation in inner if inner is not None else model._flatten_layers(include_self=False, recursive=False):
        name = f"{prefix}{operation.name}"
        if isinstance(operation, keras.Model):
            yield from _operations(operation, f"{name}/")
        elif not isinstance(operation, keras.layers.InputLayer | keras.metrics.Metric):
            yield name, operation


def _work(operation: keras.Operation, variables: list[keras.Variable]) -> int:
    """Multiplications of one example: each number of a kernel counts once for each place that it gives numbers for.

    What is looked up in a table is not multiplied; where a table also gives logits, it is.
    """
    nodes = operation._inbound_nodes
    if isinstance(operation, keras.layers.Embedding):
        nodes = nodes[1:]
    elif not nodes:
        # The layer of a model that is no graph: how many places it gives is not known.
        return sum(map(_numbers, variables))
    places = 0
    for node in nodes:
        shapes = [tensor.shape for tensor in keras.tree.flatten(node.output_tensors)]
        places += max((math.prod(size or 1 for size in shape[1:-1]) for shape in shapes), default=1)
    return places * sum(map(_numbers, variables))


def _numbers(variable: keras.Variable) -> int:
    """Those of a kernel or a table; of a bias, none."""
    return int(math.prod(variable.shape)) if variable.trainable and len(variable.shape) > 1 else 0
