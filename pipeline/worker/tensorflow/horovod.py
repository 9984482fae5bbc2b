"""Adds by Horovod's all-reduce over Gloo, between processes that have joined under `tf.distribute` already.

Neither `horovodrun` nor MPI: the first process serves a rendezvous over HTTP, where the others find each other's
addresses, and each tells Horovod its place from the plan. Horovod's client has no token to show, but it asks for
"http://HOST:PORT/scope/key" with whatever it is given as the host: here an address that ends in a token, of the path.
"""

import hmac
import itertools
import math
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import tensorflow as tf

from pipeline.plan.plan import Plan, Process
from pipeline.worker.model_error import TrainingError
from pipeline.worker.tensorflow import collective as sums
from pipeline.worker.tensorflow.collective import Addend, from_first, over, over_replicas

# What Horovod does not add travels as what it does, which holds every value of it.
WIDER = {tf.bfloat16: tf.float32, tf.uint16: tf.int32, tf.int16: tf.int32, tf.uint32: tf.int64}


def of_plan(plan: Plan, process: Process, strategy: tf.distribute.Strategy) -> "HorovodCollective":
    """Joins this process with the others, all of which call it."""
    own = over(strategy)
    first = plan.leaders[0]
    host = _host(plan, first)
    elsewhere = nullcontext((0, "00" * TOKEN_BYTES))
    with served(host) if process.rank == first else elsewhere as (port, token):
        (received,) = from_first(strategy, own)([tf.constant([port, *token.encode()])])
        port, token = int(received[0]), bytes(received[1:].numpy().tolist()).decode()
        with told({**place(plan, process), **meeting(plan, process, f"{host}:{port}/{token}", port)}):
            import horovod.tensorflow as hvd

            hvd.init()
        # Nobody is done with the rendezvous before all are.
        over_replicas(strategy, own)([tf.zeros([])])
    if (hvd.rank(), hvd.size()) != (process.rank, plan.workers):
        expected = f"Horovod to know this as process {process.rank} of {plan.workers}"
        raise TrainingError(expected, f"{hvd.rank()} of {hvd.size()}", "strategy.collective=tensorflow")
    return HorovodCollective(plan.workers)


class HorovodCollective:
    """Adds over processes, each with one replica."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        # Horovod's operations have no order of their own; those of a step must be over before the next has the same.
        with tf.init_scope(), tf.device("CPU:0"):
            self._turn = tf.Variable(0.0, trainable=False, name="turn")
        self._numbers: weakref.WeakKeyDictionary[object, Iterator[int]] = weakref.WeakKeyDictionary()

    def sum(self, arrays: Sequence[Addend]) -> list[Addend]:
        """The sums, and as their gradients the sums of the gradients."""
        if any(isinstance(array, tf.IndexedSlices) for array in arrays):
            return self._in_turn(arrays)
        return sums.with_sums_as_gradients(self._in_turn, self.sum, arrays)

    def sent_bytes(self, size: int) -> int:
        """2 (n - 1) / n of the bytes, as in each ring (Patarasuk & Yuan, 2009)."""
        return 2 * (self.replicas - 1) * size // self.replicas

    def _in_turn(self, arrays: Sequence[Addend]) -> list[Addend]:
        with tf.control_dependencies([self._turn.read_value()]):
            # TensorFlow folds what is made of constants alone, such as zeros of all ranks but one: that rank would add
            # once, while the graph is optimized, and never again. It folds no copy.
            copy = tf.raw_ops.DeepCopy
            copies = [tf.nest.map_structure(lambda x: copy(x=x), array, expand_composites=True) for array in arrays]
        summed = sums.by_kind(copies, self._packed, partial(sums.with_rows, partial(self._wide, "allgather", "rows")))
        with tf.control_dependencies(tf.nest.flatten(summed, expand_composites=True)):
            self._turn.assign_add(1.0)
        return summed

    def _packed(self, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        # Left to itself Horovod joins what is there, slower on CPUs: other arrays each time, whose last bits differ.
        pieces = sums.by_type(arrays, range(len(arrays)))
        added = self._wide("allreduce", "sum", list(pieces.values()))
        summed = sums.parted(arrays, zip(pieces, added, strict=True))
        return [summed[place] for place in range(len(arrays))]

    def _wide(self, join: str, what: str, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Joins each array in a type that Horovod adds."""
        import horovod.tensorflow as hvd

        options = {"op": hvd.Sum} if join == "allreduce" else {}
        wide = [tf.cast(array, WIDER.get(array.dtype, array.dtype)) for array in arrays]
        joined = [getattr(hvd, join)(one, name=self._name(what), ignore_name_scope=True, **options) for one in wide]
        return [tf.cast(one, array.dtype) for one, array in zip(joined, arrays, strict=True)]

    def _name(self, what: str) -> str:
        """Returns this addend's name in all processes, which trace the same functions, if not equally often."""
        if tf.executing_eagerly():
            return what
        graph = tf.compat.v1.get_default_graph()
        # Of a branch or loop, the function that it is in.
        while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
            graph = graph.outer_graph
        return f"{what}_{graph.name}_{next(self._numbers.setdefault(graph, itertools.count()))}"


