"""What a run does not choose of how a model is compiled stays, also in what is saved of it."""

import keras
import numpy as np
import pytest

from pipeline.worker.compiling import compile_anew

X, Y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)


def compiled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("adam", "mse", loss_weights=0.5, metrics=["mae"])
    return model


@pytest.mark.parametrize(
    ("loss", "metrics", "wanted"),
    [
        (None, None, {"loss": 4.5, "mae": 3.0}),
        ("mae", None, {"loss": 3.0, "mae": 3.0}),
        (None, ["mse"], {"loss": 4.5, "mse": 9.0}),
        ("mae", ["mse"], {"loss": 3.0, "mse": 9.0}),
    ],
)
def test_a_saved_model_evaluates_as_it_was_trained(tmp_path, loss, metrics, wanted):
    model = compiled()
    compile_anew(model, "sgd", loss, metrics)
    assert model.evaluate(X, Y, verbose=0, return_dict=True) == pytest.approx(wanted)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.evaluate(X, Y, verbose=0, return_dict=True) == pytest.approx(wanted)
    assert isinstance(loaded.optimizer, keras.optimizers.SGD)
