"""What is taken from TensorFlow and Keras without their promise is there, by name, and stands in one file.

Names of losses, metrics and optimizers, which are refused before Keras is imported, are those of the Keras there is.
"""

import ast
import re

import keras
import pytest
import tensorflow as tf
from conftest import ROOT
from keras.src import losses, metrics, optimizers
from test_imports import imported

from pipeline import private, private_jax, private_keras
from pipeline.plan.checks import LOSSES, METRICS, OPTIMIZERS
from pipeline.worker.tensorflow.loss_scaling.reduction import _INSTEAD

# What is used of public classes, and of what is made of private ones, under names that are not promised either.
OF_CLASSES = {
    "collective.CollectiveAllReduceExtended": "_initialize_local_devices",
    "context.Context": "configure_coordination_service",
    "keras.Model": "_flatten_layers _symbolic_build _compute_loss _should_eval",
    "keras.callbacks.EarlyStopping": "_set_monitor_op",
    "keras.optimizers.Optimizer": """
        _apply_weight_decay _backend_apply_gradients _backend_increment_gradient_accumulators _backend_update_step
        _backend_reset_gradient_accumulators _clip_gradients _track_variable _update_model_variables_moving_average
    """,
    "parameter_server_strategy.ParameterServerStrategyExtended": "_create_var_creator _container_strategy",
    "parameter_server_strategy_v2.ParameterServerStrategyV2Extended": "_create_variable_round_robin",
    "LRUCache": "get put",
    "tf.Graph": "_get_function",
    "tf.Operation": "_set_attr",
    "tf.data.Dataset": "_as_serialized_graph _inputs",
    "tf.distribute.MirroredStrategy": "_collective_key_base",
    "tf.distribute.MultiWorkerMirroredStrategy": "_collective_key_base",
}
PRIVATE = re.compile(r"^(keras\.src|tensorflow\.python|tensorflow\.core)\b")


def used() -> set[str]:
    """Dotted names of what our files use of what `private*.py` take: `array_slicing.can_slice_array`."""
    names = {f"{owner}.{name}" for owner, of_owner in OF_CLASSES.items() for name in of_owner.split()}
    for path in sorted((ROOT / "pipeline").rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        called = {
            alias.asname or alias.name: alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pipeline.private")
            for alias in node.names
        }
        chains = [ast.unparse(node).partition(".") for node in nodes if isinstance(node, ast.Attribute)]
        names |= {
            f"{called[root]}.{rest}" for root, _, rest in chains if root in called and re.fullmatch(r"[\w.]+", rest)
        }
    return names


@pytest.mark.parametrize("name", sorted(used()))
def test_what_is_used_of_it_is_still_there(name):
    root, *rest = name.split(".")
    modules = (private, private_keras, private_jax)
    found = {"keras": keras, "tf": tf}.get(root) or next(getattr(one, root) for one in modules if hasattr(one, root))
    for part in rest:
        assert hasattr(found, part), f"{name} is gone from this version: see pipeline/private.py for its use"
        found = getattr(found, part)


def test_all_operations_that_draw_are_still_there():
    assert [name for module, name in _INSTEAD if not hasattr(module, name)] == []


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
