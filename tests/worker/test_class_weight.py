"""Examples are weighed by class as Keras's `fit` weighs them, whatever kind of data they are in, under JAX too."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import QUICK, Ran

from pipeline.data.errors import DataError
from pipeline.data.examples import Examples, Leaf
from pipeline.worker.data.conversion import weighed
from pipeline.worker.jax import data

WEIGHTS = {0: 0.5, 2: 4.0}
X = np.arange(12, dtype="float32").reshape(6, 2)
Y = np.array([0, 1, 2, 2, 7, 0], "int32")
LABELS = {
    "numbers": Y, "a column": Y[:, None], "floats": Y.astype("float32"), "one-hot": np.eye(8, dtype="float32")[Y]
}  # fmt: skip


def by_keras(y: np.ndarray) -> list[float]:
    """The weights that Keras gives a model for such labels."""
    seen = []

    class Seeing(keras.Model):
        def call(self, x):
            return x[:, :1]

        def train_step(self, data):
            seen.extend(data[2].numpy().tolist())
            return {"loss": tf.zeros(())}

    model = Seeing()
    model.compile(run_eagerly=True)
    model.fit(X, y, batch_size=6, shuffle=False, class_weight=WEIGHTS, verbose=0)
    return seen


@pytest.mark.parametrize("kind", LABELS)
def test_arrays_data_sets_and_made_examples_get_the_weights_that_keras_gives(kind):
    y, expected = LABELS[kind], [0.5, 1.0, 4.0, 4.0, 1.0, 0.5]
    spec = (Leaf((2,), "float32"), Leaf(y.shape[1:], str(y.dtype)))
    decoded = weighed(Examples((X, y), spec, decode=lambda example: example), WEIGHTS)
    parsed = weighed(Examples((X, y), spec, parse=lambda batch: batch), WEIGHTS)
    for weights in (
        by_keras(y),
        weighed((X, y), WEIGHTS)[2],
        weighed((X, y, np.full(6, 2.0)), WEIGHTS)[2] / 2,
        weighed((X, y, np.full((6, 1), 2.0)), WEIGHTS)[2][:, 0] / 2,
        data._weighed((X, y), WEIGHTS)[2],
        data._weighed((X, y, np.full((6, 1), 2.0)), WEIGHTS)[2][:, 0] / 2,
        [weight for *_, weight in weighed(tf.data.Dataset.from_tensor_slices((X, y)), WEIGHTS)],
        weighed(Examples((X, y), spec), WEIGHTS).raw[2],
        [decoded.decode((X[place], y[place]))[2] for place in range(6)],
        parsed.parse((X, y))[2],
    ):
        assert list(map(float, weights)) == expected
    # A label beyond 32 bits is no small class.
    assert weighed((X, Y.astype(np.int64) + 2**32), WEIGHTS)[2].tolist() == [1.0] * 6


@pytest.mark.parametrize(("part", "words"), [
    ((X,), "received data of x alone"),
    ((X, {"a": Y, "b": Y}), "labels of 2 outputs"),
    ((X, X[:, :, None]), r"\[2, 1\]"),
])  # fmt: skip
def test_data_without_one_label_an_example_are_refused(part, words):
    with pytest.raises(DataError, match=words):
        weighed(part, WEIGHTS)


@pytest.mark.parametrize("given", "{0:-1} {0:x} {0:1,a:2} {} [1,2] {0:inf} {1.5:2} {0:0}".split())
def test_a_wrong_value_is_refused_in_words(asked, given):
    ran: Ran = asked(*QUICK, "mode=plan", f"train.class_weight={given}").failed(2)
    assert "Expected train.class_weight to give numbers of classes weights" in ran.err
    assert "Try train.class_weight='{0: 1.0, 1: 5.0}', or null." in ran.err
