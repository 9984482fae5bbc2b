"""A Keras callback with which another process says when a training is over."""

from pathlib import Path

import keras


class Until(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes the file `path` with `.began` behind it after the first step; ends training once `path` is there."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Looks for the file."""
        self.path.with_suffix(".began").touch()
        if self.path.exists():
            self.model.stop_training = True
