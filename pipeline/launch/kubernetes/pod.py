"""The first process of a pod: an agent that dials the driver, or has a door for it, and ends as a Job expects.

It ends with 0 once the driver's command has ended, in whatever way; with 69 or 75, for which no Job makes another pod,
if the driver has never come, or was given up after its processes saved a checkpoint; with 143 if the pod is taken away,
once all processes of the run have saved one.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.schema import ClusterConfig, StartMethod
from pipeline.launch.agents.agent import Agent, AgentPlace
from pipeline.launch.agents.channel import Channel
from pipeline.launch.agents.endpoint import Endpoint
from pipeline.launch.agents.messages import DRIVER
from pipeline.launch.kubernetes.door import Door
from pipeline.launch.kubernetes.jobset import ABANDONED, UNREACHED
from pipeline.launch.local import LocalCluster

# Seconds to wait for a driver that has never answered: it may look for pods only now and then.
CONTACT_SECONDS = 120.0


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Serves a driver to its end; returns the exit code."""
    arguments = _arguments()
    # The first process of a container gets no signal that it has no handler for.
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    token = arguments.token_file.read_bytes().strip()
    order = arguments.first + int(environ["JOB_COMPLETION_INDEX"])
    config = ClusterConfig(name="local", start_method=StartMethod[arguments.start_method])
    cluster = LocalCluster(config, environ)
    endpoint = Endpoint(arguments.name, token)
    channel = endpoint.dial(DRIVER, arguments.dial or Door(arguments.door).address)

    def gone(channel: Channel, orphan_timeout: float) -> bool:
        return channel.away > (orphan_timeout if channel.life else CONTACT_SECONDS)

    cluster.warm_up()
    agent = Agent(endpoint, channel, cluster, AgentPlace(order, arguments.address), gone, leaves=True)
    code = agent.serve(lambda: signals[0] if signals else None)
    if signals:
        # Otherwise a Job counts its work as done.
        code = 128 + signals[0]
    elif code is None:
        code = ABANDONED if channel.life else UNREACHED
        print(f"The driver {'was lost' if channel.life else 'has never come'}: {channel.problem}.", file=sys.stderr)
    else:
        code = 0
    endpoint.close(1.0)
    cluster.close(code)
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m pipeline.launch.kubernetes.pod", description=__doc__)
    parser.add_argument("--name", required=True, help="the name of the pod's host")
    parser.add_argument("--address", required=True, help="the name by which other pods reach it")
    parser.add_argument("--first", type=int, required=True, help="the place among all of the first pod of its kind")
    parser.add_argument("--token-file", type=Path, required=True, help="the file that a Secret is mounted as")
    parser.add_argument("--start-method", default="forkserver", choices=[method.name for method in StartMethod])
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--dial", help="HOST:PORT at which the driver listens")
    way.add_argument("--door", type=int, help="the port at which it comes in by the API server")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
