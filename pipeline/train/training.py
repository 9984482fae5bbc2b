"""A training under way: epochs of compiled calls, validation, callbacks, and what to tell of them."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from pipeline.train.callbacks import Callbacks
from pipeline.train.loop import Call, Loop, Tell, TrainingError
from pipeline.train.step import innermost


class Training:
    """A training that goes on by as many steps as it is told to, so that others can be timed in between.

    Its calls are the same however it is told, and the pauses between are in none of its timings.
    """

    def __init__(
        self,
        loop: Loop,
        epochs: int | None,
        last_step: int | None,
        callbacks: Sequence[keras.callbacks.Callback],
        tell: Tell,
        clock: Callable[[], float] = time.perf_counter,
        hooks: Callable[..., Callbacks] = Callbacks,
        must_be_finite: bool = True,
    ) -> None:
        """Trains for `epochs`, or up to `last_step`, telling of `steps` after each call and of each `epoch`.

        `hooks` makes what runs the callbacks. Where the loss `must_be_finite`, training ends with an error if not.
        """
        self._loop, self._tell, self._clock = loop, tell, clock
        self._hooks, self._must_be_finite = hooks, must_be_finite
        per_epoch = loop.steps_per_epoch
        self._last_step = last_step or (1 if epochs is None else epochs) * per_epoch
        self._epochs = -(-self._last_step // per_epoch)
        self._callbacks = callbacks
        self._steps_per_call = 1
        # Steps that are still to come before whoever told it to go on has it wait again; None: all.
        self._wanted: int | None = 0
        self._seconds, self._resumed = 0.0, 0.0
        self._calls = self._run()
        # epochs, loss, metrics, val_loss and val_metrics as they were after the last epoch.
        self.result: dict[str, Any] = {}

    def advance(self, steps: int | None, steps_per_call: int) -> Iterator[Call]:
        """Trains at least `steps` steps in whole calls, or to the end where there are fewer or `steps` is None."""
        self._wanted, self._steps_per_call = steps, steps_per_call
        self._resumed = self._clock()
        while (self._wanted is None or self._wanted > 0) and (call := next(self._calls, None)):
            if self._wanted is not None:
                self._wanted -= call.steps
            yield call
        self._seconds += self._clock() - self._resumed

    def _run(self) -> Iterator[Call]:
        loop, per_epoch = self._loop, self._loop.steps_per_epoch
        hooks = self._hooks(self._callbacks, loop.model, loop.strategy, loop.chief, loop.alone, self._epochs, per_epoch)
        hooks.call("on_train_begin")
        epoch = hooks.first_epoch
        logs: dict[str, float] = {}
        while epoch < self._epochs and not loop.model.stop_training:
            began = self._active()
            hooks.call("on_epoch_begin", epoch)
            logs = yield from self._epoch(epoch, hooks)
            logs |= {f"val_{name}": value for name, value in loop.evaluate(self._steps_per_call, self._tell).items()}
            epoch += 1
            self.result = {"epochs": epoch, **_split(logs), **loop.facts()}
            step = min(epoch * per_epoch, self._last_step)
            if loop.chief:
                self._tell("epoch", epoch=epoch, step=step, seconds=self._active() - began, **_split(logs))
            hooks.call("on_epoch_end", epoch - 1, logs)
        inner = innermost(loop.model.optimizer)
        inner.finalize_variable_values(loop.model.trainable_variables)
        hooks.call("on_train_end", logs)

    def _epoch(self, epoch: int, hooks: Callbacks) -> Generator[Call, None, dict[str, float]]:
        loop = self._loop
        loop.reset_metrics()
        first = done = epoch * loop.steps_per_epoch
        until = min(first + loop.steps_ahead(), self._last_step)
        totals = loop.totals()
        logs: dict[str, float] = {}
        # What was begun before training was told to stop is a part of it.
        while (done < until and not loop.model.stop_training) or loop.pending:
            hooks.call("on_train_batch_begin", done - first)
            left = 0 if loop.model.stop_training else until - done
            wanted = left if self._wanted is None else min(self._wanted, left)
            call = loop.call(min(self._steps_per_call, left), wanted)
            if not call.steps:
                break
            if self._must_be_finite:
                _check_finite(call.losses[:, 0], done)
            done += call.steps
            totals.add(call.losses, call.sizes)
            metrics = loop.metrics()
            logs = totals.means() | metrics
            if loop.chief:
                self._tell(
                    "steps",
                    epoch=epoch + 1,
                    step=done,
                    losses=call.losses[:, 0].tolist(),
                    metrics=metrics,
                    examples=float(call.sizes.sum()),
                    seconds=call.seconds,
                    learning_rate=float(keras.ops.convert_to_numpy(loop.model.optimizer.learning_rate)),
                )
            else:
                self._tell("beat", step=done)
            hooks.call("on_train_batch_end", done - first - 1, logs)
            yield call
        return logs

    def _active(self) -> float:
        """Seconds that this training has had so far."""
        return self._seconds + self._clock() - self._resumed


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
