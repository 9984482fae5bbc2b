"""Makes a training step of a model's own for the sake of what it would do, as `trial.py` does with Keras's.

What replicas add up in a person's own step is found out while that is traced, with batches of open sizes. So it is
traced here as training traces it, and run once; an optimizer that is asked to apply gradients gives them back.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.worker.collective import Pausable
from pipeline.worker.data.reading import Batch
from pipeline.worker.loop import flat
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.custom_steps import step as custom_step
from pipeline.worker.tensorflow.custom_steps.loop import result_of, values_of
from pipeline.worker.tensorflow.custom_steps.watching import kinds, watched
from pipeline.worker.tensorflow.equality_check.trial import (
    Outputs,
    Trial,
    attributes_kept,
    copies,
    held_here,
    outputs_kept,
    replica,
)
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling import loss as losses
from pipeline.worker.tensorflow.loss_scaling.fixed_randomness import fixed_randomness
from pipeline.worker.tensorflow.patched import patched

Variable: TypeAlias = keras.Variable | tf.Variable
# (examples of the global batch, the batches of the replicas here) -> the step's loss, then its values
Step: TypeAlias = Callable[[tf.Tensor, Sequence[Batch]], tf.Tensor]


@dataclass
class _Trace:
    """Gradients by replica, in the order in which the traced step applies them, and what layers return."""

    gradients: dict[int, list[tuple[str, Addend]]] = field(default_factory=dict)
    outputs: dict[int, Outputs] = field(default_factory=dict)


class CustomTrials:
    """Steps of a loop that is built and has not begun, of a model whose steps are its own."""

    # Always: a person's own code need not bear to be given none.
    with_gradients = True

    def __init__(self, loop: Loop, collective: Pausable[Addend]) -> None:
        own = custom_step.of(loop.model)
        assert own is not None, "a model with steps of its own"
        self._loop, self._collective, self._model, self._own = loop, collective, loop.model, own
        self._step = custom_step.training_step(loop.model, collective, 32, False, False)
        loop.reset_metrics()

    def on_all(self, examples: int, batches: Sequence[Batch]) -> Trial:
        """A step of all replicas, of which those here have these batches; `examples` are those of the global batch."""
        strategy, trial = self._loop.strategy, Trial()

        def step(examples: tf.Tensor, batches: Sequence[Batch]) -> tf.Tensor:
            local = strategy.experimental_distribute_values_from_function(
                lambda context: batches[context.replica_id_in_sync_group % len(batches)]
            )
            summed = strategy.run(self._step, args=(examples, local))
            return strategy.experimental_local_results(summed)[0]

        with self._put_back():
            self._make(step, trial, float(examples), batches)
            trial.state = self._state()
            self._tell_metrics(trial, self._loop.metrics())
        self._loop.reset_metrics()
        return trial

    def on_one(self, batch: Batch, noise: np.random.Generator | None = None, until: float = math.inf) -> Trial:
        """A step of one device on a batch; with `noise`, what each layer returns is wrong in its last digits.

        Raises `TimeoutError` where it is still traced when the clock says `until`.
        """
        trial, began = Trial(), time.process_time()
        device = self._loop.strategy.extended.worker_devices[0]
        examples = float(tf.nest.flatten(batch)[0].shape[0])
        variables = [variable for variable in self._variables() if isinstance(variable, keras.Variable)]
        with self._put_back(), tf.device(device), held_here(variables), self._collective.paused():
            self._make(lambda count, batches: self._step(count, batches[0]), trial, examples, [batch], noise, until)
            trial.state = self._state()
            results = {name: result_of(*source) for name, source in self._own.train.metrics.items()}
            self._tell_metrics(trial, flat(results))
        trial.cpu_seconds = time.process_time() - began
        return trial

    def _make(
        self,
        step: Step,
        trial: Trial,
        examples: float,
        batches: Sequence[Batch],
        noise: np.random.Generator | None = None,
        until: float = math.inf,
    ) -> None:
        """Traces the step and runs it once."""
        trace = _Trace()

        def traced(examples: tf.Tensor, batches: Sequence[Batch]) -> tuple[tf.Tensor, list[Addend], list[tf.Tensor]]:
            graph = tf.compat.v1.get_default_graph()
            values = step(examples, batches)
            for outputs in trace.outputs.values():
                # What is computed in a condition or a loop stays in there.
                outputs[:] = [(name, [leaf for leaf in leaves if leaf.graph is graph]) for name, leaves in outputs]
            gradients = [gradient for _, gradient in _of_first(trace.gradients)]
            if any(gradient.graph is not graph for gradient in gradients):
                raise ModelError("its train_step applies gradients inside of a condition or a loop of TensorFlow")
            return (
                values,
                gradients,
                [leaf for calls in trace.outputs.values() for _, leaves in calls for leaf in leaves],
            )

        specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), list(batches))
        with (
            fixed_randomness(), outputs_kept(trace.outputs, noise, until), _not_applied(trace),
            losses.without_keras_scaling(), watched(),
        ):  # fmt: skip
            function = tf.function(traced, autograph=False)
            compiled = function.get_concrete_function(tf.TensorSpec([], tf.float32), specs)
        values, gradients, leaves = compiled(tf.constant(examples), list(batches))
        trial.losses = values.numpy()
        names = [name for name, _ in _of_first(trace.gradients)]
        trial.gradients = dict(zip(names, gradients, strict=True))
        run = iter(leaves)
        for number, outputs in trace.outputs.items():
            trial.outputs[number] = [(name, [next(run) for _ in leaves_of]) for name, leaves_of in outputs]

    def _tell_metrics(self, trial: Trial, results: dict[str, float]) -> None:
        """Takes values apart from the loss, and has what a step gives back under other names among its metrics."""
        returned = self._own.train
        trial.metrics = results | values_of(returned, trial.losses[1:])
        trial.metrics.pop(returned.loss, None)
        trial.losses = trial.losses[:1]

    def _variables(self) -> list[Variable]:
        """All that a step may assign, once each."""
        of_metrics = [variable for metric, _ in self._own.train.metrics.values() for variable in metric.variables]
        of_optimizers = [variable for optimizer in self._own.optimizers for variable in optimizer.variables]
        variables = [
            *self._model.variables,
            *self._model.metrics_variables,
            *of_metrics,
            *of_optimizers,
            *self._loop.beside,
            *self._loop.counted_beside,
        ]
        return list({id(variable): variable for variable in variables}.values())

    def _state(self) -> dict[str, list[np.ndarray]]:
        """The value on each replica here of what is no metric's, no optimizer's, and counts nothing that was drawn."""
        layers = self._model._flatten_layers()
        of_metrics = [variable for metric, _ in self._own.train.metrics.values() for variable in metric.variables]
        drawn = [generator.state for layer in layers for generator in layer._seed_generators]
        passed = {id(variable) for variable in [*of_metrics, *self._model.metrics_variables, *drawn]}
        state: dict[str, list[np.ndarray]] = {}
        for variable in [*self._model.variables, *self._loop.beside]:
            if id(variable) not in passed and variable.dtype != tf.string:
                name = variable.path if isinstance(variable, keras.Variable) else variable.name
                state[_unused(state, name, "number")] = [copy.numpy() for copy in copies(variable)]
        return state

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Inside, a step may change what it likes; afterwards variables and attributes are what they were."""
        values = [(copy, copy.numpy()) for variable in self._variables() for copy in copies(variable)]
        try:
            with attributes_kept(self._model):
                yield
        finally:
            for copy, value in values:
                copy.assign(value)


def _of_first(gradients: dict[int, list[tuple[str, Addend]]]) -> list[tuple[str, Addend]]:
    """Those of the first replica here: all are given the same."""
    return gradients[min(gradients)] if gradients else []


def _unused(names: dict[str, list[np.ndarray]] | dict[str, Addend], name: str, what: str) -> str:
    """A name that is not among these: itself, or with how many times there is one."""
    times, unused = 1, name
    while unused in names:
        times += 1
        unused = f"{name}, {what} {times}"
    return unused


@contextmanager
def _not_applied(traced: _Trace) -> Iterator[None]:
    """Inside, optimizers apply nothing of what they are given, which is kept."""

    def apply(
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Addend | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        applied = traced.gradients.setdefault(replica(), [])
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        for gradient, variable in zip(grads, variables, strict=False):
            if gradient is not None:
                applied.append((_unused(dict(applied), variable.path, "update"), gradient))

    with ExitStack() as stack:
        for kind in kinds(keras.optimizers.Optimizer):
            if "apply" in vars(kind):
                stack.enter_context(patched(kind, {"apply": apply}))
        yield
