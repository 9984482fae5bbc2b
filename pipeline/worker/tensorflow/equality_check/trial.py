"""Makes a training step for the sake of what it would do: on all replicas, or on one device, with nothing changed.

It is the step that is compiled for training, run at once, operation by operation: tracing it takes longer than running
it once. An optimizer that is asked to apply gradients keeps them, and what is assigned is put back.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

from pipeline.private_keras import keras_variables
from pipeline.worker.collective import Pausable
from pipeline.worker.data.reading import Batch
from pipeline.worker.loop import flat
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling import loss as losses
from pipeline.worker.tensorflow.loss_scaling.fixed_randomness import fixed_randomness
from pipeline.worker.tensorflow.patched import patched
from pipeline.worker.tensorflow.step import ReplicaStep, training_step

# What is late for having had less than this of a core has not had its turn on it.
LEAST_CPU_SECONDS = 1.0

# The distance from 1 to the next number of a type, and how many of these a layer's output is disturbed by at most.
EPSILONS = {"float32": 2.0**-23, "float64": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
DIGITS = 4
# Between two looks whether threads of replicas have ended, which free last what their step kept. TensorFlow has 1 s.
THREAD_SECONDS = 0.005
# Examples after which disturbances come again, where their number is open.
NOISY_ROWS = 16

Outputs = list[tuple[str, list[tf.Tensor]]]


@dataclass
class Trial:
    """A step's losses, metrics, gradients, and its layers' outputs on each replica here.

    `state` has what was assigned, by the variable's path: a value for each replica here. `cpu_seconds` are those of
    this process.
    """

    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))
    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Addend] = field(default_factory=dict)
    state: dict[str, list[np.ndarray]] = field(default_factory=dict)
    outputs: dict[int, Outputs] = field(default_factory=dict)
    cpu_seconds: float = 0.0


class Trials:
    """Steps of a loop that is built and has not begun."""

    # Without them a step takes a third of the time.
    with_gradients = True

    def __init__(self, loop: Loop, collective: Pausable[Addend]) -> None:
        self._loop, self._collective, self._model = loop, collective, loop.model
        self._step: ReplicaStep = training_step(loop.model, collective, 32, False, False, loop.gather)
        loop.reset_metrics()

    def on_all(self, examples: int, batches: Sequence[Batch]) -> Trial:
        """A step of all replicas, of which those here have these batches; `examples` are those of the global batch."""
        strategy, trial = self._loop.strategy, Trial()
        with self._watched(trial), self._put_back(trial), losses.without_keras_scaling(), _quiet(), _threads_joined():
            local = strategy.experimental_distribute_values_from_function(
                lambda context: batches[context.replica_id_in_sync_group % len(batches)]
            )
            summed = strategy.run(self._step, args=(tf.constant(float(examples)), local))
            trial.losses = strategy.experimental_local_results(summed)[0].numpy()
            trial.metrics = self._loop.metrics()
        self._loop.reset_metrics()
        return trial

    def on_one(self, batch: Batch, noise: np.random.Generator | None = None, until: float = math.inf) -> Trial:
        """A step of one device on a batch; with `noise`, what each layer returns is wrong in its last digits.

        Raises `TimeoutError` where it still goes forward when the clock says `until`.
        """
        trial, began = Trial(), time.process_time()
        examples = tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float32)
        device = self._loop.strategy.extended.worker_devices[0]
        with (
            self._watched(trial, noise, until), self._own_state(trial), self._put_back(trial),
            self._collective.paused(), losses.without_keras_scaling(), tf.device(device),
        ):  # fmt: skip
            trial.losses = self._step(examples, batch).numpy()
        trial.cpu_seconds = time.process_time() - began
        return trial

    def _stateful(self) -> list[keras.Variable]:
        """The variables of a model and its losses, without its metrics' and those that count what was drawn."""
        layers = self._model._flatten_layers()
        others = [generator.state for layer in layers for generator in layer._seed_generators]
        passed = {id(variable) for variable in [*self._model.metrics_variables, *others]}
        return [variable for variable in (*self._model.variables, *self._beside()) if id(variable) not in passed]

    def _beside(self) -> list[keras.Variable]:
        return [variable for variable in self._loop.beside if isinstance(variable, keras.Variable)]

    @contextmanager
    def _watched(
        self, trial: Trial, noise: np.random.Generator | None = None, until: float = math.inf
    ) -> Iterator[None]:
        """Inside, nothing is drawn or applied, and the trial keeps gradients and what layers return."""
        optimizer, variables = self._model.optimizer, self._model.trainable_variables
        # Those of TensorFlow, which Keras does not know of.
        others = [variable for variable in self._loop.beside if not isinstance(variable, keras.Variable)]
        before = [variable.numpy() for variable in others]

        def apply(gradients: Sequence[Addend | None], *others: object) -> None:
            pairs = zip(variables, gradients, strict=True)
            trial.gradients = {variable.path: value for variable, value in pairs if value is not None}

        def no_gradient(tape: tf.GradientTape, target: tf.Tensor, sources: Sequence[object], **named: object) -> object:
            return [None] * len(sources)

        with ExitStack() as stack:
            names = stack.enter_context(attributes_kept(self._model))
            stack.enter_context(patched(optimizer, {"apply": apply}))
            stack.enter_context(fixed_randomness())
            stack.enter_context(outputs_kept(trial.outputs, noise, until))
            if not self.with_gradients:
                stack.enter_context(patched(tf.GradientTape, {"gradient": no_gradient}))
            try:
                yield
            finally:
                for variable, value in zip(others, before, strict=True):
                    now = [copy.numpy() for copy in copies(variable)]
                    if not all(np.array_equal(copy, value) for copy in now):
                        trial.state[names.get(id(variable), variable.name)] = now
                    variable.assign(value)

    @contextmanager
    def _put_back(self, trial: Trial) -> Iterator[None]:
        """Inside, the first value is kept of each variable that is assigned; afterwards it has it again."""
        before: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        beside = self._loop.counted_beside
        assign_one = keras_variables.Variable.assign
        metrics = {id(one) for one in (*self._model.metrics_variables, *beside)}
        counted = [(copy, copy.numpy()) for variable in beside for copy in copies(variable)]

        def assign(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
            if id(variable) not in metrics and id(variable) not in before:
                before[id(variable)] = (variable, tf.identity(variable.value))
            return assign_one(variable, value)

        try:
            with patched(keras_variables.Variable, {"assign": assign}):
                yield
        finally:
            compared = {id(variable) for variable in self._stateful()}
            for number, (variable, value) in before.items():
                if number in compared:
                    trial.state[variable.path] = [tf.convert_to_tensor(copy).numpy() for copy in copies(variable)]
                variable.assign(value.numpy())
            for copy, number_there in counted:
                copy.assign(number_there)

    @contextmanager
    def _own_state(self, trial: Trial) -> Iterator[None]:
        """Inside, what is not trained is held in variables of this process alone, from what its first replica has.

        Those of several replicas are read and assigned by all processes together.
        """
        model = self._model
        others = (variable for variable in model.variables if not variable.trainable)
        variables = [*model.metrics_variables, *others, *self._beside(), *self._loop.counted_beside]
        with held_here(variables):
            yield
            lost = ("loss", *self._loop.outputs)
            results = model.get_metrics_result()
            trial.metrics = flat({name: result for name, result in results.items() if name not in lost})


@contextmanager
def held_here(variables: Iterable[keras.Variable]) -> Iterator[None]:
    """Inside, variables of Keras are of this process alone, with what its first replica has."""
    with ExitStack() as stack:
        for variable in {id(variable): variable for variable in variables}.values():
            own = tf.Variable(copies(variable)[0], trainable=variable.trainable)
            stack.enter_context(patched(variable, {"_value": own}))
        yield


@contextmanager
def attributes_kept(model: keras.Model) -> Iterator[dict[int, str]]:
    """Gives names of what the model's layers hold, by identity; afterwards their attributes are what they were."""
    attributes = [(layer, dict(vars(layer))) for layer in model._flatten_layers()]
    try:
        yield {id(value): f"{layer.name}/{name}" for layer, held in attributes for name, value in held.items()}
    finally:
        for layer, before in attributes:
            vars(layer).clear()
            vars(layer).update(before)


def copies(variable: keras.Variable | tf.Variable) -> Sequence[tf.Variable]:
    """The variable's copy of each replica here."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return getattr(value, "values", (value,))


@contextmanager
def outputs_kept(outputs: dict[int, Outputs], noise: np.random.Generator | None, until: float) -> Iterator[None]:
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
        outputs.setdefault(replica(), []).append((operation.name, leaves))
        return output

    with patched(keras.Operation, {"__call__": call}):
        yield


def replica() -> int:
    """The number of the replica whose step is made in this thread."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))


def _disturbed(leaf: object, noise: np.random.Generator) -> object:
    """A tensor that is off by some of the last digits of its type."""
    if not isinstance(leaf, tf.Tensor) or not leaf.dtype.is_floating:
        return leaf
    digits = DIGITS * EPSILONS.get(leaf.dtype.name, EPSILONS["float32"])
    if leaf.shape.is_fully_defined():
        return leaf + leaf * tf.cast(noise.uniform(-digits, digits, leaf.shape), leaf.dtype)
    if not leaf.shape.rank:
        return leaf
    # While it is traced its examples are not counted yet; other sizes that are open share a number.
    several = noise.uniform(-digits, digits, [NOISY_ROWS, *(size or 1 for size in leaf.shape[1:])])
    rows = tf.range(tf.shape(leaf)[0]) % NOISY_ROWS
    return leaf + leaf * tf.cast(tf.gather(several, rows), leaf.dtype)


@contextmanager
def _threads_joined() -> Iterator[None]:
    """Inside, a strategy goes on as soon as the threads of its replicas have ended."""
    wait_one = tf.train.Coordinator.wait_for_stop

    def wait_for_stop(coordinator: tf.train.Coordinator, timeout: float | None = None) -> bool:
        return bool(wait_one(coordinator, THREAD_SECONDS))

    with patched(tf.train.Coordinator, {"wait_for_stop": wait_for_stop}):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, TensorFlow does not say that what is run once would be faster compiled."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
