"""Compiles a model with what a run chooses, so that what it does not choose stays, also in what is saved."""

from typing import Any

import keras

# What a loss brings along, and what metrics do: given anew together.
TOGETHER = (("loss", "loss_weights"), ("metrics", "weighted_metrics"))


def compile_anew(made: keras.Model, optimizer: Any, loss: Any, metrics: Any) -> None:
    """Compiles with the optimizer, and with loss and metrics where they are not None.

    A compiled model keeps the others while it trains. Keras would leave them out of what it saves, and of copies.
    """
    before = dict(made._compile_config.config) if made.compiled and hasattr(made, "_compile_config") else {}
    made.compile(optimizer=optimizer, loss=loss, metrics=metrics)
    now = getattr(getattr(made, "_compile_config", None), "config", None)
    if now is None:
        return
    for names in TOGETHER:
        if all(now.get(name) is None for name in names):
            now.update({name: before.get(name) for name in names})
    # Found out anew wherever it is loaded: another backend's answer is another.
    now["jit_compile"] = "auto"
