"""Engines by name: TensorFlow's and JAX's are ours, packages offer others."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from pipeline.config.offered import check_offer, load_offer
from pipeline.plan.plan import Plan, Process
from pipeline.record.commands import Command
from pipeline.record.events import Event, EventBase, Failed, Warned

# Sends the driver an event; when, and by whom, is added on the way.
Emit = Callable[[Event], None]


@runtime_checkable
class CommandHandler(Protocol):
    """An engine of a package that carries out commands itself."""

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
INSTEAD = "backend=tensorflow"


def check_engine(name: str) -> None:
    """Refuses a name that no engine has, without importing any. Raises `UserError`."""
    check_offer("engines", name, "backend", ENGINES, INSTEAD)


def engine_of(name: str) -> Callable[[Plan, Process, Emit, Callable[[], bool]], Any]:
    """Returns what makes a `CommandHandler` or a `loop.Engine`, given whether it was asked to leave; or `UserError`."""
    make: Callable[..., Any] = load_offer("engines", name, "backend", ENGINES, INSTEAD)
    return make


class Notes:
    """Notes in the order in which they came; none are kept where another process has the way to `emit` them."""

    def __init__(self, emit: Emit | None) -> None:
        self._emit = emit
        self.texts: list[str] = []

    def keep(self, text: str) -> None:
        """Keeps a text for the result alone: it is nothing to be warned of."""
        if self._emit is not None and text not in self.texts:
            self.texts.append(text)

    def add(self, text: str) -> None:
        """Emits a text as a warning, the first time that it comes."""
        if self._emit is not None and text not in self.texts:
            self.texts.append(text)
            self._emit(Warned(text))
