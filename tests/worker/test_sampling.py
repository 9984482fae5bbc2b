"""What a language model writes at the end of a run: drawn as said, of which model, and left out in words of others."""

import re
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.data import text
from pipeline.worker.artifacts import TextSample, continued, sample_of, text_of

LENGTH, VOCABULARY = 8, 5
OUT = (None, LENGTH, VOCABULARY)
NAMES = tuple("abcde")
TOKENS = (np.arange(LENGTH)[None] % VOCABULARY, (np.arange(LENGTH)[None] + 1) % VOCABULARY)


def plan(tokens: int | None = None, temperature: float = 0.8, seed: int = 0) -> Any:
    training = SimpleNamespace(sample_tokens=tokens, sample_temperature=temperature, seed=seed)
    return SimpleNamespace(training=training, data=SimpleNamespace(name="digits"), model=SimpleNamespace(name="mlp"))


def of(out: object, example: Any = TOKENS, names: tuple[str, ...] | None = NAMES, **asked: Any) -> Any:
    """(what is to be written, the notes) of a model with such outputs."""
    notes: list[str] = []
    model: Any = SimpleNamespace(output_shape=out)
    return sample_of(plan(**asked), model, names, lambda: example, notes.append), notes


def test_a_language_model_is_to_write_a_hundred_tokens_or_as_many_as_were_asked_for():
    assert of(OUT)[0].tokens == 100
    assert of((None, None, VOCABULARY), tokens=7)[0].tokens == 7
    assert of(OUT, tokens=0) == (None, [])


@pytest.mark.parametrize(("out", "example", "names"), [
    ((None, 10), TOKENS, NAMES), ((None, LENGTH, VOCABULARY + 1), TOKENS, NAMES), ([OUT], TOKENS, NAMES),
    (OUT, TOKENS, None), (OUT, (TOKENS[0].astype(np.float32), TOKENS[1]), NAMES),
    (OUT, (TOKENS[0], TOKENS[1][:, 0]), NAMES), (OUT, ({"ids": TOKENS[0]}, TOKENS[1]), NAMES),
])  # fmt: skip
def test_another_model_writes_nothing_and_says_so_where_it_was_asked_to(out, example, names):
    assert of(out, example, names) == (None, [])
    writing, (note,) = of(out, example, names, tokens=50)
    assert writing is None
    assert "for train.sample_tokens=50, received data=digits and model=mlp. Try train.sample_tokens=null." in note


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_logits_say_at_a_temperature_and_by_the_seed_alone(temperature):
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5])

    def drawn(seed: int, count: int) -> list[int]:
        tiled = np.tile(logits, (1, LENGTH, 1))
        return list(islice(continued(TOKENS[0][0], lambda _: tiled, temperature, np.random.default_rng(seed)), count))

    often = np.bincount(drawn(0, 20_000), minlength=VOCABULARY) / 20_000
    wanted = np.exp(logits / temperature)
    np.testing.assert_allclose(often, wanted / wanted.sum(), atol=0.015)
    assert drawn(0, 50) == drawn(0, 50) != drawn(1, 50)


def test_each_token_is_drawn_by_those_that_went_before_it():
    seen: list[list[int]] = []

    def logits(tokens: np.ndarray) -> np.ndarray:
        seen.append(tokens[0].tolist())
        return np.eye(VOCABULARY)[(tokens + 2) % VOCABULARY]

    assert list(islice(continued(np.array([0, 1, 2]), logits, 0.0, np.random.default_rng(0)), 3)) == [4, 1, 3]
    assert seen == [[0, 1, 2], [1, 2, 4], [2, 4, 1]]


@pytest.mark.parametrize("tokens", ["bytes", "characters"])
def test_what_was_read_as_tokens_is_written_as_it_was(tmp_path, tokens):
    said = "Größe: “naïve” café\n\t\\x41 — \x00ok " * 20
    (tmp_path / "said.txt").write_text(said)
    train, _ = text(str(tmp_path / "said.txt"), tokens=tokens, length=16)
    assert train.class_names is not None
    assert said.startswith(text_of(train.raw[0][:2].reshape(-1), train.class_names).rstrip("\ufffd"))


def test_the_file_says_what_was_given_what_was_made_of_it_and_how(tmp_path):
    told: list[object] = []
    TextSample(12, 0.0, 3, TOKENS[0][0], NAMES).write(
        lambda tokens: np.eye(VOCABULARY)[(tokens + 1) % VOCABULARY], tmp_path, told.append
    )
    assert (tmp_path / "sample.txt").read_text() == (
        "abcdeabc\n\n--- what the model made of it: 12 tokens, temperature 0, seed 3 ---\n\ndeabcdeabcde\n"
    )
    # Whoever watches sees that it gets on.
    assert len(told) == 12


SMALL = (
    "model=transformer", "data=text", "model.build.blocks=1", "model.build.width=32", "model.build.heads=2",
    "data.build.length=16", "train.steps=4", "train.global_batch=32", "train.sample_tokens=20", "measure.steps=0",
    "measure.baseline=none", "train.check=off", "launch.startup_timeout=120",
    "tracking.system_metrics_seconds=0",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", [
    ("hardware=2cpu", "strategy=multi_worker", "workers=2"),
    ("hardware=2cpu", "strategy=parameter_server", "workers=2", "strategy.parameter_servers=1"),
    ("hardware=4cpu", "backend=jax", "strategy=model_parallel", "workers=1"),
], ids=["several processes", "asynchronous", "jax, a model over several devices"])  # fmt: skip
def test_a_run_of_a_language_model_leaves_a_sample_beside_its_model_and_in_mlflow(pipeline, layout):
    ran = pipeline(*SMALL, *layout).ok()
    (folder,) = ran.run_folders
    assert ran.result["sample"] == "sample.txt"
    assert ran.result["val_metrics"]["perplexity"] > 1
    # A path that is long goes on in the next line.
    assert re.search(rf"^sample +\S*\s*{re.escape(folder.name)}/sample\.txt$", ran.out, re.M)
    marked = r"(?s).+\n\n--- what the model made of it: 20 tokens, temperature 0.8, seed 0 ---\n\n.{1,20}\n+"
    assert re.fullmatch(marked, (folder / "sample.txt").read_text())
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{ran.folder / 'outputs' / 'mlflow.db'}")
    assert "sample.txt" in {each.path for each in client.list_artifacts(ran.result["mlflow_run_id"])}
