"""Asynchronous workers on parameter servers: exact where one trains, counted right and never lost where several do."""

import dataclasses
import itertools
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import own
import pytest
import tensorflow as tf
import whole
from conftest import CONF, QUICK, Ran, UnderWay, came, events, left_behind, sampled
from equality import assert_equal, sweep

from pipeline.worker.data.batches import Data
from pipeline.worker.data.source import Source, source
from pipeline.worker.layout import BatchLayout, Position
from pipeline.worker.model_error import ModelError, TrainingError
from pipeline.worker.tensorflow import scheduled as servers
from pipeline.worker.tensorflow import tables

RACING = ("strategy=parameter_server", "workers=2")
ONE = ("strategy=one_device,parameter_server", "workers=1")
MODELS = (
    *(("model=normalised", "data=numbered", f"model.build.optimizer={optimizer}", "train.class_weight={0: 3.0, 4: 0.5}")
      for optimizer in ("sgd", "adam", "clipped", "overwritten", "scheduled")),
    *(("model=two_headed", "data=two_headed", f"data.build.weighted={weighted}", f"model.build.reduction={reduction}")
      for weighted in ("false", "true") for reduction in ("sum", "mean_with_sample_weight")),
    ("model=masked", "data=padded"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", sampled(MODELS, 1))
def test_one_worker_trains_what_one_device_trains_whatever_the_model(pipeline, model):
    (folders,) = sweep(pipeline, 2, *ONE, *model).values()
    assert_equal(folders)


@pytest.mark.slow
def test_tables_in_shards_on_two_servers_train_and_load_as_whole_ones(pipeline):
    log = ("model=recommender", "data=clicks", "data.build.train_examples=2500", "data.build.validation_examples=1000")
    servers = ("strategy.parameter_servers=2", "strategy.min_shard_bytes=4000")
    (folders,) = sweep(pipeline, 2, *ONE, *log).values()
    cut = pipeline(
        *QUICK, "train.steps=20", "train.global_batch=32", "train.steps_per_call=5", "strategy=parameter_server",
        "workers=1", *log, *servers,
    ).ok()  # fmt: skip
    assert "warning: hidden_0/kernel (14,336 bytes) stays whole on one server: only embeddings can be cut." in cut.out
    assert_equal([*folders, *(folder for folder in cut.run_folders if folder not in folders)])


@pytest.mark.slow
def test_racing_workers_see_each_example_once_an_epoch_and_every_step_is_applied(pipeline):
    ran = pipeline(
        *QUICK, *RACING, f"--config-dir={CONF}", "data=numbered", "model=tiny", "train.epochs=3",
        "train.replica_batch=8", "train.steps_per_call=1",
        "model.build._target_=own.counting", "data.build._target_=own.serial_arrays", "data.build.examples=203",
    ).ok()  # fmt: skip
    serial = np.arange(203)
    for epoch in ran.events("epoch"):
        counted = [epoch["metrics"][f"labels_{place}"] for place in range(3)]
        assert counted == pytest.approx([203, serial.sum(), np.square(serial).sum()], rel=1e-6)
        assert epoch["val_metrics"]["labels_0"] == 203
    steps = ran.events("steps")
    assert sum(event["examples"] for event in steps) == 3 * 203
    assert [event["step"] for event in steps] == sorted(event["step"] for event in steps)
    result = ran.result
    assert (result["examples"], result["asynchronous"], result["restarts"]) == (3 * 203, True, 0)
    assert result["steps"] == result["updates"] == 3 * 26 == sum(result["worker_steps"].values())
    assert set(result["worker_steps"]) == {"worker 1", "worker 2"}
    assert 0 <= result["staleness_mean"] <= result["staleness_max"]
    assert any(note.startswith("Asynchronous") for note in result["notes"])
    assert "staleness" in ran.out


@pytest.mark.slow
def test_the_parameter_server_tutorial_s_fit_trains_and_counts_every_step():
    told = came("tutorial", timeout=240)
    assert "To use this dataset, you need to pass this dataset to ClusterCoordinator" in told["keras"]
    losses = told["tutorial"]["loss"]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert told["updates"] == 5 * 20
    digits = told["digits"]
    assert set(digits) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert digits["val_accuracy"][-1] > 0.8
    # Early stopping after the second of five epochs; no step more or less than asked for.
    assert len(told["stopped"]["loss"]) == 2
    assert told["net_updates"] == 2 * 125 + 2 * 10
    assert len(told["batches"]["loss"]) == 2
    assert told["predicted"] > 0.8
    assert "received an unknown number" in told["unknown"]
    assert "steps_per_epoch" in told["unknown"]


def test_asynchronous_workers_refuse_what_is_no_sum_and_gathering(pipeline, asked):
    ran = pipeline(*QUICK, "strategy=parameter_server", "workers=1", *whole.NAMED).failed()
    assert "received largest (Largest), whose state is no" in ran.err
    refused = asked("strategy=parameter_server", "train.gather=true", "mode=plan").failed(2)
    assert "Expected train.gather=false" in refused.err


def trained(made: Source, count: int) -> list[list[float]]:
    """The labels of the batches that the next steps train, where one worker makes them."""
    rows, edges = made.rows(count)
    batches = iter(made.made())
    return [made.batch(batches, rows, *pair)[1].numpy().tolist() for pair in itertools.pairwise(edges)]


@pytest.mark.parametrize("data", [own.serial_arrays, own.serial_set])
def test_steps_from_a_position_train_what_they_would_have_trained(data):
    layout = BatchLayout(global_batch=12, replicas=1, first=0, local=1, counts=(50,))
    part = data(50)[0]
    train = Data(part, layout, shuffle=True, seed=1)
    whole = trained(source(train, [part], 1), 20)
    for epoch, step in [(0, 2), (1, 4), (1, 5), (2, 0)]:
        rest = source(train, [part], 1, Position(epoch, step * 12))
        assert trained(rest, 5) == whole[epoch * 5 + step :][:5]
    other = Data(part, dataclasses.replace(layout, global_batch=20), shuffle=True, seed=1)
    rest = trained(source(other, [part], 1, Position(0, 24)), 5)
    assert [len(batch) for batch in rest] == [20, 6, 20, 20, 10]
    assert sorted(itertools.chain(*whole[:2], *rest[:2])) == sorted(itertools.chain(*rest[2:])) == list(range(50))


@pytest.mark.parametrize("shards", [1, 2])
def test_of_a_data_set_each_worker_goes_on_where_its_share_would_have_been(shards, monkeypatch):
    layout = BatchLayout(global_batch=4, replicas=1, first=0, local=1, counts=(50,))
    part = own.serial_set(50)[0]
    parts = [part] if shards == 1 else [part.take(26), part.skip(26)]
    train = Data(part, layout, shuffle=True, seed=1)

    def labels(worker: int, position: Position, examples: int) -> list[float]:
        # What a worker's own process would say.
        monkeypatch.setattr(tf.distribute.coordinator, "experimental_get_current_worker_index", lambda: worker)
        made = source(train, parts, 2, position).made()
        return [float(label) for _, label in made.unbatch().take(examples)]

    begun = [labels(worker, Position(), 24) for worker in range(2)]
    # Of 16 examples, 8 stand for each worker's; a worker's epochs follow each other within a batch.
    assert [labels(worker, Position(0, 16), 16) for worker in range(2)] == [each[8:] for each in begun]
    assert not {*begun[0]} & {*begun[1]}
    second = [labels(worker, Position(1), 24) for worker in range(2)]
    assert [len({*each}) for each in second] == [24, 24]
    assert all(each != before for each, before in zip(second, begun, strict=True))


def harmed(folder: Path, rank: int, number: int, *arguments: str) -> Ran:
    """Starts a long run of two asynchronous workers and sends a process a signal midway; returns how it ended."""
    with UnderWay(folder, *QUICK, *RACING, "data=digits", "model=mlp", *arguments) as run:
        run.until_told("steps", 3)
        run.harm(number, rank)
        return run.ended(150)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number", "steps", "more", "words"), sampled([
    (1, signal.SIGKILL, 1_500, (), "worker 1 was killed by SIGKILL. It was started again"),
    (2, signal.SIGSTOP, 3_000, ("launch.heartbeat_timeout=8",),
     "worker 2 gave no sign of life for 8 s: it is stopped. It was started again"),
], 1))  # fmt: skip
def test_a_worker_that_is_gone_is_replaced_and_no_step_is_lost(tmp_path, rank, number, steps, more, words):
    ran = harmed(tmp_path, rank, number, f"train.steps={steps}", "train.steps_per_call=10", *more).ok()
    result = ran.result
    assert (result["status"], result["restarts"], result["steps"]) == ("FINISHED", 1, steps)
    assert any(words in note for note in result["notes"]), result["notes"]
    assert f"warning: {words}" in ran.out
    assert result["examples"] == sum(event["examples"] for event in ran.events("steps"))
    # A step that was under way is made again: it may have been applied before.
    assert steps <= result["updates"] <= steps + 10
    assert ran.events("steps")[-1]["step"] == steps
    assert [event["rank"] for event in events(tmp_path) if event["event"] == "started"].count(rank) == 2
    assert not left_behind(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number", "words"), sampled([
    (1, signal.SIGKILL, "worker 1 was killed by SIGKILL"), (3, signal.SIGKILL, "parameter server 3 was killed by SIG"),
    (0, signal.SIGKILL, "coordinator 0 was killed by SIGKILL"), (3, signal.SIGSTOP, "parameter server 3 gave no sign"),
    (0, signal.SIGSTOP, "coordinator 0 gave no sign of life"),
], 1))  # fmt: skip
def test_whoever_is_gone_is_named_within_a_minute(tmp_path, rank, number, words):
    patience = ("launch.max_restarts=0", "launch.heartbeat_timeout=10")
    ran = harmed(tmp_path, rank, number, "train.epochs=500", *patience).failed()
    assert words in ran.err
    assert ran.result["status"] == "FAILED"
    assert ran.seconds < 60
    assert not left_behind(tmp_path)


