"""A model, its strategy and its data, joined by compiled functions: some steps of training, or one validation."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from pipeline.worker.collective import Collective
from pipeline.worker.data.batches import Data
from pipeline.worker.data.reading import Batches
from pipeline.worker.engine import Emit
from pipeline.worker.layout import BEGINNING, BatchLayout, Position
from pipeline.worker.loop import Call, Facts, TrainingLoop, flat
from pipeline.worker.model_error import ModelError
from pipeline.worker.patched import patched
from pipeline.worker.state import digest
from pipeline.worker.tensorflow import custom_steps, feed
from pipeline.worker.tensorflow import step as steps
from pipeline.worker.tensorflow.collective import Addend, from_first, over, over_replicas
from pipeline.worker.tensorflow.custom_steps import Returned
from pipeline.worker.tensorflow.loss_scaling import metrics
from pipeline.worker.tensorflow.tables import grouped as shards_together
from pipeline.worker.variables import HELD, Variable, held, kept_by_metrics, updating


class Loop(TrainingLoop):
    """A training on this process. Used outside `strategy.scope()`: inside, saving a model makes variables.

    Metrics of steps that a model makes itself are results as they have run on, and values as the last step gave them.
    """

    # The types of operations that XLA leaves to TensorFlow; None where it compiles no step.
    xla: set[str] | None = None
    # Is what is asked for that of validation?
    _validating = False

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
        """`alone`: this is the only process, `chief`: the first. With `gather` losses are of the global batch."""
        self.model, self.strategy, self.collective = model, strategy, collective or over(strategy)
        self.own = custom_steps.of(model)
        # Values of the last step of training, and of validation (True), where steps are the model's own.
        self._last = dict.fromkeys((False, True), np.zeros(0, np.float32))
        # The losses of each output, where there are several and the steps are not the model's own.
        entries = () if self.own is not None or model._compile_loss is None else model._compile_loss._flat_losses or ()
        self.outputs = tuple(f"{entry.name}_loss" for entry in entries) if len(entries) > 1 else ()
        self.train_data = train
        self.chief, self.alone, self._position = chief, alone, position
        # A single replica has the global batch.
        self.gather = gather and self.collective.replicas > 1
        self.layout = layout = train.layout
        fed = layout.always_fed_after(position.examples) if position.examples else layout.always_fed
        self.replicas = steps.Replicas(
            strategy, self.collective, gradient_bits, fed, layout.last != "short", False, self.gather,
            layout.global_batch,
        )  # fmt: skip
        # Makes its compiled function once more, for a model that is called otherwise by then.
        self.compiled_anew = partial(custom_steps.compiled_steps, model, self.replicas)
        self._train = self.compiled_anew()
        self.optimizers = tuple(one for outer in steps.optimizers(model) for one in updating(outer))
        # Variables of losses and the like, that neither the model nor optimizers list; and those of metrics that a loss
        # has, of which each replica adds to a copy of its own.
        listed = [*model.variables, *_of_optimizers(model), *self._metrics_variables()]
        beside = [*kept_by_metrics(model.metrics), *held([model, *steps.optimizers(model)], listed)]
        values = [one.value if isinstance(one, keras.Variable) else one for one in beside]
        apart = [hasattr(one, "values") and one.synchronization is tf.VariableSynchronization.ON_READ for one in values]
        self.beside: list[Variable] = [one for one, is_apart in zip(beside, apart, strict=True) if not is_apart]
        self._counted_beside = [one for one in itertools.compress(beside, apart) if isinstance(one, keras.Variable)]
        # A compiled function each, because one that has seen two shapes takes neither for granted.
        self._held_out = [(one, self._validation_function(one.layout)) for one in validation if one.layout.examples]
        self.validates = bool(self._held_out)
        self._results = tf.function(self.results_now, autograph=False)
        self._sums = tf.function(lambda: [tf.convert_to_tensor(one.value) for one in self.counting()], autograph=False)
        # Kept for the process's life: tf.data's tuner holds up the end of an iterator for up to a minute.
        self._training: Batches | None = None
        self._validation: list[Batches] | None = None

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
        losses, sizes, seconds = self._losses(losses), sizes.numpy(), time.perf_counter() - started
        waits = feed.waits(times.numpy(), began, began + seconds) if feed.is_ahead(batches) else times.numpy()
        return Call(losses, sizes, seconds, waits)

    def _losses(self, values: tf.Tensor, validating: bool = False) -> np.ndarray:
        """The losses of steps, without what else a model's own give back."""
        width, vectors = 1 + len(self.outputs), values.numpy()
        if len(vectors):
            self._last[validating] = vectors[-1, width:]
        return vectors[:, :width]  # type: ignore[no-any-return]

    def compile_by(self, xla: set[str] | None) -> steps.Steps:
        """Compiles steps by XLA, see `step.marked`, or not; returns the function that trains from now on."""
        self.xla, self.compiled_anew = xla, partial(self.compiled_anew, xla=xla)
        self._train = self.compiled_anew()
        return self._train

    def evaluate(self, steps_per_call: int, emit: Emit) -> dict[str, float]:
        """Loss and metrics over the whole validation part; empty where there is none."""
        with patched(self, {"_validating": True}):
            return super().evaluate(steps_per_call, emit)

    def metrics(self) -> dict[str, float]:
        """The metrics so far; of a model's own steps also the last one's values, and one that it calls loss."""
        if self.own is None:
            return super().metrics()
        returned = self.own.returned(not self._validating)
        return flat(self._metric_results()) | values_of(returned, self._last[self._validating])

    def _validation_calls(self, steps_per_call: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if self._validation is None:
            self._validation = [feed.iterator(self.strategy, data.stream()) for data, _ in self._held_out]
        for (data, validate), iterator in zip(self._held_out, self._validation, strict=True):
            for done in range(0, data.layout.steps, steps_per_call):
                yield self._validate_some(validate, iterator, min(steps_per_call, data.layout.steps - done))

    def graph(self, examples: int | None = None) -> tf.Graph:
        """The graph of the compiled loop, compiled now if it was not yet; or of one for so many examples a replica."""
        train: tf.types.experimental.PolymorphicFunction = self._train if examples is None else self.compiled_anew()
        if examples is None:
            return train.get_concrete_function(self.reader(), tf.constant(1)).graph

        def batch(spec: tf.TensorSpec) -> tf.Tensor:
            return tf.zeros([examples, *spec.shape[1:]] if spec.shape.rank else [], spec.dtype)

        spec = self.train_data.stream().element_spec
        batches = tf.data.Dataset.range(1).map(lambda _: tf.nest.map_structure(batch, spec)).repeat()
        return train.get_concrete_function(feed.iterator(self.strategy, batches), tf.constant(1)).graph

    def facts(self) -> Facts:
        """Returns the bytes that a replica sends in a step for its gradients, with all rows of embeddings."""
        numbers = sum(int(np.prod(variable.shape)) for variable in self.model.trainable_variables)
        return {"sent_bytes": self.collective.sent_bytes(numbers * self.replicas.gradient_bits // 8)}

    def metrics_state(self) -> list[np.ndarray]:
        """The values of the metrics' variables over all replicas; all processes take part."""
        own = [] if self.own is None else [self._last[False].copy()]
        return [*(value.numpy() for value in self._sums()), *own]

    def set_metrics_state(self, state: Sequence[np.ndarray]) -> None:
        """Goes on from what `metrics_state` gave: the first replica has it all, the others nothing."""
        if self.own is not None:
            *state, self._last[False] = state
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
        with metrics.held_here(variables, before) if self.chief else contextlib.nullcontext(()) as own:
            yield
        after = [np.array(variable.numpy()) for variable in own] or before
        changed = np.array([not all(map(np.array_equal, before, after))], np.float64)
        if np.asarray(self.from_first([changed])[0])[0]:
            self.set_metrics_state([np.asarray(value) for value in self.from_first(after)])

    def reset_metrics(self) -> None:
        """Begins the metrics anew, as for an epoch."""
        metrics.reset(self.model, self.chief)

    def _validation_function(self, layout: BatchLayout | None) -> steps.Steps:
        """Validates data in such a layout; None where that is not known beforehand."""
        if layout is None:
            fed, padded, largest = self.strategy.num_replicas_in_sync == 1, False, None
        else:
            fed, padded, largest = layout.always_fed, layout.last == "padded", layout.global_batch
        as_fed = {"always_fed": fed, "static": False, "padded": padded, "largest": largest}
        return custom_steps.compiled_steps(self.model, dataclasses.replace(self.replicas, **as_fed), training=False)

    def _validate_some(self, validate: steps.Steps, iterator: Batches, count: int) -> tuple[np.ndarray, np.ndarray]:
        values, sizes, _ = validate(iterator, tf.constant(count))
        return self._losses(values, validating=True), sizes.numpy()

    def results_now(self, validating: bool = False) -> dict[str, tf.Tensor]:
        """The results of metrics that a step gives back, or the part of that name where one has several."""
        if self.own is None:
            return self.model.get_metrics_result()  # type: ignore[no-any-return]
        results = dict[str, tf.Tensor]()
        for name, (metric, part) in self.own.returned(not validating).metrics.items():
            result = metric.result()
            results[name] = tf.convert_to_tensor(result if part is None else result[part])
        return results

    def _metrics_variables(self) -> list[keras.Variable]:
        variables: list[keras.Variable] = self.model.metrics_variables
        if self.own is None:
            return variables
        both = filter(None, (self.own.train, self.own.test))
        variables += [one for returned in both for metric, _ in returned.metrics.values() for one in metric.variables]
        return list({id(variable): variable for variable in variables}.values())

    def counting(self) -> list[keras.Variable]:
        """The variables that metrics count in, those of losses too."""
        return [*self._metrics_variables(), *self._counted_beside]

    def _metric_results(self) -> dict[str, tf.Tensor]:
        # Which of a model's own two steps it is of, is a part of what it is traced for.
        return self._results(self.own is not None and self._validating)  # type: ignore[no-any-return]

    def variables(self) -> list[Variable]:
        """All that training goes on with, without what metrics count, in an order that freezing leaves as it is."""
        counted = {id(variable) for variable in self.model.metrics_variables}
        own = [variable for variable in self.model.variables if id(variable) not in counted]
        return [*own, *_of_optimizers(self.model), *self.beside]

    def value(self, variable: Variable) -> np.ndarray:
        """The value that this process has in its first copy."""
        return np.asarray(tf.convert_to_tensor(copies(variable)[0]))

    def kept(self) -> dict[str, list[list[Variable]]]:
        """Returns what a checkpoint holds; a table in shards is one array."""
        model = self.model
        own = {id(variable) for variable in [*model.trainable_variables, *model.metrics_variables]}
        other = [variable for variable in model.variables if id(variable) not in own]
        listed = {"trained": model.trainable_variables, "other": other, "optimizer": _of_optimizers(model)}
        return {name: shards_together(some) for name, some in listed.items()} | {HELD: [[one] for one in self.beside]}

    def put(self, variable: Variable, value: np.ndarray) -> None:
        """Gives a variable a value on each replica."""
        variable.assign(value)

    def replica_digests(self) -> list[str]:
        """A hash of the trained weights for each replica here."""
        return replica_digests(self.model.trainable_variables)

    def added(self, values: Sequence[float]) -> list[float]:
        """The sums of small numbers over all replicas; all processes call it together."""
        (sums,) = over_replicas(self.strategy, self.collective)([tf.constant(values, tf.float32)])
        return sums.numpy().tolist()  # type: ignore[no-any-return]

    def from_first(self, values: Sequence[tf.Tensor | np.ndarray]) -> list[tf.Tensor]:
        """The first replica's values on all processes, which call it together with equal types and shapes."""
        return from_first(self.strategy, self.collective)(values)


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


def _of_optimizers(model: keras.Model) -> list[keras.Variable]:
    return [variable for optimizer in steps.optimizers(model) for variable in optimizer.variables]


def copies(variable: Variable) -> Sequence[tf.Variable]:
    """The variable's copy of each replica here."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return getattr(value, "values", (value,))


def replica_digests(variables: Sequence[keras.Variable]) -> list[str]:
    """A hash of weights for each replica that this process holds: all of them must agree."""
    replicas = len(copies(variables[0])) if variables else 0
    return [digest(copies(variable)[replica] for variable in variables) for replica in range(replicas)]
