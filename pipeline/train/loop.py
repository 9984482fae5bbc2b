"""One training loop for every strategy: epochs of compiled calls, validation, callbacks, and what to tell of them."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.train import step as steps
from pipeline.train.batches import Layout, stream
from pipeline.train.callbacks import Callbacks

# Called with an event's kind and its fields; see `pipeline.events`.
Tell = Callable[..., None]


class TrainingError(RuntimeError):
    """Training that cannot go on: the message says why and what to try."""


@dataclass(frozen=True)
class Data:
    """A part of the data, (x, y) arrays or a `tf.data.Dataset` of examples, and how it is laid over replicas."""

    part: Any
    layout: Layout
    shuffle: bool
    seed: int

    def iterator(self) -> Iterator[Any]:
        """Each step's batches for this process's replicas, from the first epoch on, without end."""
        return iter(stream(self.part, self.layout, self.shuffle, self.seed))


class Loop:
    """A model, its strategy and its data, joined by compiled functions.

    Used outside `strategy.scope()`: inside, saving a model makes variables, which all processes must do together.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        train: Data,
        validation: Data | None = None,
        outputs: Sequence[str] = (),
        gradient_bits: int = 32,
        chief: bool = True,
        alone: bool = True,
    ) -> None:
        """`outputs` names the losses per output; `alone` says that this is the only process, `chief` the first."""
        self.model, self.strategy = model, strategy
        self.train_data, self.validation_data = train, validation
        self.outputs, self.chief, self.alone = tuple(outputs), chief, alone
        self._train = steps.training_steps(model, strategy, gradient_bits, train.layout.always_fed)
        self._validate = steps.validation_steps(model, strategy)
        self._results = tf.function(model.get_metrics_result)
        self._validation: Iterator[Any] | None = None
        # Kept for the process's life: tf.data's tuner holds up the end of an iterator for up to a minute.
        self._iterators: list[Iterator[Any]] = []

    def iterator(self) -> Iterator[Any]:
        """Training batches for this process's replicas, from the first epoch on, without end."""
        self._iterators.append(self.train_data.iterator())
        return self._iterators[-1]

    def run(
        self,
        epochs: int | None,
        last_step: int | None,
        steps_per_call: int,
        callbacks: Sequence[keras.callbacks.Callback],
        tell: Tell,
        clock: Callable[[], float] = time.perf_counter,
    ) -> dict[str, Any]:
        """Trains for `epochs`, or up to `last_step`, telling of `steps` after each call and of each `epoch`.

        Returns epochs, loss, metrics, val_loss and val_metrics as they were after the last epoch.
        """
        per_epoch = self.train_data.layout.steps
        last_step = last_step or (epochs or 1) * per_epoch
        epochs = -(-last_step // per_epoch)
        iterator = self.iterator()
        hooks = Callbacks(callbacks, self.model, self.strategy, self.chief, self.alone, epochs, per_epoch)
        hooks.call("on_train_begin")
        epoch, logs, result = 0, {}, {}
        while epoch < epochs and not self.model.stop_training:
            began = clock()
            hooks.call("on_epoch_begin", epoch)
            first = epoch * per_epoch
            logs = self._epoch(
                iterator, epoch, first, min(first + per_epoch, last_step), steps_per_call, hooks, tell, clock
            )
            logs |= {f"val_{name}": value for name, value in self.evaluate(steps_per_call, tell).items()}
            epoch += 1
            result = {"epochs": epoch, **_split(logs)}
            tell("epoch", epoch=epoch, step=min(epoch * per_epoch, last_step), seconds=clock() - began, **_split(logs))
            hooks.call("on_epoch_end", epoch - 1, logs)
        inner = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        inner.finalize_variable_values(self.model.trainable_variables)
        hooks.call("on_train_end", logs)
        return result

    def evaluate(self, steps_per_call: int, tell: Tell) -> dict[str, float]:
        """Loss and metrics over the whole validation part, on all replicas; empty where there is none."""
        if self.validation_data is None or self.validation_data.layout.examples == 0:
            return {}
        if self._validation is None:
            self._validation = self.validation_data.iterator()
        self.model.reset_metrics()
        totals, left = _Totals(("loss", *self.outputs)), self.validation_data.layout.steps
        while left:
            count = min(steps_per_call, left)
            values, sizes = self._validate(self._validation, tf.constant(count))
            totals.add(values.numpy(), sizes.numpy())
            left -= count
            tell("beat", validated=self.validation_data.layout.steps - left)
        return totals.means() | self.metrics()

    def call(self, iterator: Iterator[Any], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Trains `count` steps; returns losses [count, 1 + outputs] and examples [count] once they are done."""
        values, sizes = self._train(iterator, tf.constant(count))
        return values.numpy(), sizes.numpy()

    def metrics(self) -> dict[str, float]:
        """The metrics over all replicas, without the losses that Keras tracks among them."""
        flat: dict[str, float] = {}
        for name, value in self._results().items():
            values = np.asarray(value)
            if name in ("loss", *self.outputs):
                continue
            many = {f"{name}_{index}": float(each) for index, each in enumerate(values.flat)}
            flat |= many if values.ndim else {name: float(values)}
        return flat

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, training happens for the sake of measuring; afterwards model and optimizer are what they were."""
        variables = [*self.model.variables, *self.model.optimizer.variables]
        kept = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
        yield
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)
        self.model.reset_metrics()

    def _epoch(
        self,
        iterator: Iterator[Any],
        epoch: int,
        first: int,
        until: int,
        steps_per_call: int,
        hooks: Callbacks,
        tell: Tell,
        clock: Callable[[], float],
    ) -> dict[str, float]:
        self.model.reset_metrics()
        totals, done = _Totals(("loss", *self.outputs)), first
        logs: dict[str, float] = {}
        while done < until and not self.model.stop_training:
            count = min(steps_per_call, until - done)
            hooks.call("on_train_batch_begin", done - first)
            started = clock()
            values, sizes = self.call(iterator, count)
            seconds = clock() - started
            _check_finite(values[:, 0], done)
            done += count
            totals.add(values, sizes)
            metrics = self.metrics()
            logs = totals.means() | metrics
            tell(
                "steps",
                epoch=epoch + 1,
                step=done,
                losses=values[:, 0].tolist(),
                metrics=metrics,
                examples=float(sizes.sum()),
                seconds=seconds,
                learning_rate=float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)),
            )
            hooks.call("on_train_batch_end", done - first - 1, logs)
        return logs


