"""Names of losses, metrics and optimizers, which are refused before Keras is imported, held to the Keras there is."""

import keras
import pytest
from keras.src import losses, metrics, optimizers

from pipeline.plan.checks import LOSSES, METRICS, OPTIMIZERS


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
