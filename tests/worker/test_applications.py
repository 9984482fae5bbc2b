"""Models of keras.applications build, trace, step and save under two replicas, and load as they were."""

import pytest
from applications import FAMILIES
from conftest import sampled
from scripts import begun, printed


@pytest.mark.slow
def test_models_of_keras_applications_train_on_two_replicas_and_are_saved():
    # Others in each run of CI: all of them take minutes, and `python tests/support/applications.py` tries them.
    names = sampled(list(FAMILIES), 1)
    (shown,) = printed(begun("applications", *names), timeout=600)
    assert [line.split()[0] for line in shown.splitlines()] == names
