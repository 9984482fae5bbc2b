"""Builds a model whose steps are its own, and finds out what they do: optimizers that they apply, what they give back.

Such a model may have no `call`, and optimizers under any name. So its steps are traced once on symbols, by Keras's own
way of building: nothing is computed, assigned or drawn, and what layers they call are built.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.private_keras import compute_output_spec
from pipeline.worker.data.reading import Batch
from pipeline.worker.model_error import ModelError, reason
from pipeline.worker.tensorflow import custom_steps
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow.collective import Gradients
from pipeline.worker.tensorflow.custom_steps import VARIABLES, CustomSteps, Returned, Sources, Watcher
from pipeline.worker.tensorflow.loss_scaling import reduction
from pipeline.worker.tensorflow.loss_scaling.reduction import Reduction
from pipeline.worker.tensorflow.step import CUSTOM_AS


def build(model: keras.Model, batch: Batch, arrays: bool) -> None:
    """Builds a compiled model with steps of its own, in its strategy's scope, for such a batch. Raises `ModelError`."""
    symbols = keras.tree.map_structure(
        lambda leaf: keras.KerasTensor((None, *leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype)),
        custom_steps.given(batch, arrays),
    )
    whole = all(layer.built for layer in model._flatten_layers(include_self=False))
    # A step that names weights before it calls their layers sees them when it is made once more.
    for _ in range(1 if whole else 2):
        look = _Look()
        train = _returned(look, model, "train_step", symbols)
    if not look.applied:
        expected = "a train_step that applies gradients by a Keras optimizer"
        instead = "optimizer.apply_gradients(zip(gradients, variables))"
        raise ModelError(expected, f"{type(model).__name__}'s, which applies none", instead)
    for optimizer, variables in look.applied.items():
        if not optimizer.built:
            optimizer.build(variables)
    # Keras leaves a model without `call` as not built, and then counts and saves nothing of it; a layer that no step
    # calls has nothing to build.
    model.built = True
    test, untested = None, ""
    try:
        test = _returned(_Look(), model, "test_step", symbols)
    except ModelError as error:
        if reduction.is_own(model, "test_step"):
            raise
        untested = str(error) if error.__cause__ is None else reason(error.__cause__)
    # Past Keras's own setter, which looks for weights in everything.
    vars(model)[CUSTOM_AS] = CustomSteps(tuple(look.applied), arrays, train, test, untested)


def sums_over_examples(model: keras.Model, batch: Batch) -> list[str]:
    """Returns a note on a built model that takes gradients of a sum over examples, tried on made-up ones; else none."""
    own: CustomSteps = vars(model)[CUSTOM_AS]
    state = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in model.metrics_variables]

    def tried(piece: Batch, share: float) -> list[float]:
        look = _Look()
        with losses.without_keras_scaling(), custom_steps.watched(), keras.StatelessScope(state):
            look.at(model.train_step, custom_steps.given(piece, own.arrays))
        return [reduction.total(target) for target in look.targets]

    try:
        tries = reduction.on_pieces(tried, reduction.made_up(batch, reduction.SEEDS[0]))
    except Exception:  # whatever a person's code raises on made-up examples
        return []
    for values in zip(*tries, strict=False):
        rule = reduction.reduction_of(values[:3])
        if Reduction.SUM in (rule, rule is Reduction.NEITHER and reduction.of_doubled(values)):
            return [
                f"Expected a train_step that takes gradients of a mean over examples, received a sum in that of "
                f"{type(model).__name__}: each replica's counts by its share of the examples, so that over several it "
                f"is as many times smaller than on one device. Try ops.mean over the first axis."
            ]
    return []


def _returned(look: "_Look", model: keras.Model, name: str, symbols: Nested[keras.KerasTensor]) -> Returned:
    try:
        with custom_steps.watched():
            compute_output_spec(partial(look.at, getattr(model, name)), symbols)
    except Exception as error:  # whatever a person's code raises
        raise ModelError(
            f"{reason(error).rstrip('.')}. Expected a {name} that takes a batch of the data, received this from "
            f"that of {type(model).__name__}. Try it on one batch with Keras alone."
        ) from error
    logs = look.logs
    if not isinstance(logs, Mapping) or not logs:
        received = f"{type(logs).__name__} from that of {type(model).__name__}"
        raise ModelError(f"a {name} that returns a dictionary of names and values", received, 'return {"loss": loss}')
    logs = custom_steps.flattened(logs)
    results = {name: look.metric_of(value) for name, value in logs.items()}
    metrics = {name: result for name, result in results.items() if result is not None}
    if "loss" in metrics and metrics["loss"][0] not in look.updated:
        # That of Keras's own step, which says 0 of a step that never tells it.
        del metrics["loss"]
    values = dict[str, tuple[int, ...]]()
    for name, value in ((name, tf.convert_to_tensor(value)) for name, value in logs.items() if results[name] is None):
        sizes = value.shape[1:] if value.shape.rank and value.shape[0] is None else value.shape
        if not sizes.is_fully_defined():
            received = f"{name} of shape {value.shape}"
            raise ModelError("values of known sizes from a step of the model's own", received, "its mean")
        values[name] = tuple(sizes.as_list())
    named = [name for name in logs if name in metrics or name in values] or list(logs)
    loss = min(named, key=lambda name: (name != "loss", "loss" not in name, name in metrics))
    return Returned(metrics, values, loss, look.used)


class _Look(Watcher):
    """Sees what a step does, which is given zeros for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: dict[keras.optimizers.Optimizer, list[keras.Variable]] = {}
        self.logs: Mapping[str, tf.Tensor] = {}
        self.updated: list[keras.metrics.Metric] = []
        # The metrics of whose results something else has been made; what gradients of variables are taken of.
        self.used: list[keras.metrics.Metric] = []
        self.targets: list[tf.Tensor] = []

    def at(self, step: Callable[[Batch], Mapping[str, tf.Tensor]], batch: Batch) -> tuple[()]:
        with custom_steps.replica_watcher.held(self):
            self.logs = step(batch)
        # While its graph is there.
        symbols = [pair for pair in self.results if tf.is_symbolic_tensor(pair[0])]
        self.used = list({id(metric): metric for tensor, (metric, _) in symbols if tensor.consumers()}.values())
        return ()

    def gradient(self, call: Callable[[Sources], Gradients], target: Nested[tf.Tensor], sources: Sources) -> Gradients:
        # Zeros for variables, which may not be there yet.
        others = [source for source in sources if not isinstance(source, VARIABLES)]
        if len(others) < len(sources):
            self.targets += tf.nest.flatten(target)
        gradients = iter(call(others) or ())
        return [tf.zeros(one.shape, one.dtype) if isinstance(one, VARIABLES) else next(gradients) for one in sources]

    def apply(self, optimizer: keras.optimizers.Optimizer, call: Any, gradients: Any, variables: Any) -> None:
        trained = self.applied.setdefault(optimizer, [])
        trained += [variable for variable in variables or () if not any(variable is one for one in trained)]

    def update(self, metric: keras.metrics.Metric, call: Callable[[], None], values: Any, weights: Any) -> None:
        # This builds it, in a scope of its own: what is in a condition stays in there.
        self.updated.append(metric)
        with keras.StatelessScope():
            call()

    def loss(self, loss: keras.losses.Loss, *values: tf.Tensor) -> tf.Tensor:
        # A sum over examples, which is put right where it is called, as their mean.
        value = loss(*values)
        if getattr(loss, "reduction", None) != "sum":
            return value
        return value / tf.cast(tf.shape(tf.nest.flatten(values)[0])[0], value.dtype)
