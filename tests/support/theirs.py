"""What another package offers: a cluster and a collective over sockets, a view, choices, and a NumPy engine."""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import numpy as np

from pipeline.launch import this_machine
from pipeline.launch.signals import STACKS
from pipeline.record import commands, events
from pipeline.record.log import from_line, stamped

BOOT = """
import socket, sys
from multiprocessing.connection import Connection
from pipeline.launch import child
port, rank, group, log = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
plan = sys.stdin.read()
ends = [Connection(socket.create_connection(("127.0.0.1", port)).detach()) for _ in range(3)]
child.main(plan, rank, group, *ends, log)
"""


class Cluster:
    def __init__(self, config, environ):
        self.root, self.environ = config.options["folders"], dict(environ)

    def serve(self, say, asked):
        return None

    def inventory(self):
        return this_machine.detect(self.environ)

    def warm_up(self):
        pass

    def addresses(self, plan):
        with contextlib.ExitStack() as held:
            servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in plan.processes]
            return [f"127.0.0.1:{each.getsockname()[1]}" for each in servers]

    def start(self, plan, group, folder):
        return Job(self, plan, group, folder)

    def close(self, code):
        pass


class Job:
    def __init__(self, cluster, plan, group, folder):
        self.cluster, self.plan, self.group, self.folder = cluster, plan, group, folder
        self.processes, self.ends, self.waiting = {}, {}, queue.SimpleQueue()
        for process in plan.processes:
            self.begin(process.rank)

    def begin(self, rank):
        home = os.path.join(self.cluster.root, f"{self.group}-{rank}")
        os.makedirs(home, exist_ok=True)
        environ = {**self.cluster.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(60)
            log = str((self.folder / f"{self.group}-{rank}.log").resolve())
            started = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(server.getsockname()[1]), str(rank), self.group, log],
                cwd=home, env=environ, stdin=subprocess.PIPE,
            )  # fmt: skip
            self.processes[rank] = started
            started.stdin.write(self.plan.to_json().encode())
            started.stdin.close()
            told, *others = (server.accept()[0] for _ in range(3))
        self.ends[rank] = [Connection(end.detach()) for end in others]
        self.add(rank, events.Started(started.pid, self.plan.processes[rank].role))
        threading.Thread(target=self.follow, args=(rank, started, told), daemon=True).start()

    def add(self, rank, event):
        self.waiting.put(stamped(event, time.time(), self.group, rank))

    def follow(self, rank, process, told):
        """Passes on what a process tells, and how it has ended unless another has taken its place."""
        with told, told.makefile("rb") as lines, contextlib.suppress(ConnectionError):
            for line in lines:
                if line.endswith(b"\n"):
                    self.waiting.put(from_line(line))
        code = process.wait()
        if self.processes.get(rank) is process:
            self.add(rank, events.Exited(code))

    def events(self, timeout):
        waiting = []
        with contextlib.suppress(queue.Empty):
            waiting.append(self.waiting.get(timeout=min(timeout, 0.2)))
            while True:
                waiting.append(self.waiting.get_nowait())
        return waiting

    def send(self, command):
        for end, _ in self.ends.values():
            with contextlib.suppress(OSError):
                end.send_bytes(command.to_json().encode())

    def restart(self, rank):
        process = self.processes.pop(rank)
        process.kill()
        process.wait()
        self.begin(rank)

    def dump_stacks(self):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(STACKS)

    def stop(self, grace):
        deadline = time.monotonic() + grace
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        for end in (end for ends in self.ends.values() for end in ends):
            end.close()
        self.ends.clear()


class Broken(Cluster):
    def start(self, plan, group, folder):
        raise KeyError("no such partition")


class Partial:
    def __init__(self, config, environ):
        pass


class Lines:
    def __init__(self, plan, folder):
        self.path, self.most = folder / "lines.txt", plan.workers

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self.path.open("a") as lines:
            lines.write(f"end {self.most}\n")

    def update(self, event, now):
        with self.path.open("a") as lines:
            lines.write(event.kind + "\n")


class Falls(Lines):
    def update(self, event, now):
        if isinstance(event, events.Built):
            raise OSError("the disk is full")
        super().update(event, now)


