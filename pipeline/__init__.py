"""Distributed Keras training: a config becomes a plan, a plan becomes processes, processes report events, and events
become a result that can be compared."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.worker.fit.fitting import fit

__all__ = ["fit"]


def __getattr__(name: str) -> Any:
    # Only where it is asked for: it imports TensorFlow, which the driver never does.
    if name == "fit":
        from pipeline.worker.fit.fitting import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