def place(plan: Plan, process: Process) -> dict[str, str]:
    """Returns a process's place for Horovod, as `horovodrun` would tell it."""
    local_ranks = [rank for rank in plan.leaders if plan.processes[rank].host == process.host]
    hosts = sorted({plan.processes[rank].host for rank in plan.leaders})
    places = {"HOROVOD_HOSTNAME": f"host{process.host}"}
    of_all = (("", process.rank, plan.leaders), ("LOCAL_", process.rank, local_ranks), ("CROSS_", process.host, hosts))
    for of, one, every in of_all:
        places |= {f"HOROVOD_{of}RANK": str(every.index(one)), f"HOROVOD_{of}SIZE": str(len(every))}
    return places


def meeting(plan: Plan, process: Process, address: str, port: int) -> dict[str, str]:
    """Returns where the processes meet, by which interface, and how long they wait: the driver loses patience first."""
    host = _host(plan, process.rank)
    names = (name for name, addresses in psutil.net_if_addrs().items() if any(one.address == host for one in addresses))
    interface: str | None = next(names, None)
    if interface is None:
        expected = f"a network interface with the address {host}, by which Horovod joins processes"
        instead = "strategy.collective=tensorflow, or an address of this machine as cluster.host"
        raise TrainingError(expected, "none", instead)
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(plan.launch.heartbeat_timeout)),
        "HOROVOD_STALL_CHECK_DISABLE": "1",
    }


@contextmanager
def told(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, the environment has these values, which Horovod reads once, as it begins."""
    before = {name: os.environ[name] for name in values.keys() & os.environ.keys()}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def _host(plan: Plan, rank: int) -> str:
    return socket.gethostbyname(str(plan.processes[rank].address).rpartition(":")[0])


# What Gloo leaves of a process is some hundred bytes.
MOST_BYTES = 1 << 20
TOKEN_BYTES = 16


@contextmanager
def served(host: str) -> Iterator[tuple[int, str]]:
    """The port and the token of one at an address of this machine, and no other, as long as the context lasts."""
    token = secrets.token_hex(TOKEN_BYTES)
    server = ThreadingHTTPServer((host, 0), partial(_Handler, f"/{token}", {}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1], token
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answers `HTTPStore` of horovod/common/gloo/http_store.cc: GET, PUT and DELETE of /scope/key."""

    def __init__(self, token: str, kept: dict[str, bytes], *request: Any) -> None:
        self._token, self._kept = token, kept
        super().__init__(*request)

    def parse_request(self) -> bool:
        # Who does not know the token is refused before anything is read.
        parsed = super().parse_request()
        knows = parsed and hmac.compare_digest(self.path[: len(self._token)].encode(), self._token.encode())
        if parsed and not knows:
            self._answer(403)
        return knows

    def do_GET(self) -> None:
        # Horovod asks again for what is not there yet.
        value = self._kept.get(self.path)
        self._answer(200 if value is not None else 404, value or b"")

    def do_PUT(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        if size > MOST_BYTES:
            self._answer(413)
            return
        self._kept[self.path] = self.rfile.read(size)
        self._answer(200)

    def do_DELETE(self) -> None:
        # A process that has met all others takes back what it never left.
        self._kept.pop(self.path, None)
        self._answer(200)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing: Horovod asks a hundred times a second until all are there."""

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
