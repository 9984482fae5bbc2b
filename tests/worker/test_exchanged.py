"""TensorFlow and JAX train to the same losses from the same weights, and go on with what the other has saved."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import exchanged
import numpy as np
import pytest
from conftest import ROOT, SUPPORT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install jax"),
]


@pytest.fixture(scope="module")
def came(tmp_path_factory):
    """What each backend came to, by what it did: see `exchanged.py`. Both at once, then both with both's files."""
    folder = tmp_path_factory.mktemp("exchanged")
    given = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, SUPPORT)))}
    for what in ("train", "go_on"):
        commands = [
            [sys.executable, str(SUPPORT / "exchanged.py"), name, what, str(folder)] for name in exchanged.BACKENDS
        ]
        running = [subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True) for command in commands]
        for process in running:
            _, said = process.communicate(timeout=500)
            assert process.returncode == 0, said
    return {
        (name, what): json.loads((folder / f"{name}_{what}.json").read_text())
        for name in exchanged.BACKENDS
        for what in ("train", "go_on")
    }


@pytest.mark.parametrize("name", exchanged.NAMES)
def test_both_train_to_the_same_losses_over_fifty_steps_from_the_same_weights(came, name):
    ours, theirs = (came[backend, "train"][name] for backend in exchanged.BACKENDS)
    assert ours["iterations"] == theirs["iterations"] == len(ours["losses"]) == exchanged.STEPS
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=0, atol=1e-3)
    # It has learnt: what comes to nothing would be alike, too.
    assert ours["losses"][-1] < 0.95 * ours["losses"][0]


@pytest.mark.parametrize("name", exchanged.NAMES)
@pytest.mark.parametrize("backend", exchanged.BACKENDS)
def test_each_goes_on_with_what_the_other_has_saved_as_with_its_own(came, backend, name):
    found = {of: came[backend, "go_on"][f"{name} of {of}"] for of in exchanged.BACKENDS}
    ours, theirs = found.values()
    # With the optimizer's state: it counts on.
    assert ours["iterations"] == theirs["iterations"] == exchanged.STEPS + exchanged.MORE
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=0, atol=1e-3)
    other = came[next(one for one in exchanged.BACKENDS if one != backend), "go_on"][f"{name} of {backend}"]
    np.testing.assert_allclose(ours["losses"], other["losses"], rtol=0, atol=1e-3)
    assert ours["losses"][0] < came[backend, "train"][name]["losses"][0]
