"""Times deep models, whose steps take long to trace: seconds to the first step, and steps, beside a bare loop's.

    python benchmarks/deep.py --rounds 1 --only ResNet50

The bare loop is TensorFlow's guide's, a step a call, with the guide's strategy, Keras's synchronized
BatchNormalization, and our threads and cores. (With our way of adding up in MirroredStrategy, or several steps a call,
it traces ResNet50 for minutes.) In a round both are started, one after the other, from a process that has imported
TensorFlow; then they train in turn. At 64x64 pixels or 64 tokens, two examples a replica, two replicas.
"""

import argparse
import dataclasses
import multiprocessing as mp
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

import contestants
import record
from contestants import Ours, Rival
from rivals import Spec

from pipeline.config.schema import ClusterConfig
from pipeline.launch.local import LocalCluster
from pipeline.plan.plan import Plan

WORKERS, REPLICA_BATCH = 2, 2
IMAGES, TOKENS = (64, 64, 3), (64,)
APPLICATIONS = ("ResNet50", "MobileNetV2", "EfficientNetB0", "DenseNet121")
MODELS = (*APPLICATIONS, "transformer")
STRATEGIES = ("mirrored", "multi_worker")
# What ours may take of the bare loop's seconds.
FIRST_STEP, STEP = 1.2, 1.0


def main() -> int:
    """Prints each pair's seconds as they come, then the medians of their ratios; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="how often both are started")
    parser.add_argument("--stretches", type=int, default=5, help="how often both train in turn in a round")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of a stretch")
    parser.add_argument("--blocks", type=int, default=12, help="of the transformer")
    parser.add_argument("--only", default="", help="the cases whose names hold this, such as ResNet50 or multi_worker")
    smoke = ["--only=transformer, mirrored", "--blocks=1", "--stretches=1", "--seconds=0.1"]
    arguments = record.parse(parser, smoke)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.path.insert(0, str(record.OWN))
    cases = [(model, strategy) for model in MODELS for strategy in STRATEGIES]
    rows: dict[str, dict[str, list[list[float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="deep_") as folder:
        cluster = LocalCluster(ClusterConfig(name="local"), os.environ)
        cluster.warm_up()
        _wait_until_imported()
        try:
            for number in range(arguments.rounds):
                for model, strategy in cases:
                    name = f"{model}, {strategy}"
                    if arguments.only in name:
                        row = rows.setdefault(name, {"first": [], "step_ms": []})
                        _round(
                            row, number, _plan(model, strategy, arguments.blocks, cluster), cluster, folder, arguments
                        )
                        print(_line(name, row), flush=True)
        finally:
            cluster.close(0)
    record.write(arguments, arguments.rounds, rows)
    return 0


def _round(
    row: dict[str, list[list[float]]],
    number: int,
    plan: Plan,
    cluster: LocalCluster,
    folder: str,
    arguments: argparse.Namespace,
) -> None:
    """Adds [ours, the bare loop's] of a round to the row: seconds to the first step, and milliseconds of steps."""
    running: list[Ours | Rival] = []
    try:
        running.append(Ours(cluster, [plan], "ours", Path(folder)))
        running.append(Rival(_bare(plan, cluster), "bare", Path(folder)))
        row["first"].append([contestant.first_seconds for contestant in running])
        for turn in range(arguments.stretches):
            order = running if (number + turn) % 2 == 0 else running[::-1]
            taken = {contestant: contestant.time(arguments.seconds).step_ms for contestant in order}
            row["step_ms"].append([taken[contestant] for contestant in running])
    finally:
        for contestant in running:
            contestant.stop()


def _wait_until_imported() -> None:
    """Returns once the fork server, which starts the processes of both, has imported TensorFlow."""
    process = mp.get_context("forkserver").Process(target=int)
    process.start()
    process.join()


def _plan(model: str, strategy: str, blocks: int, cluster: LocalCluster) -> Plan:
    """What a person gets who types it."""
    ports = tuple(cluster.free(WORKERS)) if strategy == "multi_worker" else ()
    plan = contestants.make_plan(strategy, "mlp", WORKERS, REPLICA_BATCH, ports)
    is_application = model in APPLICATIONS
    build = {"_target_": "deep_models.transformer", "blocks": blocks}
    if is_application:
        build = {"_target_": "deep_models.application", "name": model}
    shape = IMAGES if is_application else TOKENS
    data = plan.data.build | {"shape": list(shape), "train_examples": 256, "validation_examples": 8}
    return dataclasses.replace(
        plan,
        model=dataclasses.replace(plan.model, name=model, build=build),
        data=dataclasses.replace(plan.data, build=data, input_shape=shape),
        # On a machine that others use, tracing takes long.
        launch=dataclasses.replace(plan.launch, progress_timeout=contestants.ANSWER_SECONDS),
    )


def _bare(plan: Plan, cluster: LocalCluster) -> Spec:
    first = plan.processes[0]
    spec = Spec(
        None, plan.model.build, plan.data.build, "loop", plan.training.global_batch,
        devices=len(first.devices), cores=tuple(process.cores for process in plan.processes),
        threads=(first.intra_op_threads, first.inter_op_threads), synchronized=True,
    )  # fmt: skip
    if len(plan.processes) == 1:
        return spec
    return dataclasses.replace(spec, addresses=tuple(f"127.0.0.1:{port}" for port in cluster.free(WORKERS)))


def _line(name: str, row: dict[str, list[list[float]]]) -> str:
    first, step = (statistics.median(ours / bare for ours, bare in row[kind]) for kind in ("first", "step_ms"))
    ours, bare = row["first"][-1]
    ms = [statistics.median(pair[place] for pair in row["step_ms"]) for place in (0, 1)]
    return (
        f"{name}: first step after {ours:.1f} s, the bare loop's {bare:.1f} s, ratio {first:.2f} (goal {FIRST_STEP}); "
        f"a step {ms[0]:.0f} ms, the bare loop's {ms[1]:.0f} ms, ratio {step:.2f} (goal {STEP})"
    )


if __name__ == "__main__":
    sys.exit(main())
