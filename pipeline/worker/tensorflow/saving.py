"""Hashes of what the replicas of a process have learnt."""

import hashlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf


def replica_digests(variables: Sequence[keras.Variable]) -> list[str]:
    """A hash of weights for each replica that this process holds: all of them must agree."""
    found = [hashlib.sha256() for _ in _copies(variables[0].value)] if variables else []
    # One variable after the other: all of them at once would be the model's memory once more.
    for variable in variables:
        for digest, copy in zip(found, _copies(variable.value), strict=True):
            digest.update(np.ascontiguousarray(copy).view(np.uint8).data)
    return [digest.hexdigest()[:16] for digest in found]


def _copies(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    return tuple(getattr(variable, "values", (variable,)))
