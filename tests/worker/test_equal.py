"""What docs/equal.md says to be equal to one device is, row by row, and so are models that nobody wrote.

What the page says not to be equal is tested where it says.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, sampled

PAGE = (ROOT / "docs" / "equal.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
# Of the examples that layers are tried on.
SHAPES = {
    "vectors": ("numbers", (4,)),
    "series": ("numbers", (4, 3)),
    "images": ("numbers", (5, 5, 2)),
    "words": ("words", (4,)),
    "padded series": ("padded", (4, 3)),
}
BENCHMARKS = ROOT / "benchmarks"
# What differed once, each made as small as it could be; a name begins with the strategy.
KEPT = sorted((Path(__file__).parent / "cases").glob("*.json"))
# The same cases each time; others are for `benchmarks/differential.py`, for hours.
SEED = 7
CLASSES, HEADS = 3, {"numbers": "Dense(2)", "classes": "Dense(3)", "one-hot": "Dense(3, activation='softmax')",
                     "binary": "Dense(2, activation='sigmoid')"}  # fmt: skip


def rows(section: str) -> list[tuple[list[str], str]]:
    """(what is in backquotes in the first column, the second column) of each row of a section's table."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTIONS[section].splitlines()
             if line.startswith("| `")]  # fmt: skip
    return [(re.findall(r"`(.+?)`", first), second) for first, second, *_ in found]


def words(section: str) -> list[str]:
    """All that is in backquotes in the first column."""
    return [one for found, _ in rows(section) for one in found]


@pytest.fixture(scope="module")
def differing(tmp_path_factory):
    """What trains a case on one device and on two replicas of a strategy, and judges whether they are equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, BENCHMARKS))))
        compared, pair = (importlib.import_module(f"differing.{name}") for name in ("compared", "pair"))
        pairs = {}

        def judged(case, strategy="mirrored"):
            if strategy not in pairs:
                pairs[strategy] = pair.Pair(strategy, tmp_path_factory.mktemp("pair"))
            return compared.judged(case, pairs[strategy])

        yield judged
        for one in pairs.values():
            one.end()


def output(of: int, labels: str, **settings):
    """An output of a value for labels of a kind; by default numbers, under the mean squared error."""
    from differing.case import Output

    shape = {"numbers": (2,), "classes": (), "one-hot": (3,), "binary": (2,)}[labels]
    loss = {
        "numbers": "MeanSquaredError()",
        "classes": "SparseCategoricalCrossentropy(from_logits=True)",
        "one-hot": "CategoricalCrossentropy()",
        "binary": "BinaryCrossentropy()",
    }[labels]
    made = Output((f"keras.layers.{HEADS[labels]}",), of, labels, shape, CLASSES, f"keras.losses.{loss}", 1.0, (), ())
    return replace(made, **settings)


def case(**settings):
    """A small training of one dense layer, of which some settings are others."""
    from differing.case import Case, Input, Layer

    base = Case(
        (Input("numbers", (4,)),), (Layer('keras.layers.Dense(4, activation="tanh")', (0,)),), (output(1, "numbers"),),
        "keras.optimizers.SGD(0.1)", (), batch=8, examples=19, validation_examples=5, epochs=2, steps_per_call=2,
        weights=None, data="arrays", seed=3,
    )  # fmt: skip
    return replace(base, **settings)


def assert_equal(judged) -> None:
    assert judged.verdict.name in ("EQUAL", "WITHIN_NOISE"), judged.words


def test_the_page_says_the_digits_that_are_compared(differing):
    from differing.compared import TOLERANCE

    assert set(map(float, re.findall(r"\d?e-\d+", PAGE.partition("<!-- figures:")[0]))) == {TOLERANCE}


@pytest.mark.slow
@pytest.mark.parametrize("of", SHAPES)
def test_layers_of(of, differing):
    from differing.case import Input, Layer

    named = [one for found, second in rows("Layers") if second == of for one in found]
    # Others in each run of CI.
    named = sampled(named, (len(named) + 1) // 2)
    layers, ends = [], []
    for one in named:
        values = (0, 0) if one.startswith("MultiHeadAttention") else (0,)
        for word, inputs in ((one, values), ("Flatten()", (len(layers) + 1,)), ("Dense(2)", (len(layers) + 2,))):
            layers.append(Layer(f"keras.layers.{word}", inputs))
        ends.append(len(layers))
    if len(ends) > 1:
        layers.append(Layer("keras.layers.Average()", tuple(ends)))
    kind, shape = SHAPES[of]
    assert_equal(differing(case(
        # The last batch leaves a replica without examples.
        inputs=(Input(kind, shape),), layers=tuple(layers), outputs=(output(len(layers), "numbers"),), examples=17
    )))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("labels", HEADS)
def test_losses_and_metrics_of(labels, differing):
    losses, metrics = (
        [one if one[0].islower() else f"keras.{section.lower()}.{one}"
         for found, second in rows(section) if second == labels for one in found]
        for section in ("Losses", "Metrics")
    )  # fmt: skip
    assert losses
    assert metrics
    outputs = [output(1, labels, loss=loss) for loss in losses]
    outputs[0] = replace(outputs[0], metrics=tuple(metrics), weighted_metrics=tuple(metrics[:1]))
    assert_equal(differing(case(outputs=tuple(outputs), weights="drawn")))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    *({"optimizer": f"keras.optimizers.{one}"} for one in sampled(words("Optimizers"), 3)),
    *({"callbacks": tuple(f"keras.callbacks.{one}" for one in found), "epochs": 4} for found, _ in rows("Callbacks")),
    *({found.arg: ast.literal_eval(found.value) for found in ast.parse(f"dict({data})").body[0].value.keywords}
      for data in sampled(words("Data"), 3)),
], ids=str)  # fmt: skip
def test_optimizers_callbacks_and_data(settings, differing):
    assert_equal(differing(case(**settings)))


@pytest.mark.parametrize("name", re.findall(r"`(tests/\S+::\S+)`", PAGE))
def test_what_is_not_equal_is_tested_where_the_page_says(name):
    path, _, function = name.partition("::")
    defined = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert function in defined


@pytest.mark.slow
def test_what_differed_once_is_equal_or_refused_in_words(differing):
    from differing import case

    for path in KEPT:
        strategy = "multi_worker" if path.stem.startswith("multi_worker") else "mirrored"
        judged = differing(case.from_json(path.read_text()), strategy)
        assert judged.verdict.name in ("EQUAL", "TOLD"), (path.stem, judged.words)


@pytest.mark.slow
def test_models_that_are_drawn_train_what_one_device_trains(tmp_path):
    said = subprocess.run(
        [sys.executable, str(BENCHMARKS / "differential.py"), f"--seed={SEED}", "--count=6", "--json=found.json"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=1_500,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert rows.keys() == {"mirrored", "multi_worker"}
    for row in rows.values():
        assert sum(row["verdicts"].values()) == 6
        # Else it would be of no use: what is drawn is trained.
        assert row["verdicts"]["equal"] > 3
