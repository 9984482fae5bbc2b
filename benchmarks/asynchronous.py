"""Turns one run on this machine into ratios: our asynchronous training beside a bare ClusterCoordinator's.

    python benchmarks/asynchronous.py --rounds 9 --only mlp

Turns are taken as in `side_by_side.py`. Both have the same model, data, batch, optimizer, workers, cores, threads and
steps in a closure, and one server with all variables.

    parameter_server    ours, as `python -m pipeline` plans it
    bare-coordinator    the loop of TensorFlow's guide for custom training on parameter servers, with steps in a loop
    bare-unmeasured     the same without its metric, whose variables are on the server
"""

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import contestants
import record
import turns
from contestants import Ours, Rival
from rivals import Spec
from turns import Claim, Contestant, Make

from pipeline.config.schema import ClusterConfig
from pipeline.launch.local import LocalCluster

OURS, BARE, UNMEASURED = "parameter_server", "bare-coordinator", "bare-unmeasured"
SUITES = {
    model: (Claim(OURS, (BARE,), least), Claim(OURS, (UNMEASURED,), 1.0))
    for model, least in (("mlp", 1.5), ("cnn", 1.0), ("recommender", 1.0))
}
REPLICA_BATCH = {"mlp": 32, "cnn": 64, "recommender": 64}
DATA = {"recommender": ("data=clicks",)}
SMOKE = (f"mlp:{OURS}", f"mlp:{BARE}")


def main() -> None:
    """Runs the suites that were asked for and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_options(parser)
    arguments = record.parse(parser, smoke=turns.smallest(SMOKE))
    turns.check(parser, arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="asynchronous_") as folder:
        cluster = LocalCluster(ClusterConfig(name="local"), os.environ)
        cluster.warm_up()
        try:
            turns.run_suites(SUITES, partial(field, arguments.workers, cluster, Path(folder)), arguments)
        finally:
            cluster.close(0)


def field(workers: int, cluster: LocalCluster, folder: Path, suite: str) -> dict[str, Make]:
    """What makes each contestant of a model. Ours comes first, because rivals take over its steps per call."""
    others = (f"workers={workers}", "strategy.parameter_servers=1", *DATA.get(suite, ()))
    ports = tuple(cluster.free(3 * (workers + 2)))
    here, there, unmeasured = (ports[first::3] for first in range(3))
    plan = contestants.make_plan(OURS, suite, workers, REPLICA_BATCH[suite], here, *others)
    worker = plan.processes[1]
    spec = Spec(
        None, plan.model.build, plan.data.build, "coordinator", plan.training.global_batch,
        cores=tuple(process.cores for process in plan.processes),
        threads=(worker.intra_op_threads, worker.inter_op_threads),
    )  # fmt: skip

    def rival(name: str, ports: tuple[int, ...], running: Mapping[str, Contestant]) -> Contestant:
        per_call = running[OURS].steps_per_call if OURS in running else 1
        addresses = tuple(f"127.0.0.1:{port}" for port in ports)
        chosen = dataclasses.replace(spec, addresses=addresses, steps_per_call=per_call, measured=name == BARE)
        return Rival(chosen, f"{suite}-{name}", folder)

    return {
        OURS: lambda running: Ours(cluster, [plan], f"{suite}-{OURS}", folder),
        BARE: partial(rival, BARE, there),
        UNMEASURED: partial(rival, UNMEASURED, unmeasured),
    }


if __name__ == "__main__":
    main()
