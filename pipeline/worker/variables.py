"""The variables of a training: those that a built model and its optimizers list, and those that nothing lists.

Losses, metrics, objects of a user's own and functions may hold variables, and numbers, which are constants of a step
once it is traced. They are found in attributes, lists, dictionaries, closures, and modules that code names.
"""

import itertools
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import keras

from pipeline.plan import size
from pipeline.private_keras import keras_variables

# Optimizers that update no weight themselves, and whose own learning rate is none.
HANDING_ON = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)


def within(optimizer: keras.optimizers.Optimizer) -> tuple[keras.optimizers.Optimizer, ...]:
    """Returns the optimizers that an optimizer holds, each after those that it holds itself, and the optimizer last.

    >>> scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(name="inner"), name="outer")
    >>> [one.name for one in within(scaled)]
    ['inner', 'outer']
    """
    attributes = keras.tree.flatten(list(vars(optimizer).values()))
    inside = [one for one in attributes if isinstance(one, keras.optimizers.Optimizer)]
    inner_ones = {id(one): one for inner in inside for one in within(inner)}
    return (*inner_ones.values(), optimizer)


def updating(optimizer: keras.optimizers.Optimizer) -> tuple[keras.optimizers.Optimizer, ...]:
    """Returns those `within` an optimizer that update weights."""
    return tuple(one for one in within(optimizer) if not isinstance(one, HANDING_ON))


def listed(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer], cut: dict[str, tuple[int, ...]] | None = None
) -> tuple[tuple[size.Variable, ...], int]:
    """Returns (variables of a built model, other bytes of its optimizers); `cut` has parts of variables, by path."""
    layers = [one for one in model._flatten_layers() if isinstance(one, keras.layers.Embedding) and one.built]
    tables = {id(variable): _of_table(layer) for layer in layers for variable in layer.weights}
    slots = {owner: sum(map(bytes_of, own)) for owner, own in slots_of(optimizers).items()}
    variables = [
        size.Variable(
            path=variable.path,
            shape=tuple(variable.shape),
            dtype=keras.backend.standardize_dtype(variable.dtype),
            trainable=bool(variable.trainable),
            slot_bytes=slots.get(id(variable), 0),
            cut=(cut or {}).get(variable.path, ()),
            **tables.get(id(variable), {"whole": size.ONLY_TABLES}),
        )
        for variable in model.variables
    ]
    apart = sum(bytes_of(one) for optimizer in optimizers for one in optimizer.variables) - sum(slots.values())
    return tuple(variables), apart


def slots_of(optimizers: Sequence[keras.optimizers.Optimizer]) -> dict[int, list[keras.Variable]]:
    """Returns what optimizers keep beside each trainable variable, by its id: lists as long as the variables'."""
    slots_by_id = dict[int, list[keras.Variable]]()
    for optimizer in itertools.chain.from_iterable(map(updating, optimizers)):
        trained = optimizer._trainable_variables
        others = [
            slots for name, slots in vars(optimizer).items() if name not in ("_trainable_variables", "_variables")
        ]
        lists = [slots for slots in others if isinstance(slots, list) and len(slots) == len(trained)]
        for variable, *slots in zip(trained, *lists, strict=True):
            own = slots_by_id.setdefault(id(variable), [])
            own += [slot for slot in slots if isinstance(slot, keras.Variable)]
    return slots_by_id


def state_bytes(model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]) -> int:
    """Bytes of what a step of a compiled model goes through whatever its batch: weights, gradients, slots."""
    slots = [variable for optimizer in optimizers for variable in optimizer.variables]
    return sum(map(bytes_of, (*model.variables, *model.trainable_variables, *slots)))


def bytes_of(variable: keras.Variable) -> int:
    """Bytes of a variable, as one device holds it."""
    return int(math.prod(variable.shape)) * size.bytes_each(keras.backend.standardize_dtype(variable.dtype))