class _Totals:
    """Adds up losses weighted by examples, so that their mean is exact over batches of different sizes."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._sums = np.zeros(len(names))
        self._examples = 0.0

    def add(self, values: np.ndarray, sizes: np.ndarray) -> None:
        self._sums += (values.astype(np.float64) * sizes[:, None]).sum(axis=0)
        self._examples += float(sizes.sum())

    def means(self) -> dict[str, float]:
        return dict(zip(self._names, (self._sums / max(self._examples, 1.0)).tolist(), strict=True))


def _split(logs: dict[str, float]) -> dict[str, Any]:
    """Keras's flat logs as loss, metrics, val_loss and val_metrics.

    >>> _split({"loss": 1.0, "accuracy": 0.5, "val_loss": 2.0})
    {'loss': 1.0, 'metrics': {'accuracy': 0.5}, 'val_loss': 2.0, 'val_metrics': {}}
    """
    own = {name: value for name, value in logs.items() if not name.startswith("val_")}
    held_out = {name[4:]: value for name, value in logs.items() if name.startswith("val_")}
    return {
        "loss": own.pop("loss", None),
        "metrics": own,
        "val_loss": held_out.pop("loss", None),
        "val_metrics": held_out,
    }


def _check_finite(losses: np.ndarray, done: int) -> None:
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
        raise TrainingError(
            f"Expected a finite loss, received {losses[bad[0]]} at step {done + int(bad[0]) + 1}. "
            f"Try a smaller train.learning_rate, or look for bad values in the data."
        )
