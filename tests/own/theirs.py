"""What another package offers: a cluster that starts processes in other folders and speaks over sockets, and a view."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from pipeline.launch import machine

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
        return machine.detect(self.environ)

    def warm_up(self):
        pass

    def addresses(self, plan):
        held = [socket.create_server(("127.0.0.1", 0)) for _ in plan.processes]
        found = [f"127.0.0.1:{each.getsockname()[1]}" for each in held]
        for each in held:
            each.close()
        return found

    def start(self, plan, group, folder):
        return Job(self, plan, group, folder)

    def close(self, code):
        pass


class Job:
    def __init__(self, cluster, plan, group, folder):
        self.cluster, self.plan, self.group, self.folder = cluster, plan, group, folder
        self.processes, self.ends, self.partial, self.waiting, self.exited = {}, {}, {}, [], set()
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
            self.ends[rank] = [Connection(server.accept()[0].detach()) for _ in range(3)]
        os.set_blocking(self.ends[rank][0].fileno(), False)
        self.partial[rank] = b""
        self.add(rank, event="started", pid=started.pid, role=self.plan.processes[rank].role, host=0)

    def add(self, rank, **fields):
        self.waiting.append({"time": time.time(), "group": self.group, "rank": rank, **fields})

    def read(self, rank):
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := os.read(self.ends[rank][0].fileno(), 1 << 20):
                *lines, self.partial[rank] = (self.partial[rank] + data).split(b"\n")
                self.waiting += [json.loads(line) for line in lines if line]

    def events(self, timeout):
        if not self.waiting:
            live = [self.ends[rank][0] for rank in self.ends if rank not in self.exited]
            select.select(live, [], [], min(timeout, 0.2)) if live else time.sleep(min(timeout, 0.2))
        for rank, process in self.processes.items():
            if rank not in self.exited:
                ended = process.poll()
                self.read(rank)
                if ended is not None:
                    self.exited.add(rank)
                    self.add(rank, event="exited", code=ended)
        waiting, self.waiting = self.waiting, []
        return waiting

    def send(self, command):
        for rank, (_, commands, _) in self.ends.items():
            if rank not in self.exited:
                with contextlib.suppress(OSError):
                    commands.send_bytes(json.dumps(command).encode())

    def restart(self, rank):
        self.processes[rank].kill()
        self.processes[rank].wait()
        self.exited.discard(rank)
        self.begin(rank)

    def dump_stacks(self):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR2)

    def stop(self, grace):
        deadline = time.monotonic() + grace
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        for ends in self.ends.values():
            for end in ends:
                end.close()
        self.ends.clear()


class Broken(Cluster):
    def start(self, plan, group, folder):
        raise KeyError("no such partition")


class Partial:
    def __init__(self, config, environ):
        pass


class Lines:
    """A line an event, in a file of the run's folder."""

    def __init__(self, plan, folder):
        self.path, self.most = folder / "lines.txt", plan.workers

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self.path.open("a") as lines:
            lines.write(f"end {self.most}\n")

    def update(self, event, now):
        with self.path.open("a") as lines:
            lines.write(event["event"] + "\n")


class Falls(Lines):
    def update(self, event, now):
        if event["event"] == "built":
            raise OSError("the disk is full")
        super().update(event, now)
