"""Puts the variables, slots and calls of a model's layers on the devices that share each copy of it.

A layer's own operations are placed when it is called. TensorFlow makes those of its backward pass in a name scope
that is named after that of the forward pass, so that they are known. What is left, such as the update of a weight,
follows the data. `plan.division` says where each layer goes, and the graph is asked whether it is there.
On micro-batches one device computes on the next of them meanwhile: all go forward, the loss is that of the whole batch,
and all go back, as in GPipe (Huang et al. 2019), so that only what a layer computes over a batch is not of the whole.
"""

import contextlib
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.errors import refuse
from pipeline.plan.division import balanced, written
from pipeline.plan.size import Layer
from pipeline.private import get_keras_mask, set_keras_mask
from pipeline.worker.data.reading import Batch
from pipeline.worker.model_error import ModelError, TrainingError
from pipeline.worker.patched import OfThread
from pipeline.worker.tensorflow import step as steps
from pipeline.worker.tensorflow.loss_scaling import reduction
from pipeline.worker.tensorflow.loss_scaling.global_batch import first_of
from pipeline.worker.tensorflow.size import BACKWARD, body_of
from pipeline.worker.variables import bytes_of, slots_of, within

# In the names of operations: the unit, and the replica, that they are of.
SCOPE = re.compile(r"placed\.(\d+)\.(\d+)(?:_\d+)?/")
KEY = "strategy.build.micro_batches"
# In a run's folder.
FILE = "placement.txt"


@dataclass(frozen=True)
class Unit:
    """A layer, or an operation of `keras.ops` that a functional model calls, with the variables that are its own."""

    operation: keras.Operation
    variables: tuple[keras.Variable, ...]
    layer: Layer


