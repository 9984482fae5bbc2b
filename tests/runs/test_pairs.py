"""Every strategy with every choice of `train`, `data` and `checkpoint`, two at a time: a covering array of runs.

Each is trained, or refused in words before it starts. The choices of a key that is true or false, or one of some names,
are read from the schema; those of others stand here.
"""

import copy
import enum
import os
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from conftest import ROOT, SUPPORT, UnderWay, left_behind

from pipeline.config import config as configs
from pipeline.config.composing import Composer
from pipeline.config.schema import Config
from pipeline.driver.requests import devices
from pipeline.driver.session import Session
from pipeline.driver.start import plan_run
from pipeline.errors import as_typed
from pipeline.plan import planning

pytestmark = pytest.mark.slow
STRATEGIES = sorted(path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml"))
# Of these a strategy's devices are made, where it takes others than the rest.
HARDWARE = {"model_parallel": ("hardware=4cpu", "strategy.devices_per_replica=2"),
            "tpu": ("hardware=tpu_v5e_8", "hardware.rehearse=true", "hardware.devices_per_host=2")}  # fmt: skip
SMALL = (
    f"--config-dir={SUPPORT}/conf", "model=crossed", "data=crossed", "tracking=none", "measure.steps=0",
    "measure.baseline=none", "train.replica_batch=8", "train.steps=7",
)  # fmt: skip
# Choices of keys of which the schema tells the type alone. How long and on what a run trains is the same for all.
OTHERS: dict[str, tuple[Any, ...]] = {
    "train.optimizer": (None, "adam", {"_target_": "keras.optimizers.SGD", "momentum": 0.9}),
    "train.learning_rate": (None, 0.01),
    "train.loss": (None, "sparse_categorical_crossentropy"),
    "train.metrics": (None, ["accuracy"]),
    "train.class_weight": (None, {0: 2.0}),
    "train.callbacks": ([], [{"_target_": "keras.callbacks.EarlyStopping", "monitor": "loss", "patience": 9}]),
    "train.seed": (0, 1),
    "train.steps_per_call": (None, 2),
    "train.gradient_bits": (32, 16),
    "train.xla": (None, "true", "false", "auto"),
    "train.batch_statistics": ("global", "host", "replica"),
    "train.check": ("true", "strict", "off"),
    "train.compare_weights_every": (None, 2),
    "train.divergence_factor": (1e4, 1e6),
    "data.shuffle_window": (10_000, 8),
    "data.parallel_reads": (4, 1),
    "data.prefetch": (2, 0),
    "data.service": (None, "1"),
    "checkpoint.every_steps": (None, 3),
    "checkpoint.every_minutes": (10.0, None),
    "checkpoint.every_epochs": (None, 1),
    "checkpoint.keep": (2, 1),
    # Without one, checkpoint.best_is is refused.
    "checkpoint.keep_best": ("val_loss", None),
}
ALIKE = {
    "train.epochs", "train.steps", "train.replica_batch", "train.global_batch", "train.sample_tokens",
    "train.sample_temperature", "data.name", "data.num_classes", "data.input_shape", "data.train_examples",
    "data.validation_examples", "data.path", "data.build", "checkpoint.folder",
}  # fmt: skip
# The words of every refusal.
SAYS = ("Expected ", "received ", "Try ")
Row: TypeAlias = dict[str, Any]


def factors() -> dict[str, tuple[Any, ...]]:
    """Returns what is crossed: the choices of each key, the default first."""
    engines = tuple((name, backend) for backend in ("tensorflow", "jax") for name in STRATEGIES)
    found: dict[str, tuple[Any, ...]] = {"strategy": engines, "workers": (2, 1), "data": ("arrays", "elements")}
    for group in ("train", "data", "checkpoint"):
        kind = typing.get_type_hints(Config)[group]
        for name, of in typing.get_type_hints(kind).items():
            default, key = getattr(kind(), name), f"{group}.{name}"
            kinds = typing.get_args(of) if isinstance(of, types.UnionType) else (of,)
            listed = [member for one in kinds if isinstance(one, enum.EnumType) for member in one]
            listed += [False, True] if bool in kinds else []
            if key not in ALIKE:
                found[key] = OTHERS.get(key) or (default, *(value for value in listed if value != default))
    return found


def rows(crossed: Mapping[str, Sequence[Any]], refusal: Callable[[Row], str | None]) -> tuple[list[Row], list[Row]]:
    """Returns (rows in which every pair of choices comes that is not refused, a row for each pair that is).

    Greedy: a row begins with a pair that is still to come, and takes of each key what most such pairs come with.
    """
    left = {
        pair: None
        for one, other in combinations(crossed, 2)
        for pair in product(*([(key, place) for place in range(len(crossed[key]))] for key in (one, other)))
    }
    made, refused = list[Row](), list[Row]()

    def row_of(chosen: Mapping[str, int]) -> Row:
        return {key: crossed[key][place] for key, place in chosen.items()}

    while left:
        pair = dict(next(iter(left)))
        chosen, taken = dict.fromkeys(crossed, 0) | pair, pair.copy()
        if refusal(row_of(chosen)) is not None:
            refused.append(row_of(chosen))
            del left[next(iter(left))]
            continue
        for key in (key for key in crossed if key not in pair):
            brings = {
                place: sum(two in left for one in taken.items() for two in permutations([(key, place), one]))
                for place in range(len(crossed[key]))
            }
            for place in sorted(brings, key=lambda place: -brings[place]):
                if place == chosen[key] or refusal(row_of(chosen | {key: place})) is None:
                    chosen[key] = taken[key] = place
                    break
        for two in combinations(chosen.items(), 2):
            left.pop(two, None)
        made.append(row_of(chosen))
    return made, refused


@cache
def composed(strategy: str, backend: str, workers: int) -> Config:
    """Returns the config of a strategy, with defaults for all else."""
    configs.register(partial(devices, os.environ))
    composer = Composer("config", Config, f"{SUPPORT}/conf", None)
    made, _ = composer.composed(typed_of({"strategy": (strategy, backend), "workers": workers})[1:])
    return configs.typed_as(Config, made, ())


@cache
def session() -> Session:
    """Returns what all plans share."""
    return Session((str(SUPPORT), *sys.path), dict(os.environ), None, None)  # type: ignore[arg-type]


def refusal(row: Row) -> str | None:
    """Returns why a row is refused before anything starts; None where it is not."""
    # What is refused of what a function returns, and of what a step comes to, is refused once that is known.
    if row["data"] == "elements" and row["strategy"][1] == "jax":
        return "Expected arrays, received a data set. Try numpy.array."
    if row["train.check"] == "strict" and row["train.batch_statistics"] != "global":
        return "Expected replicas that train what one device trains, received others. Try train.check=true."
    config = copy.deepcopy(composed(*row["strategy"], row["workers"]))
    for group, name, value in ((*key.split("."), value) for key, value in row.items() if "." in key):
        setattr(getattr(config, group), name, value)
    config.data.build = {"_target_": f"crossed.{row['data']}"}
    try:
        plan_run(planning.on_one_device(config), session(), begin=False)
    except Exception as error:  # whatever it is: what is no refusal is seen when the row is run
        return str(error)
    return None


def typed_of(row: Row) -> list[str]:
    """Returns a row as a person types it."""
    (strategy, backend), rest = row["strategy"], {key: value for key, value in row.items() if "." in key}
    source = [f"data.build._target_=crossed.{row['data']}"] if "data" in row else []
    return [
        *SMALL, f"strategy={strategy}", f"backend={backend}", f"workers={row['workers']}",
        *HARDWARE.get(strategy, ("hardware=2cpu",)), *source,
        *(f"{key}={as_typed(value)}" for key, value in rest.items()),
    ]  # fmt: skip


def wrong(code: int, said: str) -> str | None:
    """Returns what is wrong with how a run ended: it has to finish, or to be refused in words."""
    if "Traceback (most recent call last)" in said:
        return "a traceback"
    refused = code == 2 and all(word in said for word in SAYS)
    return None if code == 0 or refused else f"exit code {code}"


def run(row: Row) -> str | None:
    """Returns what is wrong with how the run of a row ended, and what it wrote; None where all is right."""
    with tempfile.TemporaryDirectory() as name, UnderWay(Path(name), *typed_of(row)) as command:
        ran = command.ended(600)
        logs = "".join(path.read_text(errors="replace")[-3000:] for path in command.folder.rglob("point-*.log"))
        left = left_behind(command.folder)
    found = f"left behind: {left}" if left else wrong(ran.code, ran.out + ran.err)
    # Of all, some are refused by what only a run can tell.
    found = found or (f"exit code {ran.code}" if FIRST and ran.code else None)
    return found and " ".join([found, *typed_of(row), ran.err[-1500:], logs])


# Rows that are run, which hold most pairs; with TEST_SEED=all, every one. A refused pair of so many is typed.
FIRST, EACH = None if os.environ["TEST_SEED"] == "all" else 8, 50


@pytest.fixture(scope="module")
def crossed():
    return rows(factors(), refusal)


def test_rows_hold_every_pair_that_is_not_refused_and_every_refusal_says_what_to_try(crossed):
    made, refused = crossed
    choices = factors()
    assert {"train.deterministic", "data.cache", "checkpoint.best_is", "strategy"} <= set(choices)
    held = {(one, other, str(row[one]), str(row[other])) for row in [*made, *refused] for one in row for other in row}
    for one, other in permutations(choices, 2):
        assert held >= {(one, other, str(a), str(b)) for a in choices[one] for b in choices[other]}
    assert not [row for row in made if refusal(row)]
    assert not [said for row in refused if not all(word in (said := refusal(row)) for word in SAYS)]


def test_a_refused_pair_leaves_with_exit_code_2_and_leaves_nothing(crossed, asked, tmp_path):
    # Not those that only a run can tell.
    told = [row for row in crossed[1] if row["data"] == "arrays" and row["train.check"] != "strict"]
    for row in told[::EACH]:
        ran = asked(*typed_of(row)).failed(2)
        assert wrong(ran.code, ran.out + ran.err) is None, ran.err
        assert not list(tmp_path.glob("outputs/runs/*"))


@pytest.mark.waits
def test_the_first_rows_train_without_a_traceback(crossed):
    # Two at a time, as the cores are.
    with ThreadPoolExecutor(2) as pool:
        assert [said for said in pool.map(run, crossed[0][:FIRST]) if said] == []
