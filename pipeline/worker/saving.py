"""The trained model as a file, and whether a checkpoint can be gone on with."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from pipeline.plan.plan import Plan
from pipeline.record.events import MODEL, WEIGHTS, Warned
from pipeline.worker.engine import Tell
from pipeline.worker.loop import TrainingError


def save(model: keras.Model, folder: Path, tell: Tell) -> str:
    """Writes the model whole or not at all, and returns the name of its file. It loads on one device as it does here.

    Of a model whose class does not say how it is made, the weights alone.
    """
    try:
        try:
            return _written(model.save, folder, MODEL)
        except OSError:
            raise
        except Exception as error:  # whatever a class of a person's own raises
            name = _written(model.save_weights, folder, WEIGHTS)
            tell(
                Warned(
                    f"The trained model was saved as its weights, {name}, since Keras cannot save it whole: "
                    f"{' '.join(str(error).split())[:200]}. Try get_config and from_config in "
                    f"{type(model).__name__}; the weights load into a model that is made and built as this one was."
                )
            )
            return name
    except OSError as error:
        raise TrainingError(
            f"Expected to be able to write the trained model to {folder}, received: {error.strerror or error}. Try "
            f"more space: the same command then goes on from the last checkpoint."
        ) from error


def _written(write: Callable[[Path], object], folder: Path, name: str) -> str:
    partial = folder / f".partial.{name}"
    try:
        write(partial)
        partial.rename(folder / name)
    finally:
        partial.unlink(missing_ok=True)
    return name


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
            f"the data that the checkpoint was trained on, {then['examples']} examples ({then['digest']})",
            f"{now['examples']} ({now['digest']}): it has changed since",
            "resume=never",
        )
