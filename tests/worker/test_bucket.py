"""Gradients that travel in one bucket under JAX, for models that train the same by it."""

import pytest
from on_jax import ENVIRON
from scripts import came


@pytest.fixture(scope="module")
def found():
    """What `support/bucketed.py` prints."""
    return came("bucketed", **ENVIRON)


@pytest.mark.slow
def test_only_models_of_which_no_example_meets_another_before_the_loss_have_a_bucket(found):
    assert {name: of["fits"] for name, of in found.items()} == {name: of["expected"] for name, of in found.items()}
    assert not any(of["others"] for of in found.values()), "one device, and one that is cut over several, exchange none"


@pytest.mark.slow
def test_a_bucket_is_one_array_and_makes_of_a_batch_what_is_made_without(found):
    for name, of in found.items():
        if of["fits"]:
            assert " ".join(of["sums"]).count("f32") == 1, (name, of["sums"])
            assert of["far"]["whole"] < 1e-6, name
            # Batches that do not divide evenly, and those whose examples have weights, go without.
            assert of["far"]["short"] == of["far"]["weighted"] == 0, name
