"""The stream of batches, also of static shape, and strategy=tpu: refused where there is none, and rehearsed."""

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any

import grpc
import keras
import numpy as np
import own
import pytest
import tensorflow as tf
from bad_input import fault
from batch_layouts import EXAMPLES, LAYOUTS, ONE, expect_to_go_on, labels, leaves, part_of, stream
from conftest import QUICK, Ran, sampled
from tensorflow.core.framework import device_attributes_pb2

from pipeline import models
from pipeline.errors import UserError
from pipeline.launch import reach
from pipeline.worker.data.batches import Data, spec, static_parts
from pipeline.worker.layout import BatchLayout, Position
from pipeline.worker.tensorflow import build, loopback, static
from pipeline.worker.tensorflow.loop import Loop

TPU = ("strategy=tpu", "hardware=tpu_v5e_4")
REHEARSED = (*TPU, "hardware.rehearse=true")
# Where nothing listens.
CLOSED = "grpc://127.0.0.1:1"


@contextmanager
def listening(answer: bytes | None, backlog: int = 8) -> Iterator[str]:
    """The address of something that takes connections and says `answer`; None: nothing, and keeps it.

    With a `backlog` of 0 it takes none: its queue is full, so that Linux drops whoever else would connect.
    """
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=backlog))
        for _ in range(0 if backlog else 4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())

        def take() -> None:
            with suppress(OSError):
                while True:
                    connection = stack.enter_context(server.accept()[0])
                    if answer is not None:
                        connection.sendall(answer)

        if backlog:
            threading.Thread(target=take, daemon=True).start()
        yield f"grpc://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def grpc_server(answer: bytes | None) -> Iterator[str]:
    """The address of a gRPC server that answers TensorFlow's first question; None: it knows no method at all."""

    over = threading.Event()

    class Worker(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            if answer is None:
                return None
            asked = call.method == reach.GET_STATUS
            # Whatever else it is asked, it keeps its caller waiting.
            return grpc.unary_unary_rpc_method_handler(lambda *_: answer if asked or over.wait() else b"")

    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=(Worker(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        over.set()
        server.stop(None).wait()


def refusal(ran: Ran) -> str:
    """The one line of a command that was refused before anything was started."""
    assert fault(ran) is None
    # Ten are meant; on a machine that is busy with other things it may be as many more.
    assert ran.seconds < 20
    return ran.err


@pytest.mark.parametrize(("place", "words"), [
    (lambda: nullcontext(CLOSED), "no connection: Connection refused"),
    (lambda: listening(None, backlog=0), "no connection within 3 s"),
    (lambda: listening(None), "something that connects and says nothing"),
    (lambda: listening(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "something that does not speak gRPC"),
    (lambda: grpc_server(None), "a gRPC server that is no TensorFlow worker"),
    (lambda: grpc_server(b"CPU:0"), "a TensorFlow worker without a TPU"),
], ids=["closed", "black hole", "silent", "web server", "other gRPC", "no TPU"])  # fmt: skip
def test_an_address_without_a_tpu_is_refused_in_words_within_ten_seconds(asked, place, words):
    with place() as address:
        error = refusal(asked(*TPU, f"strategy.build.address={address}"))
    assert f"Expected a TPU at strategy.build.address={address}, received {words}." in error
    assert "hardware.rehearse=true" in error


def test_tensorflow_s_own_server_is_asked_as_tensorflow_asks_it_and_one_that_lists_a_tpu_is_taken():
    assert loopback.listen_on_loopback_only()
    server = tf.distribute.Server.create_local_server()
    with pytest.raises(UserError, match="a TensorFlow worker without a TPU"):
        reach.expect_tpu(server.target)
    with grpc_server(b"/job:worker/replica:0/task:0/device:TPU_SYSTEM:0") as address:
        reach.expect_tpu(address)


@pytest.mark.slow
def test_a_tpu_that_answers_once_and_then_hangs_ends_the_run_by_name(pipeline):
    system = device_attributes_pb2.DeviceAttributes(
        name="/job:worker/replica:0/task:0/device:TPU_SYSTEM:0", device_type="TPU_SYSTEM", incarnation=1
    )
    # GetStatusResponse has the devices as its first field, each with its length before it.
    listed = system.SerializeToString()
    with grpc_server(b"\x0a" + bytes([len(listed)]) + listed) as address:
        ran = pipeline(
            *QUICK, *TPU, f"strategy.build.address={address}", "launch.startup_timeout=12", "launch.max_restarts=0"
        ).failed()
    assert "chief 0 did not join within 12 s" in ran.err
    assert ran.seconds < 45


@pytest.mark.parametrize(("arguments", "key"), [
    (["strategy=tpu"], "hardware=auto"),
    (["strategy=tpu", "hardware=2cpu"], "hardware=tpu_v5e_8"),
    (["strategy=mirrored", "hardware=tpu_v5e_8"], "strategy=tpu."),
    (TPU, "hardware.rehearse=true"),
    ([*TPU, "strategy.build.address=local"], "no address of one"),
    ([*TPU, "strategy.build.address=10.0.0.2:8470"], "strategy.build.address=grpc://10.0.0.2:8470."),
    ([*TPU, "strategy.build.address=grpc://10.0.0.2"], "strategy.build.address=grpc://10.0.0.2:8470."),
    ([*TPU, "strategy.build.address=grpc://10.0.0.2:99999"], "a port up to 65535"),
    ([*TPU, "strategy.build.address=my-tpu"], "strategy.build.address=grpc://my-tpu:8470."),
    ([*REHEARSED, "train.precision=mixed_float16"], "train.precision=mixed_bfloat16."),
    ([*REHEARSED, "workers=5"], "workers=5"),
    ([*REHEARSED, "data=synthetic", "data.train_examples=100", "train.replica_batch=64"], "train.replica_batch=25."),
])  # fmt: skip
def test_what_no_tpu_could_run_is_refused_before_anything_starts(asked, arguments, key):
    assert key in refusal(asked(*arguments))


def test_the_environment_s_address_is_asked_too(asked):
    assert "received no connection: Connection refused" in refusal(asked(*TPU, TPU_NAME=CLOSED))
    assert "(TPU_NAME=my-tpu is no address)" in refusal(asked(*TPU, TPU_NAME="my-tpu"))


def test_a_plan_can_be_looked_at_anywhere(asked):
    ran = asked("mode=plan", "strategy=tpu", "hardware=tpu_v5e_8", "data=synthetic").ok()
    refused = "hardware=tpu_v5e_8 is a TPU, this machine has none: a run here is refused"
    for words in ("8 TPU workers", "mixed_bfloat16", refused, "TPU:0-7", "none, so no speedup"):
        assert words in ran.out


def test_a_rehearsal_trains_in_bfloat16_says_so_and_validates_every_example(pipeline):
    ran = pipeline(
        *REHEARSED, "model=mlp", "data=digits", "train.steps=6", "tracking=none", "measure.repeats=2",
        "measure.steps=2", "train.steps_per_call=2",
    ).ok()  # fmt: skip
    result = ran.result
    assert (result["status"], result["precision"], result["rehearsal"]) == ("FINISHED", "mixed_bfloat16", True)
    assert any(note.startswith("The check for TPUs passed: all operations of a step on ") for note in result["notes"])
    assert "The check for TPUs passed" in ran.out
    assert any("each epoch leaves out up to 255 training examples" in note for note in result["notes"])
    assert result["speedup"]
    (built,) = [event for event in ran.events("built") if event["group"] == "point"]
    assert (built["validation_examples"], built["steps_per_epoch"]) == (359, 5)
    assert "(rehearsal" in ran.out


def test_a_model_that_would_not_compile_ends_the_rehearsal_in_one_message(pipeline):
    ran = pipeline(
        *QUICK, *REHEARSED, "model.build._target_=own.odd", "+model.build.kind=boolean_mask", "data=digits"
    ).failed()
    assert "received Where of shape [None, 1] in layer odd. Try tf.where(condition, x, 0.0)" in ran.err


SAMPLE = (tf.zeros((2, 8, 8, 1)), tf.zeros((2,), tf.int32))


def checked(make: Callable[[], keras.Model], sample: Any = SAMPLE) -> None:
    model = build.model(make, tf.distribute.get_strategy(), sample)
    static.check_model(model, sample, replica_batch=4, gradient_bits=32)


@pytest.mark.parametrize(("kind", "words"), [
    ("boolean_mask", r"Where of shape \[None, 1\] in layer odd"),
    ("where", r"Where of shape \[None, 2\] in layer odd"),
    ("unique", r"Unique of shape \[None\] in layer odd"),
    ("reshape", r"Reshape of shape \[None, None\] in layer odd"),
    ("text", "AsString in layer odd"),
    ("loss", r"Where of shape \[None, 1\] at compile_loss/of_some/"),
])  # fmt: skip
def test_what_xla_cannot_compile_is_named_with_its_layer(kind, words):
    make = own.odd_loss if kind == "loss" else partial(own.odd, kind=kind)
    with pytest.raises(build.ModelError, match=words):
        checked(lambda: make((8, 8, 1), 10))


def reshaped() -> keras.Model:
    layers = keras.layers
    inside = [layers.Reshape((-1, 4)), layers.Bidirectional(layers.GRU(8, return_sequences=True)), layers.Flatten()]
    outputs = layers.Dense(10, activation="softmax", dtype="float32")
    return keras.Sequential([keras.Input((8, 8, 1)), *inside, outputs])


def recognizer() -> keras.Model:
    """With a loss of functions that show no graph."""
    model = keras.Sequential([keras.Input((8, 3)), keras.layers.Dense(5, "softmax")])
    model.compile("sgd", keras.losses.CTC())
    return model


WORDS = tf.zeros((2, 6), tf.int32), tf.zeros((2, 6), tf.int32)
ORDINARY = {
    "lstm": (own.masked, WORDS),
    "attention": (partial(models.transformer, input_shape=(6,), num_classes=20, blocks=1, width=8, heads=2), WORDS),
    "convolution": (partial(models.cnn, input_shape=(8, 8, 1), num_classes=10), SAMPLE),
    "residual": (partial(models.resnet20, input_shape=(8, 8, 1), num_classes=10), SAMPLE),
    "gru": (reshaped, SAMPLE),
    "ctc": (recognizer, (tf.zeros((2, 8, 3)), tf.ones((2, 3), tf.int32))),
}


@pytest.mark.parametrize("name", sampled(list(ORDINARY), 2))
def test_ordinary_layers_and_losses_pass(name):
    make, sample = ORDINARY[name]
    checked(make, sample)


@pytest.mark.parametrize(("optimizer", "words"), [
    (keras.optimizers.SGD(momentum=0.9), None),
    (keras.optimizers.SGD(clipnorm=1.0), "rows/table); by SGD it updates"),
    (keras.optimizers.Adam(), "rows/table); by Adam it updates"),
])  # fmt: skip
def test_rows_that_a_tpu_updates_otherwise_than_one_device_are_said(optimizer, words):
    table = keras.layers.Embedding(7, 2, name="table")
    model = keras.Sequential([keras.Input((4,), dtype="int32"), table, keras.layers.Flatten()], name="rows")
    model.compile(optimizer, "mse")
    said = static.updated_otherwise(model)
    assert said is None if words is None else words in said
    table.trainable = False
    assert static.updated_otherwise(model) is None


@pytest.mark.parametrize(("x", "words"), [
    (tf.range, r"received a TensorSpec of shape \[None\]. Try padding or cutting them to a fixed length"),
    (lambda label: tf.RaggedTensor.from_tensor([[label]]), "received a RaggedTensorSpec of shape"),
    (tf.strings.as_string, r"received tf.string of shape \[\]. Try turning text into numbers"),
], ids=["open", "ragged", "text"])  # fmt: skip
def test_data_of_open_shape_are_refused(x, words):
    with pytest.raises(build.ModelError, match=f"Expected training examples .*{words}"):
        static.check_data(tf.data.Dataset.range(60).map(lambda label: (x(label), label)), "training")


SERIAL = pytest.mark.parametrize("make", [own.serial_arrays, own.serial_set])


def steps_of(part: Any, layout: BatchLayout, steps: int, shuffle: bool = False) -> list[tuple[int, list[float]]]:
    """(examples that count, labels) of steps."""
    taken = stream(part, layout, shuffle, seed=1).take(steps)
    return [(int(total), [float(label) for _, labels in batch for label in labels]) for total, batch in taken]


@SERIAL
def test_static_batches_leave_out_what_fills_none_and_validation_counts_each_example_once(make):
    part = make(50)[0]
    layout = BatchLayout(global_batch=16, replicas=4, first=0, local=4, counts=(50,), last="left out")
    assert layout.steps == 3
    shapes = {leaf.shape for leaf in tf.nest.flatten(stream(part, layout, True, 1).element_spec[1])}
    assert shapes == {tf.TensorShape([4, 1]), tf.TensorShape([4])}
    labels = [label for _, labels in steps_of(part, layout, 6, shuffle=True) for label in labels]
    assert len(set(labels[:48])) == len(set(labels[48:])) == 48
    assert labels[:48] != labels[48:96] == labels[48:]
    for examples in (1, 3, 4, 16, 17, 50, 63):
        layout, counted = BatchLayout(global_batch=16, replicas=4, first=0, local=4, counts=(examples,)), []
        for part, each in static_parts(make(examples)[0], layout):
            for total, labels in steps_of(part, each, each.steps):
                counted += labels[:total]
                assert len(labels) == each.global_batch
        assert sorted(counted) == list(range(examples))


@SERIAL
def test_validation_in_static_batches_is_exact_also_for_metrics_without_weights(make):
    train, validation = make(50)
    results = []
    for fixed in (False, True):
        keras.utils.set_random_seed(1)
        strategy = tf.distribute.get_strategy()
        model = build.model(lambda: own.counting((1,)), strategy, spec(train))
        plain = BatchLayout(16, 1, 0, 1, (50,))
        parts = static_parts(validation, plain) if fixed else [(validation, plain)]
        held_out = [Data(part, layout, False, 1) for part, layout in parts]
        loop = Loop(model, strategy, Data(train, plain, False, 1), held_out)
        results.append(loop.evaluate(4, lambda *_, **__: None))
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[1]["labels_0"] == 50


# The order of the examples is drawn beside how they are laid out; others in each run of CI.
@pytest.mark.parametrize(
    ("name", "shuffle"), [*((name, True) for name in sampled(list(LAYOUTS), 1)), ("one replica", False)]
)
@pytest.mark.parametrize("make", [own.serial_arrays, own.serial_set])
def test_a_stream_from_a_position_goes_on_as_the_one_from_the_beginning(make, name, shuffle):
    layout = LAYOUTS[name]
    part = part_of(lambda examples: make(examples)[0], layout)
    expect_to_go_on(part, layout, shuffle, [(0, 1), (1, layout.steps - 1), (1, layout.steps)])


@pytest.mark.parametrize("make", [own.serial_arrays, own.serial_set])
def test_other_replicas_go_on_with_the_same_global_batches(make):
    part, position = make(EXAMPLES)[0], Position(1, 24)
    one = labels(stream(part, ONE, True, 1, position).take(8))
    four = [dataclasses.replace(ONE, replicas=4, first=first, local=2) for first in (0, 2)]
    each = [labels(stream(part, layout, True, 1, position).take(8)) for layout in four]
    assert [first + second for first, second in zip(*each, strict=True)] == one


@pytest.mark.parametrize("make", [own.serial_arrays, own.serial_set])
@pytest.mark.parametrize(("global_batch", "sizes"), [(5, [5, 5, 5, 5, 5, 1]), (20, [20, 6]), (60, [26])])
def test_another_global_batch_trains_the_rest_of_the_epoch_and_whole_ones_after_it(make, global_batch, sizes):
    part, other = make(EXAMPLES)[0], dataclasses.replace(ONE, global_batch=global_batch)
    begun = labels(stream(part, ONE, True, 1).take(2))
    assert other.steps_after(24) == len(sizes)
    rest = labels(stream(part, other, True, 1, Position(0, 24)).take(len(sizes) + other.steps))
    assert [len(batch) for batch in rest[: len(sizes)]] == sizes
    assert sorted(chain(*begun, *rest[: len(sizes)])) == list(range(EXAMPLES))
    next_epoch = labels(stream(part, other, True, 1, Position(1)).take(other.steps))
    assert rest[len(sizes) :] == next_epoch
    assert sorted(chain(*next_epoch)) == list(range(EXAMPLES))


@pytest.mark.parametrize("last", ["left out", "padded"])
@pytest.mark.parametrize("make", [own.serial_arrays, own.serial_set])
def test_another_global_batch_of_static_shape_counts_the_rest_once(make, last):
    part, layout = make(EXAMPLES)[0], dataclasses.replace(LAYOUTS[last], global_batch=8)
    steps = layout.steps_after(24)
    rest = stream(part, layout, True, 1, Position(0, 24)).take(steps)
    totals = [int(total) for total, _ in rest.as_numpy_iterator()]
    assert totals == {"left out": [8, 8, 8], "padded": [8, 8, 8, 2]}[last]
    counted = [batch[:total] for batch, total in zip(labels(rest), totals, strict=True)]
    begun = labels(stream(part, ONE, True, 1).take(2))
    assert len({*chain(*begun, *counted)}) == 24 + sum(totals)


def test_replicas_are_promised_examples_only_where_the_rest_of_an_epoch_has_them_too():
    layout = BatchLayout(global_batch=8, replicas=2, first=0, local=2, counts=(EXAMPLES,))
    # Of 25 that are left, the last batch of the rest has one.
    assert [layout.always_fed_after(examples) for examples in (0, 24, 25, 48, 56)] == [True, True, False, True, True]
    shards = dataclasses.replace(layout, counts=(26, 24))
    assert not any(shards.always_fed_after(examples) for examples in (0, 8, 48))


def test_arrays_begin_anywhere_at_once():
    part, layout = own.serial_arrays(EXAMPLES)[0], dataclasses.replace(ONE, global_batch=1)
    started = time.perf_counter()
    first = labels(stream(part, layout, True, 1, Position(10**9, 49)).take(1))
    assert len(first[0]) == 1
    assert time.perf_counter() - started < 5


def shuffled_twice() -> tf.data.Dataset:
    files = tf.data.Dataset.range(10).shuffle(10, seed=1).prefetch(1)
    return files.flat_map(lambda file: tf.data.Dataset.range(file * 5, file * 5 + 5)).shuffle(7, seed=2)


@pytest.mark.parametrize(("make", "layout", "shuffle"), [
    (lambda: tf.data.Dataset.range(EXAMPLES).cache().shuffle(9, seed=1), "one replica", False),
    (lambda: tf.data.Dataset.range(EXAMPLES).shuffle(9, seed=1).cache(), "one replica", False),
    (lambda: tf.data.Dataset.range(2 * EXAMPLES).shuffle(9, seed=1).take(EXAMPLES), "one replica", False),
    (shuffled_twice, "one replica", False),
    *((shuffled_twice, layout, True) for layout in ("one replica", "left out", "padded")),
])  # fmt: skip
def test_the_orders_that_a_data_set_draws_itself_are_where_they_would_have_been(make, layout, shuffle):
    layout = LAYOUTS[layout]

    def numbers(position: Position, steps: int) -> list[list[int]]:
        # A new data set, as in the process of a training that is resumed.
        part = make().apply(tf.data.experimental.assert_cardinality(EXAMPLES)).map(lambda number: (number,))
        return leaves(stream(part, layout, shuffle, 1, position).take(steps))

    whole = numbers(Position(), 4 * layout.steps)
    for epoch, step in [(1, layout.steps), (2, 2)]:
        done = epoch * layout.steps + step
        assert numbers(Position(epoch, 12 * step), len(whole) - done) == whole[done:]


@pytest.mark.parametrize("global_batch", [10, 12])
@pytest.mark.parametrize("last", ["short", "left out"])
def test_what_a_data_set_caches_is_read_once(last, global_batch):
    read: list[int] = []

    def noted(number: Any) -> Any:
        read.append(int(number))
        return np.int64(number)

    part = tf.data.Dataset.range(EXAMPLES).map(lambda number: tf.numpy_function(noted, [number], tf.int64))
    part = part.map(lambda number: (tf.ensure_shape(number, []),)).cache()
    layout = dataclasses.replace(ONE, global_batch=global_batch, last=last)
    list(stream(part, layout, False, 1, Position(1, 2 * global_batch)).take(5 * layout.steps))
    assert read == list(range(EXAMPLES))
