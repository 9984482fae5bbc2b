"""Models of keras.applications build, trace, step and save under two replicas, and load as they were."""

import os
import subprocess
import sys

import pytest
from applications import FAMILIES
from conftest import ROOT, SUPPORT, sampled


@pytest.mark.slow
def test_models_of_keras_applications_train_on_two_replicas_and_are_saved():
    # Others in each run of CI: all of them take minutes, and `python tests/support/applications.py` tries them.
    names = sampled(list(FAMILIES), 1)
    quiet = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    program = [sys.executable, str(SUPPORT / "applications.py"), *names]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, env=os.environ | quiet, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == names
