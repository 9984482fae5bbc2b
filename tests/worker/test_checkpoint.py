"""A checkpoint holds all that decides how training goes on, is whole or not there, and is verified when it is read."""

import functools
import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import beside
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from conftest import sampled, with_
from loops import loop_over
from plans import config, machine
from tensorflow.python.framework.config import disable_op_determinism

from pipeline.plan import planning
from pipeline.plan.plan import Checkpoints
from pipeline.record.events import Event
from pipeline.record.log import to_plain
from pipeline.worker import compiling
from pipeline.worker.checkpoint import Checkpointer, State, grouped
from pipeline.worker.layout import BEGINNING, BatchLayout, Position
from pipeline.worker.model_error import TrainingError
from pipeline.worker.process import WorkerProcess
from pipeline.worker.training import Preempted, Training

EXAMPLES = 70


class Told(list[Event]):
    __call__ = list.append

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in map(to_plain, self) if event["event"] == kind]


RNG = np.random.default_rng(0)
ARRAYS = RNG.normal(size=(EXAMPLES, 6)).astype(np.float32), RNG.integers(0, 3, EXAMPLES).astype(np.int32)
DATA: dict[str, Callable[[], Any]] = {
    "arrays": lambda: ARRAYS, "set": lambda: tf.data.Dataset.from_tensor_slices(ARRAYS),
    "beside": lambda: beside.examples()[0],
}  # fmt: skip


def network() -> keras.Model:
    """Of all that has a state: dropout, moving averages."""
    layers = keras.layers
    inner = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.4)]
    return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3, activation="softmax")])


def training(
    folder: Path, tell: Told, state: State | None = None, *, make: Callable[[], keras.Model] = network,
    optimizer: Callable[[], Any] = lambda: "adam", data: str = "arrays", callbacks: Callable[[], list[Any]] = list,
    epochs: int | None = 3, steps: int | None = None, leave: Callable[[], bool] = bool, kept: Checkpoints | None = None,
    policy: str = "float32", rate_scale: float = 1.0, clock: Callable[[], float] = time.perf_counter,
    share: float | None = None,
) -> tuple[keras.Model, Training]:  # fmt: skip
    """A training of a model that goes on from `state`, in the first of all processes."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    part = DATA[data]()
    position = BEGINNING if state is None else Position(state.values["epoch"], state.values["examples"])
    loop = loop_over(make, part, seed=1, held_out=part, position=position, optimizer=optimizer(), rate_scale=rate_scale)
    kept, about = kept or Checkpoints(folder=str(folder)), {"data": {}, "learning_rate": None}
    checkpointer = Checkpointer(kept, tell, state, leave, about, 1e4, rate_scale, share)
    return loop.model, Training(loop, epochs, steps, callbacks(), tell, clock, checkpointer=checkpointer)


@pytest.fixture(autouse=True)
def _plain_again():
    tf.config.experimental.enable_op_determinism()
    yield
    # It holds for the process, and so for other modules' tests.
    disable_op_determinism()
    keras.config.set_dtype_policy("float32")


def weights(model: keras.Model) -> list[np.ndarray]:
    return [np.array(variable) for variable in [*model.variables, *model.optimizer.variables]]


def ran(made: tuple[keras.Model, Training], per_call: int = 2) -> tuple[keras.Model, Training]:
    for _ in made[1].advance(None, per_call):
        pass
    return made


def left(folder: Path, told: Told, leave: Callable[[], bool], per_call: int = 2, **options: Any) -> State:
    """What a training that is asked to leave, and does, is to go on from."""
    with pytest.raises(Preempted):
        ran(training(folder, told, leave=leave, **options), per_call)
    return last(folder, told)


def last(folder: Path, told: Told) -> State:
    state = checkpointer(folder, told).last()
    assert state is not None
    return state


def losses(told: Told) -> dict[int, float]:
    calls = [(event["losses"], event["step"] - len(event["losses"]) + 1) for event in told.of("steps")]
    return {step: loss for of_call, first in calls for step, loss in enumerate(of_call, first)}


def running() -> keras.Model:
    """A model whose loss keeps a running mean in a variable of TensorFlow's."""
    model = beside.running((5,))
    model.loss.scale = tf.Variable(1.0, trainable=False)
    return model


