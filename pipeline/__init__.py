"""Distributed Keras training: a config becomes a plan, a plan becomes processes, processes report events, and events
become a result that can be compared."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.worker.keras_fit.fitting import fit

__all__ = ["fit"]

# Where `python -m pipeline.report`, as it was typed once, finds what answers it.
__path__.append(str(Path(__file__).with_name("moved")))


def __getattr__(name: str) -> Any:
    # Only where it is asked for: it imports TensorFlow, which the conductor never does.
    if name == "fit":
        from pipeline.worker.keras_fit.fitting import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
