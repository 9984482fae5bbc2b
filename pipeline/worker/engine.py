"""Engines by name: TensorFlow's and JAX's are ours, packages offer others."""

from collections.abc import Callable
from typing import Protocol

from pipeline.record.commands import Command
from pipeline.record.events import Event, EventBase, Failed

# Sends the driver an event; when, and by whom, is added on the way.
Emit = Callable[[Event], None]
# Keeps a text for the result.
Note = Callable[[str], object]


class CommandHandler(Protocol):
    """An engine in a process. Those for Keras models are a `pipeline.worker.process.WorkerProcess`."""

    def join(self) -> dict[str, str]:
        """Takes the process's devices, and returns, once every process has joined, the versions of what computes."""

    def obey(self, command: Command[EventBase]) -> None:
        """Carries out a command and emits the event that answers it."""

    def failure(self, error: BaseException) -> Failed:
        """Returns the event that reports an error."""


# Ours; a package offers others as entry points of the group `pipeline.engines`.
ENGINES = {
    "tensorflow": "pipeline.worker.tensorflow.engine:TensorFlowEngine",
    "jax": "pipeline.worker.jax.engine:JaxEngine",
}
