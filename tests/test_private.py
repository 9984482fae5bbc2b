"""What is taken from TensorFlow and Keras without their promise is there, by name, and stands in one file.

Names of losses, metrics and optimizers, which are refused before Keras is imported, are those of the Keras there is.
"""

import re

import keras
import pytest
import tensorflow as tf
from conftest import ROOT
from keras.src import losses, metrics, optimizers
from test_imports import imported

from pipeline import private, private_keras
from pipeline.plan.checks import LOSSES, METRICS, OPTIMIZERS

ATTRIBUTES = private.ATTRIBUTES | private_keras.ATTRIBUTES
PRIVATE = re.compile(r"^(keras\.src|tensorflow\.python|tensorflow\.core)\b")


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in ATTRIBUTES.items() for name in names])
def test_what_is_used_of_it_is_still_there(owner, name):
    root, *rest = owner.split(".")
    found = {"keras": keras, "tf": tf}.get(root) or getattr(private, root, None) or getattr(private_keras, root)
    for part in rest:
        found = getattr(found, part)
    assert hasattr(found, name), f"{owner}.{name} is gone from this version: see pipeline/private.py for its use"


def test_no_other_file_reaches_into_tensorflow_or_keras():
    reaching = [f"{path.relative_to(ROOT)}: {module}" for path, module in imported() if PRIVATE.match(module)]
    kept = [found for found in reaching if not found.startswith(("pipeline/private.py", "pipeline/private_keras.py"))]
    # Keras's folder for downloads has no other name, and the data sets of a process without TensorFlow ask for it.
    assert kept == ["pipeline/data/image_sets.py: keras.src.backend.config"]


@pytest.mark.parametrize(("names", "get", "known"), [
    (LOSSES, keras.losses.get, losses.ALL_OBJECTS_DICT),
    (METRICS, None, metrics.ALL_OBJECTS_DICT),
    (OPTIMIZERS, keras.optimizers.get, optimizers.ALL_OBJECTS_DICT),
])  # fmt: skip
def test_the_names_are_those_that_keras_has_but_for_what_needs_something_to_work_on(names, get, known):
    needing = {"Loss", "LossFunctionWrapper", "Metric", "metric", "MeanMetricWrapper", "mean_metric_wrapper"}
    needing |= {"optimizer", "optimizermap", "multioptimizer", "lossscaleoptimizer"}
    of_compile = {"acc", "crossentropy", "ce"} if get is None else set()
    assert {*names} == {*known, *of_compile} - needing
    for name in names if get else ():
        get(name)
