"""Finds out how a loss scales with the batch, and whether a metric's state is a sum: by trying it, before training.

What it is tried on is made of the shapes and types of a batch, and the same in all processes. A batch and two unequal
parts of it tell a mean over examples from a sum over them, and either from what depends on the batch as a whole.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FunctionType
from typing import TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.nested import Nested
from pipeline.worker.input.part import Batch

# Examples of the batch that is tried, and of its first part: even numbers, since some losses take examples in pairs.
EXAMPLES, FIRST = 6, 2
WHOLE, PARTS = slice(0, EXAMPLES), (slice(0, FIRST), slice(FIRST, EXAMPLES))
# In place of a size that is open.
OPEN_SIZE = 8
SEEDS = (1, 2)
# How far apart two values may be that are the same in exact arithmetic, as a part of the larger.
TOLERANCE, NARROW_TOLERANCE = 1e-4, 3e-2


class Rule(Enum):
    """How the value of a batch is made of those of its parts."""

    MEAN = "mean over examples"
    SUM = "sum over examples"
    WEIGHTED = "mean by sample weight"
    NEITHER = "of the batch as a whole"


@dataclass(frozen=True)
class Values:
    """A loss of a batch, of its parts, and of the first part twice over. `weights` are the parts' sums of weights."""

    whole: float
    parts: tuple[float, float]
    doubled: float | None = None
    weights: tuple[float, float] | None = None
    tolerance: float = TOLERANCE

    @property
    def tell(self) -> bool:
        """Do they tell anything? What is zero everywhere, or is no number, does not."""
        values = np.array([self.whole, *self.parts])
        return bool(np.isfinite(values).all() and np.any(values != 0))

    def rule(self) -> Rule:
        """The rule that they follow.

        >>> Values(whole=5.0, parts=(3.0, 6.0)).rule(), Values(whole=9.0, parts=(3.0, 6.0)).rule()
        (<Rule.MEAN: 'mean over examples'>, <Rule.SUM: 'sum over examples'>)
        >>> Values(whole=6.0, parts=(3.0, 6.0)).rule()
        <Rule.NEITHER: 'of the batch as a whole'>
        """
        first, second = self.parts
        shares = (FIRST / EXAMPLES, 1 - FIRST / EXAMPLES)
        if self._is(shares[0] * first + shares[1] * second):
            return Rule.MEAN
        if self._is(first + second):
            return Rule.SUM
        if self.weights is not None and self._is(float(np.dot(self.weights, self.parts)) / sum(self.weights)):
            return Rule.WEIGHTED
        return Rule.NEITHER

    def of_doubled(self) -> Rule:
        """The rule that the same examples twice over follow, whatever layers make of a batch's statistics."""
        if self.doubled is None:
            return Rule.NEITHER
        again = Values(self.doubled, (self.parts[0], self.parts[0]), tolerance=self.tolerance)
        return again.rule()

    def _is(self, value: float) -> bool:
        return abs(self.whole - value) <= self.tolerance * max(abs(self.whole), *map(abs, self.parts))


# What a loss may ask other replicas for in turn, each after the answer to the one before.
MOST_EXCHANGES = 8
# The attribute under which a model keeps that a loss of it does so.
ASKS_AS = "_asks_others_of_pipeline"
Part = TypeVar("Part")
Made = TypeVar("Made")
# What has a value on some of the examples, and the sum of their weights where they have any.
Tried: TypeAlias = Callable[[slice], tf.Tensor]


def rule_of(tried: Tried, weights: tf.Tensor | None) -> Rule | None:
    """The rule that a function of some examples follows; None where what it gives does not tell."""
    try:
        whole, *parts = *together(tried, [WHOLE]), *together(tried, PARTS)
    except Exception:  # whatever a loss of a person's own raises on made-up labels
        return None
    values = Values(
        total(whole),
        (total(parts[0]), total(parts[1])),
        weights=None if weights is None else (total(weights[PARTS[0]]), total(weights[PARTS[1]])),
        tolerance=tolerance(whole.dtype),
    )
    return values.rule() if values.tell else None


