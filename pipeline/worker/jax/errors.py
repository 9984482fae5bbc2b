"""What a process failed of, for the conductor."""

import re

# What Gloo and JAX's coordination say where another process is gone.
_LOST = re.compile(r"Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|coordination service|[Cc]onnection (closed|reset|refused)")
# What XLA raises, also as plain errors of Python.
_KINDS = ("JaxRuntimeError", "XlaRuntimeError", "ValueError", "RuntimeError")


def lost_a_peer(error: BaseException) -> bool:
    """Is this what is raised in a process whose peers have gone?

    >>> lost_a_peer(ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))
    True
    """
    return type(error).__name__ in _KINDS and bool(_LOST.search(str(error)))
