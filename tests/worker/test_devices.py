"""Devices as planned, graphs, batches and layers on them, and the addresses that TensorFlow's servers listen on."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from conftest import QUICK, ROOT, SUPPORT, came, left_behind, one_of, sampled, start
from ports import reserved_ports

from pipeline.errors import UserError
from pipeline.plan.division import balanced, written
from pipeline.plan.size import Layer
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import build, feed
from pipeline.worker.tensorflow.loopback import on_loopback

GRAPHS = """
import tensorflow as tf
from pipeline.worker.tensorflow.devices import optimize_graphs_once
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
optimize_graphs_once()
assert len(tf.config.list_logical_devices("CPU")) == 2
x = tf.ones([4, 4])
print(float(tf.function(lambda: tf.reduce_sum(tf.nn.relu(x @ x + 1) @ x))()))
"""
SPINS = """
import os
from dataclasses import replace
from shipped_sizes import planned
from pipeline.private import context
from pipeline.worker.tensorflow.devices import prepare_devices
plan, own = planned("strategy=one_device"), tuple(os.sched_getaffinity(0))
for cores in (own[:1], own):
    prepare_devices(plan, replace(plan.processes[0], cores=cores))
    print(len(cores) == 1, context.context().config.experimental.disable_thread_spinning)
"""


def ran(code: str, printed: str, **environment: str) -> list[str]:
    """What a process writes beside what it is to print."""
    of_tests = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}
    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | of_tests | environment, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert process.stdout == printed, process.stderr
    return process.stderr.splitlines()


@pytest.mark.slow
def test_graphs_for_cpus_are_optimized_once_and_not_for_other_devices():
    lines = ran(GRAPHS, "320.0\n", TF_CPP_MIN_LOG_LEVEL="0", TF_CPP_VMODULE="meta_optimizer=1")
    lines = [line for line in lines if "Graph size after" in line]
    assert sum("remapper: " in line for line in lines) == 1
    assert not [line for line in lines if "memory_optimizer: " in line or "layout: " in line or "tfg_optimizer" in line]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_look_out_for_work_before_they_sleep_unless_they_share_a_core():
    ran(SPINS, "True True\nFalse False\n")


@pytest.mark.slow
def test_batches_that_are_fed_ahead_train_to_the_last_bit_as_those_that_are_asked_for_and_without_the_host():
    # Of so many replicas; 0: one, without a strategy.
    found = {int(number): one for number, one in came("fed", 0, 1, 2).items()}
    for replicas, each in found.items():
        plain, ahead = each["plain"], each["ahead"]
        for name in ("losses", "sizes", "held_out"):
            assert ahead[name] == plain[name], (replicas, name)
        assert ahead["sizes"] == [32, 32, 32, 11] * 2 + [32]
        assert all(wait >= 0 for wait in ahead["waits"])
        # What was read ahead and not trained on is read again after a resume.
        assert each["resumed"] == ahead["losses"][3:], replicas
        # One batch is trained on again and again by the same compiled loop.
        whole, parts, *sizes, traced = each["again"]
        assert (parts, sizes, traced) == (max(1, replicas), [whole] * 2, 1)
        if replicas:
            # The host has no part in the steps of a call; what is asserted is seen where it is so.
            assert each["ahead on host"] == []
            assert any("IteratorGetNext" in name for name in each["plain on host"])
    # Two replicas equal one device.
    np.testing.assert_allclose(found[2]["ahead"]["losses"], found[1]["plain"]["losses"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("arrived", "ended", "waits"), [
    ([-3, -2, -1, -1], 4, [0, 0, 0, 0]),
    # Each step takes 1, and each batch comes 2 after the one before.
    ([1, 3, 5, 7], 8, [1, 1, 1, 1]),
    # One batch of four is late; the others were there.
    ([-1, -1, 5, 5], 7, [0, 0, 3, 0]),
    # The last came as the call ended: a step takes no time.
    ([0, 2], 2, [0, 2]),
    ([], 1, []),
])  # fmt: skip
def test_waits_are_what_batches_came_late_by(arrived, ended, waits):
    np.testing.assert_allclose(feed.waits(np.array(arrived, float), 0.0, ended), waits, atol=1e-9)


def test_only_devices_with_memory_of_their_own_are_fed_ahead():
    name = "/job:worker/replica:0/task:1/device:{}:0"
    assert feed.feeds_ahead([name.format("GPU")])
    assert not any(feed.feeds_ahead(devices) for devices in ([], [name.format("CPU")], [name.format("TPU")]))


@pytest.mark.slow
def test_processes_that_are_fed_ahead_train_to_the_same(pipeline):
    ran = pipeline(
        "-m", "strategy=multi_worker", "workers=2", "data=digits", "train.replica_batch=50", "train.epochs=2", *QUICK,
        "strategy.build._target_=pipeline.strategies.multi_worker,fed.multi_worker",
        "data.service={}".format(one_of(("null", "1"))),
    ).ok()  # fmt: skip
    plain, ahead = ran.results
    for name in ("loss", "metrics", "val_loss", "val_metrics"):
        assert ahead[name] == plain[name]


LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}
PROCESS = """
import json, signal, sys, threading
signal.alarm(120)  # The kernel ends a process that hangs, also one that waits for its interpreter lock.
import tensorflow as tf
from pipeline.worker.tensorflow import loopback
held = loopback.listen_on_loopback_only() and loopback.listen_on_loopback_only()
started = False
def compete_for_the_interpreter_lock():
    while not started:
        pass
