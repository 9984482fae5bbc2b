"""One process's life: its devices, strategy, data and model, then what the conductor asks of it, told as events.

A worker or parameter server of an asynchronous training serves its coordinator, and takes `exit` alone.

Commands, each a dictionary with `do`:

    load       {"folder"}             make the data, and look for what is broken; answered by `loaded`
    drop       {"broken"}             leave out what any process found broken; answered by `loaded`
    build      {"train_counts", "validation_counts", "resume"}   make the model; `built`. Training will go on from the
               last good checkpoint with `resume` "last" or "back"; with "back" later ones are removed; `restored`
    size       {}                     tell how large the model is; `sized`
    profile    {"what", "steps"}      before `begin`, time the "model" alone, then the "input", each a few and then
               so many steps, then the "stages" of the input in the first process; each answered by `profiling`
    begin      {}                     begin training: from here on, steps are those of the training while it lasts
    calibrate  {"steps_per_call"}     trace, time a few steps; `calibrated`
    measure    {"repeat", "warmup_steps", "steps", "steps_per_call"}   time steps; `measured`
    train      {"steps_per_call", "folder"}   train to the end, save; `saved`, `finished`
    explain    {"what", ...}          once training is over, or in a baseline: time steps with "everything" or
               "no input" or "no statistics" ("warmup_steps", "steps", "steps_per_call"), a call with "no step", or
               some "replicas" with "no communication" ("seconds", "steps_per_call"); each answered by `explaining`
    leave      {}                     write a checkpoint as soon as all agree to, and do nothing more; `left`. It is
               heard at once, whatever a process is at
    exit       {}                     end with 0

Training tells `steps`, `epoch` and `checkpoint`. Without `begin`, as in the baseline, steps train the model for nothing
but time.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from pipeline.plan.plan import from_json
from pipeline.worker.engine import Tell, engine_of


def main(
    plan_text: str,
    rank: int,
    tell: Tell,
    take: Callable[[], dict[str, Any]],
    asked_to_leave: Callable[[], bool],
    leave: Callable[[int], NoReturn],
) -> NoReturn:
    """Lives process `rank` of a plan: tells events, takes commands, and on `exit` leaves at once with 0.

    It does not return, because letting go of an engine's iterators and servers can take a minute.
    """
    plan = from_json(plan_text)
    process = plan.processes[rank]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    engine = engine_of(plan.backend)(plan, process, tell, asked_to_leave)
    try:
        versions = engine.join()
        tell("joined", devices=list(process.devices), versions=versions)
        if rank == min(other.rank for other in plan.processes if other.host == process.host):
            _sample_system(plan.system_metrics_seconds, process.host, tell)
        while (command := take())["do"] != "exit":
            engine.obey(command.pop("do"), **command)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        tell("failed", **engine.failure(error))
        leave(1)
    leave(0)


def _sample_system(seconds: float, host: int, tell: Tell) -> None:
    """Tells this host's load every so many seconds, from a thread of its own."""
    if seconds <= 0:
        return
    import psutil

    psutil.cpu_percent()
    name = f"host{host}"

    def sample() -> None:
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
                tell("system", host=name, values=values)

    threading.Thread(target=sample, daemon=True).start()
