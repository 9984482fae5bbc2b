"""A training under way: epochs of compiled calls, validation, callbacks, and what to tell of them."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np

from pipeline.errors import refuse
from pipeline.record.events import Beat, Epoch, Event, Left, Steps
from pipeline.record.log import from_plain, stamped, to_plain
from pipeline.worker.callbacks import Callbacks
from pipeline.worker.checkpoint import Checkpointer, State, grouped
from pipeline.worker.engine import Emit
from pipeline.worker.loop import NO_COMPARISON, Call, TrainingLoop, WeightComparison, figures
from pipeline.worker.model_error import TrainingError
from pipeline.worker.state import of_callbacks, of_random_state, put_back_callbacks, put_back_random_state
from pipeline.worker.variables import state_bytes

# So many events of steps and epochs go with a checkpoint.
RECENT = 64
Arrays: TypeAlias = dict[str, np.ndarray]


class Preempted(Exception):
    """All processes have agreed to leave, with a checkpoint of where they are."""


class Diverged(TrainingError):
    """The loss is NaN, or has exploded."""


class Training:
    """A training that advances by so many steps at a time; pauses between change nothing and are in no timing."""

    def __init__(
        self,
        loop: TrainingLoop,
        epochs: int | None,
        last_step: int | None,
        callbacks: Sequence[keras.callbacks.Callback],
        emit: Emit,
        clock: Callable[[], float] = time.perf_counter,
        hooks: Callable[..., Callbacks] = Callbacks,
        must_be_finite: bool = True,
        checkpointer: Checkpointer | None = None,
        same: WeightComparison = NO_COMPARISON,
    ) -> None:
        """Trains for `epochs`, or up to `last_step`; `hooks` makes what runs the callbacks."""
        self._loop, self._emit, self._clock = loop, emit, clock
        self._must_be_finite, self._checkpointer, self._same = must_be_finite, checkpointer, same
        self._last_step, self._epochs = last_step, 1 if epochs is None else epochs
        if last_step is not None:
            self._epochs = -(-last_step // loop.steps_per_epoch)
        # Steps that are still to come before whoever told it to go on has it wait again; None: all.
        self._wanted: int | None = 0
        self._steps_per_call, self._seconds, self._resumed = 1, 0.0, 0.0
        # Steps and whole epochs done; of the epoch under way the steps, and the examples that those stand for.
        self._done, self._epoch, self._in_epoch, self._examples = 0, 0, 0, 0
        self._totals, self._cut = loop.totals(), False  # Has the last epoch been ended before its last step?
        self._loss: float | None = None
        self._first_loss: float | None = None
        # The last that was told, which a driver that was killed may not have heard.
        self._recent: deque[Event] = deque(maxlen=RECENT)
        # What has been agreed on: to write a checkpoint as soon as no step is under way, and then to leave.
        self._saving = self._leaving = False
        self._saved_at, self._saved_when = 0, clock()
        self._calls = self._run(partial(hooks, callbacks, loop, self._epochs, loop.steps_per_epoch))
        # epochs, loss, metrics, val_loss and val_metrics as they were after the last epoch.
        self.result: dict[str, Any] = {}

    def advance(self, steps: int | None, steps_per_call: int) -> Iterator[Call]:
        """Trains at least `steps` in whole calls, None: to the end; `Preempted` where it left, with a checkpoint."""
        self._wanted, self._steps_per_call = steps, steps_per_call
        self._resumed = self._clock()
        while (self._wanted is None or self._wanted > 0) and (call := next(self._calls, None)):
            if self._wanted is not None:
                self._wanted -= call.steps
            yield call
        self._seconds += self._clock() - self._resumed

    def leave(self) -> None:
        """Writes a checkpoint and raises `Preempted`; returns where training is over."""
        self._saving = self._leaving = True
        for _ in self._calls:
            pass

    def _run(self, make_hooks: Callable[[], Callbacks]) -> Iterator[Call]:
        loop, clock = self._loop, self._clock
        self._hooks = hooks = make_hooks()
        hooks.call("on_train_begin")
        self._epoch = first = hooks.first_epoch
        self._done = self._epoch * loop.steps_per_epoch
        self._restore()
        self._same.compare(self._done)
        logs: dict[str, float] = {}
        # An epoch that a checkpoint was written in goes on. As in Keras, what is stopped before a first step makes one.
        while self._in_epoch or not (self._is_complete() or (loop.model.stop_training and self._epoch > first)):
            began = self._seconds + clock() - self._resumed
            if not self._in_epoch:
                hooks.call("on_epoch_begin", self._epoch)
            logs = yield from self._train_epoch()
            logs |= {f"val_{name}": value for name, value in self._validate().items()}
            self._epoch, self._in_epoch, self._examples = self._epoch + 1, 0, 0
            self.result = {"epochs": self._epoch, **figures(logs), **loop.facts()}
            if loop.chief:
                seconds = self._seconds + clock() - self._resumed - began
                self._emit_and_keep(Epoch(self._epoch, self._done, seconds=seconds, **figures(logs)))
            hooks.call("on_epoch_end", self._epoch - 1, logs)
            self._after_epoch(logs)
        for optimizer in filter(lambda one: one.built, loop.optimizers):
            optimizer.finalize_variable_values(optimizer._trainable_variables)
        self._same.compare(self._done)
        hooks.call("on_train_end", logs)
        if loop.model.stop_training and (self._cut or not self._is_complete()):
            self.result = self.result | {"stopped_by": hooks.watched.stopped_by, "stopped_at": self._done}
        # The last of them puts the weights of its best epoch back.
        stopping = [one for one in hooks.own if isinstance(one, keras.callbacks.EarlyStopping) and one.best_weights]
        if stopping and stopping[-1].best_epoch + 1 != self._epoch:
            self.result = self.result | {"restored_epoch": stopping[-1].best_epoch + 1}
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def _is_complete(self) -> bool:
        return self._epoch >= self._epochs if self._last_step is None else self._done >= self._last_step

    def _train_epoch(self) -> Generator[Call, None, dict[str, float]]:
        loop, hooks = self._loop, self._hooks
        every = None if self._checkpointer is None else self._checkpointer.kept.every_steps
        if self._in_epoch:
            # It goes on where a checkpoint was written.
            logs = self._totals.means() | loop.metrics()
        else:
            loop.reset_metrics()
            self._totals, logs = loop.totals(), {}
        until = self._done + loop.begin_epoch(self._examples)
        if self._last_step is not None:
            until = min(until, self._last_step)
        while True:
            if self._saving and not loop.pending:
                self._checkpoint()
            stopped = loop.model.stop_training and (self._in_epoch or loop.pending)
            going = self._done < until and not stopped
            # What was begun before training was told to stop is a part of it.
            if not going and not loop.pending:
                self._cut = self._done < until
                return logs
            hooks.call("on_train_batch_begin", self._in_epoch)
            left = until - self._done if going and not self._saving else 0
            left = left if every is None else min(left, every - self._done % every)
            left = min(left, 1) if loop.model.stop_training else left
            wanted = left if self._wanted is None else min(self._wanted, left)
            call = loop.call(min(self._steps_per_call, left), wanted)
            if not call.steps:
                return logs
            if self._must_be_finite:
                self._check(call.losses[:, 0])
            self._done += call.steps
            self._in_epoch += call.steps
            self._totals.add(call.losses, call.sizes)
            metrics = loop.metrics()
            logs = self._totals.means() | metrics
            if loop.chief:
                others = {name: value for name, value in metrics.items() if name != "loss"}
                rate = float(keras.ops.convert_to_numpy(loop.optimizers[0].learning_rate))
                size, losses = float(call.sizes.sum()), call.losses[:, 0].tolist()
                self._emit_and_keep(Steps(self._done, losses, self._epoch + 1, others, size, call.seconds, rate))
            else:
                self._emit(Beat(step=self._done))
            hooks.call("on_train_batch_end", self._in_epoch - 1, logs)
            self._same.after(self._done)
            if self._checkpointer is not None:
                self._examples += call.steps * loop.layout.global_batch
                self._agree()
            yield call

    def _validate(self) -> dict[str, float]:
        """Loss and metrics over the validation data; who is asked to leave meanwhile leaves as if it had not begun."""
        loop = self._loop
        if loop.validates:
            self._hooks.call("on_test_begin")
        metrics = {} if self._checkpointer is None else self._of_metrics()

        def emit(event: Event) -> None:
            self._emit(event)
            if self._checkpointer is not None:
                self._agree()
                if self._leaving:
                    self._checkpoint(metrics)

        logs = loop.evaluate(self._steps_per_call, emit)
        if loop.validates:
            self._hooks.call("on_test_end", logs)
        return logs

    def _after_epoch(self, logs: Mapping[str, float]) -> None:
        if (checkpointer := self._checkpointer) is None:
            return
        policy, best = checkpointer.kept, dict[str, float]()
        if policy.best is not None and self._loop.chief:
            expected = f"checkpoint.keep_best to be one of {', '.join(logs)}"
            instead = f"checkpoint.keep_best={next(iter(logs), 'loss')}"
            refuse((policy.best not in logs, expected, policy.best, instead), error=TrainingError)
            best = {policy.best: logs[policy.best]} if checkpointer.is_best(logs[policy.best]) else {}
        due = policy.every_epochs is not None and self._epoch % policy.every_epochs == 0
        # While steps are timed nothing else is done beside them.
        if checkpointer.share is not None and self._wanted is None and self._loop.chief:
            size = state_bytes(self._loop.model, self._loop.optimizers)
            due = checkpointer.expected_seconds(size) < checkpointer.share * (self._clock() - self._saved_when)
        # What other processes do not know is the first one's alone, and so is writing between two epochs.
        if due or best or self._saving:
            self._checkpoint({}, best or None)

    def _agree(self) -> None:
        # One process knows that it is time for a checkpoint, or that it must leave.
        assert self._checkpointer is not None
        policy, loop = self._checkpointer.kept, self._loop
        by_time = policy.every_minutes is not None and self._clock() - self._saved_when >= 60 * policy.every_minutes
        requests = [float(by_time and loop.chief), float(self._checkpointer.leave())]
        if not loop.alone:
            requests = loop.added(requests)
        by_steps = policy.every_steps is not None and self._done % policy.every_steps == 0
        by_steps = by_steps and self._saved_at != self._done
        self._leaving = self._leaving or requests[1] > 0
        self._saving = self._saving or requests[0] > 0 or by_steps or self._leaving

    def _checkpoint(self, metrics: Arrays | None = None, best: Mapping[str, float] | None = None) -> None:
        """Writes a checkpoint, with no metrics between two epochs; raises `Preempted` where all are to leave."""
        assert self._checkpointer is not None
        self._saving, self._saved_at, self._saved_when = False, self._done, self._clock()
        written: bool | None = None
        arrays = self._of_metrics() if metrics is None else metrics
        if self._loop.chief:
            state = self._state(arrays, best)
            gathered = self._clock() - self._saved_when
            written = self._checkpointer.write(state, wait=self._leaving, gathered=gathered)
        if self._leaving:
            self._emit(Left(self._done, written))
            raise Preempted

    def _state(self, metrics: Arrays, best: Mapping[str, float] | None) -> State:
        assert self._checkpointer is not None
        callbacks, arrays = of_callbacks(self._hooks.own, self._others())
        values = {
            **self._checkpointer.about,
            "time": time.time(),
            "step": self._done,
            "epoch": self._epoch,
            "in_epoch": self._in_epoch,
            "examples": self._examples,
            "loss": self._loss,
            "first_loss": self._first_loss,
            "best": best,
            "result": self.result,
            "stop_training": bool(self._loop.model.stop_training),
            "stopped_by": self._hooks.watched.stopped_by,
            "cut": self._cut,
            "rate_scale": self._checkpointer.rate_scale,
            "callbacks": callbacks,
            "chance": of_random_state(),
            "told": [to_plain(event) for event in self._recent],
        }
        state = self._loop.state()
        return State(values | state.values, arrays | state.arrays | metrics)

    def _others(self) -> list[object]:
        return [self._loop.model, *self._loop.model.metrics_variables, *self._loop.variables()]

    def _emit_and_keep(self, event: Event) -> None:
        self._recent.append(stamped(event, time.time()))
        self._emit(event)

    def _of_metrics(self) -> Arrays:
        return grouped("metrics", self._loop.metrics_state()) | grouped("totals", self._totals.state())

    def _restore(self) -> None:
        checkpointer = self._checkpointer
        if checkpointer is None or (state := checkpointer.state) is None:
            return
        loop, values = self._loop, state.values
        rates = [optimizer._learning_rate for optimizer in loop.optimizers]
        fixed = [(rate, float(keras.ops.convert_to_numpy(rate))) for rate in rates if isinstance(rate, keras.Variable)]
        loop.set_state(state)
        for rate, value in fixed:
            if values["learning_rate"] != checkpointer.about["learning_rate"]:
                rate.assign(value)
            elif values["rate_scale"] != checkpointer.rate_scale:
                rate.assign(rate * (checkpointer.rate_scale / values["rate_scale"]))
        self._done = self._saved_at = values["step"]
        self._epoch, self._in_epoch, self._examples = values["epoch"], values["in_epoch"], values["examples"]
        self._loss, self._first_loss = values["loss"], values["first_loss"]
        self.result = values["result"]
        self._recent.extend(map(from_plain, values.get("told", ())))
        if self._in_epoch:
            loop.reset_metrics()
            loop.set_metrics_state(state.group("metrics"))
            self._totals = loop.totals()
            self._totals.set_state(state.group("totals"))
        put_back_callbacks(self._hooks.own, values["callbacks"], state, self._others())
        put_back_random_state(values["chance"])
        loop.model.stop_training = values["stop_training"]
        self._hooks.watched.stopped_by = values.get("stopped_by", self._hooks.watched.stopped_by)
        self._cut = values.get("cut", False)

    def _check(self, losses: np.ndarray) -> None:
        self._first_loss = float(losses[0]) if self._first_loss is None else self._first_loss
        factor = math.inf if self._checkpointer is None else self._checkpointer.divergence_factor
        limit = factor * max(1.0, abs(self._first_loss))
        for place in np.flatnonzero(~np.isfinite(losses) | (losses > limit)).tolist():
            # The first that fails has all others killed.
            if self._checkpointer is not None:
                self._checkpointer.wait()
                if not self._loop.alone:
                    self._loop.added([0.0])
            expected = "a finite loss" if not np.isfinite(losses[place]) else f"a loss below {limit:g}"
            instead = "a smaller train.learning_rate, train.on_divergence=rollback, or look for bad values in the data"
            raise Diverged(expected, f"{losses[place]:g} at step {self._done + place + 1}", instead)
        self._loss = float(losses[-1])
