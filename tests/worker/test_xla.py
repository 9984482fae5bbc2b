"""Steps that XLA compiles, and blocks that are computed again, train to the losses of one device without that."""

import contextlib
from functools import cache, partial

import keras
import numpy as np
import own
import pytest
import steps
import tensorflow as tf
from conftest import sampled
from loops import loop_over
from on_jax import QUICK
from scripts import came
from two_devices import DEVICES

from pipeline.models import cnn, mlp, resnet20, transformer
from pipeline.private import context
from pipeline.strategies import central_storage, mirrored
from pipeline.worker.jax.devices import KEEPS_BARRIERS
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import build, profile

BATCH = 8
NUMBERS = np.random.default_rng(3)
IMAGES = NUMBERS.random((20, 8, 8, 3), np.float32), NUMBERS.integers(0, 10, 20, np.int32)
TOKENS = NUMBERS.integers(0, 16, (20, 8), np.int32), NUMBERS.integers(0, 16, (20, 8), np.int32)
STRATEGIES = {"one": tf.distribute.get_strategy, "mirrored": partial(mirrored, DEVICES),
              "central": partial(central_storage, DEVICES)}  # fmt: skip
# Convolution, and normalization over the global batch.
SMALL = partial(own.normalised, (8, 8, 3), 10)


def under(name, make, part=IMAGES, accumulated=None, **settings):
    """The loop of a model under a strategy, whose last batches are shorter."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    strategy = STRATEGIES[name]()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=accumulated)
    return loop_over(make, part, strategy, BATCH, optimizer=optimizer, **settings)


def trained(loop, count=7):
    """(losses of the steps, weights after them)."""
    losses = loop.call(count).losses[:, 0]
    return losses, [np.array(variable.value) for variable in loop.model.weights]


def assert_equal(one, other):
    for expected, received in zip([one[0], *one[1]], [other[0], *other[1]], strict=True):
        np.testing.assert_allclose(received, expected, rtol=0, atol=1e-5)


@contextlib.contextmanager
def pieces_of_xla():
    """Gives what XLA runs of the functions that are called inside, by name."""
    ran = []
    # Graphs are told of functions that are called first while it is on.
    context.context().enable_run_metadata()
    yield ran
    metadata = context.context().export_run_metadata()
    context.context().disable_run_metadata()
    graphs = [graph for one in metadata.function_graphs for graph in one.partition_graphs]
    ran += [node.name for graph in [*graphs, *metadata.partition_graphs] for node in graph.node if node.op == "_XlaRun"]


def test_what_xla_compiles_trains_as_one_device_does_without_it():
    expected, loop = trained(under("one", SMALL)), under("mirrored", SMALL)
    with pieces_of_xla() as ran:
        note, facts = profile.settle(loop, IMAGES, "true")
    assert ran
    assert note.startswith("XLA compiled the step before training, in ")
    assert facts.keys() == {"xla", "seconds_compiling"}
    assert facts["xla"]
    assert facts["seconds_compiling"] > 0
    profile.seed(loop, 5)
    with pieces_of_xla() as again:
        received = trained(loop)
    assert not again, "compiled again"
    assert_equal(expected, received)


BLOCKS = partial(transformer, input_shape=(8,), num_classes=16, blocks=2, width=16, heads=2, dropout=0.0)
# A model, its data, and how many steps it trains.
KINDS = {
    "mlp": (partial(mlp, input_shape=(8, 8, 3), num_classes=10), IMAGES, 5),
    "cnn": (partial(cnn, input_shape=(8, 8, 3), num_classes=10, dropout=0.0), IMAGES, 5),
    # An activation near 0 falls on the other side of it by rounding, sooner or later, with and without XLA.
    "resnet": (partial(resnet20, input_shape=(8, 8, 3), num_classes=10, blocks_per_stage=1), IMAGES, 2),
    "transformer": (BLOCKS, TOKENS, 5),
    # Rows of a table, and a mask, by which the loss is divided over replicas.
    "masked": (own.masked, own.padded_data(20)[0], 5),
    "own step": (steps.by_keras, steps.points()[0], 5),
    "accumulated": (SMALL, IMAGES, 5),
    "remat": (BLOCKS, TOKENS, 5),
}


def of_kind(name, kind):
    make, part, _ = KINDS[kind]
    loop = under(name, make, part, 2 if kind == "accumulated" else None)
    if kind == "remat":
        build.forget(loop.model)
    return loop


@cache
def on_one_device(kind):
    """What a model comes to on one device without XLA, once for all strategies."""
    return trained(of_kind("one", kind), KINDS[kind][2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    # Of two replicas whose variables are on the host, a step of its own is the same. Others in each run of CI.
    sampled([(kind, name) for kind in KINDS for name in STRATEGIES if (kind, name) != ("own step", "central")], 7),
)
def test_models_train_as_one_device_does(kind, name):
    _, part, count = KINDS[kind]
    by_xla = of_kind(name, kind)
    profile.settle(by_xla, part, "true")
    assert_equal(on_one_device(kind), trained(by_xla, count))


def test_auto_keeps_the_faster_and_changes_nothing_of_training():
    untouched, loop = under("mirrored", SMALL), under("mirrored", SMALL)
    note, facts = profile.settle(loop, IMAGES, "auto")
    assert ("XLA compiles no step" in note) == (loop.xla is None) == (facts["xla_speedup"] <= 1)
    assert facts["xla"] == (facts["xla_speedup"] > 1)
    assert "(train.xla=auto)" in note
    assert_equal(trained(untouched), trained(loop))


def test_what_xla_has_no_compiler_for_stays_and_is_named():
    def reading():
        text = keras.layers.Lambda(lambda x: x + tf.cast(tf.strings.length(tf.as_string(x)), tf.float32) * 0)
        return keras.Sequential([keras.Input((8, 8, 3)), text, keras.layers.Flatten(), keras.layers.Dense(10)])

    loop = under("one", reading, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pieces_of_xla() as ran:
        note, _ = profile.settle(loop, IMAGES, "true")
    assert ran
    assert "without AsString, StringLength, which it has no compiler for" in note


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
