"""Puts the variables, slots and calls of a model's layers on the devices that share each copy of it."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from pipeline.plan.balance import balanced, written
from pipeline.plan.size import Layer
from pipeline.worker.rates import within
from pipeline.worker.tensorflow.placement.following import Following
from pipeline.worker.tensorflow.step import FOLLOWED_AS, optimizers
from pipeline.worker.variables import bytes_of, slots_of

# The attribute under which a model keeps where it is.
KEPT_AS = "_placement_of_pipeline"
Creator = Callable[..., tf.Variable]


@dataclass(frozen=True)
class Unit:
    """A layer, or an operation of `keras.ops` that a functional model calls, with the variables that are its own."""

    operation: keras.Operation
    variables: tuple[keras.Variable, ...]
    layer: Layer


@dataclass(frozen=True)
class Placement:
    """A model's place: the part of each unit, and the devices [replica, part]."""

    units: Sequence[Unit]
    parts: Sequence[int]
    devices: Sequence[Sequence[str]]
    following: Following

    def on(self, part: int) -> list[str]:
        """The devices of a part, one for each replica."""
        return [devices[part] for devices in self.devices]

    def of_variables(self, model: keras.Model) -> dict[int, int]:
        """The part of each variable of the model, its optimizers and its metrics, by id."""
        parts = dict.fromkeys(map(id, _all_variables(model)), 0)
        parts |= {id(one): part for unit, part in zip(self.units, self.parts, strict=True) for one in unit.variables}
        slots = slots_of(optimizers(model))
        return parts | {id(slot): parts[variable] for variable, own in slots.items() for slot in own}


def of(model: keras.Model) -> Placement | None:
    """Returns the placement of a model that is laid over several devices; None for another."""
    placement: Placement | None = vars(model).get(KEPT_AS)
    return placement


@contextlib.contextmanager
def in_host_memory() -> Iterator[None]:
    """Inside, variables begin in the host's memory, which has room for a model that one device has none for."""

    def creator(next_creator: Creator, **options: Any) -> tf.Variable:
        with tf.device("CPU:0"):
            return next_creator(**options)

    with tf.variable_creator_scope(creator):
        yield


def place(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    devices: Sequence[Sequence[str]],
    layout: Mapping[str, int] | None = None,
) -> Placement:
    """Lays a built model over `devices`, names such as CPU:1, [replica, part]; `layout` gives names of layers a part.

    Used outside `strategy.scope()`. Raises `UserError` for a layout that does not fit.
    """
    all_units, parts = units(model), len(devices[0])
    layers = [unit.layer for unit in all_units]
    placed = balanced(layers, parts) if layout is None else written(layers, layout, parts)
    placement = Placement(all_units, placed, [[f"/device:{name}" for name in names] for names in devices], Following())
    at = placement.of_variables(model)
    key, now = optimizers(model)[0]._var_key, dict[str, str]()
    for variable in _all_variables(model):
        before = key(variable)
        _move(variable, strategy, placement.on(at[id(variable)]))
        now[before] = key(variable)
    for optimizer in optimizers(model):
        for one in within(optimizer):
            _rekey(one, now)
    for unit, part in zip(all_units, placed, strict=True):
        _call_on(unit, part, placement)
    vars(model)[KEPT_AS], vars(model)[FOLLOWED_AS] = placement, placement.following.followed
    return placement


def _all_variables(model: keras.Model) -> list[keras.Variable]:
    of_optimizers = [
        variable for optimizer in optimizers(model) for one in within(optimizer) for variable in one.variables
    ]
    every = {id(variable): variable for variable in (*model.variables, *of_optimizers, *model.metrics_variables)}
    return list(every.values())


def _move(variable: keras.Variable, strategy: tf.distribute.Strategy, devices: Sequence[str]) -> None:
    """Makes what a variable holds anew, on a device for each replica."""
    value, places = variable.numpy(), iter(devices)

    def creator(next_creator: Creator, **options: Any) -> tf.Variable:
        with tf.device(next(places)):
            return next_creator(**options)

    # Outside the strategy's own, so that it is asked for the variable of each replica.
    with tf.variable_creator_scope(creator), strategy.scope():
        variable._initialize(value)


def _rekey(optimizer: keras.optimizers.Optimizer, now: Mapping[str, str]) -> None:
    """Tells an optimizer of variables that were made anew, which Keras looks up by keys of what they held."""
    for name, entries in list(vars(optimizer).items()):
        if isinstance(entries, dict) and not now.keys().isdisjoint(entries):
            vars(optimizer)[name] = {now.get(key, key): value for key, value in entries.items()}
        elif isinstance(entries, set) and not now.keys().isdisjoint(entries):
            vars(optimizer)[name] = {now.get(key, key) for key in entries}


def _call_on(unit: Unit, part: int, placement: Placement) -> None:
    call_inside: Callable[..., Any] = unit.operation.call
    devices, following = placement.on(part), placement.following

    @functools.wraps(call_inside)
    def call(*args: Any, **named: Any) -> Any:
        with following.called(unit.layer.name, part, devices[following.replica]):
            return call_inside(*args, **named)

    # Past Keras's own setter: what is saved of a layer does not know of it.
    vars(unit.operation)["call"] = call


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
