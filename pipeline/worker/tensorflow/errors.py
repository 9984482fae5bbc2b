"""What a process failed of, for a person and for the conductor."""

import re

import tensorflow as tf

from pipeline.config import targets
from pipeline.worker.loop import TrainingError
from pipeline.worker.model_error import ModelError
from pipeline.worker.training import Diverged

_ABOVE_THE_REASON = re.compile(r"Graph execution error|Detected at node|<stack traces|File |\d+ root error|\[\[")

# What Horovod's operations fail with once a process is gone, which TensorFlow has no kind of error for.
_LEFT_BY_HOROVOD = re.compile(r"Horovod has been shut down|gloo/transport/\w+/pair")


def explain(error: BaseException) -> str:
    """An error in one line for a person: our own messages as they stand, others with their type."""
    # What TensorFlow wraps around the error of a step that a coordinator handed out.
    error = getattr(error, "original_exception", error)
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    lines = [re.sub(r"^\(\d+\) [A-Z_]+: *", "", line.strip()) for line in text.splitlines() if line.strip()]
    # What TensorFlow writes above the reason: where in the graph, and that there is a reason.
    first = next((line for line in lines if not _ABOVE_THE_REASON.match(line)), next(iter(lines), ""))
    own = isinstance(error, TrainingError | ModelError | targets.TargetError) or first.startswith("Expected ")
    if "Could not start gRPC server" in first:
        return "Expected a free port, received one that another program listens on. Try cluster.base_port=null."
    return first if own else f"{type(error).__name__}: {first}"


def diverged(error: BaseException) -> bool:
    """Has the training diverged, so that another learning rate may help?"""
    return isinstance(error, Diverged)


def lost_a_peer(error: BaseException) -> bool:
    """Is this what TensorFlow raises in a process whose peers have gone?"""
    kinds = (
        tf.errors.UnavailableError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
    )
    left = isinstance(error, tf.errors.UnknownError) and _LEFT_BY_HOROVOD.search(error.message) is not None
    return isinstance(error, kinds) or left
