"""Replicas draw random numbers of their own: dropout masks that are the same everywhere regularise less."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from conftest import OWN, ROOT, sampled


def masks(strategy: str, replicas: int) -> list[Any]:
    program = [sys.executable, str(OWN / "masks.py"), strategy, str(replicas)]
    quiet = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env=os.environ | quiet, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_each_replica_draws_a_dropout_mask_of_its_own_and_the_first_that_of_one_device():
    (strategy,) = sampled(("mirrored", "central_storage"), 1)
    drawn, alone = masks(strategy, 2), masks("one_device", 1)
    assert [step[0] for step in drawn] == [step[0] for step in alone]
    every = [tuple(mask) for step in drawn for mask in step]
    assert len(set(every)) == len(every) == 6
