"""Tells a mean over examples from a sum over them, and either from what depends on the batch as a whole.

Keras's own losses and metrics are known by class. Anything else is computed on a made-up batch of the data's shapes
and types, on two unequal parts of it, and on the first part twice over; the values tell. Meanwhile every draw is one
number, since a dropout mask is drawn for the examples of a replica.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import FunctionType
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from pipeline.private import gen_random_ops, gen_stateful_random_ops, gen_stateless_random_ops
from pipeline.private import gen_stateless_random_ops_v2 as gen_stateless_v2
from pipeline.worker.data.reading import Batch
from pipeline.worker.patched import all_patched
from pipeline.worker.tensorflow.loss_scaling.global_batch import together

# Examples of the made-up batch, and of its first part: even numbers, since some losses take examples in pairs.
EXAMPLES, FIRST = 6, 2
SHARES = (FIRST / EXAMPLES, 1 - FIRST / EXAMPLES)
# In place of a size that is open.
OPEN_SIZE = 8
SEEDS = (1, 2)
# What is added to weights that may all be zero at first.
MOVED = 0.1
# How far apart two values may be that are the same in exact arithmetic, as a part of the larger.
TOLERANCE, NARROW_TOLERANCE = 1e-4, 3e-2
# Keras's own functions whose value depends on the batch as a whole.
OF_THE_BATCH = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)
# A part of [0, 1) that bfloat16 has, and that keeps what dropout may leave out; a part of a normal deviation.
UNIFORM, NORMAL = 127 / 128, 0.5

Value = TypeVar("Value")


class Reduction(Enum):
    """The ways in which a batch's value is made of those of its parts."""

    MEAN = "mean over examples"
    SUM = "sum over examples"
    WEIGHTED = "mean by sample weight"
    NEITHER = "of the batch as a whole"


def reduction_of(
    values: Sequence[float], tolerance: float = TOLERANCE, weights: Sequence[float] | None = None
) -> Reduction | None:
    """Returns how the value of the whole batch, the first, is made of its two parts', which may weigh as `weights`.

    None where all is zero, or anything is no number.

    >>> reduction_of((5.0, 3.0, 6.0)), reduction_of((9.0, 3.0, 6.0))
    (<Reduction.MEAN: 'mean over examples'>, <Reduction.SUM: 'sum over examples'>)
    >>> reduction_of((6.0, 3.0, 6.0))
    <Reduction.NEITHER: 'of the batch as a whole'>
    """
    whole, *parts = values
    if not np.isfinite(values).all() or not any(values):
        return None
    ways = {Reduction.MEAN: float(np.dot(SHARES, parts)), Reduction.SUM: sum(parts)}
    if weights is not None and any(weights):
        ways[Reduction.WEIGHTED] = float(np.average(parts, weights=weights))
    margin = tolerance * np.abs(values).max()
    return next((way for way, value in ways.items() if abs(whole - value) <= margin), Reduction.NEITHER)


def of_doubled(values: Sequence[float], tolerance: float = TOLERANCE) -> Reduction | None:
    """The reduction that the same examples twice over follow, whatever layers make of a batch's statistics."""
    _, first, _, doubled = values
    return reduction_of((doubled, first, first), tolerance)


def on_pieces(step: Callable[[Batch, float], Value], examples: Batch) -> list[Value]:
    """Returns what a step of (piece, share) gives for the whole, its two parts, and the first twice over."""

    def rows(*parts: slice) -> Batch:
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.concat([leaf[part] for part in parts], 0), examples
        )

    begin, end = slice(FIRST), slice(FIRST, EXAMPLES)
    pieces = (((examples, 1.0),), ((rows(begin), SHARES[0]), (rows(end), SHARES[1])), ((rows(begin, begin), 1.0),))
    with trying():
        return [value for parts in pieces for value in together(lambda part: step(*part), parts)]


def made_up(batch: Batch, seed: int) -> Batch:
    """Examples of a batch's shapes and types: floats of 0.1 to 0.9, whole numbers of 0 and 1, one text."""
    random = np.random.default_rng(seed)

    def leaf(like: tf.Tensor | None) -> tf.Tensor | None:
        if like is None:
            return None
        shape = [EXAMPLES, *(OPEN_SIZE if size is None else int(size) for size in like.shape[1:])]
        dtype = tf.as_dtype(like.dtype)
        if dtype == tf.string:
            return tf.fill(shape, "a")
        return tf.cast(random.uniform(0.1, 0.9, shape) if dtype.is_floating else random.integers(0, 2, shape), dtype)

    return keras.tree.map_structure(leaf, batch)


