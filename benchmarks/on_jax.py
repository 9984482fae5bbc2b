"""Turns one run on this machine into ratios under JAX: our engine beside Keras's own `fit`, and the machine's limit.

    python benchmarks/on_jax.py --rounds 9 --only mlp

As `side_by_side.py` does for TensorFlow: all contestants of a model stay alive and wait without computing, each in turn
trains for about a second, and a ratio is the median over rounds of two stretches of the same round.

    limit               as many processes as workers, each on cores of its own, that never talk: throughputs added
    one                 one of these alone
    mirrored, multi_worker  ours, as `python -m pipeline backend=jax` plans them
    keras-one-*         Keras model.fit on one JAX device, with our threads and cores, on arrays or a data set
    keras-mirrored-*    the same on as many devices as workers, under keras.distribution.DataParallel

Keras's are given the faster of two kinds of data: NumPy arrays, or a `tf.data` data set.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
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
from pipeline.plan.plan import Plan

WAYS = ("arrays", "dataset")
KERAS_ONE, KERAS_MIRRORED = (tuple(f"keras-{kind}-{way}" for way in WAYS) for kind in ("one", "mirrored"))
# What ours is to be at least, as many times as fast as Keras's `fit`: of a small model, a step is mostly its overhead.
SMALL, LARGE = 2.0, 1.0
# Of what as many processes do that never talk; as of TensorFlow's engine.
OF_LIMIT = 0.65
SUITES = {
    model: (
        Claim("one", KERAS_ONE, least),
        Claim("mirrored", KERAS_MIRRORED, least),
        Claim("multi_worker", ("limit",), OF_LIMIT),
    )
    for model, least in (("digits", SMALL), ("mlp", SMALL), ("cnn", LARGE), ("transformer", LARGE))
}
REPLICA_BATCH = {"digits": 32, "mlp": 32, "cnn": 64, "transformer": 8}
# `digits` is the model `mlp` on pictures of 8x8, which make a step of little else than its overhead.
MODELS = {"digits": "mlp"}
OTHERS = {"digits": ("data=digits",), "transformer": ("data=text",)}
# One contestant of each kind; under DataParallel XLA's devices now and then wait for each other for good.
SMOKE = ("mlp:limit", "mlp:multi_worker", "mlp:mirrored", "mlp:keras-one-dataset")


def main() -> None:
    """Runs the suites that were asked for and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_options(parser)
    arguments = record.parse(parser, smoke=turns.smallest(SMOKE))
    turns.check(parser, arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="on_jax_") as folder:
        cluster = LocalCluster(ClusterConfig(name="local"), os.environ)
        make = partial(field, arguments.workers, cluster, Path(folder))
        turns.run_suites(SUITES, make, arguments, ("jax", "jaxlib"))


def field(workers: int, cluster: LocalCluster, folder: Path, suite: str) -> dict[str, Make]:
    """What makes each contestant of a model."""
    ports = tuple(cluster.free(workers))

    def planned(strategy: str, ports: tuple[int, ...] = ()) -> Plan:
        asked = "backend=jax", *OTHERS.get(suite, ())
        model = MODELS.get(suite, suite)
        return contestants.make_plan(strategy, model, workers, REPLICA_BATCH[suite], ports, *asked)

    mirrored, multi_worker = planned("mirrored"), planned("multi_worker", ports)
    alone = contestants.alone(multi_worker)
    ours = {"limit": alone, "one": alone[:1], "mirrored": [mirrored], "multi_worker": [multi_worker]}
    theirs = {
        name: _spec(plan, f"fit_{way}")
        for plan, names in ((alone[0], KERAS_ONE), (mirrored, KERAS_MIRRORED))
        for name, way in zip(names, WAYS, strict=True)
    }

    def our(name: str, running: Mapping[str, Contestant]) -> Contestant:
        return Ours(cluster, ours[name], f"{suite}-{name}", folder)

    def their(name: str, running: Mapping[str, Contestant]) -> Contestant:
        return Rival(theirs[name], f"{suite}-{name}", folder)

    made: dict[str, Callable[[str, Mapping[str, Contestant]], Contestant]] = dict.fromkeys(ours, our)
    made |= dict.fromkeys(theirs, their)
    return {name: partial(make, name) for name, make in made.items()}


def _spec(plan: Plan, way: str) -> Spec:
    """Keras's `fit` of what a plan trains, on its devices, threads and cores."""
    first = plan.processes[0]
    return Spec(
        None, plan.model.build, plan.data.build, way, plan.training.global_batch, len(first.devices),
        cores=(first.cores,), threads=(first.intra_op_threads, first.inter_op_threads), backend="jax",
    )  # fmt: skip


if __name__ == "__main__":
    main()
