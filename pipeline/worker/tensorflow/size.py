"""Reads a model's size from the built model, and what a step holds from its graph."""

import tensorflow as tf

from pipeline.data.examples import Examples
from pipeline.plan.size import Moment, Size
from pipeline.worker import variables
from pipeline.worker.input.part import Part
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import remat
from pipeline.worker.tensorflow.liveness import EXAMPLES, fullest
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling import normalization
from pipeline.worker.tensorflow.step import optimizers

BACKWARD = "gradient_tape/"


def of(loop: Loop, forgetful: bool = False) -> Size:
    """The size of a loop's model; with `forgetful` also what a step holds whose blocks compute again, for good."""
    model, replicas = loop.model, loop.train_data.layout.local
    listed, apart = variables.listed(model, optimizers(model))
    per_example = example_bytes(loop.train_data.part)
    normalizations = len(normalization.layers(model))
    try:
        step, operations = _step(loop, replicas)
    except ModelError as unknown:
        return Size(listed, apart, None, per_example, str(unknown), normalizations)
    again: tuple[Moment, ...] | None = None
    if forgetful:
        try:
            remat.forget(model)
            again, _ = _step(loop, replicas)
        except ModelError:
            # A model without blocks has nothing to forget.
            again = None
    return Size(listed, apart, step, per_example, None, normalizations, operations, again)


def example_bytes(part: Part) -> int | None:
    """Bytes of one example in arrays that every process holds whole; None for data that is read as it trains."""
    if isinstance(part, tf.data.Dataset) or (isinstance(part, Examples) and part.in_files):
        return None
    leaves = tf.nest.flatten(part.raw if isinstance(part, Examples) else part)
    return int(sum(leaf.nbytes for leaf in leaves)) // len(leaves[0])


def _step(loop: Loop, replicas: int) -> tuple[tuple[Moment, ...], int]:
    """(moments of a step of one replica, operations of its graph). Raises `ModelError`."""
    body = body_of(loop.graph(EXAMPLES))
    moments = tuple((fixed // replicas, growing // replicas) for fixed, growing in fullest(body))
    return moments, len(body.get_operations())


def body_of(graph: tf.Graph) -> tf.Graph:
    """The graph of one step in that of the compiled loop over steps."""
    loop = next(operation for operation in graph.get_operations() if operation.type in ("While", "StatelessWhile"))
    return graph._get_function(loop.get_attr("body").name).graph
