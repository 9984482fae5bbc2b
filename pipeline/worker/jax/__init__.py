"""JAX's engine: the same models, data and steps through Keras on JAX, on a mesh of devices, without TensorFlow."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.plan.plan import Plan, Process
from pipeline.worker.engine import Emit

if TYPE_CHECKING:
    from pipeline.worker.jax.engine import JaxEngine


def engine(plan: Plan, process: Process, emit: Emit, asked_to_leave: Callable[[], bool]) -> "JaxEngine":
    """Makes JAX's engine in a process that has not imported Keras, which takes its backend from the environment."""
    os.environ["KERAS_BACKEND"] = "jax"
    from pipeline.worker.jax.engine import JaxEngine

    return JaxEngine(plan, process, emit, asked_to_leave)
