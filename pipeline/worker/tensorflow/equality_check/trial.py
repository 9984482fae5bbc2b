"""Makes a training step for the sake of what it would do: on all replicas, or on one device, with nothing changed.

A step of Keras's is run at once: tracing it takes longer than running it once. A person's own is traced with batches of
open sizes, which is when replicas find out what to add up, and run once. An optimizer that is asked to apply gradients
keeps them, and what is assigned is put back.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.private_keras import keras_variables
from pipeline.record.findings import What
from pipeline.worker.collective import Pausable
from pipeline.worker.data.reading import Batch
from pipeline.worker.loop import flat
from pipeline.worker.model_error import ModelError
from pipeline.worker.patched import all_patched, patched
from pipeline.worker.tensorflow import custom_steps
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow.collective import Addend, by_replica
from pipeline.worker.tensorflow.custom_steps import kinds, watched
from pipeline.worker.tensorflow.loop import Loop, copies, values_of
from pipeline.worker.tensorflow.loss_scaling.metrics import held_here
from pipeline.worker.tensorflow.loss_scaling.reduction import fixed_randomness
from pipeline.worker.tensorflow.step import Replicas
from pipeline.worker.variables import Variable

# What is late for having had less than this of a core has not had its turn on it.
LEAST_CPU_SECONDS = 1.0

# The distance from 1 to the next number of a type, and how many of these a layer's output is disturbed by at most.
EPSILONS = {"float32": 2.0**-23, "float64": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
DIGITS = 4
# Between two looks whether threads of replicas have ended, which free last what their step kept. TensorFlow has 1 s.
THREAD_SECONDS = 0.005
# Examples after which disturbances come again, where their number is open.
NOISY_ROWS = 16

Outputs: TypeAlias = list[tuple[str, list[tf.Tensor]]]
# (examples of the global batch, the batches of the replicas here) -> the loss vector
Step: TypeAlias = Callable[[tf.Tensor, Sequence[Batch]], tf.Tensor]


@dataclass
class Trial:
    """A step's losses, metrics and gradients, and on each replica here outputs of layers, and what was assigned."""

    numbers: dict[tuple[What, str], float] = field(default_factory=dict)
    gradients: dict[str, Addend] = field(default_factory=dict)
    state: dict[str, list[np.ndarray]] = field(default_factory=dict)
    outputs: dict[int, Outputs] = field(default_factory=dict)
    cpu_seconds: float = 0.0


