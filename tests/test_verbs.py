"""One command with verbs: what the first word asks for, and what is said to a word that asks for nothing."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from pipeline.commands import verbs

MOVED = {
    "report": "report", "compare": "compare", "prepare": "prepare", "ui": "ui", "predict": "predict",
    "explain": "explain", "track sync": "sync", "run": "",
}  # fmt: skip


def said(tmp_path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("verb", ["report", "compare", "prepare", "sync", "ui", "predict", "explain"])
def test_a_verb_says_how_it_is_typed(tmp_path, verb):
    told = said(tmp_path, "-m", "pipeline", verb, "--help")
    assert told.returncode == 0, told.stderr
    assert f"python -m pipeline {verb}" in told.stdout


def test_the_help_of_a_training_names_all_verbs(tmp_path):
    told = said(tmp_path, "-m", "pipeline", "--help")
    assert f"\n{', '.join(verbs.VERBS)}\n" in told.stdout


@pytest.mark.parametrize(("before", "now"), MOVED.items())
def test_what_was_a_module_of_its_own_answers_with_the_verb(tmp_path, before, now):
    module, *more = before.split()
    told = said(tmp_path, "-m", f"pipeline.{module}", *more, "a=1", "two words")
    assert (told.returncode, told.stdout) == (2, "")
    wanted = " ".join(["python -m pipeline", *now.split(), "a=1 'two words'"])
    assert told.stderr == f"pipeline: Expected {wanted}, received python -m pipeline.{module}. Try {wanted}.\n"


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("reprot", "Try python -m pipeline report mine."),
        ("predcit", "Try python -m pipeline predict mine."),
        ("zzz", "Try `python -m pipeline --help`."),
    ],
)
def test_a_word_that_is_no_verb_gets_the_nearest_one(tmp_path, word, instead):
    told = said(tmp_path, "-m", "pipeline", word, "mine")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith(
        "pipeline: Expected a verb (report, compare, prepare, sync, ui, predict, explain) or "
    )
    assert told.stderr.strip().endswith(instead)
    assert not list(tmp_path.iterdir())


def test_predict_and_explain_are_short_for_a_setting_of_a_training(tmp_path):
    told = said(tmp_path, "-m", "pipeline", "predict", "workers=2")
    assert told.returncode == 2
    assert "runs" in told.stderr
    told = said(tmp_path, "-m", "pipeline", "explain", "strategy=parameter_server")
    assert told.returncode == 2
    assert "Expected measure.explain=false with strategy=parameter_server" in told.stderr
    told = said(tmp_path, "-m", "pipeline", "explain", "nowhere")
    assert told.returncode == 2
    assert "Expected a run's folder, its name or its id in MLflow, received nowhere." in told.stderr


def test_a_verb_with_the_words_of_a_training_composes_them(tmp_path):
    told = said(tmp_path, "-m", "pipeline", "mode=plan", "workers=1", "strategy=one_device")
    assert told.returncode == 0, told.stderr
    assert said(tmp_path, "-m", "pipeline", "--version").stdout.startswith("pipeline ")


def test_a_run_that_was_explained_says_so_again(tmp_path):
    folder = tmp_path / "outputs" / "runs" / "one"
    folder.mkdir(parents=True)
    parts = [{"name": "communication", "share": 0.4, "low": 0.38, "high": 0.42}]
    explained = {"lost": 0.4, "lost_low": 0.38, "lost_high": 0.42, "parts": parts, "advice": "Try less."}
    (folder / "plan.json").write_text(json.dumps({"workers": 2}))
    (folder / "result.json").write_text(json.dumps({"status": "FINISHED", "explained": explained}))
    told = said(tmp_path, "-m", "pipeline", "explain", "one")
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[0] == "Try less."
    assert "communication 40% (38% to 42%)" in told.stdout
    (folder / "result.json").write_text(json.dumps({"status": "FINISHED", "explained": None}))
    told = said(tmp_path, "-m", "pipeline", "explain", "one")
    assert told.returncode == 2
    assert "Expected a run that was explained" in told.stderr
