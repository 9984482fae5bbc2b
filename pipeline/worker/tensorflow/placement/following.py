"""Runs what a step computes where its layer is, and what belongs to no layer where its largest input is.

A layer's own operations are placed when it is called. TensorFlow makes those of its backward pass in a name scope
that is named after that of the forward pass, so that they are known. What is left, such as the clipping of a gradient
or the update of a weight, follows the data, so that nothing large travels for it.
"""

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import tensorflow as tf

from pipeline.worker.data.reading import Batch
from pipeline.worker.tensorflow.size import BACKWARD
from pipeline.worker.tensorflow.step import ReplicaStep


@dataclass(frozen=True)
class Called:
    """A layer's call in a graph: its name, its part of the model, and the replica's device for that."""

    layer: str
    part: int
    device: str


class _ReplicaOfThread(threading.local):
    """Each replica is traced in a thread of its own."""

    replica = 0


class Following:
    """The calls of a model's layers, by the graphs in which they are."""

    def __init__(self) -> None:
        self._calls: WeakKeyDictionary[tf.Graph, dict[str, Called]] = WeakKeyDictionary()
        # The names of what a graph takes from outside, with what that is there.
        self._captured: WeakKeyDictionary[tf.Graph, dict[str, tf.Tensor]] = WeakKeyDictionary()
        self._thread = _ReplicaOfThread()

    @property
    def replica(self) -> int:
        """The replica whose step is traced in this thread; 0 outside."""
        return self._thread.replica

    @contextlib.contextmanager
    def called(self, layer: str, part: int, device: str) -> Iterator[None]:
        """Inside, operations are a layer's: they run on its device, and so does what goes back through them."""
        with tf.device(device):
            if tf.executing_eagerly():
                yield
                return
            # A scope of its own, whoever calls the layer.
            with tf.name_scope("placed"):
                graph = tf.compat.v1.get_default_graph()
                self._calls.setdefault(graph, {})[graph.get_name_scope()] = Called(layer, part, device)
                yield

    def followed(self, replica_step: ReplicaStep) -> ReplicaStep:
        """A step of which nothing is left for TensorFlow to place, which would put it on the first device."""

        def step(examples: tf.Tensor, batch: Batch) -> tf.Tensor:
            number = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
            before, self._thread.replica = self._thread.replica, int(number)
            try:
                # The public `tf.device` takes no function.
                with tf.compat.v1.device(self._device_of):
                    return replica_step(examples, batch)
            finally:
                self._thread.replica = before

        return step

    def calls(self, graph: tf.Graph) -> Mapping[str, Called]:
        """The calls of layers in a graph, by their name scopes."""
        return self._calls.get(graph, {})

    def call_of(self, graph: tf.Graph, name: str) -> Called | None:
        """The call that an operation of that name is of, forward or backward."""
        calls, scope = self.calls(graph), name.rpartition(BACKWARD)[2]
        while calls and (scope := scope.rpartition("/")[0]):
            if scope in calls:
                return calls[scope]
        return None

    def placed(self, operation: tf.Operation) -> str:
        """The device that an operation was given, or that of the variable that it reads, or of what it is kept beside.

        TensorFlow lets go of all devices for the latter two.
        """
        if operation.device:
            device: str = operation.device
            return device
        if operation.type == "ReadVariableOp":
            return self._place_of(operation.inputs[0])
        beside = [group.decode().removeprefix("loc:@") for group in operation.colocation_groups()]
        others = [_named(operation.graph, name) for name in beside if name != operation.name]
        return next(filter(None, (self.placed(other) for other in others if other is not None)), "")

    def _device_of(self, operation: tf.Operation) -> str:
        """Returns the device of an operation that is being made; "" leaves it to the strategy."""
        if operation.device:
            device: str = operation.device
            return device
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource and (device := self._place_of(tensor)):
                return device
        graph, name = operation.graph, operation.name
        while graph is not None:
            if BACKWARD in name and (call := self.call_of(graph, name)) is not None:
                return call.device
            graph = getattr(graph, "outer_graph", None)
            name = f"{graph.get_name_scope()}/" if isinstance(graph, tf.Graph) else ""
        # Of equal ones, the first.
        placed = [tensor for tensor in operation.inputs if tensor.dtype != tf.resource and self.placed(tensor.op)]
        return self.placed(max(placed, key=_size).op) if placed else ""

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
        device: str = handle.device
        return device


def _named(graph: tf.Graph | None, name: str) -> tf.Operation | None:
    """Returns the operation of that name in a graph, or in those that it is a part of; None where there is none."""
    while graph is not None:
        try:
            return graph.get_operation_by_name(name)
        except KeyError:
            graph = getattr(graph, "outer_graph", None)
    return None


def _size(tensor: tf.Tensor) -> int:
    """Numbers of a tensor, of one example where that is not known."""
    return 1 if tensor.shape.rank is None else math.prod(size or 1 for size in tensor.shape.as_list())
