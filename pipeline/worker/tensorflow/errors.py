"""What a process failed of, for a person and for the conductor."""

import re

import tensorflow as tf

from pipeline.worker.model_error import told
from pipeline.worker.tensorflow.shared_memory import PeerLostError
from pipeline.worker.training import Diverged

# What Horovod's operations and ours fail with once a process is gone, which TensorFlow has no kind of error for.
_LEFT = re.compile(rf"Horovod has been shut down|gloo/transport/\w+/pair|{PeerLostError.__name__}:")


def explain(error: BaseException) -> str:
    """Returns an error in one line for a person: our own messages as they stand, others as their reason."""
    if "Could not start gRPC server" in str(error):
        return "Expected a free port, received one that another program listens on. Try cluster.base_port=null."
    return told(error)


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
        PeerLostError,
    )
    left = isinstance(error, tf.errors.UnknownError) and _LEFT.search(error.message) is not None
    return isinstance(error, kinds) or left
