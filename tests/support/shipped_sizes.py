"""Makes pipeline/plan/sizes.json, the sizes of the built-in models on our data.

python tests/support/shipped_sizes.py
"""

import functools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec

from pipeline.config import config
from pipeline.config.composing import Composer
from pipeline.config.schema import ClusterConfig, Config
from pipeline.driver import timing
from pipeline.launch.local import LocalCluster
from pipeline.plan import planning, size
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan

IMAGES = ("digits", "mnist5k", "mnist", "fashion_mnist", "cifar10", "synthetic")
CHOICES = [
    ("recommender", "clicks"), ("transformer", "text"),
    *((model, data) for model in ("mlp", "cnn", "resnet20") for data in IMAGES),
]  # fmt: skip
# The precisions that strategies have by default.
SHIPPED = [(*each, precision) for precision in ("float32", "mixed_bfloat16") for each in CHOICES]


def configured(*overrides: str) -> Config:
    config.register()
    return config.typed_as(Config, Composer("config", Config, None).composed(overrides)[0])


@functools.cache
def planned(*overrides: str, cores: int = 8, gpus: int = 0) -> Plan:
    """The plan of a command on a machine with so many cores and GPUs."""
    on = Machine("host", tuple(range(cores)), 16.0, "A processor", ("H100",) * gpus)
    return planning.make(configured(*overrides), on, present=False)


def built(choices: Iterable[tuple[str, str, str]]) -> Iterator[tuple[Plan, size.Size]]:
    """(plan, the size of its model as a process builds it) for each model, data set and precision.

    Data that would have to be downloaded is stood for by made-up examples of the same shape.
    """
    cluster = LocalCluster(ClusterConfig("local"), os.environ)
    try:
        for model, data, precision in choices:
            made = planned(f"model={model}", f"data={data}", f"train.precision={precision}")
            yield made, replace(timing.learn_size(_offline(made, data), cluster), layers=())
    finally:
        cluster.close(0)


def _offline(each: Plan, data: str) -> Plan:
    if data not in ("mnist", "fashion_mnist", "cifar10"):
        return each
    made_up = {"_target_": "pipeline.data.synthetic", "shape": list(each.data.input_shape or ()), "num_classes": 10}
    return replace(each, data=replace(each.data, build=made_up | {"train_examples": 64, "validation_examples": 8}))


def main() -> None:
    entries: dict[str, list[object]] = {}
    for each, made in built(SHIPPED):
        entries.setdefault(json.dumps(msgspec.to_builtins(made)), []).append(size.facts(each))
    lines = [json.dumps({"of": of, "size": json.loads(made)}) for made, of in entries.items()]
    size.SHIPPED.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