def _of_table(layer: keras.layers.Layer) -> dict[str, Any]:
    """Rows that an example looks up, over all places where the model calls the layer; and why they stay together."""
    # No rows where a step reads or changes the whole table, as it does for a regularizer.
    if not is_plain(layer):
        return {"rows_per_example": None, "whole": "its layer is not a plain Embedding"}
    called = [tensor.shape for node in layer._inbound_nodes for tensor in node.input_tensors]
    shapes = called or [(layer.get_build_config() or {}).get("input_shape") or (None,)]
    rows = sum(math.prod(length or 1 for length in shape[1:]) for shape in shapes)
    named = [name for name in ("embeddings_constraint", "embeddings_regularizer") if getattr(layer, name) is not None]
    whole = f"its layer has an {named[0]}, which needs the whole of it" if named else None
    return {"rows_per_example": None if "embeddings_regularizer" in named else rows, "whole": whole}


def is_plain(layer: keras.layers.Layer) -> bool:
    """True for an embedding of Keras's that looks rows up in a table, and does nothing else with it."""
    return type(layer) is keras.layers.Embedding and not layer.lora_rank and not layer.quantization_mode


# A variable of Keras's, or one of TensorFlow's that Keras does not know of.
Variable: TypeAlias = Any
# What is no variable and holds none.
Plain: TypeAlias = "bool | int | float | str | None"
PLAIN = (bool, int, float, str, type(None))
# The group of values of variables in a checkpoint.
HELD = "held"
# Libraries whose objects hold no variable of a training's, or hold it in memory of their own.
PASSED_OVER = sys.stdlib_module_names | {"tensorflow", "jax", "jaxlib", "numpy", "pandas", "scipy", "h5py", "pipeline"}
# Which layers have called each other is no state, and is as deep as the model.
NODES = ("_inbound_nodes", "_outbound_nodes")
# What decorators have wrapped: properties, `functools.partial`, class methods, `tf.function`.
WRAPPED = ("fget", "func", "args", "keywords", "__func__", "python_function", "__wrapped__")
# Values of a list or a dictionary, from which on they are data.
MANY = 100


class Reference(NamedTuple):
    """Where a value is: an attribute, a place in a list, a key of a dictionary, or what a function closes over."""

    owner: Any
    key: Any

    def get(self) -> Any:
        """Returns what is stored there, and not computed by code of the owner's own; None where nothing is."""
        try:
            if isinstance(self.owner, dict | list | tuple | deque):
                return self.owner[self.key]
            if isinstance(self.owner, type):
                return vars(self.owner)[self.key]
            return object.__getattribute__(self.owner, self.key)
        except (AttributeError, KeyError, IndexError, ValueError):
            return None

    def put(self, value: Plain) -> None:
        """Puts another value there."""
        if isinstance(self.owner, dict | list):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


def held(roots: Iterable[object], known: Iterable[object]) -> list[Variable]:
    """The variables reached from `roots` but not only by way of `known`; in one order wherever these are made alike.

    >>> [variable.name for variable in held([[{"rate": keras.Variable(0.5, name="alpha")}]], known=[])]
    ['alpha']
    """
    return [thing for _, thing in _reached(roots, known) if is_variable(thing)]


def plain_values(roots: Sequence[object]) -> dict[str, Reference]:
    """The places of numbers, words and truth values that can be reached from `roots`, by names alike in all processes.

    >>> list(plain_values([SimpleNamespace(rate=0.5, inner=SimpleNamespace(on=True))]))
    ['0/rate', '0/inner/on']
    """
    places: dict[str, Reference] = {}
    for name, thing in _reached(roots, ()):
        if isinstance(thing, tuple | deque | property) or (isinstance(thing, dict | list) and len(thing) > MANY):
            continue
        places |= {f"{name}/{place.key}": place for place in _inside(thing) if isinstance(place.get(), PLAIN)}
    return places


def is_variable(thing: object) -> bool:
    """True if it is a variable of Keras's or of TensorFlow's."""
    kind = type(thing)
    return isinstance(thing, keras_variables.Variable) or (hasattr(kind, "assign_add") and hasattr(kind, "read_value"))


