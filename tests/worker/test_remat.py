"""`train.remat`: blocks that are computed again train to the same losses in less memory, under both engines."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loops import loop_over
from on_jax import QUICK
from scripts import came
from two_devices import DEVICES

from pipeline.models import cnn, transformer
from pipeline.strategies import mirrored
from pipeline.worker.jax.devices import KEEPS_BARRIERS
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import build


def of_transformer(strategy, forgets):
    """The loop of a small transformer with dropout, whose blocks compute again or do not."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    sizes = {"input_shape": (32,), "num_classes": 64, "blocks": 2, "width": 32, "heads": 2, "dropout": 0.3}
    drawn = np.random.default_rng(7).integers(0, 64, (64, 33), dtype=np.int32)
    loop = loop_over(lambda: transformer(**sizes), (drawn[:, :-1], drawn[:, 1:]), strategy)
    if forgets:
        build.forget(loop.model)
    return loop


@pytest.mark.slow
@pytest.mark.parametrize("make", [tf.distribute.get_strategy, lambda: mirrored(DEVICES)], ids=["one", "two"])
def test_blocks_that_compute_again_train_to_the_same_losses(make):
    strategy = make()
    kept, forgot = (of_transformer(strategy, forgets) for forgets in (False, True))
    losses = [loop.call(4).losses[:, 0] for loop in (kept, forgot)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-6)
    for name, array in kept.state().arrays.items():
        np.testing.assert_allclose(forgot.state().arrays[name], array, rtol=0, atol=1e-5, err_msg=name)


def test_a_model_of_plain_layers_is_refused_since_it_would_keep_as_much():
    with pytest.raises(ModelError, match=r"a model of several blocks, layers made of layers.*received cnn with 0"):
        build.forget(cnn(input_shape=(28, 28, 1), num_classes=10))


@pytest.mark.parametrize("mode", ["full", "larger_than", "list_of_layers", "activations"])
def test_layers_that_keras_cannot_compute_again_in_a_graph_are_refused(mode):
    def make():
        with keras.RematScope(mode=mode, layer_names=["head"]):
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax", name="head")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    part = np.zeros((16, 6), np.float32), np.zeros(16, np.int32)
    if mode == "activations":
        assert loop_over(make, part).call(1).steps == 1
        return
    with pytest.raises(ModelError, match=f"without keras.RematScope.*with mode='{mode}'.*train.remat=true"):
        loop_over(make, part)


@pytest.mark.slow
def test_under_jax_too_where_xla_keeps_the_barriers_and_in_silence_not_where_it_does_not():
    found = {}
    for flags, meshes in (("", ["one"]), (KEEPS_BARRIERS, ["one", "dropped", "mirrored", "model"])):
        found[flags] = came("on_jax", "forgetting", *meshes, KERAS_BACKEND="jax", XLA_FLAGS=f"{QUICK} {flags}")
    # What happens without: as much memory, and not a word.
    silent = found[""]
    assert silent["one True"]["temporary"] > 0.95 * silent["one False"]["temporary"]
    for mesh in ("one", "dropped", "mirrored", "model"):
        before, after = (found[KEEPS_BARRIERS][f"{mesh} {forgets}"] for forgets in (False, True))
        np.testing.assert_allclose(after["losses"], before["losses"], rtol=0, atol=1e-6, err_msg=mesh)
        assert after["temporary"] < 0.7 * before["temporary"], mesh


def test_a_block_that_adds_a_loss_is_refused_which_would_count_it_twice():
    class Adding(keras.layers.Layer):
        def build(self, shape):
            self.dense = keras.layers.Dense(4, activity_regularizer="l2")
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    model = keras.Sequential([keras.Input((4,)), Adding(), Adding()])
    build.forget(model)
    with pytest.raises(ModelError, match="Expected blocks that add no loss"):
        model(np.zeros((2, 4), "float32"))
