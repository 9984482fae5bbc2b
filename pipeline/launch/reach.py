"""Finds out within seconds whether a TPU's worker or a tf.data service listens at an address, without TensorFlow.

TensorFlow itself waits for minutes where nothing answers. So this asks what TensorFlow asks first when it connects,
which devices the worker has, or which workers the service, and gives up soon.
"""

import os
import socket
import threading
import time
from typing import Any

from pipeline.errors import UserError

CONNECT_SECONDS = 3.0
# From connecting to the whole answer; what no timeout bounds, such as looking up a name, ends a second later.
ANSWER_SECONDS = 4.0
GET_STATUS = "/tensorflow.WorkerService/GetStatus"
GET_WORKERS = "/tensorflow.data.DispatcherService/GetWorkers"
# What gRPC's library says by itself, in the terminal of the command, is left out.
VERBOSITY = "GRPC_VERBOSITY"


def expect_tpu(address: str) -> None:
    """Returns where a TPU's worker listens at `address`, grpc://HOST:PORT. Raises `UserError`."""
    answer = _ask(address, GET_STATUS, "a gRPC server that is no TensorFlow worker")
    # The answer lists the worker's devices, among them TPU_SYSTEM, without which TensorFlow finds no TPU.
    if isinstance(answer, str) or b"TPU" not in answer:
        raise UserError(
            f"a TPU at strategy.build.address={address}",
            answer if isinstance(answer, str) else "a TensorFlow worker without a TPU",
            "the address of a TPU that is running, "
            "or hardware.rehearse=true to run the same plan on logical CPU devices",
        )


def expect_data_service(address: str) -> None:
    """Returns where a tf.data service with one worker listens at `address`, HOST:PORT. Raises `UserError`."""
    answer = _ask(address, GET_WORKERS, "a gRPC server that is no dispatcher of tf.data")
    workers = 0 if isinstance(answer, str) else _count(answer)
    if workers != 1:
        received = answer if isinstance(answer, str) else f"one with {workers or 'none'}"
        instead = "a dispatcher for each worker, and all their addresses with commas between; or data.service=2"
        raise UserError(f"a tf.data service with one worker at data.service={address}", received, instead)


def _ask(address: str, call: str, other: str) -> bytes | str:
    """The answer to a gRPC call without arguments; in words what is there instead, `other` for another server."""
    answers: list[bytes | str] = []
    # A thread, because looking up a name has no time limit.
    asking = threading.Thread(target=lambda: answers.append(_answer(address, call) or other), daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS + 1)
    return answers[0] if answers else f"no answer within {ANSWER_SECONDS + 1:g} s"


def _answer(address: str, call: str) -> bytes | str:
    """The answer, empty where a gRPC server does not know the call; or in words what else was found."""
    target = address.removeprefix("grpc://")
    host, _, port = target.rpartition(":")
    began = time.monotonic()
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except TimeoutError:
        return f"no connection within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return f"no connection: {error.strerror or error}"
    return _called(target, call, max(1.0, ANSWER_SECONDS - (time.monotonic() - began)))


def _called(target: str, call: str, timeout: float) -> bytes | str:
    # The library reads how much it is to say as it is imported.
    before = os.environ.get(VERBOSITY)
    os.environ[VERBOSITY] = before or "NONE"
    try:
        import grpc  # type: ignore[import-untyped]
    finally:
        if before is None:
            del os.environ[VERBOSITY]
    states: list[Any] = []
    # Of this machine, a proxy knows nothing.
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        channel.subscribe(states.append, try_to_connect=True)
        try:
            answer: bytes = channel.unary_unary(call)(b"", timeout=timeout, wait_for_ready=True)
            return answer
        except grpc.RpcError as error:
            code, reached = error.code(), grpc.ChannelConnectivity.READY in states
            if code is grpc.StatusCode.UNIMPLEMENTED:
                return b""
            if not reached:
                failed = grpc.ChannelConnectivity.TRANSIENT_FAILURE in states
                return "something that does not speak gRPC" if failed else "something that connects and says nothing"
            late = code is grpc.StatusCode.DEADLINE_EXCEEDED
            return "a server that did not answer in time" if late else "a server that broke off"
        finally:
            # gRPC watches a channel in a thread of its own, which fails where it finds the channel closed.
            channel.unsubscribe(states.append)
            time.sleep(0.3)


def _count(answer: bytes) -> int:
    """Counts the fields 1, of less than 128 bytes each, of a message.

    >>> _count(b""), _count(b"\\x0a\\x02ab" + b"\\x0a\\x01c")
    (0, 2)
    """
    fields = place = 0
    while place < len(answer):
        fields, place = fields + 1, place + 2 + answer[place + 1]
    return fields