class Mean:
    """Trains one number to be the mean of others, with NumPy alone."""

    def __init__(self, plan, process, emit, asked_to_leave):
        self.plan, self.emit = plan, emit
        self.steps, self.left = 0, False

    def join(self):
        return {"python": "3", "mean": "1.0"}

    def failure(self, error):
        return events.Failed(f"{type(error).__name__}: {error}")

    def obey(self, command):
        if not self.left:
            for event in self.responses(command):
                self.emit(event)

    def responses(self, command):
        match command:
            case commands.Load():
                nothing = {"train": [], "validation": []}
                yield events.Loaded({"train": False, "validation": False}, {"train": 96, "validation": 0}, nothing)
            case commands.Build():
                yield events.Built(
                    parameters=1, state_bytes=8, input_shape=[1], input_dtype="float64", train_examples=96,
                    validation_examples=0, data_digest="mean", steps_per_epoch=self.plan.steps_per_epoch(96), epochs=1,
                )  # fmt: skip
            case commands.MeasureSize():
                yield events.Sized(error="one number")
            case commands.Calibrate():
                yield events.Calibrated(0.01)
            case commands.Measure(repeat=repeat, steps=steps):
                examples, seconds = float(steps * self.plan.training.global_batch), 0.01 * steps
                yield events.Measured(repeat, examples, seconds, steps, calls=[events.TimedCall(steps, seconds)])
            case commands.Train():
                yield from self.train()
            case commands.Leave():
                self.left = True
                yield events.Left(self.steps)

    def train(self):
        batch, data, weight = self.plan.training.global_batch, np.arange(96.0), 0.0
        while self.steps < self.plan.training.steps:
            examples = data[self.steps * batch % 96 :][:batch]
            loss = float(np.mean((weight - examples) ** 2))
            weight += 0.1 * float(np.mean(examples) - weight)
            self.steps += 1
            yield events.Steps(self.steps, [loss], epoch=1, examples=batch, seconds=0.01, learning_rate=0.1)
        yield events.Finished(["same"], epochs=1, loss=loss)


class Fails(Mean):
    def train(self):
        raise ArithmeticError("the mean of nothing")


class Sums:
    """Adds over a socket what two processes have, each with one replica, and notes how many bytes went through it."""

    def __init__(self, plan, process, strategy):
        self.replicas, self.first = plan.workers, process.rank == 0
        self.log = os.path.join(plan.output_dir, f"sums-{process.rank}.txt")
        # A name that no other run on this machine has, since the first process listens at that port.
        name = f"\0sums at {plan.processes[0].address}"
        if self.first:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(name)
                server.listen()
                server.settimeout(60)
                self.other, _ = server.accept()
        else:
            self.other = socket.socket(socket.AF_UNIX)
            until = time.monotonic() + 60
            while self.other.connect_ex(name) and time.monotonic() < until:
                time.sleep(0.05)
        self.other.settimeout(60)

    def sum(self, arrays):
        import tensorflow as tf

        sums = tf.numpy_function(self.added, arrays, [array.dtype for array in arrays])
        return [tf.ensure_shape(total, array.shape) for total, array in zip(sums, arrays, strict=True)]

    def sent_bytes(self, size):
        return size

    def added(self, *arrays):
        mine = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        if self.first:
            self.other.sendall(mine)
        theirs = self.other.recv(len(mine), socket.MSG_WAITALL)
        if not self.first:
            self.other.sendall(mine)
        with open(self.log, "a") as log:
            log.write(f"{len(mine)}\n")
        sums, start = [], 0
        for array in arrays:
            sums.append(array + np.frombuffer(theirs, array.dtype, array.size, start).reshape(array.shape))
            start += array.nbytes
        return sums


class Unlike(Sums):
    """Adds up gradients of kernels to something else in each process."""

    def added(self, *arrays):
        wrong = [total.ndim == 2 and total.dtype == np.float32 and self.first for total in arrays]
        return [total + total.dtype.type(off) for total, off in zip(super().added(*arrays), wrong, strict=True)]


class NoSums:
    def __init__(self, plan, process, strategy):
        raise KeyError("no such ring")


class HalfOfSums:
    replicas = 2

    def __init__(self, plan, process, strategy):
        pass


def hierarchical(devices, packs):
    import tensorflow as tf

    operations = tf.distribute.HierarchicalCopyAllReduce(packs)
    return tf.distribute.MirroredStrategy([f"/device:{device}" for device in devices], cross_device_ops=operations)


def line(input_shape, num_classes, units):
    import keras

    layers = [keras.layers.Dense(units), keras.layers.Dense(num_classes, "softmax")]
    return keras.Sequential([keras.Input(input_shape), *layers])


def corners(examples):
    """Points, and which of their four numbers is the largest."""
    x = np.random.default_rng(0).normal(size=(examples, 4)).astype("float32")
    y = np.argmax(x, axis=1).astype("int32")
    return (x, y), (x[:64], y[:64])


def fails(devices=None, input_shape=None):
    raise ValueError("the moon is full")
