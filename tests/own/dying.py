"""A callback that kills its process."""

import os
import signal
from pathlib import Path

import keras


class Dies(keras.callbacks.Callback):
    """Kills the process after so many calls of the compiled loop, once: then `marker` is there."""

    def __init__(self, at, marker):
        super().__init__()
        self.at, self.marker, self.seen = at, marker, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.at and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
