"""Turns one run on this machine into ratios: our training beside TensorFlow's own, Keras's own and the machine's limit.

    python benchmarks/side_by_side.py --rounds 9 --only cnn --json side_by_side.json

All contestants of a model stay alive and wait without computing. Each in turn trains for about a second, round after
round, and who begins changes with the round. A ratio is the median over rounds of two stretches of the same round, so
a machine that slows down favours nobody. Between rounds all are started anew a few times, because where a process's
memory happens to lie makes it faster or slower by some percent for its whole life. A stretch waits until others leave
the machine alone, and is taken again where they came back meanwhile, as long as there is patience; rounds that were
disturbed all the same are left out of a ratio where enough others remain. The table's last column says how much of the
machine others had.

    limit               as many processes as workers, each on cores of its own, that never talk: throughputs added
    one                 one of these alone
    mirrored, multi_worker  ours, as `python -m pipeline` plans them
    bare-*              a bare tf.distribute loop, as TensorFlow's guide writes it, with TensorFlow's default threads
    bare-*-same         the same with our strategy, threads, cores and steps per call
    fit-*               Keras model.fit on the whole machine, the global batch or the replica's, arrays or a data set
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
from typing import Any

import against
import contestants
import record
import turns
from contestants import Ours, Rival
from rivals import Spec
from turns import Claim, Contestant, Make

from pipeline.config.schema import ClusterConfig
from pipeline.launch.local import LocalCluster
from pipeline.plan.plan import Plan

FITS = ("fit-global-arrays", "fit-global-dataset", "fit-replica-arrays", "fit-replica-dataset")
CLAIMS = {
    "cnn": (
        Claim("mirrored", ("limit",), 0.96),
        Claim("mirrored", FITS, 1.0),
        Claim("multi_worker", ("limit",), 0.93),
        Claim("mirrored", ("bare-mirrored",), 1.0),
        Claim("multi_worker", ("bare-multi_worker",), 1.0),
        Claim("one", ("bare-one-same",), 0.97),
        Claim("mirrored", ("bare-mirrored-same",), 0.97),
        Claim("multi_worker", ("bare-multi_worker-same",), 0.97),
    ),
    "mlp": (
        Claim("multi_worker", ("limit",), 0.45),
        Claim("mirrored", ("fit-mirrored-arrays", "fit-mirrored-dataset", "fit-mirrored-same"), 2.0),
        Claim("one", ("bare-one-same",), 0.97),
        Claim("mirrored", ("bare-mirrored-same",), 0.97),
        Claim("multi_worker", ("bare-multi_worker-same",), 0.97),
    ),
    # Its layers normalize by the global batch, in a message each, forward and back.
    "resnet20": (Claim("multi_worker", ("one",), 0.8),),
}
# One contestant of each kind.
SMOKE = ("mlp:limit", "mlp:mirrored", "mlp:bare-multi_worker-same", "mlp:fit-mirrored-arrays")
REPLICA_BATCH = {"cnn": 64, "mlp": 32, "resnet20": 64}


def main() -> None:
    """Runs the suites that were asked for and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--against", metavar="COMMIT", help="this version in turn with another one, in place of the others"
    )
    turns.add_options(parser)
    arguments = record.parse(parser, smoke=turns.smallest(SMOKE))
    turns.check(parser, arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if arguments.against:
        rows = against.compare(arguments.against, arguments.rounds, arguments.smoke)
        if arguments.json:
            record.write(arguments, arguments.rounds, rows)
        return
    with tempfile.TemporaryDirectory(prefix="side_by_side_") as folder:
        cluster = LocalCluster(ClusterConfig(name="local"), os.environ)
        cluster.warm_up()
        try:
            turns.run_suites(CLAIMS, partial(field, arguments.workers, cluster, Path(folder)), arguments)
        finally:
            cluster.close(0)


def field(workers: int, cluster: LocalCluster, folder: Path, suite: str) -> dict[str, Make]:
    """What makes each contestant of a model. Ours come first, because rivals take over their steps per call."""
    batch = REPLICA_BATCH[suite]
    ports = tuple(cluster.free(3 * workers))
    mirrored = contestants.make_plan("mirrored", suite, workers, batch, ())
    multi_worker = contestants.make_plan("multi_worker", suite, workers, batch, ports[:workers])
    alone = contestants.alone(multi_worker)
    bare = Spec(None, mirrored.model.build, mirrored.data.build, "loop", workers * batch)
    elsewhere = tuple(f"127.0.0.1:{port}" for port in ports[workers : 2 * workers])
    elsewhere_same = tuple(f"127.0.0.1:{port}" for port in ports[2 * workers :])

    def ours(name: str, *plans: Plan) -> Make:
        return lambda running: Ours(cluster, plans, f"{suite}-{name}", folder)

    def rival(name: str, spec: Spec) -> Make:
        return lambda running: Rival(spec, f"{suite}-{name}", folder)

    def same(name: str, planned: Plan, **fields: Any) -> Make:
        first = planned.processes[0]
        spec = dataclasses.replace(
            bare,
            strategy_build=planned.strategy.build,
            global_batch=planned.training.global_batch,
            devices=len(first.devices),
            cores=tuple(process.cores for process in planned.processes),
            threads=(first.intra_op_threads, first.inter_op_threads),
            **fields,
        )

        def make(running: Mapping[str, Contestant]) -> Contestant:
            pace = running.get(planned.strategy.name if planned.workers > 1 else "one")
            per_call = pace.steps_per_call if pace and spec.way == "loop" else 1
            return Rival(dataclasses.replace(spec, steps_per_call=per_call), f"{suite}-{name}", folder)

        return make

    made = {
        "limit": ours("limit", *alone),
        "one": ours("one", alone[0]),
        "mirrored": ours("mirrored", mirrored),
        "multi_worker": ours("multi_worker", multi_worker),
        "bare-one-same": same("bare-one-same", alone[0]),
        "bare-mirrored-same": same("bare-mirrored-same", mirrored),
        "bare-multi_worker-same": same("bare-multi_worker-same", multi_worker, addresses=elsewhere_same),
    }
    if suite == "resnet20":
        return {name: made[name] for name in ("limit", "one", "multi_worker")}
    if suite == "cnn":
        made["bare-mirrored"] = rival("bare-mirrored", dataclasses.replace(bare, devices=workers))
        made["bare-multi_worker"] = rival("bare-multi_worker", dataclasses.replace(bare, addresses=elsewhere))
        for size, examples in (("global", workers * batch), ("replica", batch)):
            for way in ("arrays", "dataset"):
                spec = dataclasses.replace(bare, way=f"fit_{way}", global_batch=examples)
                made[f"fit-{size}-{way}"] = rival(f"fit-{size}-{way}", spec)
    else:
        for way in ("arrays", "dataset"):
            spec = dataclasses.replace(bare, way=f"fit_{way}", devices=workers, strategy_build=mirrored.strategy.build)
            made[f"fit-mirrored-{way}"] = rival(f"fit-mirrored-{way}", spec)
        made["fit-mirrored-same"] = same("fit-mirrored-same", mirrored, way="fit_dataset")
    return made


if __name__ == "__main__":
    main()
