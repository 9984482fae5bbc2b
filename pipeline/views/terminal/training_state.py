"""Turns a training's events into how far it is."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.plan.plan import Plan
from pipeline.record.events import Beat, Built, Epoch, Steps
from pipeline.views.terminal.words import duration, listed, named, number, pairs, plural, rate

WINDOW_SECONDS = 5.0  # of training, over which throughput and the time left are taken


@dataclass(frozen=True)
class Doing:
    """A run's current activity: a word for it, how far it is (`total` is None where unknown), and its figures."""

    label: str
    done: float = 0
    total: float | None = None
    where: str = ""
    figures: str = ""


class TrainingState:
    """A training's progress and its latest figures."""

    def __init__(self, plan: Plan) -> None:
        self.begun = False
        # The step of the last checkpoint.
        self.saved: int | None = None
        self.facts = ""
        self._plan = plan
        self._epochs = plan.training.epochs
        self._per_epoch = plan.steps_per_epoch(plan.data.train_examples) if plan.data.train_examples else None
        self._validation_steps: int | None = None
        self._validated = 0
        self._epoch = 1
        self._epochs_done = 0
        self._over = False
        self._step = 0
        self._loss: float | None = None
        self._metrics: Mapping[str, float] = {}
        self._calls: deque[tuple[int, float, float]] = deque()  # (steps, examples, seconds), the last few

    def go_back(self, step: int) -> None:
        """Training goes on from a step."""
        self._step, self._validated, self._over = step, 0, False
        self._calls.clear()

    @property
    def total(self) -> int | None:
        """Optimizer steps in all, where known."""
        if self._plan.training.steps:
            return self._plan.training.steps
        return self._epochs * self._per_epoch if self._epochs and self._per_epoch else None

    @property
    def length(self) -> str:
        """The planned length of training."""
        return listed(plural(self._epochs, "epoch"), plural(self.total, "step")) or "length unknown"

    def epoch_of(self, epoch: int) -> str:
        """Returns an epoch's number, and of how many."""
        return of("epoch", epoch, self._epochs)

    def take_built(self, event: Built) -> None:
        """Takes sizes that are known once data and model are built."""
        self._epochs = event.epochs or self._epochs
        self._per_epoch = event.steps_per_epoch or self._per_epoch
        held_out = event.validation_examples
        if held_out is not None:
            self._validation_steps = event.validation_steps or math.ceil(held_out / self._plan.training.global_batch)
        self.facts = listed(
            plural(event.parameters, "parameter"),
            plural(event.train_examples, "training example"),
            plural(held_out, "validation example"),
            f"{plural(self._per_epoch, 'step')} an epoch" if self._per_epoch else "",
        )

    def take_steps(self, event: Steps) -> None:
        """One call of the loop."""
        step = event.step
        if step < self._step:
            return
        self._calls.append((step - self._step, number(event.examples) or 0, number(event.seconds) or 0))
        while len(self._calls) > 1 and math.fsum(call[2] for call in self._calls) > WINDOW_SECONDS:
            self._calls.popleft()
        self._step, self._validated = step, 0
        self._epoch = event.epoch or self._epoch
        self._loss = event.losses[-1] if event.losses else None
        self._metrics = event.metrics

    def take_validated(self, event: Beat) -> None:
        """A beat, which during validation tells how many of its steps are done."""
        self._validated = event.validated or self._validated

    def take_epoch(self, event: Epoch) -> None:
        """The end of an epoch."""
        self._epochs_done = max(self._epochs_done, event.epoch)
        self._step = max(self._step, event.step)
        self._validated = 0
        self._over = event.epoch >= (self._epochs or math.inf) or self._step >= (self.total or math.inf)

    def view(self) -> Doing:
        """Returns what training is doing."""
        if self._validated:
            done = of("step", self._validated, self._validation_steps)
            where = listed(self.epoch_of(self._epoch), done)
            return Doing("validating", self._validated, self._validation_steps, where, self._scores())
        if self._over:
            return Doing("saving" if self._plan.training.save else "ending", 1, 1, "training is over")
        total, epoch = self.total, max(self._epoch, self._epochs_done + 1)
        where = listed(self.epoch_of(epoch), of("step", self._step, total))
        return Doing("training", self._step, total, where, self._figures())

    def _figures(self) -> str:
        steps, examples, seconds = (math.fsum(call[place] for call in self._calls) for place in range(3))
        left = ""
        if self.total and steps and seconds:
            left = f"{duration(max(0, self.total - self._step) * seconds / steps)} left"
        speed = f"{rate(examples / seconds)} examples/s" if examples > 0 and seconds > 0 else ""
        saved = f"saved at {self.saved:,}" if self.saved else ""
        return listed(speed, left, self._scores(), saved)

    def _scores(self) -> str:
        return listed(named("loss", self._loss), pairs(self._metrics))


def of(noun: str, done: int, total: int | None) -> str:
    """Returns how far something is, and of how many where that is known."""
    return f"{noun} {done:,} of {total:,}" if total else f"{noun} {done:,}"
