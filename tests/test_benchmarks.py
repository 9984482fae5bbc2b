"""Every benchmark runs: at its smallest size, as a person types it, and it writes down what it measured on what."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

FOLDER = ROOT / "benchmarks"
# Those that are started, and not those that they import.
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if "record.parse(" in path.read_text())


def test_there_are_programs_to_run():
    assert {"side_by_side", "predict", "sweep"} <= set(PROGRAMS)


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
