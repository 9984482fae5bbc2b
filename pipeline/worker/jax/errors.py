"""What a process failed of, for a person and for the conductor."""

import re

from pipeline.config import targets
from pipeline.worker.loop import TrainingError
from pipeline.worker.model_error import ModelError

# What Gloo and JAX's coordination say where another process is gone.
_LOST = re.compile(r"Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|coordination service|[Cc]onnection (closed|reset|refused)")
# What XLA raises, also as plain errors of Python.
_KINDS = ("JaxRuntimeError", "XlaRuntimeError", "ValueError", "RuntimeError")


def explain(error: BaseException) -> str:
    """An error in one line for a person: our own messages as they stand, others with their type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next(iter(lines), "")
    own = isinstance(error, TrainingError | ModelError | targets.TargetError) or first.startswith("Expected ")
    return first if own else f"{type(error).__name__}: {first}"


def lost_a_peer(error: BaseException) -> bool:
    """Is this what is raised in a process whose peers have gone?

    >>> lost_a_peer(ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))
    True
    """
    return type(error).__name__ in _KINDS and bool(_LOST.search(str(error)))
