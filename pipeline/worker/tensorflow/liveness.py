"""Follows a step's graph in the order in which TensorFlow runs it, to tell what it holds at its fullest moments."""

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from pipeline.worker.model_error import ModelError

# Operations whose result is what came in, in the same memory.
ALIASES = ("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient")
# Operations that write their result over what came in where nobody else reads that.
IN_PLACE = (
    "Add", "AddV2", "Sub", "Mul", "RealDiv", "DivNoNan", "Neg", "Exp", "Log", "Sqrt", "Rsqrt", "Square", "Tanh", "Relu",
    "Sigmoid", "Pow", "Maximum", "Minimum", "SquaredDifference", "AddN", "BiasAdd", "Softmax", "SelectV2", "TanhGrad",
    "ReluGrad", "SigmoidGrad",
)  # fmt: skip
# What comes from outside of the step, or is a part of the graph.
ELSEWHERE = ("Placeholder", "Const", "ReadVariableOp")
# How many examples a step is followed with: a prime, so that what it divides grows with the batch.
EXAMPLES = 509

# What tells one tensor from another, as `tf.Tensor.ref` has it.
Ref: TypeAlias = Hashable
# Bytes of a fixed size, and bytes for each example.
Bytes: TypeAlias = tuple[int, int]


def fullest(graph: tf.Graph) -> list[Bytes]:
    """(bytes of a fixed size, bytes for each example) of moments of a step, one of which is the fullest at any batch.

    `graph` is that of one step of `EXAMPLES` examples on each replica, all shapes of which are known. A tensor is held
    from the operation that makes it to the last that reads it, whatever other names it has; variables do not count.
    Raises `ModelError` where a size cannot be told, as with what a loop inside the model keeps.
    """
    following = _Following(graph)
    return envelope(following.moments())


def envelope(moments: Iterable[Bytes]) -> list[Bytes]:
    """Those that have the most bytes at some batch of one example or more, by how they grow.

    >>> envelope([(10, 1), (7, 2), (9, 1), (0, 3), (1, 2)])
    [(10, 1), (7, 2), (0, 3)]
    """
    best: dict[int, int] = {}
    for fixed, growing in moments:
        best[growing] = max(fixed, best.get(growing, 0))
    kept: list[Bytes] = []
    for growing, fixed in sorted(best.items()):
        while kept and kept[-1][0] + kept[-1][1] <= fixed + growing:
            kept.pop()
        # Between two others a moment is never the fullest where these cross before it has overtaken the first.
        while len(kept) > 1 and _cross(kept[-2], (fixed, growing)) <= _cross(kept[-2], kept[-1]):
            kept.pop()
        kept.append((fixed, growing))
    return kept


def _cross(one: Bytes, other: Bytes) -> float:
    """At which batch the other begins to have more."""
    return (one[0] - other[0]) / (other[1] - one[1])


@dataclass
class _Held:
    """A tensor: its bytes, and how many are still to read it."""

    bytes: Bytes
    readers: int = 0


class _Following:
    def __init__(self, graph: tf.Graph) -> None:
        self._operations = graph.get_operations()
        self._held: dict[Ref, _Held] = {}
        self._source: dict[Ref, Ref] = {}
        for operation in self._operations:
            for place, tensor in enumerate(operation.outputs):
                self._add(operation, place, tensor)
        for tensor in itertools.chain.from_iterable(operation.inputs for operation in self._operations):
            self._held[self._source[tensor.ref()]].readers += 1
        for tensor in graph.outputs:
            self._held[self._source[tensor.ref()]].readers += 1

    def _add(self, operation: tf.Operation, place: int, tensor: tf.Tensor) -> None:
        if operation.type in ALIASES:
            of = operation.inputs[place if operation.type == "IdentityN" else 0]
            self._source[tensor.ref()] = self._source[of.ref()]
            return
        self._source[tensor.ref()] = tensor.ref()
        self._held[tensor.ref()] = _Held(_bytes(operation, tensor))

    def moments(self) -> Iterable[Bytes]:
        """What is held after each operation, the first that can be run being the next."""
        waits, after = {}, defaultdict[tf.Operation, list[tf.Operation]](list)
        for operation in self._operations:
            before = {tensor.op for tensor in operation.inputs} | set(operation.control_inputs)
            waits[operation] = len(before)
            for one in before:
                after[one].append(operation)
        ready = deque(operation for operation in self._operations if not waits[operation])
        now = (0, 0)
        while ready:
            operation = ready.popleft()
            made = [tensor.ref() for tensor in operation.outputs if self._source[tensor.ref()] == tensor.ref()]
            let_go = [self._let_go(tensor) for tensor in operation.inputs]
            if operation.type in IN_PLACE:
                now, let_go = _sum(now, let_go, -1), []
            now = _sum(now, [self._held[ref].bytes for ref in made])
            yield now
            unread = [self._held[ref].bytes for ref in made if not self._held[ref].readers]
            now = _sum(now, [*let_go, *unread], -1)
            for one in after[operation]:
                waits[one] -= 1
                if not waits[one]:
                    ready.append(one)

    def _let_go(self, tensor: tf.Tensor) -> Bytes:
        held = self._held[self._source[tensor.ref()]]
        held.readers -= 1
        return (0, 0) if held.readers else held.bytes


def _sum(now: Bytes, others: Iterable[Bytes], sign: int = 1) -> Bytes:
    fixed, growing = now
    for one in others:
        fixed, growing = fixed + sign * one[0], growing + sign * one[1]
    return fixed, growing


def _bytes(operation: tf.Operation, tensor: tf.Tensor) -> Bytes:
    if operation.type in ELSEWHERE or tensor.dtype == tf.resource:
        return 0, 0
    if tensor.dtype == tf.variant:
        # The batches come by an iterator, and losses go into an array; but what a loop keeps is not to be seen.
        if operation.type in ("While", "StatelessWhile", "TensorListReserve", "EmptyTensorList"):
            raise ModelError("the model has a loop, and what that keeps is not in its graph")
        return 0, 0
    if not tensor.shape.is_fully_defined():
        return 0, 0
    numbers = math.prod(tensor.shape.as_list())
    size = numbers * tensor.dtype.size
    return (0, size // EXAMPLES) if numbers and numbers % EXAMPLES == 0 else (size, 0)