class Trials:
    """Steps of a loop that is built and has not begun."""

    # Without them a step of Keras's takes a third of the time; a person's own code need not bear to be given none.
    with_gradients = True

    def __init__(self, loop: Loop, collective: Pausable[Addend]) -> None:
        self._loop, self._collective, model = loop, collective, loop.model
        self.own = own = custom_steps.of(model)
        counting, beside = loop.counting(), list(loop.beside)
        self._step = custom_steps.replica_step(model, Replicas(loop.strategy, collective, gather=loop.gather))
        # Keras does not know of those of TensorFlow, and a person's own code may assign what it likes.
        self._kept = [variable for variable in beside if not isinstance(variable, keras.Variable)]
        held = [*counting, *(one for one in model.variables if not one.trainable), *beside]
        if own is not None:
            of_optimizers = [variable for optimizer in own.optimizers for variable in optimizer.variables]
            self._kept = held = [*counting, *model.variables, *of_optimizers, *beside]
        self._held = list({id(one): one for one in held if isinstance(one, keras.Variable)}.values())
        drawn = [generator.state for layer in model._flatten_layers() for generator in layer._seed_generators]
        passed = {id(variable) for variable in [*counting, *drawn]}
        every = (*model.variables, *beside)
        self._compared = [one for one in every if id(one) not in passed and one.dtype != tf.string]
        loop.reset_metrics()

    def on_all(self, examples: int, batches: Sequence[Batch]) -> Trial:
        """A step of all replicas, of which those here have these batches; `examples` are those of the global batch."""
        strategy, trial = self._loop.strategy, Trial()

        def step(examples: tf.Tensor, batches: Sequence[Batch]) -> tf.Tensor:
            summed = strategy.run(self._step, args=(examples, by_replica(strategy, batches)))
            return strategy.experimental_local_results(summed)[0]

        wait_one = tf.train.Coordinator.wait_for_stop
        wait = {"wait_for_stop": lambda coordinator, timeout=None: wait_one(coordinator, THREAD_SECONDS)}
        # TensorFlow would say that what is run once would be faster compiled.
        quiet = patched(tf.get_logger(), {"disabled": True})
        with self._put_back(trial), quiet, patched(tf.train.Coordinator, wait):
            values = self._make(step, trial, examples, batches)
            trial.numbers = self._numbers(values, flat(self._loop.metrics()))
        self._loop.reset_metrics()
        return trial

    def on_one(self, batch: Batch, noise: np.random.Generator | None = None, until: float = math.inf) -> Trial:
        """A step of one device on a batch, with layers' outputs off by `noise`; `TimeoutError` after `until`."""
        trial, began = Trial(), time.process_time()
        device, examples = self._loop.strategy.extended.worker_devices[0], int(tf.nest.flatten(batch)[0].shape[0])
        # What its first replica has.
        values = [copies(variable)[0] for variable in self._held]
        with tf.device(device), held_here(self._held, values), self._put_back(trial), self._collective.paused():
            vector = self._make(lambda count, own: self._step(count, *own), trial, examples, [batch], noise, until)
            trial.numbers = self._numbers(vector, flat(self._loop.results_now()))
        trial.cpu_seconds = time.process_time() - began
        return trial

    def _make(
        self, step: Step, trial: Trial, examples: int, batches: Sequence[Batch],
        noise: np.random.Generator | None = None, until: float = math.inf,
    ) -> np.ndarray:  # fmt: skip
        """The loss vector of the step, in which nothing is drawn or applied."""
        gradients: dict[int, dict[str, Addend]] = {}
        run = step if self.own is None else partial(_traced, step, trial, gradients)
        none = {"gradient": lambda tape, target, sources, **named: [None] * len(sources)}
        with (
            fixed_randomness(), _outputs_kept(trial.outputs, noise, until), _not_applied(gradients),
            patched(tf.GradientTape, {} if self.with_gradients else none), losses.without_keras_scaling(),
        ):  # fmt: skip
            values = run(tf.constant(float(examples)), list(batches))
        trial.gradients = _of_first(gradients)
        return values.numpy()  # type: ignore[no-any-return]

    def _numbers(self, values: np.ndarray, results: dict[str, float]) -> dict[tuple[What, str], float]:
        names: tuple[str, ...] = ("loss", *self._loop.outputs)
        if self.own is not None:
            names, results = (self.own.train.loss,), results | values_of(self.own.train, values[1:])
        numbers: dict[tuple[What, str], float] = {("metric", one): results[one] for one in results if one not in names}
        return {("loss", name): float(value) for name, value in zip(names, values, strict=False)} | numbers

    @contextmanager
    def _put_back(self, trial: Trial) -> Iterator[None]:
        """Inside, the first value is kept of what is assigned; afterwards it has it again, and attributes theirs."""
        before: dict[int, tuple[Variable, list[np.ndarray]]] = {}
        assign_one = keras_variables.Variable.assign

        def keep(variable: Variable) -> None:
            if id(variable) not in before:
                # Out of a graph that is traced.
                with tf.init_scope():
                    before[id(variable)] = variable, [copy.numpy() for copy in copies(variable)]

        def assign(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
            keep(variable)
            return assign_one(variable, value)

        for variable in self._kept:
            keep(variable)
        attributes = [(layer, dict(vars(layer))) for layer in self._loop.model._flatten_layers()]
        names = {id(value): f"{layer.name}/{name}" for layer, held in attributes for name, value in held.items()}
        try:
            with patched(keras_variables.Variable, {"assign": assign}):
                yield
            for variable in self._compared:
                if id(variable) in before:
                    of_keras = isinstance(variable, keras.Variable)
                    name = variable.path if of_keras else names.get(id(variable), variable.name)
                    trial.state[_unused(trial.state, name, "number")] = [copy.numpy() for copy in copies(variable)]
        finally:
            for layer, held in attributes:
                vars(layer).clear()
                vars(layer).update(held)
            for variable, values in before.values():
                for copy, value in zip(copies(variable), values, strict=True):
                    copy.assign(value)


def _traced(
    step: Step, trial: Trial, gradients: dict[int, dict[str, Addend]], examples: tf.Tensor, batches: Sequence[Batch]
) -> tf.Tensor:
    """Traces the step and runs it once; gradients and outputs are then values too."""

    def traced(examples: tf.Tensor, batches: Sequence[Batch]) -> tuple[tf.Tensor, dict[str, Addend], object]:
        graph = tf.compat.v1.get_default_graph()
        values = step(examples, batches)
        if any(gradient.graph is not graph for gradient in _of_first(gradients).values()):
            raise ModelError("its train_step applies gradients inside of a condition or a loop of TensorFlow")
        for outputs in trial.outputs.values():
            # What is computed in a condition or a loop stays in there.
            outputs[:] = [(name, [leaf for leaf in leaves if leaf.graph is graph]) for name, leaves in outputs]
        return values, _of_first(gradients), {key: [leaves for _, leaves in one] for key, one in trial.outputs.items()}

    specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), batches)
    with watched():
        function = tf.function(traced, autograph=False)
        compiled = function.get_concrete_function(tf.TensorSpec([], tf.float32), specs)
    values, applied, leaves = compiled(examples, batches)
    if gradients:
        gradients[min(gradients)] = applied
    for number, outputs in trial.outputs.items():
        outputs[:] = [(name, run) for (name, _), run in zip(outputs, leaves[number], strict=True)]
    return values


