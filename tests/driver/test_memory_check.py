"""What is refused since there is too little memory for it, and that what is named instead is held."""

import pytest
from conftest import QUICK, with_
from shipped_sizes import configured

from pipeline.config.schema import Config
from pipeline.driver.forecast import too_large, without_room
from pipeline.plan import planning
from pipeline.plan.estimate import estimate
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.plan.size import Layer, Size, Variable

GIB = 2**30
# Of 1 GiB of weights in eight blocks, and 64 MiB an example, of which blocks that compute again keep an eighth.
PATHS = tuple(f"block_{place}/kernel" for place in range(8))
VARIABLES = tuple(Variable(path, (2**12, 2**13), "float32", True, 2 * 2**27, cut=(2, 4, 8)) for path in PATHS)
BIG = Size(
    VARIABLES, 0, ((GIB, 0), (2**20, 2**26)), 1024, operations=1000, forgetful_step=((GIB, 0), (2**20, 2**23)),
    layers=tuple(Layer(path[:-7], 4 * 2**27, 9, True, (path,)) for path in PATHS),
)  # fmt: skip
TWO = ("strategy=mirrored", "workers=2", "hardware=2cpu")
COMMON = ("model=transformer", "data=text", "train.replica_batch=64", "checkpoint.every_minutes=null")


def plan_on(gib: float, gpus: int, *overrides: str, config: Config | None = None) -> Plan:
    machine = Machine("host", tuple(range(8)), gib, "A processor", ("H100",) * gpus)
    return planning.make(config or configured(*COMMON, *overrides), machine, present=False)


def refused(gib: float, gpus: int, *overrides: str) -> str | None:
    config = configured(*COMMON, *overrides)
    plan = plan_on(gib, gpus, config=config)
    return too_large(plan, BIG, config, lambda changed: plan_on(gib, gpus, config=changed))


def named(said: str) -> list[str]:
    return said.rpartition("Try ")[2].removesuffix(".").split(", or ")


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize(("gib", "gpus", "overrides", "first"), [
    # Two copies of 4 GiB and of activations in one memory.
    (14, 0, TWO, "train.remat=true"),
    (8, 0, TWO, "strategy="),
    # A device of its own memory for each.
    (64, 8, ("strategy=mirrored", "hardware=8gpu", "hardware.memory_gib=6"), "train.remat=true"),
    (64, 8, ("strategy=mirrored", "hardware=8gpu", "hardware.memory_gib=3.5"), "strategy=model_parallel"),
])  # fmt: skip
def test_a_model_that_no_device_has_room_for_is_refused_and_what_is_named_is_held(backend, gib, gpus, overrides, first):
    said = refused(gib, gpus, f"backend={backend}", *overrides)
    assert "Expected a model that fits the" in said
    assert "under strategy=mirrored, received one that takes" in said
    assert any(one.startswith(first) for one in named(said)), said
    for typed in named(said):
        instead = {given.partition("=")[0]: given for given in (*overrides, *typed.split())}
        other = plan_on(gib, gpus, f"backend={backend}", *instead.values())
        assert estimate(other, BIG).fits, typed
    assert not estimate(plan_on(gib, gpus, f"backend={backend}", *overrides), BIG).fits


def test_what_fits_is_not_refused_and_where_nothing_holds_it_or_only_once_it_is_built_that_is_said():
    assert refused(64, 0, *TWO) is None
    assert named(refused(2, 0, *TWO)) == ["a smaller model: no strategy, train.remat or batch tried holds it"]
    plan = plan_on(8, 0, *TWO)
    assert without_room(plan, 3 * GIB) is None
    said = without_room(plan, 5 * GIB)
    assert "fits 8 GiB under strategy=mirrored" in said
    assert "Try mode=plan, which names what holds it." in said
    assert without_room(with_(plan, "hardware", kind="gpu"), 5) is None


def test_a_command_is_refused_before_any_process_is_started(asked):
    small = ("strategy=mirrored", "workers=2", "hardware.memory_gib=0.03")
    ran = asked(*QUICK, "model=cnn", "data=mnist5k", *small).failed(2)
    assert "Expected a model that fits the 0.03 GiB of a device" in ran.err + ran.out
    assert "Try train.replica_batch=" in ran.err + ran.out
    assert not list(ran.folder.glob("outputs/runs/*/events.jsonl"))
