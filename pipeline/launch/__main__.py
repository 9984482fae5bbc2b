"""An agent: `python -m pipeline.launch HOST:PORT --name NAME --order NUMBER`, started on each host of a cluster.

Ends with what the driver's command ends with; 75 where that was given up, after processes have saved a checkpoint.
"""

import argparse
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.schema import ClusterConfig, StartMethod
from pipeline.launch.agents.agent import Agent, AgentPlace
from pipeline.launch.agents.channel import Channel
from pipeline.launch.agents.dialling import reached_from
from pipeline.launch.agents.endpoint import Endpoint
from pipeline.launch.agents.messages import DRIVER
from pipeline.launch.local import LocalCluster
from pipeline.launch.signals import PREEMPTING

# For how long a driver is dialled that has never answered.
CONTACT_SECONDS = 60.0
# With --detach, the process that was started hears this once the driver has answered, and ends.
READY = "ready"
ABANDONED, UNREACHED = 75, 69  # EX_TEMPFAIL and EX_UNAVAILABLE of sysexits.h


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Serves a driver to its end."""
    arguments = _arguments()
    token = (arguments.token_file.read_bytes() if arguments.token_file else sys.stdin.buffer.readline()).strip()
    if not token:
        print("Expected a token on standard input, or --token-file, received none.", file=sys.stderr)
        return UNREACHED
    signals: list[int] = []
    for number in PREEMPTING:
        signal.signal(number, lambda number, frame: signals.append(number))
    starter = _Starter(arguments.detach)
    config = ClusterConfig(name="local", start_method=StartMethod[arguments.start_method])
    cluster = LocalCluster(config, environ)
    endpoint = Endpoint(arguments.name, token)
    channel = endpoint.dial(DRIVER, arguments.conductor)

    def gone(channel: Channel, orphan_timeout: float) -> bool:
        if channel.life:
            starter.tell(READY)
        return channel.refused or channel.away > (orphan_timeout if channel.life else CONTACT_SECONDS)

    cluster.warm_up()
    place = AgentPlace(arguments.order, arguments.address or reached_as(arguments.name, arguments.conductor))
    code = Agent(endpoint, channel, cluster, place, gone).serve(lambda: signals[0] if signals else None)
    if code is None:
        code = ABANDONED if channel.life else UNREACHED
    if code == UNREACHED:
        starter.tell(f"Expected to reach the driver at {arguments.conductor}, received: {channel.problem}.")
    endpoint.close(1.0)
    cluster.close(0)
    return code


def reached_as(name: str, conductor: str) -> str:
    """Returns where other hosts reach this one: its name if that is known, else the address that the driver sees.

    >>> reached_as("no such name", "127.0.0.1:80")
    '127.0.0.1'
    """
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return reached_from(conductor.rpartition(":")[0])
    return name


class _Starter:
    """Reports to whoever started this process whether it has reached the driver."""

    def __init__(self, detach: bool) -> None:
        """With `detach`, goes on in a process of its own session; this one ends with what that reports."""
        self._told = False
        self._end: int | None = None
        if not detach:
            return
        reading, self._end = os.pipe()
        if os.fork():
            os.close(self._end)
            with os.fdopen(reading) as end:
                text = end.read()
            if text != READY:
                print(text or "Expected an agent that reaches its driver, received one that ended.", file=sys.stderr)
            os._exit(0 if text == READY else UNREACHED)
        os.close(reading)
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(2):
            os.dup2(nowhere, stream)
        os.close(nowhere)

    def tell(self, text: str) -> None:
        """Tells it once; from then on errors have nobody to be shown to."""
        if self._told:
            return
        self._told = True
        if self._end is None:
            if text != READY:
                print(text, file=sys.stderr)
            return
        os.write(self._end, text.encode())
        os.close(self._end)
        os.dup2(1, 2)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m pipeline.launch", description=__doc__)
    parser.add_argument("conductor", help="HOST:PORT at which the driver listens")
    parser.add_argument("--name", required=True, help="what a person calls this host")
    parser.add_argument("--order", type=int, required=True, help="its place among all, from 0")
    parser.add_argument("--address", help="where other hosts reach this one; else its name, if that is one")
    parser.add_argument("--token-file", type=Path, help="a file with the token, which else comes by standard input")
    parser.add_argument("--start-method", default="forkserver", choices=[method.name for method in StartMethod])
    parser.add_argument("--detach", action="store_true", help="go on once the driver has answered, in the background")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
