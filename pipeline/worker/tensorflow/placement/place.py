"""Puts the variables, slots and calls of a model's layers on the devices that share each copy of it."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from pipeline.plan.balance import balanced, written
from pipeline.worker.rates import within
from pipeline.worker.tensorflow.placement.following import Following
from pipeline.worker.tensorflow.placement.units import Unit, units
from pipeline.worker.tensorflow.step import FOLLOWED_AS, optimizers
from pipeline.worker.variables import slots_of

# The attribute under which a model keeps where it is.
KEPT_AS = "_placement_of_pipeline"
Creator = Callable[..., tf.Variable]


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
    for name, kept in list(vars(optimizer).items()):
        if isinstance(kept, dict) and not now.keys().isdisjoint(kept):
            vars(optimizer)[name] = {now.get(key, key): value for key, value in kept.items()}
        elif isinstance(kept, set) and not now.keys().isdisjoint(kept):
            vars(optimizer)[name] = {now.get(key, key) for key in kept}


def _call_on(unit: Unit, part: int, placement: Placement) -> None:
    call_inside: Callable[..., Any] = unit.operation.call
    devices, following = placement.on(part), placement.following

    @functools.wraps(call_inside)
    def call(*args: Any, **named: Any) -> Any:
        with following.called(unit.layer.name, part, devices[following.replica]):
            return call_inside(*args, **named)

    # Past Keras's own setter: what is saved of a layer does not know of it.
    vars(unit.operation)["call"] = call
