"""The engine of JAX without TensorFlow, beside one device and TensorFlow, and steps that XLA compiles or repeats."""

import contextlib
import json
import os
import subprocess
import sys
from functools import cache, partial

import keras
import numpy as np
import on_jax
import own
import pytest
import shards
import steps
import tensorflow as tf
from conftest import came, sampled
from loops import loop_over
from on_jax import QUICK
from scipy.sparse import csr_matrix
from two_devices import DEVICES

from pipeline.data import tfrecord
from pipeline.data.errors import DataError
from pipeline.models import cnn, mlp, resnet20, transformer
from pipeline.private import context
from pipeline.strategies import central_storage, mirrored
from pipeline.worker.data import batches, conversion
from pipeline.worker.jax import data
from pipeline.worker.jax.data import orders
from pipeline.worker.jax.devices import KEEPS_BARRIERS
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import build, profile


def by_tensorflow(make, arrays):
    return loop_over(make, arrays, batch=on_jax.BATCH)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(a folder of models that TensorFlow has trained, and their losses by name)."""
    folder = tmp_path_factory.mktemp("exchanged")
    return folder, on_jax.train(by_tensorflow, folder / "tensorflow")


@pytest.fixture(scope="module")
def wrote(without_tensorflow, saved):
    """What `support/on_jax.py` prints."""
    return came("on_jax", saved[0], python=without_tensorflow, **on_jax.ENVIRON)


@pytest.mark.slow
def test_batches_are_made_ready_by_a_thread_which_tells_what_fails_and_ends_where_nobody_wants_more(wrote):
    read = wrote["read"]
    steps = [batch for block in read["whole"] for batch in block]
    assert [len(batch) for batch in steps] == [16] * 6 + [4] + [16] * 2
    assert [value for batch in steps[:7] for value in batch] == list(range(100))
    assert steps[7:] == steps[:2]
    assert read["whole, on one core"] == read["strided"] == read["whole"]
    for name in ("too few", "too few, on one core"):
        assert read[name].startswith("index ")
    assert not read["whole, left"]
    assert not read["too few, left"]


@pytest.mark.slow
def test_steps_of_several_devices_of_one_process_do_not_wait_for_one_another_for_ever():
    # XLA's pool has a thread a device, and each step under way held one while it waited for the others' sums.
    assert 0 < came("on_jax", "many_steps", NPROC="1", timeout=120, **on_jax.ENVIRON) < 0.01


@pytest.mark.slow
def test_steps_are_made_in_loops_but_for_convolutions_on_a_cpu(wrote):
    room = {name: found["room"] for name, found in wrote["trained"].items()}
    assert room["mlp one"] == 39, "steps of an epoch"
    assert room["transformer both"] == 6
    assert room["normalized looped dropped"] == 4, "on a GPU, where an epoch has seven"
    assert room["normalized one"] is room["cnn one dropped"] is room["mlp stepped"] is None


@pytest.mark.slow
def test_every_mesh_trains_to_the_losses_of_one_device(wrote):
    for name, found in wrote["trained"].items():
        one = wrote["trained"][f"{name.split()[0]} one{' dropped' * name.endswith('dropped')}"]
        assert len(found["losses"]) == sum(on_jax.CALLS)
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=0, atol=1e-5, err_msg=name)
        assert len(set(found["digests"])) == 1
        assert found["handed_on"], name
        if "validated" in found:
            assert found["validated"] == pytest.approx(one["validated"], abs=1e-5)
            assert found["same"], "steps that were made for time alone are put back"


@pytest.mark.slow
def test_a_replica_of_two_devices_holds_half_on_each_and_slots_are_where_their_weights_are(wrote):
    for name in ("mlp", "normalized", "cnn", "transformer"):
        found = {key.split()[1]: value for key, value in wrote["trained"].items() if key.split()[0] == name}
        cut = found.get("both") or found["model"]
        assert cut["held"] < 0.6 * found["one"]["held"], name
        slots = {f"{one.replace('/', '_')}_{slot}": one for one in cut["cut"] for slot in ("momentum", "velocity")}
        for path, place in cut["places"].items():
            assert place == cut["places"][slots.get(path.partition("/")[2], path)], path
    # Kernels are cut by column, then by row, attention by heads, and embeddings by rows.
    cut = wrote["trained"]["transformer both"]["cut"]
    assert cut["embedding/embeddings"] == ["model", None]
    for name in ("attention/query", "attention/key", "attention/value", "widen"):
        assert cut[f"block_1/{name}/kernel"] == [None, "model"]
    for name in ("attention/projection", "narrow"):
        assert cut[f"block_1/{name}/kernel"] == ["model", None]


@pytest.mark.slow
def test_a_written_layout_that_matches_nothing_twice_or_no_shape_is_refused_and_groups_of_channels_over_a_mesh(wrote):
    nothing, twice, unfit, grouped = wrote["trained"]["mlp both"]["refused"]
    assert "received kernel, which matches none of dense" in nothing
    assert "Try .*kernel.*" in nothing
    assert "which both match dense" in twice
    assert "that divide it evenly, received [model]" in unfit
    assert grouped.startswith("(2, 2): Expected no convolution of groups of channels")
    assert "Try workers=1, or strategy=mirrored" in grouped


@pytest.mark.slow
def test_tensorflow_trains_to_the_same_losses_from_the_same_weights_and_each_goes_on_with_what_the_other_saved(
    saved, wrote
):
    (folder, losses), steps = saved, sum(on_jax.CALLS)
    by_jax = wrote["exchanged"]
    ours = {of: on_jax.go_on(by_tensorflow, folder / of) for of in on_jax.BACKENDS}
    for name in on_jax.EXCHANGED:
        assert len(losses[name]) == len(by_jax["train"][name]) == steps
        np.testing.assert_allclose(losses[name], by_jax["train"][name], rtol=0, atol=1e-3, err_msg=name)
        # It has learnt: what comes to nothing would be alike, too.
        assert np.mean(losses[name][-9:]) < np.mean(losses[name][:9]) - 0.01, name
        gone_on = [found[of][name] for found in (ours, by_jax) for of in on_jax.BACKENDS]
        for rest, iterations in gone_on:
            # With the optimizer's state: it counts on.
            assert iterations == steps + on_jax.MORE
            np.testing.assert_allclose(rest, gone_on[0][0], rtol=0, atol=1e-3, err_msg=name)
            assert np.mean(rest) < np.mean(losses[name][:9]), name


@pytest.mark.slow
def test_models_of_which_no_example_meets_another_before_the_loss_have_a_bucket_that_is_one_array_and_adds_the_same():
    for name, of in came("bucketed", **on_jax.ENVIRON).items():
        assert of["fits"] == of["expected"], name
        assert not of["others"], "one device, or one cut over several, exchange none"
        if of["fits"]:
            assert " ".join(of["sums"]).count("f32") == 1, (name, of["sums"])
            assert of["far"]["whole"] < 1e-6, name
            # Batches that do not divide evenly, and those whose examples have weights, go without.
            assert of["far"].get("short", 0) == of["far"].get("weighted", 0) == 0, name


def test_the_order_of_an_epoch_is_that_of_tensorflow():
    for examples, seed, epoch in ((1, 0, 0), (2, 3, 4), (7, 12345, 9), (1438, 0, 0), (9, 2**31 - 1, 5)):
        for number, drawn in enumerate(orders(examples, seed, range(epoch, epoch + 3)), start=epoch):
            expected = batches.order(examples, seed, tf.constant(number, tf.int64)).numpy()
            np.testing.assert_array_equal(drawn, expected)


# Has each program compiled by a process of its own, a fork of one that has imported all.
COMPILES = """
import json, os, sys
from pathlib import Path
import jax
from pipeline.worker.jax import step
for line in sys.stdin:
    folder, factor, most = json.loads(line)
    if not os.fork():
        step.MOST_BYTES = most
        step.keep(Path(folder))
        print(jax.jit(lambda x: x * factor)(2.0), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def compiled(tmp_path):
    """Compiles a program that multiplies by a number, where so many bytes are kept; returns what is then kept."""
    pipes, environ = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}, os.environ | {"KERAS_BACKEND": "jax"}

    def kept(factor, most=1 << 30):
        print(json.dumps([str(tmp_path), factor, most]), file=process.stdin, flush=True)
        assert float(process.stdout.readline()) == 2 * factor
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in tmp_path.glob("*/*")}

    with subprocess.Popen([sys.executable, "-c", COMPILES], env=environ, text=True, **pipes) as process:
        yield kept
        process.stdin.close()


