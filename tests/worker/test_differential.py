"""Models that nobody wrote train under a strategy what they train on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"
# What differed once, each made as small as it could be; a name begins with the strategy.
KEPT = sorted((Path(__file__).parent / "cases").glob("*.json"))
# The same cases each time; others are for `benchmarks/differential.py`, for hours.
SEED = 7


@pytest.fixture
def differing(monkeypatch, tmp_path):
    """What trains a case under a strategy and judges it, as the search does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    search_path = os.pathsep.join([str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", search_path)
    from differing import case, compared, pair

    pairs = {}

    def judge(path: Path) -> compared.Judged:
        strategy = "multi_worker" if path.stem.startswith("multi_worker") else "mirrored"
        if strategy not in pairs:
            pairs[strategy] = pair.Pair(strategy, tmp_path)
        return compared.judged(case.from_json(path.read_text()), pairs[strategy])

    yield judge
    for made in pairs.values():
        made.end()


@pytest.mark.slow
def test_what_differed_once_is_equal_or_refused_in_words(differing):
    verdicts = {path.stem: differing(path) for path in KEPT}
    wrong = {name: made.words for name, made in verdicts.items() if made.verdict.name not in ("EQUAL", "TOLD")}
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "count"), [("mirrored", 12), ("multi_worker", 12)])
def test_models_that_are_drawn_train_what_one_device_trains(strategy, count, tmp_path):
    arguments = (f"--seed={SEED}", f"--count={count}", f"--strategy={strategy}", "--json=found.json")
    said = subprocess.run(
        [sys.executable, str(BENCHMARKS / "differential.py"), *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1_500,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"].values()
    assert sum(row["verdicts"].values()) == count
    # Else it would be of no use: what is drawn is trained.
    assert row["verdicts"]["equal"] > count / 2
