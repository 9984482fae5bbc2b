"""Every benchmark runs: at its smallest size, as a person types it, and it writes down what it measured on what."""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

FOLDER = ROOT / "benchmarks"
# Those that are started, and not those that they import.
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if "record.parse(" in path.read_text())


def test_there_are_programs_to_run():
    assert {"side_by_side", "predict", "sweep"} <= set(PROGRAMS)


@pytest.fixture
def figures(monkeypatch):
    """The program that writes tables."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("figures")


def test_every_table_of_readme_and_docs_says_what_its_benchmark_measured(figures):
    shown = [found["name"] for page in figures.pages() for found in figures.BLOCK.finditer(page.read_text())]
    assert {"side_by_side:cnn", "side_by_side:mlp", "sweep"} <= set(shown)
    for page in figures.pages():
        text = page.read_text()
        assert figures.filled(text, figures.RESULTS) == text, f"{page.name} is not what benchmarks say: make figures"


def test_a_table_that_says_what_was_not_measured_is_found(figures):
    (text,) = [page.read_text() for page in figures.pages() if page.name == "README.md"]
    wrong = re.sub(r"\| 0\.\d\d \|", "| 0.99 |", text, count=1)
    assert wrong != text
    assert figures.filled(wrong, figures.RESULTS) == text


def test_full_runs_are_kept_with_what_they_were_run_on():
    kept = sorted((FOLDER / "results").glob("*.json"))
    assert kept
    for path in kept:
        written = json.loads(path.read_text())
        assert written["benchmark"] == path.stem
        assert "--smoke" not in written["arguments"]
        assert re.fullmatch(r"[0-9a-f]{40}", written["commit"]), "a commit without changes"


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_runs_at_its_smallest_size_and_writes_what_it_measured(tmp_path, program):
    command = [sys.executable, str(FOLDER / f"{program}.py"), "--smoke", "--json", str(tmp_path / "out.json")]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert ran.stdout.strip()
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["benchmark"] == program
    assert written["rows"]
    assert written["rounds"] >= 1
    assert written["machine"]["cores"] >= 1
    assert written["commit"]
    assert written["versions"]["tensorflow"]