def _of_first(gradients: Mapping[int, dict[str, Addend]]) -> dict[str, Addend]:
    return gradients[min(gradients)] if gradients else {}


def _unused(names: Mapping[str, object], name: str, what: str) -> str:
    """A name that is not among these: itself, or with how many times there is one."""
    numbered = (f"{name}, {what} {times}" for times in itertools.count(2))
    return next(one for one in itertools.chain([name], numbered) if one not in names)


def _not_applied(gradients: dict[int, dict[str, Addend]]) -> AbstractContextManager[None]:
    """Inside, optimizers apply nothing of what they are given, which is kept by replica, in its order."""

    def apply(optimizer: Any, grads: Sequence[Addend | None], trainable_variables: Any = None) -> None:
        applied = gradients.setdefault(_replica(), {})
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        for gradient, variable in zip(grads, variables, strict=False):
            if gradient is not None:
                applied[_unused(applied, variable.path, "update")] = gradient

    owners = [kind for kind in kinds(keras.optimizers.Optimizer) if "apply" in vars(kind)]
    return all_patched((kind, {"apply": apply}) for kind in owners)


def _outputs_kept(
    outputs: dict[int, Outputs], noise: np.random.Generator | None, until: float
) -> AbstractContextManager[None]:
    """Inside, what each layer and operation returns is kept, in order, by the number of the replica."""
    call_one: Callable[..., Batch] = keras.Operation.__call__
    began = time.process_time()

    def call(operation: keras.Operation, *arguments: object, **named: object) -> Batch:
        output = call_one(operation, *arguments, **named)
        if time.perf_counter() > until and time.process_time() - began > LEAST_CPU_SECONDS:
            raise TimeoutError
        if noise is not None:
            output = tf.nest.map_structure(lambda leaf: _disturbed(leaf, noise), output)
        leaves = [leaf for leaf in tf.nest.flatten(output) if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]
        outputs.setdefault(_replica(), []).append((operation.name, leaves))
        return output

    return patched(keras.Operation, {"__call__": call})


def _replica() -> int:
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))


def _disturbed(leaf: object, noise: np.random.Generator) -> object:
    """A tensor that is off by some of the last digits of its type."""
    if not isinstance(leaf, tf.Tensor) or not leaf.dtype.is_floating:
        return leaf
    digits = DIGITS * EPSILONS.get(leaf.dtype.name, EPSILONS["float32"])
    if leaf.shape.is_fully_defined():
        several = noise.uniform(-digits, digits, leaf.shape)
    elif not leaf.shape.rank:
        return leaf
    else:
        # While it is traced its examples are not counted yet; other sizes that are open share a number.
        numbers = noise.uniform(-digits, digits, [NOISY_ROWS, *(size or 1 for size in leaf.shape[1:])])
        several = tf.gather(numbers, tf.range(tf.shape(leaf)[0]) % NOISY_ROWS)
    return leaf + leaf * tf.cast(several, leaf.dtype)