@contextlib.contextmanager
def trying() -> Iterator[None]:
    """Inside, nothing is drawn, since a model's losses would depend on it; warnings are left out."""
    with fixed_randomness(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def scope(model: keras.Model, moved: bool = False) -> keras.StatelessScope:
    """Inside, no state changes, and weights are `moved` away from zero. Metrics have values of their own: reading
    theirs would ask the other replicas.
    """
    zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in model.metrics_variables]
    # Keras looks up here what penalties on weights are of.
    weights = [(variable, variable + MOVED if moved else variable) for variable in model.trainable_variables]
    return keras.StatelessScope([*zeros, *weights], collect_losses=True)


def total(value: tf.Tensor) -> float:
    """The sum of a value that may be one for each example."""
    return float(tf.reduce_sum(tf.cast(value, tf.float64)))


def tolerance_of(dtype: tf.DType | str) -> float:
    """Returns how far apart equal values of a type may be."""
    return NARROW_TOLERANCE if tf.as_dtype(dtype) in (tf.float16, tf.bfloat16) else TOLERANCE


def is_known(function: object) -> bool:
    """True for a loss or metric of Keras's that adds up over examples, on a function of Keras's where it has one."""
    inner = getattr(function, "fn", getattr(function, "_fn", None))
    parts = [type(function), *([] if inner is None else [inner if hasattr(inner, "__module__") else type(inner)])]
    # Over another axis than the last, which may be the batch's, nobody knows.
    is_last = getattr(function, "_fn_kwargs", {}).get("axis", -1) == -1
    is_of_keras = all(part.__module__.partition(".")[0] == "keras" for part in parts)
    return is_last and is_of_keras and inner not in OF_THE_BATCH


def is_own(model: keras.Model, name: str) -> bool:
    """True if the model's class has a method of that name that is not Keras's."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def mentions(kind: type, name: str) -> bool:
    """True if a class that is not Keras's, or a function that it calls, calls something of that name."""
    classes = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("keras", "builtins")]
    members = [getattr(member, "__func__", member) for base in classes for member in vars(base).values()]
    # What tf.function and other decorators have wrapped.
    functions = [inspect.unwrap(getattr(member, "python_function", member)) for member in members if callable(member)]
    return any(name in _names(function, depth=2) for function in functions if isinstance(function, FunctionType))


def _names(function: FunctionType, depth: int) -> Iterator[str]:
    """The names in a function's code, in functions inside it, and in those of its module that it calls."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_names")]
        for called in (function.__globals__.get(name) for name in code.co_names) if depth > 0 else ():
            if isinstance(called, FunctionType):
                yield from _names(called, depth - 1)


def fixed_randomness() -> contextlib.AbstractContextManager[None]:
    """Inside, operations that are run at once draw nothing, and no generator is any further than before."""

    def without_chance(draw: Callable[..., tf.Tensor], instead: str | float) -> Callable[..., tf.Tensor]:
        def drawn(*values: object, **named: object) -> tf.Tensor:
            # Drawn, to know shape and type.
            like, arguments = draw(*values, **named), inspect.signature(draw).bind(*values, **named).arguments
            number = arguments[instead] if isinstance(instead, str) else instead
            if instead == "logits":
                number = tf.argmax(number, axis=-1)[:, None]
            return tf.broadcast_to(tf.cast(number, like.dtype), tf.shape(like))

        return drawn

    def read(resource: tf.Tensor, alg: tf.Tensor, delta: tf.Tensor, name: str | None = None) -> tf.Tensor:
        # A generator's state, which stays as it is.
        return skip(resource, alg, tf.zeros_like(delta), name)

    skip = gen_stateful_random_ops.rng_read_and_skip
    changes: list[tuple[object, dict[str, object]]] = [
        (module, {name: without_chance(getattr(module, name), instead) for name, instead in of_module.items()})
        for module, of_module in _INSTEAD.items()
    ]
    return all_patched([*changes, (gen_stateful_random_ops, {"rng_read_and_skip": read})])


# What comes in place of what an operation of a module draws: a number, or one of its arguments, above or about which it
# draws, or the likeliest by its logits.
_INSTEAD: Mapping[object, Mapping[str, str | float]] = {
    gen_random_ops: {
        "random_uniform": UNIFORM, "random_standard_normal": NORMAL, "truncated_normal": NORMAL,
        "random_uniform_int": "minval", "parameterized_truncated_normal": "minvals", "random_gamma": "alpha",
        "random_poisson_v2": "rate", "multinomial": "logits", "random_shuffle": "value",
    },
    gen_stateless_v2: {
        "stateless_random_uniform_v2": UNIFORM, "stateless_random_normal_v2": NORMAL,
        "stateless_truncated_normal_v2": NORMAL, "stateless_random_uniform_int_v2": "minval",
        "stateless_random_gamma_v3": "alpha", "stateless_shuffle": "value",
    },
    gen_stateless_random_ops: {
        "stateless_random_poisson": "lam", "stateless_random_binomial": "counts",
        "stateless_parameterized_truncated_normal": "minvals", "stateless_multinomial": "logits",
    },
}  # fmt: skip
