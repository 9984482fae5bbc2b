"""How fast processes add gradients: through shared memory, by TensorFlow's ring, by Horovod, and in bare loops.

    make horovod
    python benchmarks/collectives.py

Turns are taken as in `side_by_side.py`. Runs in what `make horovod` has built; where it is not built, those of Horovod
are left out, which is said. `crowded` has twice as many processes, on as many cores.

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
import turns
from contestants import Ours, Rival
from rivals import Spec
from side_by_side import REPLICA_BATCH
from turns import Claim, Contestant, Make

from pipeline.config.schema import ClusterConfig
from pipeline.launch.local import LocalCluster
from pipeline.worker.collective import BUILT
from pipeline.worker.tensorflow import horovod

MODEL = "cnn"
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
SUITES = {MODEL: CLAIMS, "crowded": (Claim("multi_worker", ("ring",), 1.0),)}
OF_HOROVOD = ("horovod", "bare-horovod", "bare-horovod-same")


def main() -> None:
    """Takes turns and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_options(parser)
    small = [f"{MODEL}:{name}" for name in ("limit", "multi_worker", "ring", "horovod")]
    arguments = record.parse(parser, smoke=turns.smallest(small))
    turns.check(parser, arguments)
    built = find_spec("horovod") is not None
    python = record.ROOT / BUILT / "bin" / "python"
    if not built and python.exists() and not arguments.smoke:
        os.execv(python, [str(python), *sys.argv])
    if not built:
        print(f"Left out, since Horovod is not built (make horovod): {', '.join(OF_HOROVOD)}.", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="collectives_") as folder, contextlib.ExitStack() as serving:
        cluster = LocalCluster(ClusterConfig(name="local"), os.environ)
        cluster.warm_up()
        try:
            makes = partial(field, arguments.workers, built, cluster, Path(folder), serving)
            turns.run_suites(SUITES, makes, arguments)
        finally:
            cluster.close(0)


def field(
    workers: int, built: bool, cluster: LocalCluster, folder: Path, serving: contextlib.ExitStack, suite: str
) -> dict[str, Make]:
    """What makes each contestant. Ours come first, because rivals take over their steps per call."""
    batch = REPLICA_BATCH[MODEL]
    if suite != MODEL:
        workers *= 2
    ports = tuple(cluster.free(5 * workers))
    mine, by_ring, by_horovod, there, there_same = (ports[first::5] for first in range(5))
    plan = contestants.make_plan("multi_worker", MODEL, workers, batch, mine)
    ring = contestants.make_plan("multi_worker", MODEL, workers, batch, by_ring, "strategy.collective=tensorflow")
    other = contestants.make_plan("multi_worker", MODEL, workers, batch, by_horovod, "strategy.collective=horovod")
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
                met = (f"127.0.0.1:{port}/{token}", port)
            chosen = dataclasses.replace(spec, steps_per_call=per_call, rendezvous=met)
            return Rival(chosen, f"{suite}-{name}", folder)

        return make

    made: dict[str, Make] = {
        "limit": lambda _: Ours(cluster, contestants.alone(plan), f"{suite}-limit", folder),
        "multi_worker": lambda _: Ours(cluster, [plan], f"{suite}-multi_worker", folder),
        "ring": lambda _: Ours(cluster, [ring], f"{suite}-ring", folder),
        "horovod": lambda _: Ours(cluster, [other], f"{suite}-horovod", folder),
        "bare-multi_worker": rival("bare-multi_worker", bare),
        "bare-multi_worker-same": rival(
            "bare-multi_worker-same", dataclasses.replace(same, strategy_build=plan.strategy.build), "multi_worker"
        ),
        "bare-horovod": rival("bare-horovod", bare),
        "bare-horovod-same": rival("bare-horovod-same", same, "horovod"),
    }
    if suite != MODEL:
        return {name: made[name] for name in ("multi_worker", "ring")}
    return {name: make for name, make in made.items() if built or name not in OF_HOROVOD}


def _at(ports: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"127.0.0.1:{port}" for port in ports)


if __name__ == "__main__":
    main()
