"""Trains `model=transformer` on `data=text` with Keras's plain `fit`: `python plain_fit.py UNTIL BATCH OUT`."""

import json
import sys
from pathlib import Path

import keras
import stopping

from pipeline.data import text
from pipeline.models import transformer


def main(until: str, batch: str, out: str) -> None:
    """Fits until the file `until` is there; writes what the last validation came to."""
    keras.utils.set_random_seed(0)
    train, validation = (tuple(part.raw) for part in text())
    model = transformer(input_shape=train[0].shape[1:], num_classes=256)
    history = model.fit(
        *train, batch_size=int(batch), epochs=10_000, validation_data=validation, verbose=0,
        callbacks=[stopping.Until(until)],
    )  # fmt: skip
    steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    found = {"perplexity": float(history.history["val_perplexity"][-1]), "steps": steps}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
