"""Normalization over the global batch is that of one device, and replicas without examples change nothing."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from conftest import OWN, ROOT


def compared(what: str) -> dict[str, Any]:
    """Relative differences from one device, by case."""
    quiet = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    program = [sys.executable, str(OWN / "normalized.py"), what]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, env=os.environ | quiet, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_mean_variance_and_gradients_keep_their_digits_where_the_mean_is_far_from_zero():
    for case, differences in compared("all_moments").items():
        assert max(differences) < 1e-6, case


@pytest.mark.slow
def test_replicas_without_examples_change_nothing_whatever_the_layers():
    for model, differences in compared("all_layers").items():
        assert max(differences) < 1e-5, model