def test_too_few_examples_and_what_python_generates_and_is_too_large_are_refused(monkeypatch):
    monkeypatch.setattr("pipeline.worker.data.source.MOST_READ", 100)
    for part, count, words in (
        (own.generated_set()[0], 50, r"at most 100 bytes .* Try files: python -m pipeline prepare data.build"),
        (own.serial_set(1)[0], 1, "Expected training examples for each of 2 workers"),
    ):
        with pytest.raises(TrainingError, match=words):
            source(Data(part, BatchLayout(4, 1, 0, 1, (count,)), False, 0), [part], 2)


def made(optimizer: Any = "adam", **embedding: Any) -> keras.Model:
    """A compiled and built model with one embedding of 7 rows of 4 numbers, 112 bytes."""
    keras.utils.set_random_seed(0)
    inner = [keras.layers.Embedding(7, 4, name="table", **embedding), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *inner, keras.layers.Dense(1, name="tower")])
    model.compile(optimizer, loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_a_table_in_shards_is_the_whole_table():
    ids = np.array([[0, 6, 3], [2, 2, 5]])
    plain = made()
    with tables.on_servers(servers=3, min_shard_bytes=30):
        cut = made()
    assert [tuple(each.shape) for each in cut.layers[0].weights] == [(3, 4), (2, 4), (2, 4)]
    np.testing.assert_allclose(cut(ids), plain(ids), rtol=1e-6)
    np.testing.assert_allclose(cut.layers[0].embeddings, plain.layers[0].embeddings)
    for model in (plain, cut):
        model.optimizer.learning_rate = 0.1
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(ids) - 1.0))
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    whole = tables.whole(cut, made)
    ours, theirs = (one.weights + one.optimizer.variables for one in (whole, plain))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert type(whole.layers[0]) is keras.layers.Embedding
    assert tables.whole(whole, made) is whole is not cut


