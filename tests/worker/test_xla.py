"""`train.xla`: steps that XLA compiles train to the losses of one device without it, under several replicas too."""

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
from two_devices import DEVICES

from pipeline.models import cnn, mlp, resnet20, transformer
from pipeline.private import context
from pipeline.strategies import central_storage, mirrored
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
