"""Epochs as Keras's `fit` has them: passes over the data, validation every so often, its logs, and its callbacks."""

import contextlib
import json
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.errors import UserError, refuse
from pipeline.private import pythonify_logs
from pipeline.worker.callbacks import TEST_BATCH_HOOKS, Callbacks, overrides
from pipeline.worker.data.reading import Batch, Batches
from pipeline.worker.engine import Emit
from pipeline.worker.fit.passes import UNTIL_IT_ENDS, Passes
from pipeline.worker.loop import Call, Totals
from pipeline.worker.model_error import TrainingError
from pipeline.worker.tensorflow import tables
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling.global_batch import ASKS_AS
from pipeline.worker.tensorflow.loss_scaling.metrics import on_global_batch
from pipeline.worker.tensorflow.scheduled import AsyncLoop

# True for the number of an epoch after which to validate.
Due: TypeAlias = Callable[[int], bool]


class KerasLoop(Loop):
    """A loop whose epochs, validations and logs are those that Keras's `fit` would have on the same data."""

    # Those of the training that it makes now.
    hooks: "KerasHooks"

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy, train: Passes, gather: bool, **others: Any
    ) -> None:
        """`others` are those of `Loop`."""
        super().__init__(model, strategy, train, gather=gather, **others)  # type: ignore[arg-type]
        self._validate, self._made_for = self._validation_function(None), _parts(model, strategy, train, gather)

    def serves(self, model: keras.Model, strategy: tf.distribute.Strategy, train: Passes, gather: bool) -> bool:
        """True if the compiled functions are those of this model as it is compiled now."""
        now = _parts(model, strategy, train, gather)
        return len(now) == len(self._made_for) and all(map(operator.is_, now, self._made_for))

    @contextlib.contextmanager
    def over(
        self, train: Passes, validation: Passes | None, steps: int | None, validation_steps: int | None, due: Due
    ) -> Iterator[None]:
        """Inside, it trains over `train` and validates epochs that are `due`, in so many steps, or all there are."""
        self._passes, self._validated = train, validation
        self._steps, self._validation_steps, self._due = steps, validation_steps, due
        self._training, self._seen, self._fed = None, 0, False
        train.reset()
        try:
            yield
        finally:
            self._training = None
            for data in filter(None, (train, validation)):
                data.close()
            # Not to hold the data for as long as the model lives.
            self.train_data = self.layout = self._passes = self._validated = None  # type: ignore[assignment]

    @property
    def step_by_step(self) -> bool:
        """True if processes exchange global batches of any size, so that each call must make a single step."""
        return not self.alone and (self.gather or bool(on_global_batch(self.model)) or ASKS_AS in vars(self.model))

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch; a very large number where only reading tells."""
        return self._steps or self._passes.steps or UNTIL_IT_ENDS

    def begin_epoch(self, examples: int) -> int:
        """Begins an epoch and returns its steps: fewer than asked for where a pass over the data ends before."""
        self._passes.adapter.on_epoch_begin()
        if self._training is None or self._steps is None:
            self._begin_pass()
        if self._passes.length is None:
            return self.steps_per_epoch
        left = self._passes.length - self._seen
        if left < self.steps_per_epoch:
            _warn_of_end(self.steps_per_epoch, left, "steps_per_epoch")
        return min(self.steps_per_epoch, left)

    def call(self, count: int, wanted: int = 0) -> Call:
        """Trains up to `count` steps of the pass over the data; none where it turns out to have ended."""
        assert self._training is not None, "an epoch begins before its steps"
        passing: Any = self._training
        try:
            if self._passes.one_by_one:
                # A compiled step that finds no element has by then done what needs none, such as counting itself.
                variant = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(passing.get_next()))
                self._training = iter(tf.data.experimental.from_variant(variant, passing.element_spec))
            result = super().call(count, wanted)
        except tf.errors.OutOfRangeError:
            if not self.alone:
                expected, received = "data for every step on all processes", f"data that ended after {self._seen}"
                raise TrainingError(expected, received, "dataset.repeat() with steps_per_epoch") from None
            if not self._fed:
                instead = "looking at what it is made of: a generator that was read before gives nothing more"
                raise UserError("examples", "data that ended before the first batch", instead) from None
            if self._steps is not None:
                _warn_of_end(self._steps, self._seen, "steps_per_epoch")
            self._training = None
            nothing = np.zeros(0, np.float32)
            return Call(np.zeros((0, 1 + len(self.outputs)), np.float32), nothing, 0.0, nothing)
        self._training, self._fed = passing, True
        self._seen += result.steps
        if self._seen == self._passes.length:
            self._training = None
            if self._steps is None:
                self._passes.skip()
        return result

    def evaluate(self, steps_per_call: int, emit: Emit) -> dict[str, float]:
        """Loss and metrics over the validation data, where this epoch, whose steps are made, is due for it."""
        if not self.model.stop_training:
            self._passes.adapter.on_epoch_end()
        hooks, data = self.hooks, self._validated
        if data is None or not self._due(hooks.epoch):
            return {}
        data.reset()
        steps = self._validation_steps or data.steps or UNTIL_IT_ENDS
        longest = 1 if data.one_by_one or self.step_by_step else steps_per_call
        hooks.call("on_test_begin")
        self.reset_metrics()
        data.adapter.on_epoch_begin()
        totals, iterator, done = self.totals(), self._begun(data), 0
        until = steps if data.length is None else min(steps, data.length)
        if until < steps:
            _warn_of_end(steps, until, "validation_steps")
        logs: dict[str, float] = {}
        while done < until:
            count = min(longest, until - done)
            hooks.call("on_test_batch_begin", done)
            try:
                values, sizes = self._validate_some(self._validate, iterator, count)
            except tf.errors.OutOfRangeError:
                break
            totals.add(values, sizes)
            done += count
            logs = totals.means() | self.metrics() if hooks.every_test_batch or done == until else logs
            hooks.call("on_test_batch_end", done - 1, logs)
        if done == data.length:
            data.skip()
        data.adapter.on_epoch_end()
        logs = totals.means() | self.metrics()
        hooks.call("on_test_end", logs)
        return logs

    def totals(self) -> Totals:
        """Returns what adds up the losses as Keras does."""
        return Totals(("loss", *self.outputs), by_steps=True)

    def metrics(self) -> dict[str, float]:
        """The metrics over all replicas as Keras logs them, without the losses that it tracks among them."""
        logs = pythonify_logs(self._metric_results())
        return {name: value for name, value in logs.items() if name not in ("loss", *self.outputs)}

    def _begin_pass(self) -> None:
        self._training, self._seen = self._begun(self._passes), 0

    def _begun(self, data: Passes) -> Batches:
        """Begins another pass. Raises `UserError`, on all processes, where it is no pass of one length for them."""
        batches, length = data.begin(), data.length or 0
        if data.varies and not self.alone:
            first = self.hooks.from_first(float(length))
            differs = any(self.added([float(first != length)]))
            received = f"{length or 'none'} here and {first:g} in the first"
            expected = "a PyDataset of as many batches in every process"
            refuse((differs, expected, received, "a length that goes by the epoch alone"))
        return batches


def _parts(model: keras.Model, strategy: tf.distribute.Strategy, train: Passes, gather: bool) -> list[object]:
    compiled = [model.optimizer, model._compile_loss, model._compile_metrics]
    return [strategy, *compiled, train.always_fed, gather, *model.trainable_variables]


def _warn_of_end(steps: int, left: int, argument: str) -> None:
    warnings.warn(
        f"Expected data for {steps} steps, received {left} before it ended, and went on without the others. "
        f"Try dataset.repeat(), or {argument}={max(left, 1)}.",
        stacklevel=2,
    )


class AsyncKerasLoop(AsyncLoop, KerasLoop):
    """A loop as Keras's `fit` has it, on the coordinator, which hands out the steps of each pass over the data."""

    @contextlib.contextmanager
    def over(self, train: Passes, *others: Any) -> Iterator[None]:
        """Inside, workers train on `train` asynchronously."""
        with super().over(train, *others):
            workers = int(self.strategy._num_workers)
            self.feed(train.source(workers), workers)
            try:
                yield
            finally:
                self.let_go()

    def call(self, count: int, wanted: int = 0) -> Call:
        """The results of the next call that a worker has made; see `AsyncLoop.call`."""
        result = super().call(count, wanted)
        steps = self._seen + result.steps
        self._seen = 0 if steps == self._passes.length else steps
        return result

    def _begin_pass(self) -> None:
        """Nothing: workers read their shares round and round."""


