"""The trained model as a file, hashes of replicas and of data, and whether a checkpoint can be gone on with."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.plan.plan import Plan
from pipeline.worker.tensorflow.loop import TrainingError


def replica_digests(model: keras.Model) -> list[str]:
    """A hash of the trained weights for each replica that this process holds: all of them must agree."""
    copies = [[np.asarray(copy) for copy in _copies(variable.value)] for variable in model.trainable_variables]
    return [
        hashlib.sha256(b"".join(np.ascontiguousarray(copy).tobytes() for copy in replica)).hexdigest()[:16]
        for replica in zip(*copies, strict=True)
    ]


def _copies(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    return tuple(getattr(variable, "values", (variable,)))


def save(model: keras.Model, path: Path) -> None:
    """Writes the model whole or not at all. It loads on one device as it does here."""
    partial = path.with_name(f".{path.name}").with_suffix(".partial.keras")
    try:
        model.save(partial)
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TrainingError(
            f"Expected to be able to write the trained model to {path}, received: {error.strerror or error}. Try more "
            f"space: the same command then goes on from the last checkpoint."
        ) from error


def is_good(plan: Plan) -> Callable[[Mapping[str, Any]], bool]:
    """Is a checkpoint, by its values, of a training that had not diverged?"""

    def good(values: Mapping[str, Any]) -> bool:
        loss, first = values["loss"], values["first_loss"]
        return bool(values["finite"]) and (
            loss is None or loss <= plan.training.divergence_factor * max(1.0, abs(first))
        )

    return good


def check_same_data(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with data that has changed under the same config; other shards are told by their count alone."""
    comparable = then["shards"] == now["shards"]
    if then["build"] != now["build"]:
        # That was asked for.
        return
    if then["examples"] != now["examples"] or (comparable and then["digest"] != now["digest"]):
        raise TrainingError(
            f"Expected the data that the checkpoint was trained on, {then['examples']} examples ({then['digest']}), "
            f"received {now['examples']} ({now['digest']}): it has changed since. Try resume=never."
        )
