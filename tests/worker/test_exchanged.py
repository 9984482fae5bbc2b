"""TensorFlow and JAX train to the same losses from the same weights, and go on with what the other has saved."""

from importlib.util import find_spec

import exchanged
import numpy as np
import pytest
import scripts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install jax"),
]


@pytest.fixture(scope="module")
def came(tmp_path_factory):
    """What each backend came to, by what it did: see `exchanged.py`. Both at once, then both with both's files."""
    folder, came = tmp_path_factory.mktemp("exchanged"), {}
    for what in ("train", "go_on"):
        running = [
            scripts.begun("exchanged", name, what, folder, imported=name == "tensorflow") for name in exchanged.BACKENDS
        ]
        came |= zip([(name, what) for name in exchanged.BACKENDS], scripts.answers(*running), strict=True)
    return came


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