class KerasHooks(Callbacks):
    """The hooks, which also know the epoch and send everything that was restored at the start to all processes."""

    def __init__(
        self,
        spec: Nested[keras.KerasTensor],
        initial_epoch: int,
        verbose: int | str,
        callbacks: Sequence[keras.callbacks.Callback],
        loop: KerasLoop,
        epochs: int,
        steps: int,
    ) -> None:
        steps_per_epoch = None if steps == UNTIL_IT_ENDS else steps
        super().__init__(
            callbacks, loop, epochs, steps_per_epoch, verbose, partial(copied, loop.model, spec), tables.weights
        )  # fmt: skip
        loop.hooks, self.epoch, self._initial_epoch = self, 0, initial_epoch
        self.every_test_batch = any(overrides(callback, TEST_BATCH_HOOKS) for callback in callbacks)

    def call(self, hook: str, *arguments: int | Mapping[str, float]) -> None:
        """Runs `hook`; see `Callbacks`."""
        if hook == "on_epoch_begin":
            self.epoch = cast("int", arguments[0])
        if hook in TEST_BATCH_HOOKS and not self.every_test_batch:
            return
        super().call(hook, *arguments)
        if hook == "on_train_begin" and self._shares:
            # `BackupAndRestore` has read them in the first process alone.
            self._send(range(len(self.loop.variables())), {})
            self.model._initial_epoch = int(self.from_first(self.model._initial_epoch or 0)) or None
        # Where a callback has restored a training, the epoch after it.
        self.first_epoch = self.model._initial_epoch or self._initial_epoch

    def from_first(self, number: float) -> float:
        """The first process's number, on every process."""
        return number if self.loop.alone else float(self.loop.from_first([tf.constant([number], tf.float64)])[0][0])

    def history(self) -> keras.callbacks.History:
        """Returns the history of the epochs: on every process what the first one recorded."""
        recorded = self.model.history
        if self.loop.alone:
            return recorded
        # As JSON has it, whatever a callback has put there; hooks of others have begun none.
        own = [recorded.epoch, recorded.history] if self.loop.chief else []
        text = json.dumps(own, default=lambda value: np.asarray(value).tolist())
        of_first = self._on_all({"text": text}, {}).values["text"]
        if not self.loop.chief:
            recorded.epoch, recorded.history = json.loads(of_first)
        return recorded