def kept_by_metrics(metrics: Sequence[keras.metrics.Metric]) -> list[keras.Variable]:
    """The metrics' variables that beginning anew leaves as they are, such as a threshold."""
    kept_variables: list[keras.Variable] = []
    for metric in metrics:
        fresh = [(variable, keras.ops.zeros(variable.shape, variable.dtype)) for variable in metric.variables]
        try:
            with keras.StatelessScope(fresh) as scope:
                before = [scope.get_current_value(variable) for variable, _ in fresh]
                metric.reset_state()
                same = [old is scope.get_current_value(one) for (one, _), old in zip(fresh, before, strict=True)]
        except Exception:  # whatever a metric of a user's own raises
            continue
        kept_variables += itertools.compress(metric.variables, same)
    return list({id(variable): variable for variable in kept_variables}.values())


def _reached(roots: Iterable[object], known: Iterable[object]) -> Iterator[tuple[str, object]]:
    """(name, thing) of all that is reached, once each, the nearest first."""
    visited = {id(one) for one in known}
    waiting = deque[tuple[str, object]]((f"{number}", root) for number, root in enumerate(roots))
    # Held while it is looked through: what is made on asking, such as a bound method, would leave its number to others.
    alive = []
    while waiting:
        name, thing = waiting.popleft()
        if isinstance(thing, (*PLAIN, bytes, keras.KerasTensor)) or id(thing) in visited:
            continue
        visited.add(id(thing))
        alive.append(thing)
        yield name, thing
        if not is_variable(thing):
            waiting.extend((f"{name}/{place.key}", place.get()) for place in _inside(thing))


def _inside(thing: Any) -> Iterator[Reference]:
    """Yields where an object holds others, in an order that is the same wherever it was made in the same way."""
    if isinstance(thing, dict):
        yield from (Reference(thing, key) for key in list(thing))
    elif isinstance(thing, list | tuple | deque):
        yield from (Reference(thing, number) for number in range(len(thing)))
    elif isinstance(thing, FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, MethodType | CellType):
        names = ("__self__", "__func__") if isinstance(thing, MethodType) else ("cell_contents",)
        yield from (Reference(thing, name) for name in names)
    elif isinstance(thing, type):
        yield from () if _root(thing) in PASSED_OVER else (Reference(thing, name) for name in list(vars(thing)))
    elif not isinstance(thing, ModuleType):
        yield from _of_object(thing)


def _of_object(thing: Any) -> Iterator[Reference]:
    kinds = [kind for kind in type(thing).__mro__ if _root(kind) not in PASSED_OVER]
    if not kinds:
        yield from (Reference(thing, name) for name in WRAPPED if hasattr(type(thing), name))
    if not kinds and not isinstance(thing, SimpleNamespace):
        return
    yield from (Reference(thing, name) for name in list(getattr(thing, "__dict__", {})) if name not in NODES)
    for kind in kinds:
        slots = vars(kind).get("__slots__", ())
        yield from (Reference(thing, name) for name in ((slots,) if isinstance(slots, str) else slots))
        if _root(kind) != "keras":
            yield Reference({kind.__name__: kind}, kind.__name__)


def _of_function(function: FunctionType) -> Iterator[Reference]:
    """Yields what a function closes over, its defaults, and what its code names of its module and of others."""
    yield from (Reference(function, name) for name in list(vars(function)))
    if _root(function) in PASSED_OVER | {"keras"}:
        return
    yield from (Reference(function, name) for name in ("__closure__", "__defaults__", "__kwdefaults__"))
    names = list(dict.fromkeys(_names(function.__code__)))
    for name in names:
        # What a function imports itself is no name of its module.
        value = function.__globals__.get(name, sys.modules.get(name))
        if not isinstance(value, ModuleType):
            yield from [Reference(function.__globals__, name)] if name in function.__globals__ else []
        elif value.__name__.partition(".")[0] not in PASSED_OVER | {"keras"}:
            yield from (Reference(vars(value), inner) for inner in names if inner in vars(value))


def _names(code: CodeType) -> Iterator[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return itertools.chain(code.co_names, *map(_names, inner))


def _root(thing: type | FunctionType) -> str:
    return (thing.__module__ or "").partition(".")[0]