def with_lora(model, folder):
    """The model with a table that is adapted."""
    model.layers[0].enable_lora(2)
    model.layers[0].lora_embeddings_b.assign(np.ones((2, 4)))
    return model


def loaded(model, folder):
    """The model with weights from a file, of a model without servers where there is one."""
    file, without_optimizer = folder / "its.weights.h5", keras.Model(model.inputs, model.outputs)
    if not file.exists():
        without_optimizer.save_weights(file)
    without_optimizer.load_weights(file)
    return model


def filled(model, folder):
    """The model with a table of other numbers."""
    model.layers[0].set_weights([np.arange(28.0).reshape(7, 4)])
    return model


@pytest.mark.parametrize(("least", "of"), [(None, with_lora), *itertools.product((None, 30), (
    loaded, filled, lambda model, folder: keras.models.clone_model(model),
    lambda model, folder: keras.Sequential.from_config(model.get_config()),
))])  # fmt: skip
def test_a_table_on_servers_is_changed_copied_and_read_as_one_without_servers(least, of, tmp_path):
    ids = np.array([[0, -1, 3], [2, 2, -7]])
    plain = of(made(), tmp_path)
    with tables.on_servers(servers=3, min_shard_bytes=least):
        on_servers = of(made(), tmp_path)
    assert len(tables.shards(on_servers)) == (1 if least is None else 3)
    np.testing.assert_allclose(on_servers(ids), plain(ids), rtol=1e-6)