def copied(model: keras.Model, batch: Batch) -> keras.Model:
    """A compiled model made once more, outside its strategy, and built for such a batch. Raises `TrainingError`."""
    ways: tuple[Callable[[], keras.Model], ...] = (
        lambda: keras.models.clone_model(model, clone_function=_layer_again, recursive=True),
        lambda: type(model).from_config(model.get_config()),
        lambda: type(model)(**model._auto_config.config),  # where all of that is plain values
    )
    reasons = []
    for way in ways:
        try:
            copy = way()
            break
        except Exception as error:  # whatever a class of a user's own raises
            reasons.append(str(error))
    else:
        received = f"{type(model).__name__}, which it cannot ({reasons[1].splitlines()[0]})"
        instead = "get_config and from_config in its class, or to evaluate after fit"
        raise TrainingError("a model that Keras can copy, for callbacks that evaluate or predict", received, instead)
    config, kind = model._compile_config.config, keras.metrics.Metric
    metrics = {
        name: keras.tree.map_structure(
            lambda one: type(one).from_config(one.get_config()) if isinstance(one, kind) else one, config[name]
        )
        for name in ("metrics", "weighted_metrics")
    }
    copy.compile("sgd", config["loss"], config["loss_weights"], **metrics)
    copy._symbolic_build(data_batch=batch)
    return copy


def _layer_again(layer: keras.layers.Layer) -> keras.layers.Layer:
    """A layer as its config says, or from what it was made of; one that has no state may be the same."""
    try:
        return type(layer).from_config(layer.get_config())
    except Exception:  # whatever a class of a user's own raises
        if layer._auto_config is not None:
            return type(layer)(**layer._auto_config.config)
        if not layer.variables:
            return layer
        raise