class Placement:
    """A model's place: the part of each unit, and the devices [replica, part]."""

    def __init__(self, units: Sequence[Unit], parts: Sequence[int], devices: Sequence[Sequence[str]]) -> None:
        self.units, self.parts, self.devices = units, parts, devices
        self._replica = OfThread(0)
        # The names of what a graph takes from outside, with what that is there.
        self._captured: WeakKeyDictionary[tf.Graph, dict[str, tf.Tensor]] = WeakKeyDictionary()

    def on(self, part: int) -> list[str]:
        """The devices of a part, one for each replica."""
        return [devices[part] for devices in self.devices]

    def of_variables(self, model: keras.Model) -> dict[int, int]:
        """The part of each variable of the model, its optimizers and its metrics, by id."""
        parts = dict.fromkeys(map(id, _all_variables(model)), 0)
        parts |= {id(one): part for unit, part in zip(self.units, self.parts, strict=True) for one in unit.variables}
        slots = slots_of(steps.optimizers(model))
        return parts | {id(slot): parts[variable] for variable, own in slots.items() for slot in own}

    def called(self, number: int, call: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Calls a unit: its operations run on its device, and so does what goes back through them."""
        replica = self._replica.value
        # A scope of its own, whoever calls the layer.
        scope = contextlib.nullcontext() if tf.executing_eagerly() else tf.name_scope(f"placed.{number}.{replica}")
        with tf.device(self.devices[replica][self.parts[number]]), scope:
            return call(*args, **named)

    def call_of(self, name: str) -> tuple[int, int] | None:
        """(unit, replica) of the call that an operation of that name is of, forward or backward."""
        calls = SCOPE.findall(name.rpartition(BACKWARD)[2])
        return (int(calls[-1][0]), int(calls[-1][1])) if calls else None

    def followed(self, replica_step: steps.ReplicaStep) -> steps.ReplicaStep:
        """A step of which nothing is left for TensorFlow to place, which would put it on the first device."""

        def step(examples: tf.Tensor, batch: Batch) -> tf.Tensor:
            number = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
            # The public `tf.device` takes no function.
            with self._replica.held(int(number)), tf.compat.v1.device(self._device_of):
                return replica_step(examples, batch)

        return step

    def placed(self, operation: tf.Operation) -> str:
        """The device that an operation was given, or that of the variable that it reads, or that it is kept beside."""
        # TensorFlow lets go of all devices for the latter two.
        if operation.device:
            return str(operation.device)
        if operation.type == "ReadVariableOp":
            return self._place_of(operation.inputs[0])
        beside = [group.decode().removeprefix("loc:@") for group in operation.colocation_groups()]
        others = [_named(operation.graph, name) for name in beside if name != operation.name]
        return next(filter(None, (self.placed(other) for other in others if other is not None)), "")

    def _device_of(self, operation: tf.Operation) -> str:
        """Returns the device of an operation that is being made; "" leaves it to the strategy."""
        if operation.device:
            return str(operation.device)
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource and (device := self._place_of(tensor)):
                return device
        graph, name = operation.graph, operation.name
        while graph is not None:
            if BACKWARD in name and (call := self.call_of(name)) is not None:
                return self.devices[call[1]][self.parts[call[0]]]
            graph = getattr(graph, "outer_graph", None)
            name = f"{graph.get_name_scope()}/" if isinstance(graph, tf.Graph) else ""
        placed = [tensor for tensor in operation.inputs if tensor.dtype != tf.resource and self.placed(tensor.op)]
        # The largest; of equal ones, the first; of one example where their number is not known.
        sizes = [1 if one.shape.rank is None else math.prod(size or 1 for size in one.shape) for one in placed]
        return self.placed(placed[sizes.index(max(sizes))].op) if placed else ""

    def _place_of(self, handle: tf.Tensor) -> str:
        """The device of a variable, by its handle; "" where that is made in a graph."""
        while not isinstance(handle, tf.__internal__.EagerTensor):
            graph = handle.graph
            if not hasattr(graph, "captures"):
                return ""
            captured = self._captured.setdefault(graph, {})
            if handle.name not in captured:
                captured.update({inner.name: outer for outer, inner in graph.captures})
            if handle.name not in captured:
                return ""
            handle = captured[handle.name]
        return str(handle.device)


def in_host_memory() -> contextlib.AbstractContextManager[None]:
    """Inside, variables begin in the host's memory, which has room for a model that one device has none for."""
    return _on_each(itertools.repeat("CPU:0"))


def _on_each(places: Iterator[str]) -> contextlib.AbstractContextManager[None]:
    def creator(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        with tf.device(next(places)):
            return next_creator(**options)

    return tf.variable_creator_scope(creator)  # type: ignore[no-any-return]


def place(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    devices: Sequence[Sequence[str]],
    layout: Mapping[str, int] | None = None,
) -> Placement:
    """Lays a built model over `devices`, such as CPU:1, [replica, part]; `layout` gives names of layers a part."""
    all_units, parts = units(model), len(devices[0])
    layers = [unit.layer for unit in all_units]
    placed = balanced(layers, parts) if layout is None else written(layers, layout, parts)
    placement = Placement(all_units, placed, [[f"/device:{name}" for name in names] for names in devices])
    at = placement.of_variables(model)
    key, now = steps.optimizers(model)[0]._var_key, dict[str, str]()
    for variable in _all_variables(model):
        before, value = key(variable), variable.numpy()
        # Outside the strategy's own scope, so that it is asked for the variable of each replica.
        with _on_each(iter(placement.on(at[id(variable)]))), strategy.scope():
            variable._initialize(value)
        now[before] = key(variable)
    for one in itertools.chain.from_iterable(map(within, steps.optimizers(model))):
        # Keras looks up what an optimizer has of a variable by keys of what that held.
        for name, entries in list(vars(one).items()):
            if isinstance(entries, dict) and not now.keys().isdisjoint(entries):
                vars(one)[name] = {now.get(key, key): value for key, value in entries.items()}
            elif isinstance(entries, set) and not now.keys().isdisjoint(entries):
                vars(one)[name] = {now.get(key, key) for key in entries}
    for number, unit in enumerate(all_units):
        # Past Keras's own setter: what is saved of a layer does not know of it.
        call = unit.operation.call
        vars(unit.operation)["call"] = functools.update_wrapper(partial(placement.called, number, call), call)
    vars(model)[steps.PLACED_AS] = placement
    return placement


def _all_variables(model: keras.Model) -> list[keras.Variable]:
    applied = itertools.chain.from_iterable(map(within, steps.optimizers(model)))
    of_optimizers = itertools.chain.from_iterable(one.variables for one in applied)
    return list({id(one): one for one in (*model.variables, *of_optimizers, *model.metrics_variables)}.values())


def units(model: keras.Model) -> list[Unit]:
    """All of a built model, but for the models within it, whose layers stand for themselves."""
    # A layer that is called twice is placed where it comes first; so is a variable that two layers share.
    slots, all_units, placed = slots_of(steps.optimizers(model)), list[Unit](), set[int]()
    for name, operation in _operations(model, ""):
        if id(operation) in placed:
            continue
        held_by_it = (*getattr(operation, "variables", ()), *getattr(operation, "metrics_variables", ()))
        own = [one for one in held_by_it if id(one) not in placed]
        placed |= {id(operation), *map(id, own)}
        trained = [one for one in own if one.trainable]
        # A gradient is as large as its weight.
        held = sum(map(bytes_of, [*own, *trained, *(slot for one in own for slot in slots.get(id(one), ()))]))
        begins = any(len(one.shape) > 1 for one in trained)
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
    """Multiplications of one example: each number of a kernel counts once for each place that it gives numbers for."""
    kernels = [one.shape for one in variables if one.trainable and len(one.shape) > 1]
    nodes, is_table = operation._inbound_nodes, isinstance(operation, keras.layers.Embedding)
    # How many places the layer of a model that is no graph gives is not known.
    places = 0 if nodes or is_table else 1
    # What is looked up in a table is not multiplied; where a table also gives logits, it is.
    for node in nodes[is_table:]:
        shapes = [tensor.shape for tensor in keras.tree.flatten(node.output_tensors)]
        places += max((math.prod(size or 1 for size in shape[1:-1]) for shape in shapes), default=1)
    return places * sum(int(math.prod(shape)) for shape in kernels)


def _named(graph: tf.Graph | None, name: str) -> tf.Operation | None:
    while graph is not None:
        try:
            return graph.get_operation_by_name(name)
        except KeyError:
            graph = getattr(graph, "outer_graph", None)
    return None


def in_micro_batches(model: keras.Model, sample: Batch, count: int) -> None:
    """Makes steps that train a model call it on so many micro-batches; `ModelError` where that is not the same."""
    call = steps.caller(model)
    if reduction.is_own(model, "train_step"):
        expected = f"a model that Keras's own train_step trains for {KEY}={count}"
        raise ModelError(expected, f"{type(model).__name__}, which calls itself on whole batches", f"{KEY}=1")
    x, _, _ = keras.utils.unpack_x_y_sample_weight(sample)
    with keras.StatelessScope() as scope:
        tf.function(lambda x: call(x, training=True), autograph=False).get_concrete_function(x)
    changed = [one for one in model.non_trainable_weights if scope.get_current_value(one) is not None]
    if changed:
        expected = f"layers that compute each example by itself for {KEY}={count}"
        received = f"one that keeps {changed[0].path} of each batch"
        raise ModelError(expected, received, f"{KEY}=1, or another normalization")
    vars(model)[steps.CALLED_AS] = _in_pieces(model, call, count)


def _in_pieces(model: keras.Model, call: steps.Forward, count: int) -> steps.Forward:

    def one(x: Batch, first: tf.Tensor, last: tf.Tensor) -> Batch:
        piece = steps.never_empty(tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[first:last], x))
        outputs = call(piece, training=True)
        # Keras forgets what a layer has added with the next call.
        if adding := [layer.name for layer in model._flatten_layers() if len(layer._losses)]:
            received = f"{adding[0]}, whose loss is that of a whole batch"
            raise ModelError(f"layers that add no loss for {KEY}={count}", received, f"{KEY}=1")
        return keras.tree.map_structure(lambda leaf: first_of(leaf, last - first), outputs)

    def called(x: Batch, training: bool) -> Batch:
        if not training:
            return call(x, training=training)
        size = steps.size_of(x)
        bounds = [size * number // count for number in range(count + 1)]
        pieces = [one(x, first, last) for first, last in itertools.pairwise(bounds)]
        return keras.tree.map_structure(_joined, *pieces)

    return called


def _joined(*leaves: tf.Tensor) -> Nested[tf.Tensor]:
    joined, masks = tf.concat(leaves, 0), [get_keras_mask(leaf) for leaf in leaves]
    if masks[0] is not None:
        set_keras_mask(joined, tf.concat(masks, 0))
    return joined


@dataclass(frozen=True)
class Row:
    """A variable of a layer: where each replica has it, and its slots, and its layer's operations in a step."""

    devices: tuple[str, ...]
    bytes: int
    slot_bytes: int
    forward: int
    backward: int
    layer: str
    variable: str
    slots: tuple[str, ...]


def checked(model: keras.Model, placement: Placement, graph: tf.Graph, folder: Path) -> str:
    """Writes what is where into a run's folder, and says it in short. Raises `TrainingError` if not as planned."""
    rows = listed(model, placement, graph)
    cells = [[field.name.replace("_", " ") for field in fields(Row)]]
    for row in map(astuple, rows):
        cells.append([(" ".join(cell) if isinstance(cell, tuple) else str(cell)) or "-" for cell in row])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text("\n".join(lines) + "\n")
    held = [f"{size:,}" for size in held_bytes(rows, placement)]
    return (
        f"Each copy of the model is laid over {len(held)} devices, which hold {', '.join(held[:-1])} and {held[-1]} "
        f"bytes of weights and of the optimizer's state ({FILE})."
    )


def listed(model: keras.Model, placement: Placement, graph: tf.Graph) -> list[Row]:
    """Lists what is where, from variables and the graph of the compiled loop. Raises `TrainingError`."""
    # Each variable, slot and operation, of the forward and the backward pass, has to be where its layer is planned.
    at = placement.of_variables(model)
    layers = {id(one): unit for unit in placement.units for one in unit.variables}
    slots, counted, rows = slots_of(steps.optimizers(model)), _counted(placement, body_of(graph)), []
    for variable in model.variables:
        own = slots.get(id(variable), [])
        planned = list(map(_name, placement.on(at[id(variable)])))
        for one in (variable, *own):
            places = [_name(copy.device) for copy in getattr(one.value, "values", (one.value,))]
            _expect(f"variable {one.path}", planned, places)
        layer = layers[id(variable)].layer.name if id(variable) in layers else ""
        sizes, calls = (bytes_of(variable), sum(map(bytes_of, own))), (counted[layer, False], counted[layer, True])
        rows.append(Row(tuple(planned), *sizes, *calls, layer, variable.path, tuple(slot.path for slot in own)))
    return rows


def held_bytes(rows: Sequence[Row], placement: Placement) -> list[int]:
    """Bytes of weights and slots on each device of the first replica."""
    held = dict.fromkeys(map(_name, placement.devices[0]), 0)
    for row in rows:
        held[row.devices[0]] += row.bytes + row.slot_bytes
    return list(held.values())


def _counted(placement: Placement, body: tf.Graph) -> Counter[tuple[str, bool]]:
    """Operations of each layer, of all replicas: (layer, of its backward pass?)."""
    counts = Counter[tuple[str, bool]]()
    for operation in body.get_operations():
        # What comes from outside is no operation.
        if operation.type == "Placeholder" or (call := placement.call_of(operation.name)) is None:
            continue
        unit, backward = call[0], BACKWARD in operation.name
        what = f"operation {operation.name}" + " of the backward pass" * backward
        # What replicas give each other is made in the scope of the first.
        planned, place = list(map(_name, placement.on(placement.parts[unit]))), _name(placement.placed(operation))
        _expect(what, [place] if place in planned else planned, [place])
        counts[placement.units[unit].layer.name, backward] += 1
    return counts


def _expect(what: str, planned: list[str], places: list[str]) -> None:
    actual = " and ".join(device or "no device" for device in places)
    expected = f"{what} on {' and '.join(planned)}, where its layer is planned"
    instead = "strategy.build.layout, or strategy=mirrored"
    refuse((planned != places, expected, f"it on {actual}", instead), error=TrainingError)


def _name(device: str) -> str:
    return device.rpartition("device:")[2]
