"""What trains inside a process, found by name: TensorFlow's is ours, packages offer others."""

from collections.abc import Callable
from typing import Protocol

from pipeline.config.shipped import check_offer, load_offer
from pipeline.plan.plan import Plan, Process
from pipeline.record.commands import Command
from pipeline.record.events import Event, EventBase, Failed

# Tells the conductor an event; when, and by whom, is added on the way.
Tell = Callable[[Event], None]


class Engine(Protocol):
    """One process's part of a training. Made with the plan, its process, `tell` and whether it was asked to leave."""

    def join(self) -> dict[str, str]:
        """Takes the process's devices, and returns, once every process has joined, the versions of what computes."""

    def obey(self, command: Command[EventBase]) -> None:
        """Does what a command says, and tells the event that answers it."""

    def failure(self, error: BaseException) -> Failed:
        """What an error is told as."""


# Ours; a package offers others as entry points of the group `pipeline.engines`.
ENGINES = {
    "tensorflow": "pipeline.worker.tensorflow.engine:TensorFlowEngine",
    "jax": "pipeline.worker.jax.start:engine",
}
INSTEAD = "backend=tensorflow"


def check_engine(name: str) -> None:
    """Refuses a name that no engine has, without importing any. Raises `UserError`."""
    check_offer("engines", name, "backend", ENGINES, INSTEAD)


def engine_of(name: str) -> Callable[[Plan, Process, Tell, Callable[[], bool]], Engine]:
    """What makes an engine. Raises `UserError`."""
    made: Callable[[Plan, Process, Tell, Callable[[], bool]], Engine] = load_offer(
        "engines", name, "backend", ENGINES, INSTEAD
    )
    return made
