"""Reads a model's size from the built model, and what a step holds from its graph, in the order TensorFlow runs it."""

import contextlib
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeAlias

import tensorflow as tf

from pipeline.data.examples import Examples
from pipeline.plan.size import Moment, Size
from pipeline.worker import variables
from pipeline.worker.data import batches
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import build
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling import normalization
from pipeline.worker.tensorflow.step import optimizers

BACKWARD = "gradient_tape/"


def of(loop: Loop, forgetful: bool = False) -> Size:
    """The size of a loop's model; with `forgetful` also what a step holds whose blocks compute again, for good."""
    model, part = loop.model, loop.train_data.part
    listed, apart = variables.listed(model, optimizers(model))
    # Arrays that every process holds whole; none of data that are read as they train.
    is_read = isinstance(part, tf.data.Dataset) or (isinstance(part, Examples) and part.in_files)
    arrays = [] if is_read else tf.nest.flatten(part.raw if isinstance(part, Examples) else part)
    per_example = int(sum(array.nbytes for array in arrays)) // len(arrays[0]) if arrays else None
    size = sum(math.prod(leaf.shape[1:]) * leaf.dtype.size for leaf in tf.nest.flatten(batches.spec(part)))
    in_batch = None if size == per_example else size
    normalizations = len(normalization.layers(model))
    try:
        step, operations = _step(loop)
    except ModelError as unknown:
        return Size(listed, apart, None, per_example, str(unknown), normalizations, batch_bytes=in_batch)
    again: tuple[Moment, ...] | None = None
    # A model without blocks has nothing to forget.
    with contextlib.suppress(ModelError):
        if forgetful:
            build.forget(model)
            again, _ = _step(loop)
    return Size(listed, apart, step, per_example, None, normalizations, operations, again, batch_bytes=in_batch)


def _step(loop: Loop) -> tuple[tuple[Moment, ...], int]:
    """(moments of a step of one replica, operations of its graph). Raises `ModelError`."""
    body, replicas = body_of(loop.graph(EXAMPLES)), loop.train_data.layout.local
    fullest = envelope(_moments(body))
    return tuple((fixed // replicas, growing // replicas) for fixed, growing in fullest), len(body.get_operations())


def body_of(graph: tf.Graph) -> tf.Graph:
    """The graph of one step in that of the compiled loop over steps."""
    loop = next(operation for operation in graph.get_operations() if operation.type in ("While", "StatelessWhile"))
    return graph._get_function(loop.get_attr("body").name).graph


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
LOOPS = ("While", "StatelessWhile", "TensorListReserve", "EmptyTensorList")
# How many examples a step is followed with: a prime, so that what it divides grows with the batch.
EXAMPLES = 509

# What tells one tensor from another, as `tf.Tensor.ref` has it.
Ref: TypeAlias = Hashable


def envelope(moments: Iterable[Moment]) -> list[Moment]:
    """Moments one of which is the fullest at any batch of one example or more, by how they grow.

    >>> envelope([(10, 1), (7, 2), (9, 1), (0, 3), (1, 2)])
    [(10, 1), (7, 2), (0, 3)]
    """

    def crossing(one: Moment, other: Moment) -> float:
        # At which batch the other begins to have more.
        return (one[0] - other[0]) / (other[1] - one[1])

    best: dict[int, int] = {}
    for fixed, growing in moments:
        best[growing] = max(fixed, best.get(growing, 0))
    fullest: list[Moment] = []
    for growing, fixed in sorted(best.items()):
        now = (fixed, growing)
        while fullest and sum(fullest[-1]) <= fixed + growing:
            fullest.pop()
        # Between two others a moment is never the fullest where these cross before it has overtaken the first.
        while len(fullest) > 1 and crossing(fullest[-2], now) <= crossing(fullest[-2], fullest[-1]):
            fullest.pop()
        fullest.append(now)
    return fullest


def _moments(graph: tf.Graph) -> Iterator[Moment]:
    """Yields what a step of `EXAMPLES` a replica holds after each operation, the first that can be run being the next.

    A tensor is held from the operation that makes it to the last that reads it; variables do not count. Raises
    `ModelError` where a loop keeps what cannot be told.
    """
    operations = graph.get_operations()
    # The tensor in whose memory each one is, and the bytes of such.
    source, sizes = dict[Ref, Ref](), dict[Ref, Moment]()
    for operation in operations:
        for place, tensor in enumerate(operation.outputs):
            if operation.type in ALIASES:
                aliased = operation.inputs[place if operation.type == "IdentityN" else 0]
                source[tensor.ref()] = source[aliased.ref()]
            else:
                source[tensor.ref()], sizes[tensor.ref()] = tensor.ref(), _bytes(operation, tensor)
    inputs = {operation: [source[tensor.ref()] for tensor in operation.inputs] for operation in operations}
    # How many are still to read a tensor.
    readers = Counter([*itertools.chain(*inputs.values()), *(source[tensor.ref()] for tensor in graph.outputs)])
    waits, after = {}, defaultdict[tf.Operation, list[tf.Operation]](list)
    for operation in operations:
        before = {tensor.op for tensor in operation.inputs} | set(operation.control_inputs)
        waits[operation] = len(before)
        for one in before:
            after[one].append(operation)
    ready, now = deque(operation for operation in operations if not waits[operation]), (0, 0)
    while ready:
        operation = ready.popleft()
        readers.subtract(inputs[operation])
        let_go = [sizes[ref] for ref in set(inputs[operation]) if not readers[ref]]
        if operation.type in IN_PLACE:
            now, let_go = _sum(now, let_go, -1), []
        results = [tensor.ref() for tensor in operation.outputs if source[tensor.ref()] == tensor.ref()]
        now = _sum(now, [sizes[ref] for ref in results])
        yield now
        now = _sum(now, [*let_go, *(sizes[ref] for ref in results if not readers[ref])], -1)
        for one in after[operation]:
            waits[one] -= 1
            if not waits[one]:
                ready.append(one)


def _sum(now: Moment, others: Iterable[Moment], sign: int = 1) -> Moment:
    for fixed, growing in others:
        now = now[0] + sign * fixed, now[1] + sign * growing
    return now


def _bytes(operation: tf.Operation, tensor: tf.Tensor) -> Moment:
    # The batches come by an iterator, and losses go into an array; but what a loop keeps is not to be seen.
    if tensor.dtype == tf.variant and operation.type in LOOPS:
        raise ModelError("the model has a loop, and what that keeps is not in its graph")
    elsewhere = operation.type in ELSEWHERE or tensor.dtype in (tf.resource, tf.variant)
    if elsewhere or not tensor.shape.is_fully_defined():
        return 0, 0
    numbers = math.prod(tensor.shape.as_list())
    size = numbers * tensor.dtype.size
    return (0, size // EXAMPLES) if numbers and numbers % EXAMPLES == 0 else (size, 0)