def together(tried: Callable[[Part], Made], parts: Sequence[Part]) -> list[Made]:
    """What comes of parts that replicas have at the same time, which may ask each other for what they have.

    It is tried until each has got what the others give; at once where none asks.
    """
    given: list[list[tf.Tensor]] = [[] for _ in parts]
    kept = tf.distribute.get_replica_context
    try:
        for _ in range(MOST_EXCHANGES):
            made, asked = list[Made](), list[list[tf.Tensor]]()
            for number, part in enumerate(parts):
                context = _Pretended(number, given)
                tf.distribute.get_replica_context = lambda context=context: context
                made.append(tried(part))
                asked.append(context.asked)
            if _are_same(given, asked):
                break
            given = asked
    finally:
        tf.distribute.get_replica_context = kept
    return made


@contextlib.contextmanager
def asking_nobody(model: keras.Model | None = None) -> Iterator[None]:
    """Inside, a loss that asks other replicas finds itself alone where no step is made, as while a model is built.

    The model, if it is there already, is remembered to have such a loss.
    """
    kept, asked = tf.distribute.get_replica_context, list[tf.Tensor]()
    tf.distribute.get_replica_context = lambda: kept() or _Pretended(0, [[]], asked)
    try:
        yield
    finally:
        tf.distribute.get_replica_context = kept
        if asked and model is not None:
            # Past Keras's own setter, which would track it.
            vars(model)[ASKS_AS] = True


def asks_others(model: keras.Model) -> bool:
    """True if a loss of the model has been found to ask other replicas by itself."""
    return bool(vars(model).get(ASKS_AS))


class _Pretended:
    """A replica's context, to whom others answer what they have given before: nothing at first."""

    # It makes no step, so that a variable is assigned as outside of all replicas.
    strategy = None

    def __init__(self, number: int, given: Sequence[Sequence[tf.Tensor]], asked: list[tf.Tensor] | None = None) -> None:
        """`asked` gets what it asks others for, in turn."""
        self.replica_id_in_sync_group, self.num_replicas_in_sync = number, len(given)
        self._given, self.asked = given, list[tf.Tensor]() if asked is None else asked

    def all_gather(self, value: Nested[tf.Tensor], axis: int, options: object = None) -> Nested[tf.Tensor]:
        """The values of all replicas, one after the other."""
        return tf.nest.map_structure(lambda leaf: tf.concat(self._of_all(leaf), axis), value)

    def all_reduce(self, reduce_op: object, value: Nested[tf.Tensor], options: object = None) -> Nested[tf.Tensor]:
        """The sum of all replicas' values, or their mean."""
        name = str(getattr(reduce_op, "value", reduce_op)).upper()

        def reduced(leaf: tf.Tensor) -> tf.Tensor:
            values = self._of_all(leaf)
            total = tf.add_n(values)
            return total / tf.cast(len(values), total.dtype) if name == "MEAN" else total

        return tf.nest.map_structure(reduced, value)

    def _of_all(self, leaf: tf.Tensor) -> list[tf.Tensor]:
        place = len(self.asked)
        self.asked.append(tf.convert_to_tensor(leaf))
        others = [list(given[place : place + 1]) for given in self._given]
        others[self.replica_id_in_sync_group] = [self.asked[-1]]
        return [value for values in others for value in values]


def _are_same(given: Sequence[Sequence[tf.Tensor]], asked: Sequence[Sequence[tf.Tensor]]) -> bool:
    """True if replicas have given again what they had given before."""
    if [len(values) for values in given] != [len(values) for values in asked]:
        return False
    pairs = [pair for old, new in zip(given, asked, strict=True) for pair in zip(old, new, strict=True)]
    return all(np.array_equal(old.numpy(), new.numpy()) for old, new in pairs)


def agreed(rules: Sequence[Rule | None]) -> Rule | None:
    """The rule that all tries follow that tell one."""
    found = {rule for rule in rules if rule is not None}
    return found.pop() if len(found) == 1 else Rule.NEITHER if found else None


def total(value: tf.Tensor) -> float:
    """The sum of a value that may be one for each example."""
    return float(tf.reduce_sum(tf.cast(value, tf.float64)))


