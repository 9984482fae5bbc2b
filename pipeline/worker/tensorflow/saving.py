"""Hashes of what the replicas of a process have learnt."""

import hashlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf


def replica_digests(variables: Sequence[keras.Variable]) -> list[str]:
    """A hash of weights for each replica that this process holds: all of them must agree."""
    copies = [[np.asarray(copy) for copy in _copies(variable.value)] for variable in variables]
    return [
        hashlib.sha256(b"".join(np.ascontiguousarray(copy).tobytes() for copy in replica)).hexdigest()[:16]
        for replica in zip(*copies, strict=True)
    ]


def _copies(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    return tuple(getattr(variable, "values", (variable,)))
