"""A model, its strategy and its data, joined by compiled functions: some steps of training, or one validation."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.worker.collective import Collective
from pipeline.worker.data.batches import Data
from pipeline.worker.data.reading import Batches
from pipeline.worker.layout import BEGINNING, BatchLayout, Position
from pipeline.worker.loop import Call, Facts, TrainingLoop
from pipeline.worker.state import digest
from pipeline.worker.tensorflow import agreement, custom_steps, feed
from pipeline.worker.tensorflow import step as steps
from pipeline.worker.tensorflow.collective import Addend, over
from pipeline.worker.tensorflow.loss_scaling import metrics
from pipeline.worker.tensorflow.tables import grouped as shards_together
from pipeline.worker.variables import HELD, Variable, held, kept_by_metrics, updating

# Of metrics, as a model gives them.
Results: TypeAlias = dict[str, tf.Tensor]


class Loop(TrainingLoop):
    """A training on this process, under a `tf.distribute.Strategy`.

    Used outside `strategy.scope()`: inside, saving a model makes variables, which all processes must do together.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        train: Data,
        validation: Sequence[Data] = (),
        gradient_bits: int = 32,
        chief: bool = True,
        alone: bool = True,
        position: Position = BEGINNING,
        collective: Collective[Addend] | None = None,
        gather: bool = False,
    ) -> None:
        """`alone` says that this is the only process, `chief` the first.

        The parts of `validation` may have batches of several sizes. Training begins at `position`. Replicas add up by
        the `collective`, or TensorFlow's own. With `gather` losses are of the whole global batch.
        """
        self.model, self.strategy, self.collective = model, strategy, collective or over(strategy)
        self.train_data, self.outputs = train, steps.losses_by_output(model)
        self.chief, self.alone, self._position = chief, alone, position
        # A single replica has the global batch.
        self.gather = gather and self.collective.replicas > 1
        self.layout = layout = train.layout
        fed = layout.always_fed_after(position.examples) if position.examples else layout.always_fed
        self.replicas = steps.Replicas(
            strategy, self.collective, gradient_bits, fed, layout.last != "short", False, self.gather,
            layout.global_batch,
        )  # fmt: skip
        self._compile = partial(custom_steps.training_steps, model, self.replicas)
        self._train = self._compile()
        self.optimizers = tuple(one for outer in steps.optimizers(model) for one in updating(outer))
        # Variables of losses and the like; and those of metrics that a loss has, which replicas count in apart.
        self.beside, self.counted_beside = held_beside(model, self._metrics_variables())
        # A compiled function each, because one that has seen two shapes takes neither for granted.
        self._held_out = [(one, self._validation_function(one.layout)) for one in validation if one.layout.examples]
        self._results = tf.function(self.results_now, autograph=False)
        self._sums = tf.function(lambda: [tf.convert_to_tensor(one.value) for one in self.counting()], autograph=False)
        # Kept for the process's life: tf.data's tuner holds up the end of an iterator for up to a minute.
        self._training: Batches | None = None
        self._validation: list[Batches] | None = None

    # The types of operations that XLA leaves to TensorFlow; None where it compiles no step.
    xla: set[str] | None = None

    def call(self, count: int, wanted: int = 0) -> Call:
        """Trains `count` steps on the batches that follow those of the call before, whatever is `wanted` in all."""
        return self.on(self.reader(), count)

    def reader(self) -> Batches:
        """The batches of training, from the next step's on."""
        if self._training is None:
            self._training = feed.iterator(self.strategy, self.train_data.stream(self._position))
        return self._training

    def on(self, batches: Batches, count: int, train: steps.Steps | None = None) -> Call:
        """Trains `count` steps on the next of these batches, with `train` in place of its own compiled function."""
        began, started = time.time(), time.perf_counter()
        losses, sizes, times = (train or self._train)(batches, tf.constant(count))
        losses, sizes, seconds = losses.numpy(), sizes.numpy(), time.perf_counter() - started
        waits = feed.waits(times.numpy(), began, began + seconds) if feed.is_ahead(batches) else times.numpy()
        return Call(losses, sizes, seconds, waits)

    def compiled_anew(self) -> steps.Steps:
        """Its compiled function once more, for a model that is called otherwise by now."""
        return self._compile()

    def compile_by(self, xla: set[str] | None) -> steps.Steps:
        """Compiles steps by XLA, see `step.marked`, or not; returns the function that trains from now on."""
        self.xla, self._compile = xla, partial(self._compile, xla=xla)
        self._train = self._compile()
        return self._train

    @property
    def validates(self) -> bool:
        """True if there is data to `evaluate`."""
        return bool(self._held_out)

    def _validation_calls(self, steps_per_call: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if self._validation is None:
            self._validation = [feed.iterator(self.strategy, data.stream()) for data, _ in self._held_out]
        for (data, validate), iterator in zip(self._held_out, self._validation, strict=True):
            for done in range(0, data.layout.steps, steps_per_call):
                yield self._validate_some(validate, iterator, min(steps_per_call, data.layout.steps - done))

    def graph(self, examples: int | None = None) -> tf.Graph:
        """The graph of the compiled loop, compiled now if it was not yet; or of one for so many examples a replica."""
        if examples is None:
            compiled: tf.types.experimental.PolymorphicFunction = self._train
            return compiled.get_concrete_function(self.reader(), tf.constant(1)).graph

        def batch(spec: tf.TensorSpec) -> tf.Tensor:
            return tf.zeros([examples, *spec.shape[1:]] if spec.shape.rank else [], spec.dtype)

        spec = self.train_data.stream().element_spec
        batches = tf.data.Dataset.range(1).map(lambda _: tf.nest.map_structure(batch, spec)).repeat()
        anew: tf.types.experimental.PolymorphicFunction = self._compile()
        return anew.get_concrete_function(feed.iterator(self.strategy, batches), tf.constant(1)).graph

    def facts(self) -> Facts:
        """Returns the bytes that a replica sends in a step for its gradients, with all rows of embeddings."""
        numbers = sum(int(np.prod(variable.shape)) for variable in self.model.trainable_variables)
        return {"sent_bytes": self.collective.sent_bytes(numbers * self.replicas.gradient_bits // 8)}

    def metrics_state(self) -> list[np.ndarray]:
        """The values of the metrics' variables over all replicas; all processes take part."""
        return [value.numpy() for value in self._sums()]

    def set_metrics_state(self, state: Sequence[np.ndarray]) -> None:
        """Goes on from what `metrics_state` gave: the first replica has it all, the others nothing."""
        # Earlier versions have left out those of losses, which come last.
        for variable, value in zip(self.counting(), state, strict=False):
            metrics.put(variable, value, self.chief)

    @contextlib.contextmanager
    def metrics_at_hand(self) -> Iterator[None]:
        """Inside, the first process may read and change what metrics count, over all replicas; all enter together."""
        if self.alone:
            yield
            return
        variables = self.counting()
        before = [np.array(value) for value in self.metrics_state()][: len(variables)]
        after = list(before)
        with metrics.here(variables, after) if self.chief else contextlib.nullcontext():
            yield
        changed = np.array([not all(map(np.array_equal, before, after))], np.float64)
        if np.asarray(self.from_first([changed])[0])[0]:
            self.set_metrics_state([np.asarray(value) for value in self.from_first(after)])

    def reset_metrics(self) -> None:
        """Begins the metrics anew, as for an epoch."""
        metrics.reset(self.model, self.chief)

    def _validation_function(self, layout: BatchLayout | None) -> steps.Steps:
        return custom_steps.validation_steps(self.model, self._validating_replicas(layout))

    def _validating_replicas(self, layout: BatchLayout | None) -> steps.Replicas:
        """The replicas as they validate data in such a layout; None where that is not known beforehand."""
        if layout is None:
            fed, padded, largest = self.strategy.num_replicas_in_sync == 1, False, None
        else:
            fed, padded, largest = layout.always_fed, layout.last == "padded", layout.global_batch
        return dataclasses.replace(self.replicas, always_fed=fed, static=False, padded=padded, largest=largest)

    def _validate_some(self, validate: steps.Steps, iterator: Batches, count: int) -> tuple[np.ndarray, np.ndarray]:
        values, sizes, _ = validate(iterator, tf.constant(count))
        return values.numpy(), sizes.numpy()

    def results_now(self) -> Results:
        """The results of metrics, as a compiled function computes them and as what is run at once does."""
        return self.model.get_metrics_result()  # type: ignore[no-any-return]

    def _metrics_variables(self) -> list[keras.Variable]:
        return self.model.metrics_variables  # type: ignore[no-any-return]

    def counting(self) -> list[keras.Variable]:
        """The variables that metrics count in, those of losses too."""
        return [*self._metrics_variables(), *self.counted_beside]

    def _metric_results(self) -> Results:
        return self._results()  # type: ignore[no-any-return]

    def variables(self) -> list[Variable]:
        """All that training goes on with, without what metrics count."""
        # In an order that freezing a layer leaves as it is.
        counted = {id(variable) for variable in self.model.metrics_variables}
        own = [variable for variable in self.model.variables if id(variable) not in counted]
        return [*own, *_of_optimizers(self.model), *self.beside]

    def value(self, variable: Variable) -> np.ndarray:
        """The value that this process has in its first copy; no copy of it where that can be."""
        return np.asarray(tf.convert_to_tensor(copies(variable)[0]))

    def kept(self) -> dict[str, list[list[Variable]]]:
        """Returns what a checkpoint holds; a table in shards is one array."""
        model = self.model
        own = {id(variable) for variable in [*model.trainable_variables, *model.metrics_variables]}
        other = [variable for variable in model.variables if id(variable) not in own]
        listed = {"trained": model.trainable_variables, "other": other, "optimizer": _of_optimizers(model)}
        together = {name: shards_together(variables) for name, variables in listed.items()}
        return together | {HELD: [[one] for one in self.beside]}

    def put(self, variable: Variable, value: np.ndarray) -> None:
        """Gives a variable a value on each replica."""
        variable.assign(value)

    def replica_digests(self) -> list[str]:
        """A hash of the trained weights for each replica here."""
        return replica_digests(self.model.trainable_variables)

    def added(self, values: Sequence[float]) -> list[float]:
        """The sums of small numbers over all replicas; all processes call it together."""
        (sums,) = agreement.over_replicas(self.strategy, self.collective)([tf.constant(values, tf.float32)])
        numbers: list[float] = sums.numpy().tolist()
        return numbers

    def from_first(self, values: Sequence[tf.Tensor | np.ndarray]) -> list[tf.Tensor]:
        """The first replica's values on all processes, which call it together with equal types and shapes."""
        return agreement.from_first(self.strategy, self.collective)(values)


def _of_optimizers(model: keras.Model) -> list[keras.Variable]:
    return [variable for optimizer in steps.optimizers(model) for variable in optimizer.variables]


def held_beside(model: keras.Model, metrics: Sequence[keras.Variable]) -> tuple[list[Variable], list[keras.Variable]]:
    """(the variables that training goes on with beside those that a model and its optimizers list, and its `metrics`;
    those that each replica counts in apart, as of a metric that a loss has).
    """
    others = held([model, *steps.optimizers(model)], [*model.variables, *_of_optimizers(model), *metrics])
    others = [*kept_by_metrics(model.metrics), *others]
    apart = [one for one in others if _is_counted_apart(one)]
    together = [one for one in others if not _is_counted_apart(one)]
    return together, [one for one in apart if isinstance(one, keras.Variable)]


def copies(variable: Variable) -> Sequence[tf.Variable]:
    """The variable's copy of each replica here."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return getattr(value, "values", (value,))


def _is_counted_apart(variable: Variable) -> bool:
    """True if each replica adds to a copy of its own, and their sum is the variable's value."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return hasattr(value, "values") and value.synchronization is tf.VariableSynchronization.ON_READ


def replica_digests(variables: Sequence[keras.Variable]) -> list[str]:
    """A hash of weights for each replica that this process holds: all of them must agree."""
    replicas = len(copies(variables[0])) if variables else 0
    return [digest(copies(variable)[replica] for variable in variables) for replica in range(replicas)]
