"""How fast processes add gradients: through shared memory, by TensorFlow's ring, by Horovod, and in bare loops.

    make horovod
    python benchmarks/collectives.py

Turns are taken as in `side_by_side.py`. Runs in what `make horovod` has built; where it is not built, those of Horovod
are left out, which is said.

    limit               as many processes as workers that never talk
    multi_worker        ours, through shared memory, as `python -m pipeline` plans it
    ring                the same by TensorFlow's ring
    horovod             the same by Horovod's all-reduce
    bare-multi_worker   a bare loop under MultiWorkerMirroredStrategy, as TensorFlow's guide writes it
    bare-horovod        a bare loop that averages gradients by hvd.allreduce, as Horovod's guide writes it
    bare-*-same         the same with our threads, cores and steps per call
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import contestants
import record
from contestants import Ours, Rival
from rivals import Spec
from side_by_side import REPLICA_BATCH
from turns import Claim, Contestant, Make, run_suite

from pipeline.config.schema import ClusterConfig
from pipeline.launch.local import LocalCluster
from pipeline.worker.collective import BUILT
from pipeline.worker.tensorflow import horovod

SUITE = "cnn"
CLAIMS = (
    Claim("multi_worker", ("ring",), 1.1),
    Claim("multi_worker", ("bare-horovod",), 1.1),
    Claim("multi_worker", ("bare-horovod-same",), 1.0),
    Claim("multi_worker", ("bare-multi_worker",), 1.0),
    Claim("horovod", ("bare-horovod",), 1.0),
    Claim("horovod", ("bare-horovod-same",), 0.97),
    Claim("horovod", ("ring",), 1.0),
    Claim("bare-horovod", ("bare-multi_worker",), 1.0),
    Claim("horovod", ("limit",), 0.65),
    Claim("multi_worker", ("limit",), 0.9),
)
OF_HOROVOD = ("horovod", "bare-horovod", "bare-horovod-same")


def main() -> None:
    """Takes turns and prints what came of them."""
    arguments = _arguments()
    built = find_spec("horovod") is not None
    python = record.ROOT / BUILT / "bin" / "python"
    if not built and python.exists() and not arguments.smoke:
        os.execv(python, [str(python), *sys.argv])
    if not built:
        print(f"Left out, since Horovod is not built (make horovod): {', '.join(OF_HOROVOD)}.", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def wanted(name: str) -> bool:
        return (built or name not in OF_HOROVOD) and (not arguments.only or name in arguments.only)

    with tempfile.TemporaryDirectory(prefix="collectives_") as folder, contextlib.ExitStack() as serving:
        cluster = LocalCluster(ClusterConfig(name="local"), os.environ)
        cluster.warm_up()
        try:
            makes = partial(field, arguments.workers, cluster, Path(folder), serving)
            report = run_suite(SUITE, CLAIMS, wanted, makes, arguments)
        finally:
            cluster.close(0)
    record.write(arguments, arguments.rounds, {SUITE: report})
    if report["failed"]:
        sys.exit(f"Expected every contestant to train, received some that did not: {', '.join(report['failed'])}.")


def field(workers: int, cluster: LocalCluster, folder: Path, serving: contextlib.ExitStack) -> dict[str, Make]:
    """What makes each contestant. Ours come first, because rivals take over their steps per call."""
    batch = REPLICA_BATCH[SUITE]
    ports = tuple(cluster.free(5 * workers))
    mine, by_ring, by_horovod, there, there_same = (ports[first::5] for first in range(5))
    plan = contestants.make_plan("multi_worker", SUITE, workers, batch, mine)
    ring = contestants.make_plan("multi_worker", SUITE, workers, batch, by_ring, "strategy.collective=tensorflow")
    other = contestants.make_plan("multi_worker", SUITE, workers, batch, by_horovod, "strategy.collective=horovod")
    first = plan.processes[0]
    bare = Spec(None, plan.model.build, plan.data.build, "loop", workers * batch, addresses=_at(there))
    same = dataclasses.replace(
        bare,
        addresses=_at(there_same),
        cores=tuple(process.cores for process in plan.processes),
        threads=(first.intra_op_threads, first.inter_op_threads),
    )

    def rival(name: str, spec: Spec, pace: str | None = None) -> Make:
        def make(running: Mapping[str, Contestant]) -> Contestant:
            per_call = running[pace].steps_per_call if pace in running else 1
            met = None
            if name in OF_HOROVOD:
                port, token = serving.enter_context(horovod.served("127.0.0.1"))
                met = (horovod.address("127.0.0.1", port, token), port)
            chosen = dataclasses.replace(spec, steps_per_call=per_call, rendezvous=met)
            return Rival(chosen, f"{SUITE}-{name}", folder)

        return make

    return {
        "limit": lambda _: Ours(cluster, contestants.alone(plan), f"{SUITE}-limit", folder),
        "multi_worker": lambda _: Ours(cluster, [plan], f"{SUITE}-multi_worker", folder),
        "ring": lambda _: Ours(cluster, [ring], f"{SUITE}-ring", folder),
        "horovod": lambda _: Ours(cluster, [other], f"{SUITE}-horovod", folder),
        "bare-multi_worker": rival("bare-multi_worker", bare),
        "bare-multi_worker-same": rival(
            "bare-multi_worker-same", dataclasses.replace(same, strategy_build=plan.strategy.build), "multi_worker"
        ),
        "bare-horovod": rival("bare-horovod", bare),
        "bare-horovod-same": rival("bare-horovod-same", same, "horovod"),
    }


def _at(ports: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"127.0.0.1:{port}" for port in ports)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed stretches of each contestant; 5 or more")
    parser.add_argument("--lives", type=int, default=3, help="how often contestants are started, sharing the rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a timed stretch, about")
    parser.add_argument("--workers", type=int, default=2, help="CPU workers")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for others to leave")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="NAME, ...")
    small = ["--rounds=1", "--lives=1", "--seconds=0.1", "--patience=0", "--only=limit,multi_worker,ring,horovod"]
    arguments = record.parse(parser, smoke=small)
    if min(arguments.lives, arguments.rounds) < 1 or arguments.workers < 2 or not arguments.seconds > 0:
        parser.error("Expected --rounds and --lives of 1 or more, --workers of 2 or more and --seconds above 0.")
    return arguments


if __name__ == "__main__":
    main()
