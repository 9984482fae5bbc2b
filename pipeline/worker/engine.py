"""Engines by name: TensorFlow's and JAX's are ours, packages offer others."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from pipeline.config.offered import check_offer, load_offer
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


def check_engine(name: str) -> None:
    """Refuses a name that no engine has, without importing any. Raises `UserError`."""
    check_offer("engines", name, "backend", ENGINES, "backend=tensorflow")


def engine_of(name: str) -> Callable[..., Any]:
    """Returns what makes a `CommandHandler` or a `loop.Engine` of a process of a plan; or raises `UserError`."""
    return load_offer("engines", name, "backend", ENGINES, "backend=tensorflow")  # type: ignore[no-any-return]


class Notes:
    """Notes in the order in which they came; none are kept where another process has the way to `emit` them."""

    def __init__(self, emit: Emit | None) -> None:
        self._emit = emit
        self.texts: list[str] = []

    def add(self, text: str, warn: bool = True) -> None:
        """Keeps a text for the result the first time that it comes, and emits it if there is cause to `warn`."""
        if self._emit is not None and text not in self.texts:
            self.texts.append(text)
            if warn:
                self._emit(Warned(text))
