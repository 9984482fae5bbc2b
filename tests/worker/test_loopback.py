"""Starts TensorFlow's servers in processes of their own and asks the system what they listen on."""

import json
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, left_behind, start
from ports import reserved_ports

from pipeline.worker.tensorflow.loopback import on_loopback

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