class Tied(keras.Model):
    """Gives words, and takes them, by one table, which is made in its first call."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(7, 4)

    def call(self, ids):
        return keras.ops.matmul(self.table(ids), keras.ops.transpose(self.table.embeddings))


@pytest.mark.parametrize("least", [None, 30])
def test_a_table_is_made_in_a_call_that_only_asks_for_shapes(least):
    with tables.on_servers(servers=3, min_shard_bytes=least):
        model = Tied()
        model(keras.Input((3,), dtype="int32"))
    expected = np.dot(model.table.embeddings, np.transpose(model.table.embeddings))
    np.testing.assert_allclose(model(np.array([[1, 6, 6]]))[0], expected[[1, 6, 6]], rtol=1e-5)


@pytest.mark.parametrize(("least", "embedding", "shards"), [
    (None, {}, 1), (57, {}, 1), (56, {}, 2), (1, {}, 3), (1, {"embeddings_regularizer": "l2"}, 1),
])  # fmt: skip
def test_tables_are_cut_into_shards_that_are_large_enough_and_not_adapted(least, embedding, shards):
    with tables.on_servers(servers=3, min_shard_bytes=least):
        model = made(**embedding)
    assert len(model.layers[0].weights) == shards
    if shards > 1:
        with pytest.raises(ModelError, match="min_shard_bytes=null"):
            with_lora(model, None)


def test_what_stays_whole_is_said_and_an_optimizer_of_whole_variables_refused():
    with tables.on_servers(servers=2, min_shard_bytes=8):
        model = made(embeddings_constraint="non_neg")
        cut, clipped = made(keras.optimizers.Lamb()), made(keras.optimizers.Adam(clipnorm=1.0))
    assert [line.partition("/")[2] for line in tables.check(model, 8)] == [
        "table/embeddings (112 bytes) stays whole on one server: "
        "its layer has a constraint or regularizer, or is not a plain Embedding.",
        "tower/kernel (48 bytes) stays whole on one server: only embeddings can be cut.",
    ]
    for refused, received in ((cut, "lamb"), (clipped, "clipnorm")):
        with pytest.raises(ModelError, match=f"received {received}"):
            tables.check(refused, 8)
    assert tables.check(cut, None) == []


def sent(known: Sequence[tf.TensorShape], *arrays: tf.Tensor) -> list[tf.Tensor]:
    """The arrays, as they arrive where no more of their shapes is known than this."""
    arrays = [tf.ensure_shape(array, shape) for array, shape in zip(arrays, known, strict=True)]
    message = servers.joined(arrays)
    if servers.LARGE > 1000 and known[0].rank is not None:
        assert len(message) == 1
    return servers.split(message, arrays)


@pytest.mark.parametrize("large", [1, 64, 1 << 20])
@pytest.mark.parametrize("known", ["all", "without rows", "nothing"])
def test_arrays_of_all_kinds_arrive_as_they_were_sent(large, known, monkeypatch):
    monkeypatch.setattr(servers, "LARGE", large)
    arrays = [
        tf.constant([[1.5, -2.0, np.nan]]), tf.constant(7, tf.int64), tf.zeros([0, 4], tf.float16), tf.range(5),
        tf.cast(tf.range(3), tf.bfloat16), tf.constant([255], tf.uint8), tf.random.normal([40, 30]), tf.zeros([2, 0]),
    ]  # fmt: skip
    shapes = {
        "all": [array.shape for array in arrays],
        # Of rows that a batch names there are as many as it has.
        "without rows": [tf.TensorShape([None, *array.shape[1:]] if array.shape.rank else []) for array in arrays],
        "nothing": [tf.TensorShape(None)] * len(arrays),
    }
    specs = [tf.TensorSpec(None, array.dtype) for array in arrays]
    function = tf.function(partial(sent, shapes[known]), autograph=False).get_concrete_function(*specs)
    for array, arrived in zip(arrays, function(*arrays), strict=True):
        assert array.dtype == arrived.dtype
        np.testing.assert_array_equal(array, arrived)


def test_a_weight_that_a_layer_assigns_to_is_read_where_it_is_from_then_on():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    kernel, before = model.layers[0].kernel, model.layers[0].kernel.numpy()
    held = kernel.value

    @tf.function(autograph=False)
    def step() -> tuple[tf.Tensor, ...]:
        with servers.fetched(model, tf.constant(0)) as fetched, tf.GradientTape() as tape:
            tape.watch(list(fetched.values()))
            first = tf.reduce_sum(5.0 * kernel.value)
            kernel.assign(tf.ones([3, 2]))
            second = tf.reduce_sum(3.0 * kernel.value)
            both = first + second
        return first, second, tape.gradient(both, [fetched[id(kernel)], held])

    first, second, gradients = tf.nest.map_structure(lambda value: value.numpy(), step())
    assert first == pytest.approx(5 * before.sum(), rel=1e-5)
    assert second == 18
    assert [gradient.max() for gradient in gradients] == [5, 3]
    np.testing.assert_array_equal(kernel.numpy(), np.ones([3, 2]))
    assert kernel.value is held


def multiplied(x: tf.Tensor, kernel: keras.Variable) -> tf.Tensor:
    @tf.custom_gradient
    def product(x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., object]]:
        def gradient(upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> tuple[tf.Tensor, list[tf.Tensor]]:
            of_x = tf.matmul(upstream, tf.convert_to_tensor(kernel), transpose_b=True)
            return of_x, [tf.matmul(x, upstream, transpose_a=True) for _ in variables]

        return tf.matmul(x, tf.convert_to_tensor(kernel)), gradient

    return product(x)


def computed_again(x: tf.Tensor, kernel: keras.Variable) -> tf.Tensor:
    return tf.recompute_grad(lambda x: tf.matmul(x, tf.convert_to_tensor(kernel)))(x)


@pytest.mark.parametrize("product", [multiplied, computed_again])
def test_a_weight_behind_a_custom_gradient_has_its_gradient(product):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    kernel = model.layers[0].kernel
    held, x = kernel.value, tf.constant([[1.0, 2.0, 3.0]])

    @tf.function(autograph=False)
    def step() -> list[tf.Tensor]:
        with servers.fetched(model, tf.constant(0)) as fetched, tf.GradientTape() as tape:
            tape.watch(list(fetched.values()))
            both = tf.reduce_sum(product(x, kernel) + tf.matmul(x, tf.convert_to_tensor(kernel)))
        return tape.gradient(both, [fetched[id(kernel)], held])

    assert [gradient[:, 0].numpy().tolist() for gradient in step()] == [[1, 2, 3], [1, 2, 3]]
    assert kernel.value is held