threading.Thread(target=compete_for_the_interpreter_lock, daemon=True).start()
def server():
    try:
        return tf.distribute.Server({"worker": [sys.argv[1]]}, job_name="worker", task_index=0)
    except tf.errors.UnknownError as error:
        return error
loopback.on_loopback, as_ever = lambda address: signal.raise_signal(signal.SIGINT), loopback.on_loopback
print(json.dumps([held, server().message]), flush=True)
sys.stdin.readline()
loopback.on_loopback = as_ever
made = server()
started = True
print(json.dumps([held, made.target]), flush=True)
while True:
    signal.pause()
"""


def answer(process: subprocess.Popen[str]) -> list[object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"ended with {process.wait()} before it had a server (-14: it hung)"
    return list(json.loads(line))


def listening(pid: int) -> list[tuple[str, int]]:
    """(host, port) of every listening TCP socket of a process."""
    sockets = psutil.Process(pid).net_connections("tcp")
    return [(one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize(("family", "before", "given", "expected", "after"), [
    (socket.AF_INET, "1f90", "0.0.0.0", "127.0.0.1", "00" * 8),
    (socket.AF_INET, "1f90", "10.0.0.7", "10.0.0.7", "00" * 8),
    (socket.AF_INET6, "1f9000000001", "::", "::ffff:127.0.0.1", "00000002"),
    (socket.AF_INET6, "1f9000000001", "::ffff:0.0.0.0", "::ffff:127.0.0.1", "00000002"),
    (socket.AF_INET6, "1f9000000001", "::1", "::1", "00000002"),
])  # fmt: skip
def test_only_a_wildcard_address_changes(family, before, given, expected, after):
    def sockaddr(host: str) -> bytes:
        start = family.to_bytes(2, sys.byteorder) + bytes.fromhex(before)
        return start + socket.inet_pton(family, host) + bytes.fromhex(after)

    assert on_loopback(sockaddr(given)) == sockaddr(expected)


def test_a_process_without_tensorflow_is_promised_nothing() -> None:
    code = "from pipeline.worker.tensorflow.loopback import listen_on_loopback_only; print(listen_on_loopback_only())"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "False\n"


@pytest.mark.slow
def test_a_ctrl_c_amid_the_bind_leaves_no_server_and_the_next_one_listens_on_loopback_only() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with reserved_ports(1) as (port,):
        command = [sys.executable, "-c", PROCESS, f"127.0.0.1:{port}"]
        with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as server:
            try:
                assert answer(server) == [True, "Could not start gRPC server"]
                assert listening(server.pid) == []
                print(file=server.stdin, flush=True)
                assert answer(server) == [True, f"grpc://127.0.0.1:{port}"]
                heard = listening(server.pid)
            finally:
                server.kill()
    assert {at for _, at in heard} == {port}
    assert {host for host, _ in heard} <= LOOPBACK


@pytest.mark.slow
def test_no_process_of_a_run_listens_beyond_loopback_whatever_its_role(tmp_path: Path) -> None:
    command = start(
        tmp_path, "-m", "strategy=multi_worker,parameter_server", "workers=2", "measure.steps=0",
        "measure.baseline=none", "model=mlp", "data=digits", "train.steps=600", "train.steps_per_call=5",
        "tracking.system_metrics_seconds=0", "train.check=off",
    )  # fmt: skip
    began, heard, roles = time.monotonic(), set(), set()
    with command:
        while command.poll() is None and time.monotonic() < began + 150:
            for each in [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]:
                # A process may end while it is looked at.
                with suppress(psutil.Error, OSError):
                    heard |= {(each.pid, host) for host, _ in listening(each.pid)}
            time.sleep(0.3)
        command.kill()
    for log in tmp_path.glob("outputs/sweeps/*/*/events.jsonl"):
        told = [json.loads(line) for line in log.read_text().splitlines()]
        assert told[-1]["status"] == "FINISHED"
        pids = {event["pid"]: event["role"] for event in told if event["event"] == "started"}
        roles |= {role for pid, role in pids.items() if pid in {pid for pid, _ in heard}}
    assert roles == {"chief", "worker", "coordinator", "parameter server"}
    assert {host for _, host in heard} <= LOOPBACK
    assert not left_behind(tmp_path)


# Meshes of so many replicas of so many devices.
ALL = {
    "cnn": ("1,2", "1,4", "2,2"),
    "normalized": ("1,4", "2,2"),
    "resnet20": ("1,2", "1,4"),
    "transformer": ("1,2", "1,4", "2,2"),
    "recurrent": ("1,2", "2,2"),
    "called": ("1,2", "2,2"),
    "own": ("1,2", "2,2"),
}


def expect_planned(found, one, folder):
    """Holds a case to one device, to its plan, and to what it saved."""
    import placed  # noqa: F401 # whose classes the models are of

    np.testing.assert_allclose(found["losses"], one["losses"], rtol=0, atol=1e-5)
    for there, alone in zip(found["weights"], one["weights"], strict=True):
        np.testing.assert_allclose(there, alone, rtol=0, atol=1e-6)
    assert found["validated"] == pytest.approx(one["validated"], abs=1e-5)
    # After it has run: forward and backward, and not one elsewhere.
    assert found["ran"].keys() == {"forward", "backward"}
    for row in found["rows"]:
        if row["slots"]:
            assert row["forward"] > 0, row
            assert row["backward"] > 0, row
            # Adam's two, and an average of the weight.
            assert len(row["slots"]) == 3
    assert min(found["held"]) > 0
    saved = keras.saving.load_model(folder / "model.keras", compile=False)
    for loaded, there in zip(saved.weights, found["weights"], strict=True):
        np.testing.assert_array_equal(loaded, np.array(there, loaded.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(tuple(ALL), 1))
def test_every_model_learns_on_every_mesh_what_one_device_learns(tmp_path, name):
    found = came("placed", tmp_path, f"{name},1,1", *(f"{name},{mesh}" for mesh in ALL[name]))
    for mesh in ALL[name]:
        case = f"{name},{mesh}"
        expect_planned(found[case], found[f"{name},1,1"], tmp_path / case)
        if name == "transformer":
            held = found[case]["held"]
            assert max(abs(np.array(held) / np.mean(held) - 1)) < 0.25


@pytest.mark.slow
def test_all_is_on_the_planned_devices_and_micro_batches_learn_what_whole_ones_learn_or_are_refused(tmp_path):
    # With dropout what they draw would be other masks.
    cases = sampled(("cnn,1,2,4", "transformer,1,2,3", "masked,1,2,4", "masked,2,2,2"), 2)
    refused = {
        "normalized": "received one that keeps batch_normalization",
        "own": "which calls itself on whole batches",
        "penalized": "received squared, whose loss is that of a whole batch. Try",
    }
    found = came(
        "placed", tmp_path, *dict.fromkeys(f"{case.split(',')[0]},1,1,1" for case in cases), *cases,
        *(f"{name},1,2,2" for name in refused), "normalized,1,1", "normalized,1,2", "astray,1,2",
    )  # fmt: skip
    expect_planned(found["normalized,1,2"], found["normalized,1,1"], tmp_path / "normalized,1,2")
    assert {row["devices"][0] for row in found["normalized,1,2"]["rows"]} == {"CPU:0", "CPU:1"}
    # A layer that says itself where it runs.
    assert re.fullmatch(
        r"Expected operation while/\S*/astray\S* on CPU:1, where its layer is planned, received it on CPU:0. Try .*",
        found["astray,1,2"]["refused"],
    )
    for case in cases:
        expect_planned(found[case], found[f"{case.split(',')[0]},1,1,1"], tmp_path / case)
    for name, words in refused.items():
        assert words in found[f"{name},1,2,2"]["refused"]


@pytest.mark.slow
def test_a_run_that_is_killed_and_goes_on_ends_with_the_weights_and_slots_of_one_device(pipeline, tmp_path):
    ran = pipeline(
        "-m", "strategy=one_device,model_parallel", "workers=1", "model=cnn", "data=digits",
        "hardware=4cpu", "hardware.rehearse=true", "train.global_batch=64", "train.steps=40",
        "train.steps_per_call=2", "checkpoint.every_steps=6", "tracking=none", "measure.steps=0",
        f"train.callbacks=[{{_target_: dying.Dies, at: 7, marker: '{tmp_path}/died_${{strategy.name}}'}}]",
    ).ok()  # fmt: skip
    assert [result["restarts"] for result in ran.results] == [1, 1]
    one, placed = (keras.saving.load_model(folder / "model.keras") for folder in ran.run_folders)
    for alone, there in zip(
        one.weights + one.optimizer.variables, placed.weights + placed.optimizer.variables, strict=True
    ):
        np.testing.assert_allclose(np.asarray(there), np.asarray(alone), rtol=0, atol=1e-6)
    listed = (ran.run_folders[1] / "placement.txt").read_text()
    assert [f"CPU:{number}" in listed for number in range(3)] == [True, True, False]
    assert "Each copy of the model is laid over 2 devices" in " ".join(ran.results[1]["notes"])


LAYERS = [
    Layer(*one) for one in (("stem", 4, 100, True), ("norm", 1, 0, False), ("relu", 0, 0, False),
                            ("middle", 10, 100, True), ("head", 100, 4, True))
]  # fmt: skip


def test_a_part_begins_with_a_kernel_and_costs_are_balanced_or_a_written_layout_is_followed_and_others_refused():
    assert balanced(LAYERS, 1) == [0] * 5
    assert balanced(LAYERS, 2) == [0, 0, 0, 0, 1]
    assert balanced(LAYERS, 3) == [0, 0, 0, 1, 2]
    with pytest.raises(UserError, match=r"of at least 4 layers .* received 3. Try strategy.devices_per_replica=3"):
        balanced(LAYERS, 4)
    assert written(LAYERS, {"head|stem": 1, "middle": 0}, 2) == [1, 1, 1, 0, 1]
    for layout, words in (
        ({"stem": 0, "tail": 1}, "received tail, which matches none of stem, norm, relu, middle, head. Try"),
        ({"stem": 0, "head": 1, "h.*": 1}, r"received head and h.\*, which both match head. Try"),
        ({"stem": 0, "relu": 1, "middle": 0}, "received one that leaves device 1 without. Try"),
    ):
        with pytest.raises(UserError, match=words):
            written(LAYERS, layout, 2)


def test_keras_own_distribution_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    words = r"Expected no keras\.distribution under .* received DataParallel. Try"
    with keras.distribution.DataParallel(devices=["cpu:0"]).scope(), pytest.raises(ModelError, match=words):
        build.model(lambda: model, tf.distribute.get_strategy(), (tf.zeros((2, 4)), tf.zeros((2,), tf.int32)))