def patient() -> list[Any]:
    return [
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0),
    ]


def decaying() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.7), momentum=0.9)


class Drawing(keras.callbacks.Callback):
    """Has chance decide on the learning rate of each epoch."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.model.optimizer.learning_rate = 1e-3 * (random.random() + float(np.random.random()))


CASES = {
    "adam": {},
    "callbacks that draw": {"callbacks": lambda: [Drawing()]},
    "a data set": {"data": "set"},
    "a schedule and momentum": {"optimizer": decaying},
    "callbacks that remember": {"callbacks": patient, "epochs": 5},
    "a loss scale": {"policy": "mixed_float16"},
    "averaged weights": {"optimizer": lambda: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=4)},
    "steps, not epochs": {"epochs": None, "steps": 13},
    "what losses, metrics and callbacks hold": {
        "make": beside.net, "data": "beside", "callbacks": lambda: [beside.Changing()], "optimizer": lambda: None,
    },
    "what a step assigns to": {"make": running, "data": "beside", "optimizer": lambda: None},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "after", "waits"),
    [
        ("adam", 4, 0), ("adam", 5, 0), *((case, 8, 0) for case in CASES if case.startswith(("what", "callbacks"))),
        *((*case, 0) for case in sampled((
            ("a data set", 7), ("steps, not epochs", 12), ("a loss scale", 8), ("averaged weights", 6),
            ("a schedule and momentum", 8),
        ), 2)),
        # In the validation of an epoch, which goes on as if it had not begun.
        ("adam", 5, 2),
    ],
)  # fmt: skip
def test_a_training_that_left_goes_on_to_the_last_bit(tmp_path, case, after, waits):
    """Five steps make an epoch, the last of them a smaller one: it leaves in, at the end of, and after one."""
    options = CASES[case]
    whole, told, asked = Told(), Told(), []
    unharmed, over = ran(training(tmp_path / "none", whole, **options))

    def leave() -> bool:
        asked.extend([True] * (max(losses(told), default=0) >= after))
        return len(asked) > waits

    state = left(tmp_path / "c", told, leave, 1, **options)
    assert state.values["step"] == after
    resumed, rest = ran(training(tmp_path / "c", told, state, **options), per_call=3)
    assert losses(told) == losses(whole)
    for ours, theirs in zip(weights(resumed), weights(unharmed), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    ended, expected = ([event | {"seconds": 0} for event in events.of("epoch")] for events in (told, whole))
    assert ended == expected
    assert rest.result == over.result


def test_checkpoints_come_by_steps_and_epochs_and_the_last_ones_and_the_best_are_kept(tmp_path):
    told = Told()
    kept = Checkpoints(every_steps=3, every_epochs=2, keep=2, best="val_loss", best_is="max", folder=str(tmp_path))
    ran(training(tmp_path, told, kept=kept, epochs=4))
    # So small a training may be faster than the disk; the last of them are there all the same.
    assert {event["step"] for event in told.of("checkpoint")} <= {*range(3, 21, 3), *range(5, 21, 5)}
    manifests = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    best = [name for name, values in manifests.items() if values["best"]]
    scores = [event["val_loss"] for event in told.of("epoch")]
    assert [manifests[name]["best"] for name in best][-1] == {"val_loss": max(scores)}
    assert sorted(values["step"] for values in manifests.values())[-1] == 20
    assert 2 <= len(manifests) <= 3
    assert len(list(tmp_path.glob("*.npz"))) == len(manifests)


def test_a_metric_that_is_not_there_cannot_choose_the_best(tmp_path):
    kept = Checkpoints(best="val_auc", folder=str(tmp_path))
    with pytest.raises(TrainingError, match=r"Expected checkpoint\.keep_best to be one of loss, accuracy, val_loss"):
        ran(training(tmp_path, Told(), kept=kept))


@pytest.mark.parametrize(("seconds", "timed", "share", "minutes", "epochs"), sampled([
    (100.0, False, 0.01, 1e3, [1, 2, 3, 4]),
    # A hundredth of it is no time to write anything.
    (0.1, False, 0.01, 1e3, []),
    # All steps but the last call's are.
    (100.0, True, 0.01, 1e3, [4]),
    (100.0, False, None, 1e3, []),
    # By the minute, after the call in which time is up: the first of each epoch.
    (100.0, False, None, 1.0, [0.4, 1.4, 2.4, 3.4]),
], 2))  # fmt: skip
def test_by_default_a_checkpoint_comes_after_each_epoch_that_costs_more_and_none_while_steps_are_timed(
    tmp_path, seconds, timed, share, minutes, epochs
):
    told, now = Told(), [0.0]
    kept = Checkpoints(every_minutes=minutes, folder=str(tmp_path))

    def passes(epoch: int, logs: object) -> None:
        now[0] += seconds
        # The last one is written by then, as where the seconds are not made up.
        made.wait()

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=passes)]
    model, under_way = training(
        tmp_path, told, kept=kept, epochs=4, callbacks=lambda: callbacks, clock=lambda: now[0], share=share
    )
    made = under_way._checkpointer
    if timed:
        assert sum(call.steps for call in under_way.advance(20, 2)) == 20
    ran((model, under_way))
    assert [event["step"] / 5 for event in told.of("checkpoint")] == epochs
    assert len(list(tmp_path.glob("*.json"))) == min(2, len(epochs))


def test_a_training_that_a_callback_ends_says_so_also_where_it_goes_on(tmp_path):
    class Stopping(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.model.stop_training = self.model.stop_training or self.model.optimizer.iterations >= 12

    whole, told = Told(), Told()
    best = functools.partial(keras.callbacks.EarlyStopping, min_delta=9.0, restore_best_weights=True)

    def callbacks() -> list[Any]:
        return [best(patience=9), Stopping(), best(patience=9)]

    _, over = ran(training(tmp_path / "none", whole, callbacks=callbacks, epochs=4), per_call=1)
    assert {name: over.result[name] for name in ("epochs", "stopped_by", "stopped_at", "restored_epoch")} == {
        "epochs": 3, "stopped_by": "Stopping", "stopped_at": 12, "restored_epoch": 1,
    }  # fmt: skip
    kept = Checkpoints(every_epochs=1, folder=str(tmp_path))
    ran(training(tmp_path, told, callbacks=callbacks, epochs=4, kept=kept), per_call=1)
    state = last(tmp_path, told)
    # Also where nothing is left to train, and where more was asked for since.
    for epochs in (4, 9):
        _, rest = ran(training(tmp_path, told, state, callbacks=callbacks, epochs=epochs), per_call=1)
        assert rest.result == over.result


@pytest.mark.parametrize(
    ("length", "ended"), sampled([({"epochs": 2}, None), ({"epochs": 3}, 10), ({"steps": 11}, 10)], 1)
)
def test_a_training_that_is_told_to_stop_at_its_end_has_not_ended_early(tmp_path, length, ended):
    stopping = [keras.callbacks.EarlyStopping("loss", min_delta=9.0, patience=1)]
    made = training(tmp_path, Told(), callbacks=lambda: stopping, **{"epochs": None, **length})
    assert ran(made)[1].result.get("stopped_at") == ended


def small(step: int, epoch: int = 0, **values: Any) -> State:
    arrays = grouped("trained", [np.full((3, 2), step, np.float32)])
    return State({"step": step, "epoch": epoch, "best": None, **values}, arrays)


def checkpointer(folder: Path | str, told: Told, **kept: Any) -> Checkpointer:
    return Checkpointer(Checkpoints(folder=str(folder), **kept), told)


def test_of_two_folders_the_later_checkpoint_counts(tmp_path, monkeypatch):
    for name, step in (("now", 3), ("before", 5)):
        values = {"loss": None, "first_loss": None, "examples": 8 * step, "data": {"shards": 1, "build": "another"}}
        assert checkpointer(tmp_path / name, Told()).write(small(step, **values), wait=True)
    plan = planning.make(config(), machine())
    plan = with_(plan, "checkpoint", folder=str(tmp_path / "now"), before=str(tmp_path / "before"))
    told, layout = Told(), BatchLayout(8, 1, 0, 1, (EXAMPLES,))
    monkeypatch.setattr(WorkerProcess, "__abstractmethods__", frozenset())
    process: Any = WorkerProcess(plan, plan.processes[0], told, bool)
    assert process._resume("last", layout, "", lambda state: state) == Position(0, 40)
    assert [event["step"] for event in told.of("restored")] == [5]


@pytest.mark.parametrize(("harm", "words"), [
    ("cut", "it was cut short or changed"), ("flipped", "it was cut short or changed"), ("gone", "No such file"),
    ("nonsense", ""), ("cut manifest", ""), ("pickled", "allow_pickle=False"),
])  # fmt: skip
def test_a_checkpoint_that_was_harmed_is_passed_over_for_the_one_before_and_nothing_unpickled(tmp_path, harm, words):
    told = Told()
    assert all(checkpointer(tmp_path, told, keep=3).write(small(step), wait=True) for step in (1, 2))
    (archive,) = tmp_path.glob("step-0000000002-*.npz")
    manifest = tmp_path / "step-0000000002-000000.json"
    data, text = archive.read_bytes(), manifest.read_text()
    if harm == "pickled":
        np.savez(archive, **{"trained/00000": np.array([{"a": 1}], dtype=object)})
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        manifest.write_text(json.dumps(json.loads(text) | {"sha256": digest}))
    elif harm == "gone":
        archive.unlink()
    elif harm in ("cut", "flipped"):
        archive.write_bytes(data[:100] if harm == "cut" else data[:100] + bytes([data[100] ^ 1]) + data[101:])
    else:
        manifest.write_text("[]" if harm == "nonsense" else text[:20])
    state = last(tmp_path, told)
    assert state.values["step"] == 1
    np.testing.assert_array_equal(state.group("trained")[0], np.ones((3, 2), np.float32))
    (warning,) = told.of("warning")
    assert "step-0000000002-000000 was passed over for the one before" in warning["text"]
    assert words in warning["text"]


def test_a_disk_that_is_full_is_told_at_once_and_loses_nothing_and_what_is_cut_short_is_not_there(
    tmp_path, monkeypatch
):
    told = Told()
    made = checkpointer(tmp_path, told)
    assert made.write(small(1), wait=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        assert not made.write(small(2), wait=True)
    (warning,) = told.of("warning")
    assert "The checkpoint of step 2 could not be written" in warning["text"]
    assert "No space left on device" in warning["text"]
    assert not list(tmp_path.glob("*.partial"))
    for name in ("step-0000000009-000000-abcdabcd.npz.partial", "step-0000000009-000000-abcdabcd.npz"):
        (tmp_path / name).write_bytes(b"PK")
    assert made.last().values["step"] == 1
    assert made.write(small(3), wait=True)
    assert made.last().values["step"] == 3
    assert len(told.of("warning")) == 1


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"Expected to be able to write checkpoints to .*/file/c"):
        checkpointer(tmp_path / "file" / "c", Told()).check()


@pytest.mark.parametrize("where", ["{}", "ram://{}/checkpoints"])
def test_what_is_written_comes_back_with_types_that_numpy_has_no_name_for_from_a_disk_and_elsewhere(tmp_path, where):
    """A file system of TensorFlow's takes the place of gs:// and s3:// here."""
    folder = where.format(tmp_path)
    made = checkpointer(folder, Told(), keep=1)
    made.check()
    assert made.write(small(1), wait=True)
    arrays = [np.array([[1.5, -2.0]], ml_dtypes.bfloat16), np.array(ml_dtypes.bfloat16(3)), np.array(True)]
    assert made.write(State(small(2).values, grouped("trained", arrays)), wait=True)
    assert made.last().values["step"] == 2
    for array, expected in zip(made.last().group("trained"), arrays, strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(array, expected)
    assert len([name for name in tf.io.gfile.listdir(folder) if name.endswith(".npz")]) == 1


@pytest.fixture
def go(monkeypatch):
    """Lets checkpoints be written once it is set."""
    event, whole = threading.Event(), Checkpointer._write_one
    monkeypatch.setattr(Checkpointer, "_write_one", lambda self, state: (event.wait(10), whole(self, state))[1])
    return event


def test_while_one_is_written_the_last_waits_and_those_between_are_left_out_which_is_told_once(tmp_path, go):
    told = Told()
    made = checkpointer(tmp_path, told, keep=9)
    for step in range(1, 6):
        assert made.write(small(step))
        time.sleep(0.1)
    go.set()
    made.wait()
    assert [event["step"] for event in told.of("checkpoint")] == [1, 5]
    (warning,) = told.of("warning")
    assert "that of step 2 was left out" in warning["text"]
    assert made.last().values["step"] == 5


@pytest.mark.slow
def test_what_training_adds_up_while_a_checkpoint_is_written_is_not_in_it(tmp_path, go):
    kept = Checkpoints(folder=str(tmp_path), every_steps=2, keep=9)
    _, made = training(tmp_path, Told(), epochs=None, steps=4, kept=kept)
    steps = []
    for step in made.advance(None, 1):
        steps.append(step)
        if len(steps) == 3:
            go.set()
    made._checkpointer.wait()
    saved = sorted(tmp_path.glob("step-0000000002-*.npz"))[0]
    sums, examples = (np.load(saved)[name] for name in ("totals/00000", "totals/00001"))
    assert examples == sum(float(step.sizes.sum()) for step in steps[:2])
    assert sums[0] == pytest.approx(sum(float(step.losses[0, 0] * step.sizes[0]) for step in steps[:2]))


def test_the_rate_of_a_schedule_is_scaled_after_a_rollback_and_what_is_saved_is_the_schedule(tmp_path):
    scheduled, _ = training(tmp_path, Told(), optimizer=decaying, rate_scale=0.5)
    assert float(scheduled.optimizer.learning_rate) == pytest.approx(0.05)
    compiling.unscaled(scheduled.optimizer)
    assert type(scheduled.optimizer._learning_rate).__name__ == "ExponentialDecay"


def test_an_earlier_version_s_checkpoint_without_variables_of_losses_is_gone_on_with_and_another_model_s_refused(
    tmp_path,
):
    told, options = Told(), CASES["what losses, metrics and callbacks hold"]
    state = left(tmp_path, told, lambda: max(losses(told), default=0) >= 2, **options, epochs=1)
    assert [name for name in state.arrays if "held/" in name] == [
        "callback/0.held/00000", "held/00000", "held/00001", "held/00002",
    ]  # fmt: skip
    earlier = State(state.values, {name: array for name, array in state.arrays.items() if "held/" not in name})
    _, rest = ran(training(tmp_path, told, earlier, **options, epochs=1))
    assert rest.result["epochs"] == 1
    with pytest.raises(TrainingError, match="Expected a checkpoint of this model"):
        ran(training(tmp_path, told, state, optimizer=lambda: keras.optimizers.SGD()))
