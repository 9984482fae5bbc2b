"""One process's life: its devices, then one command of `pipeline.record.commands` after another, answered by events."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from pipeline.config.offered import load_offer
from pipeline.plan.plan import from_json
from pipeline.record import events
from pipeline.record.commands import Command, Exit
from pipeline.record.events import EventBase
from pipeline.worker.engine import ENGINES, CommandHandler, Emit


def main(
    plan_text: str,
    rank: int,
    emit: Emit,
    take: Callable[[], Command[EventBase]],
    asked_to_leave: Callable[[], bool],
    leave: Callable[[int], NoReturn],
) -> NoReturn:
    """Runs process `rank` of a plan: takes commands, emits events, and on `Exit` leaves at once with 0."""
    # It does not return, because letting go of an engine's iterators and servers can take a minute.
    plan = from_json(plan_text)
    process = plan.processes[rank]
    # As gRPC spells it: no proxy for the other processes, even for those of this machine, where one is set.
    name = "no_grpc_proxy"
    others = os.environ.get(name) or os.environ.get("no_proxy") or ""
    hosts = dict.fromkeys(other.address.rpartition(":")[0] for other in plan.processes if other.address)
    os.environ[name] = ",".join(filter(None, [*hosts, others]))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if plan.backend in ENGINES:
        # By which Keras, once it is imported, computes.
        os.environ["KERAS_BACKEND"] = plan.backend
    make = load_offer("engines", plan.backend, "backend", ENGINES, "backend=tensorflow")
    handler: CommandHandler = make(plan, process, emit, asked_to_leave)
    try:
        versions = handler.join()
        emit(events.Joined(list(process.devices), versions))
        seconds, host = plan.measurement.system_metrics_seconds, process.host
        if seconds > 0 and rank == min(other.rank for other in plan.processes if other.host == host):
            threading.Thread(target=_sample_system, args=(seconds, host, emit), daemon=True).start()
        while not isinstance(command := take(), Exit):
            handler.obey(command)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        emit(handler.failure(error))
        leave(1)
    leave(0)


def _sample_system(seconds: float, host: int, emit: Emit) -> None:
    import psutil

    psutil.cpu_percent()
    while True:
        time.sleep(seconds)
        memory, network = psutil.virtual_memory(), psutil.net_io_counters()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_gib": memory.used / 2**30,
            "system_memory_usage_percentage": memory.percent,
            "network_receive_gib": network.bytes_recv / 2**30,
            "network_transmit_gib": network.bytes_sent / 2**30,
        }
        with suppress(OSError):
            emit(events.System(f"host{host}", values))