def tolerance(dtype: tf.DType) -> float:
    """How far apart equal values of a type may be."""
    return NARROW_TOLERANCE if dtype in (tf.float16, tf.bfloat16) else TOLERANCE


def made_up(batch: Batch, seed: int) -> Batch:
    """Examples of a batch's shapes and types: floats of 0.1 to 0.9, whole numbers of 0 and 1, one text."""
    random = np.random.default_rng(seed)

    def leaf(like: tf.Tensor) -> tf.Tensor:
        shape = [EXAMPLES, *(OPEN_SIZE if size is None else int(size) for size in like.shape[1:])]
        dtype = tf.as_dtype(like.dtype)
        if dtype == tf.string:
            return tf.fill(shape, "a")
        if dtype.is_floating:
            return tf.cast(random.uniform(0.1, 0.9, shape), dtype)
        return tf.cast(random.integers(0, 2, shape), dtype)

    return keras.tree.map_structure(lambda like: None if like is None else leaf(like), batch)


def rows(values: Nested[tf.Tensor], part: slice) -> Nested[tf.Tensor]:
    """Some of the examples."""
    return keras.tree.map_structure(lambda value: None if value is None else value[part], values)


def twice(values: Nested[tf.Tensor], part: slice) -> Nested[tf.Tensor]:
    """Some of the examples, two times over."""
    return keras.tree.map_structure(lambda value: None if value is None else tf.concat([value[part]] * 2, 0), values)


def is_own(model: keras.Model, name: str) -> bool:
    """Has the model's class such a method of its own?"""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def mentions(kind: type, name: str) -> bool:
    """Does a class that is not Keras's, or a function that it calls, call something of such a name?"""
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("keras", "builtins")]
    members = [getattr(member, "__func__", member) for base in own for member in vars(base).values()]
    # What tf.function and other decorators have wrapped.
    functions = [inspect.unwrap(getattr(member, "python_function", member)) for member in members if callable(member)]
    return any(name in _names(function, depth=2) for function in functions if isinstance(function, FunctionType))


@contextlib.contextmanager
def trying() -> Iterator[None]:
    """Inside, random numbers are the same for each example, and nothing is dropped; what is warned of is not told.

    The draws of layers and of TensorFlow are meant, which a model's losses would otherwise depend on.
    """
    random, dropping = tf.random, tf.nn.experimental
    kept = {name: getattr(random, name) for name in (*DRAWS, *(f"stateless_{name}" for name in DRAWS))}
    dropout, stateless_dropout = tf.nn.dropout, dropping.stateless_dropout
    try:
        for name in DRAWS:
            drawn = partial(_same_rows, kept[f"stateless_{name}"])
            setattr(random, f"stateless_{name}", drawn)
            setattr(random, name, partial(_seeded, drawn))
        tf.nn.dropout = dropping.stateless_dropout = lambda x, *arguments, **named: tf.convert_to_tensor(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, draw in kept.items():
            setattr(random, name, draw)
        tf.nn.dropout, dropping.stateless_dropout = dropout, stateless_dropout


DRAWS = ("normal", "uniform", "truncated_normal")


def _same_rows(draw: Callable[..., tf.Tensor], shape: Sequence[int], *how: object, **named: object) -> tf.Tensor:
    """Random numbers of a shape, whose rows are all the same."""
    sizes = [int(size) for size in shape] if tf.executing_eagerly() else []
    if not sizes:
        return draw(shape, *how, **named)
    return tf.repeat(draw([1, *sizes[1:]], *how, **named), sizes[0], axis=0)


def _seeded(draw: Callable[..., tf.Tensor], shape: Sequence[int], *how: object, **named: object) -> tf.Tensor:
    """What is drawn without a seed, or from one of a generator with a state."""
    named.pop("seed", None)
    return draw(shape, (1, 2), *how, **named)


def _names(function: FunctionType, depth: int) -> Iterator[str]:
    """The names in a function's code, in functions inside it, and in those of its module that it calls."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_names")]
        if depth > 0:
            called = (function.__globals__.get(name) for name in code.co_names)
            for other in called:
                if isinstance(other, FunctionType):
                    yield from _names(other, depth - 1)