def test_a_program_of_which_only_a_part_is_there_is_compiled_again_and_those_used_least_recently_go(compiled):
    (first,) = one = compiled(3)
    assert compiled(3) == one
    size = one[first][0]
    first.write_bytes(first.read_bytes()[: size // 2])
    one = compiled(3)
    assert one[first][0] == size
    both = compiled(4)
    assert len(both) == 2
    # The first one is used again.
    assert compiled(3) == both
    left = compiled(5, most=int(2.5 * one[first][0]))
    assert len(left) == 2
    assert first in left
    assert left.keys() - both


def test_prepared_files_are_read_without_tensorflow_also_without_what_is_broken(tmp_path):
    train, validation = tfrecord(path=str(shards.write(tmp_path, [5, 3], [2])))
    x, y = data._arrays(train)
    assert (x.dtype, x.shape, y.dtype, y.tolist()) == (np.float32, (8, 4), np.int32, list(range(8)))
    np.testing.assert_array_equal(x[:, 0], np.arange(8, dtype=np.float32) / 100)
    shards.flip(tmp_path, 0, (2, 20))
    (flaw,) = train.look(train, 0, 1, True)
    assert data._arrays(train.without([flaw]))[1].tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert data._arrays(validation)[1].tolist() == [8, 9]


def test_none_is_weights_or_labels_that_are_not_there_and_refused_in_any_other_place():
    x, y = np.zeros((3, 2), np.float32), np.array([0, 1, 2])
    assert len(data._known((x, y, None), "train")) == 2
    for part in ((x, None, y), ({"a": x, "b": None}, y), (x, {"a": y, "b": None}), ((x, None), y)):
        with pytest.raises(DataError, match=r"None\. Try (leaving it out|zeros as y)"):
            data._known(part, "train")


def test_lists_are_arrays_wherever_they_are_as_under_tensorflow():
    lists = {"a": [1.0, 2.0], "b": ({"c": [[1], [2]]}, {"c": (3, 4)})}
    for x, y in (data._known((lists, [0, 1]), "train"), conversion.part((lists, [0, 1]), "training")):
        found = [(leaf.dtype.name, leaf.tolist()) for leaf in (x["a"], *(one["c"] for one in x["b"]), y)]
        assert found == [("float32", [1.0, 2.0]), ("int64", [[1], [2]]), ("int64", [3, 4]), ("int64", [0, 1])]
    assert data._count(data._known(([], []), "train")) == 0
    # And arrays of another byte order are those of this machine.
    (x,) = data._known((np.array([1.5, 2.0], ">f4"),), "train")
    assert x.dtype.isnative
    assert x.tolist() == [1.5, 2.0]


@pytest.mark.parametrize(("part", "words"), [
    (([[1.0], [1.0, 2.0]], [0, 1]), "rows of one length"),
    ((np.ones(2, np.longdouble), [0, 1]), r"numbers .* Try \.astype"),
    ((csr_matrix(np.eye(2)), [0, 1]), r"Try \.toarray\(\)"),
    (np.eye(2), r"one array, of shape \[2, 2\]\. Try return \(x, y\), None"),
    (tf.data.Dataset.range(3), "received a _RangeDataset"),
])  # fmt: skip
def test_arrays_that_are_others_are_refused_with_what_makes_them_right(part, words):
    with pytest.raises(DataError, match=words):
        data._known(part, "train")


def test_numbers_that_jax_would_wrap_or_make_infinite_are_refused():
    for array in (np.array([1, 3_000_000_000]), np.array([2**40], np.uint64), np.array([-1e300, np.nan])):
        with pytest.raises(DataError, match="Try backend=tensorflow"):
            data._check_range(array, "training")
    for array in (np.array([1, -5]), np.array([3_000_000_000], np.uint32), np.array([1e30, np.inf]), np.array([True])):
        data._check_range(array, "training")


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


@pytest.mark.slow
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
    sampled([(kind, name) for kind in KINDS for name in STRATEGIES if (kind, name) != ("own step", "central")], 3),
)
def test_models_train_as_one_device_does(kind, name):
    _, part, count = KINDS[kind]
    by_xla = of_kind(name, kind)
    profile.settle(by_xla, part, "true")
    assert_equal(on_one_device(kind), trained(by_xla, count))


@pytest.mark.slow
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


@pytest.mark.slow
def test_blocks_that_compute_again_draw_the_same_and_train_to_the_same_losses():
    kept, forgot = (under("mirrored", partial(BLOCKS, dropout=0.3), TOKENS) for _ in range(2))
    build.forget(forgot.model)
    assert_equal(trained(kept, 4), trained(forgot, 4))


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
    cases = ["one", *sampled(("dropped", "mirrored", "model"), 1)]
    for flags, meshes in (("", ["one"]), (KEEPS_BARRIERS, cases)):
        found[flags] = came("on_jax", "forgetting", *meshes, KERAS_BACKEND="jax", XLA_FLAGS=f"{QUICK} {flags}")
    # What happens without: as much memory, and not a word.
    silent = found[""]
    assert silent["one True"]["temporary"] > 0.95 * silent["one False"]["temporary"]
    for mesh in cases:
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
