"""The loop of a model whose steps are its own: their losses, and what they give back under its names."""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from pipeline.worker.data.reading import Batches
from pipeline.worker.engine import Emit
from pipeline.worker.loop import Call, flat
from pipeline.worker.model_error import ModelError
from pipeline.worker.patched import patched
from pipeline.worker.tensorflow import custom_steps
from pipeline.worker.tensorflow import step as steps
from pipeline.worker.tensorflow.custom_steps import Returned
from pipeline.worker.tensorflow.loop import Loop, Results


class CustomLoop(Loop):
    """A loop whose metrics are results as they have run on, and values as the last step gave them, as in Keras."""

    # Is what is asked for that of validation? And values of the last step of training, and of validation.
    _validating = False
    _last = _last_held_out = np.zeros(0, np.float32)

    def on(self, batches: Batches, count: int, train: steps.Steps | None = None) -> Call:
        """Trains `count` steps; see `Loop.on`."""
        call = super().on(batches, count, train)
        if call.steps:
            self._last = call.losses[-1, 1:]
        return dataclasses.replace(call, losses=call.losses[:, :1])

    def evaluate(self, steps_per_call: int, emit: Emit) -> dict[str, float]:
        """Loss and what `test_step` gives back over the whole validation part; empty where there is none."""
        with patched(self, {"_validating": True}):
            return super().evaluate(steps_per_call, emit)

    def metrics(self) -> dict[str, float]:
        """Returns the last step's values, of metrics the results over all replicas; also one that it calls loss."""
        last = self._last_held_out if self._validating else self._last
        return flat(self._metric_results()) | values_of(self._returned(self._validating), last)

    def metrics_state(self) -> list[np.ndarray]:
        """Returns what `set_metrics_state` goes on from; all processes take part."""
        return [*super().metrics_state(), self._last.copy()]

    def set_metrics_state(self, state: Sequence[np.ndarray]) -> None:
        """Goes on from what `metrics_state` gave."""
        *state, self._last = state
        super().set_metrics_state(state)

    @property
    def _own(self) -> custom_steps.CustomSteps:
        return custom_steps.known(self.model)

    def _returned(self, validating: bool) -> Returned:
        returned = self._own.test if validating else self._own.train
        assert returned is not None, "what cannot be evaluated is not validated"
        return returned

    def _metrics_variables(self) -> list[keras.Variable]:
        """Returns those of the model's metrics, and of metrics whose results its steps return beside them."""
        returned = [self._own.train, *([] if self._own.test is None else [self._own.test])]
        metrics = [metric for one in returned for metric, _ in one.metrics.values()]
        variables = [*super()._metrics_variables(), *(one for metric in metrics for one in metric.variables)]
        return list({id(variable): variable for variable in variables}.values())

    def _metric_results(self) -> Results:
        # Which of the two functions it is, is a part of what it is traced for.
        return self._results(self._validating)  # type: ignore[no-any-return]

    def results_now(self, validating: bool = False) -> Results:
        """The results of metrics that a step gives back."""
        return {name: result_of(*source) for name, source in self._returned(validating).metrics.items()}

    def _validate_some(self, validate: steps.Steps, iterator: Batches, count: int) -> tuple[np.ndarray, np.ndarray]:
        values, sizes = super()._validate_some(validate, iterator, count)
        self._last_held_out = values[-1, 1:]
        return values[:, :1], sizes


def not_validated(model: keras.Model, own: custom_steps.CustomSteps, best: str | None) -> str:
    """Returns a note that nothing evaluates the model; raises `ModelError` where a value of it is to be `best`."""
    why = f"{type(model).__name__} has no test_step of its own, and Keras's cannot evaluate it"
    if best is not None and best.startswith("val_"):
        expected = f"a model that can be evaluated for checkpoint.keep_best={best}"
        raise ModelError(expected, f"one that cannot: {why}", f"a test_step, or checkpoint.keep_best={own.train.loss}")
    return f"The validation data are left out: {why}. {own.untested}"


def values_of(returned: Returned, last: np.ndarray) -> dict[str, float]:
    """The values of a step, `last` of its loss vector, by their names; empty where there was no step yet."""
    sizes = [int(np.prod(shape)) for shape in returned.values.values()]
    if not sizes or last.size != sum(sizes):
        return {}
    shaped = zip(returned.values.items(), np.split(last, np.cumsum(sizes)[:-1]), strict=True)
    return flat({name: values.reshape(shape) for (name, shape), values in shaped})


def result_of(metric: keras.metrics.Metric, name: str | None) -> tf.Tensor:
    """A metric's result, or the part of that name where it has several."""
    result = metric.result()
    return tf.convert_to_tensor(result if name is None else result[name])
