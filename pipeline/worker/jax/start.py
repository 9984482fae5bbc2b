"""Makes JAX's engine in a process that has not imported Keras yet, which takes its backend from the environment."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.plan.plan import Plan, Process
from pipeline.worker.engine import Tell

if TYPE_CHECKING:
    from pipeline.worker.jax.engine import JaxEngine


def engine(plan: Plan, process: Process, tell: Tell, asked_to_leave: Callable[[], bool]) -> "JaxEngine":
    """See `pipeline.worker.engine.Engine`."""
    os.environ["KERAS_BACKEND"] = "jax"
    from pipeline.worker.jax.engine import JaxEngine

    return JaxEngine(plan, process, tell, asked_to_leave)
