"""An agent: `python -m pipeline.launch HOST:PORT --name NAME --order NUMBER`, started on each host of a cluster.

Ends with what the driver's command ends with; 75 where that was given up, after processes have saved a checkpoint, and
69 where it has never come. In a pod it ends as a Job expects: with 0 once the driver's command has ended, in whatever
way, and with 143 if the pod is taken away, once all processes of the run have saved a checkpoint.
"""

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from pipeline.config.schema import ClusterConfig, StartMethod
from pipeline.launch.agents.agent import ABANDONED, UNREACHED, Agent
from pipeline.launch.agents.channel import Channel
from pipeline.launch.agents.dialling import reached_from
from pipeline.launch.agents.endpoint import DRIVER, Endpoint
from pipeline.launch.local import LocalCluster
from pipeline.launch.signals import PREEMPTING

# For how long a driver is waited for that has never answered; in a pod, as it may look for pods only now and then.
CONTACT_SECONDS, POD_CONTACT_SECONDS = 60.0, 120.0


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Serves a driver to its end; returns the exit code."""

    def order(text: str) -> int:
        return sum(map(int, text.split("+")))

    parser = argparse.ArgumentParser("python -m pipeline.launch", description=__doc__)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("conductor", nargs="?", help="HOST:PORT at which the driver listens")
    way.add_argument("--listen", type=int, metavar="PORT", help="wait for the driver at a port of loopback")
    parser.add_argument("--name", required=True, help="what a person calls this host")
    parser.add_argument("--order", type=order, required=True, help="its place among all, from 0, as 3 or 2+1")
    parser.add_argument("--address", help="where other hosts reach this one; else its name, if that is one")
    parser.add_argument("--token-file", type=Path, help="a file with the token, which else comes by standard input")
    parser.add_argument("--start-method", default="forkserver", choices=[method.name for method in StartMethod])
    parser.add_argument("--detach", action="store_true", help="go on once the driver has answered, in the background")
    parser.add_argument("--pod", action="store_true", help="be a pod of a Job, which may be taken away alone")
    arguments = parser.parse_args()
    token = (arguments.token_file.read_bytes() if arguments.token_file else sys.stdin.buffer.readline()).strip()
    if not token:
        print("Expected a token on standard input, or --token-file, received none.", file=sys.stderr)
        return UNREACHED
    signals: list[int] = []
    for number in PREEMPTING:
        signal.signal(number, lambda number, frame: signals.append(number))
    reached = _detached() if arguments.detach else lambda: None
    cluster = LocalCluster(ClusterConfig(name="local", start_method=StartMethod[arguments.start_method]), environ)
    endpoint = Endpoint(arguments.name, token)
    if arguments.listen is None:
        channel = endpoint.dial(DRIVER, arguments.conductor)
    else:
        endpoint.listen(f"127.0.0.1:{arguments.listen}")
        channel = endpoint.channel(DRIVER)
    contact_seconds = POD_CONTACT_SECONDS if arguments.pod else CONTACT_SECONDS

    def gone(channel: Channel, orphan_timeout: float) -> bool:
        if channel.life:
            reached()
        return channel.refused or channel.away > (orphan_timeout if channel.life else contact_seconds)

    cluster.warm_up()
    address = arguments.address or reached_as(arguments.name, arguments.conductor)
    code = Agent(channel, cluster, arguments.order, address, gone, leaves=arguments.pod).serve(
        lambda: signals[0] if signals else None
    )
    if signals and arguments.pod:
        # Otherwise a Job counts its work as done.
        code = 128 + signals[0]
    elif code is None:
        code = ABANDONED if channel.life else UNREACHED
        expected = "the driver to come back" if channel.life else "to reach the driver"
        where = f" at {arguments.conductor}" if arguments.conductor else ""
        print(f"Expected {expected}{where}, received: {channel.problem or 'nothing'}.", file=sys.stderr)
    elif arguments.pod:
        code = 0
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


def _detached() -> Callable[[], None]:
    """Goes on in a process of its own session, and returns what this one's end waits for, unless that ends before."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os._exit(0 if os.read(reading, 1) else UNREACHED)
    os.close(reading)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere, shown = os.open(os.devnull, os.O_RDWR), os.dup(2)
    # What the agent starts holds none of the streams, whose end ssh waits for.
    for stream in range(3):
        os.dup2(nowhere, stream)
    sys.stderr = os.fdopen(shown, "w", buffering=1)
    # Python's resource tracker is handed what this names.
    sys.stderr.fileno = lambda: 2  # type: ignore[method-assign]

    @cache
    def reached() -> None:
        # From now on errors have nobody to be shown to.
        os.dup2(nowhere, shown, inheritable=False)
        os.write(writing, b"!")

    return reached


if __name__ == "__main__":
    sys.exit(main())
