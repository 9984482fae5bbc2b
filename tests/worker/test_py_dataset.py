"""`pipeline.fit` asks of a `keras.utils.PyDataset` what Keras's `fit` asks of it on one device, at the same moments."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import two_devices  # noqa: F401 # which are this process's
from conftest import sampled

import pipeline
from pipeline import strategies


class Told(keras.utils.PyDataset):
    """Batches that are others after each epoch, as many as `sizes` says, and a note of each hook."""

    def __init__(self, sizes: list[int], notes: list[str], name: str = "", **kept: Any) -> None:
        super().__init__(**kept)
        self.sizes, self.notes, self.name, self.ends = sizes, notes, name, 0

    def __len__(self) -> int:
        return self.sizes[min(self.ends, len(self.sizes) - 1)]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.default_rng([self.ends, index]).normal(size=(4 + index % 3, 2)).astype("float32")
        return x, x @ np.array([[1.0], [2.0]], "float32")

    def on_epoch_begin(self) -> None:
        self.notes.append(f"{self.name} begin")

    def on_epoch_end(self) -> None:
        self.ends += 1
        self.notes.append(f"{self.name} end")


class Endless(Told):
    """The same without an end, and without a change."""

    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.ends = 0
        return super().__getitem__(index)


class Stop(keras.callbacks.Callback):
    """Ends training in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self.model.stop_training = batch == 1


def arguments(call: str, notes: list[str]) -> dict[str, Any]:
    """What `fit` is called with."""
    of_many = {"workers": 2, "max_queue_size": 2}
    return {
        "as many each time": lambda: {"x": Told([3], notes), "shuffle": True},
        "fewer, then more": lambda: {"x": Told([4, 2, 5, 1, 3], notes)},
        "threads": lambda: {"x": Told([4, 3, 2], notes, **of_many)},
        "processes": lambda: {"x": Told([3], notes, use_multiprocessing=True)},
        "without end": lambda: {"x": Endless([3], notes, **of_many), "steps_per_epoch": 2},
        "more steps than there are": lambda: {"x": Told([3], notes), "steps_per_epoch": 5},
        "ended early": lambda: {"x": Told([5], notes), "callbacks": [Stop()]},
        "validated every second epoch": lambda: {
            "x": Told([3], notes, "train"), "validation_data": Told([2, 3, 1], notes, "held out"),
            "validation_freq": 2, "epochs": 4,
        },
        "validated in part": lambda: {
            "x": Told([3], notes, "train"), "validation_data": Told([3], notes, "held out"), "validation_steps": 2,
        },
    }[call]()  # fmt: skip


@pytest.mark.filterwarnings("ignore:Expected data for:UserWarning", "ignore:Your input ran out:UserWarning")
# Keras forks for processes.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
# Others in each run of CI.
@pytest.mark.parametrize("devices", [("CPU:0",), ("CPU:0", "CPU:1")], ids=["one", "two"])
@pytest.mark.parametrize("call", [
    *sampled(("fewer, then more", "validated every second epoch", "more steps than there are", "threads"), 2),
    *(
        pytest.param(call, marks=pytest.mark.slow)
        for call in sampled(
            ("as many each time", "processes", "without end", "ended early", "validated in part"), 3
        )
    ),
])  # fmt: skip
def test_hooks_are_called_and_batches_read_when_keras_does(call, devices):
    def fitted(strategy: tf.distribute.Strategy, fit: Any) -> tuple[list[str], dict[str, list[float]], list[Any]]:
        notes = list[str]()
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        history = fit(model, **({"epochs": 3, "verbose": 0, "shuffle": False} | arguments(call, notes))).history
        return notes, history, model.get_weights()

    notes, history, weights = fitted(tf.distribute.get_strategy(), keras.Model.fit)
    our_notes, ours, our_weights = fitted(strategies.mirrored(devices), pipeline.fit)
    assert our_notes == notes
    assert list(ours) == list(history)
    for name, values in history.items():
        assert ours[name] == pytest.approx(values, abs=1e-5), name
    for one, other in zip(our_weights, weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
