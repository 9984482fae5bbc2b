"""Turns a run's events into lines to show and into how far the run is.

Pure: time is an argument. It survives events in any order, and odd values.
"""

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.plan.plan import Plan
from pipeline.record import events
from pipeline.views.terminal.result import explained_lines, profile_lines
from pipeline.views.terminal.words import clean, duration, listed, named, number, pairs, plural, rate

MOST_FAILURES = 5  # different ones shown in full
WINDOW_SECONDS = 5.0  # of training, over which throughput and the time left are taken
CTRL_C = "Ctrl-C: leaving with a checkpoint, if that takes seconds. Ctrl-C again ends it at once."


class StatusMessage(NamedTuple):
    """A line to show; a lasting one stays above the bars, others are shown only where there are none."""

    text: str
    lasting: bool = False


class Doing(NamedTuple):
    """A run's current activity: a word for it, how far it is (`total` is None where unknown), and its figures."""

    label: str
    done: float = 0
    total: float | None = None
    where: str = ""
    figures: str = ""


@dataclass
class _ProcessGroup:
    """Progress of the run's processes ("point") or its baseline's: `expected` join, `leaders` tell the rest."""

    expected: int
    leaders: int
    reached: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    rates: dict[int, float] = field(default_factory=dict)

    def count(self, stage: str) -> int:
        return min(len(self.reached[stage]), self.expected if stage in ("started", "joined") else self.leaders)

    @property
    def calibrated(self) -> bool:
        return self.count("calibrated") == self.leaders


class RunState:
    """The state of a run: a fold over its events.

    `timing`: repeats are being timed. Of the last event, `turned`: it ended one of them, or what comes before them;
    `failing`: it told of a failure, or of a Ctrl-C.
    """

    def __init__(self, plan: Plan, now: float) -> None:
        self.start = self._now = now
        self.timing = self.turned = self.failing = False
        self._plan = plan
        self._groups = {"point": _ProcessGroup(max(1, len(plan.processes)), max(1, len(plan.leaders)))}
        self._shown: set[str] = set()
        self._repeats_shown = 0
        self._failed = self._explaining = self._training = self._trained = self._over = False
        self._epochs, self._step, self._epoch = plan.training.epochs, 0, 1
        self._per_epoch = plan.steps_per_epoch(plan.data.train_examples) if plan.data.train_examples else None
        self._validated = 0  # steps of a validation that is under way
        self._validation_steps: int | None = None
        self._saved: int | None = None  # the step of the last checkpoint
        self._calls: deque[tuple[int, float, float]] = deque()  # (steps, examples, seconds), the last few
        self._scores = ""

    def take(self, event: events.Event, now: float) -> list[StatusMessage]:
        """Adds one event, and returns the lines to show for it."""
        if event.group == "baseline":
            self._groups.setdefault("baseline", _ProcessGroup(1, 1))
        turns, self._now = self._turns(), now
        lines = self._lines(event)
        groups = self._groups.values()
        begun = all(group.calibrated for group in groups) or any(group.seconds for group in groups)
        idle = self._plan.measurement.steps == 0 or self._failed or self._over
        self.timing = begun and not (idle or self._all_measured())
        self.turned = self._turns() != turns
        self.failing = isinstance(event, events.Failed) or (isinstance(event, events.Signalled) and event.group is None)
        return lines

    def view(self) -> Doing:
        """Returns what is happening now."""
        if self._failed:
            return Doing("stopping", where="a process failed")
        if self._explaining:
            return Doing("explaining", where="steps with parts switched off")
        if self._over:
            return Doing("ending", 1, 1)
        training = self._view_training if self._training else self._view_starting
        return self._view_measuring() if self.timing else training()

    def _view_starting(self) -> Doing:
        groups = self._groups.values()
        expected, leaders = sum(group.expected for group in groups), sum(group.leaders for group in groups)
        joined, built = (sum(group.count(stage) for group in groups) for stage in ("joined", "built"))
        if joined < expected and not built:
            return Doing("starting", joined, expected, f"{joined:,} of {expected:,} processes joined")
        if built < leaders:
            return Doing("building", built, leaders, f"{built:,} of {leaders:,} have data and model")
        if self._all_measured():
            return Doing("training", 0, self._total, "the first steps")
        return Doing("preparing", where="tracing the training step")

    def _view_measuring(self) -> Doing:
        done = {name: len(group.rates) for name, group in self._groups.items()}
        repeats = self._plan.measurement.repeats
        where = f"repeat {min(min(done.values()) + 1, repeats):,} of {repeats:,}"
        # Which of the two goes first is the driver's choice; who goes second is plain.
        if len(set(done.values())) > 1:
            where += f", {'the baseline' if done['baseline'] < done['point'] else self._plan.strategy.name}"
        figures = [_speed(name, group.rates[max(group.rates)]) for name, group in self._groups.items() if group.rates]
        return Doing("measuring", sum(done.values()), repeats * len(done), where, listed(*figures))

    def _view_training(self) -> Doing:
        epoch = _of("epoch", self._epoch, self._epochs)
        if self._validated:
            where = listed(epoch, _of("step", self._validated, self._validation_steps))
            return Doing("validating", self._validated, self._validation_steps, where, self._scores)
        if self._trained:
            return Doing("saving" if self._plan.training.save else "ending", 1, 1, "training is over")
        steps, examples, seconds = (math.fsum(call[place] for call in self._calls) for place in range(3))
        left = speed = ""
        if self._total and steps and seconds:
            left = f"{duration(max(0, self._total - self._step) * seconds / steps)} left"
        if examples > 0 and seconds > 0:
            speed = _speed("point", examples / seconds)
        figures = listed(speed, left, self._scores, f"saved at {self._saved:,}" if self._saved else "")
        return Doing("training", self._step, self._total, listed(epoch, _of("step", self._step, self._total)), figures)

    def _lines(self, event: events.Event) -> list[StatusMessage]:
        chief = event.group != "baseline" and event.rank == 0
        match event:
            case events.Started() | events.Joined() | events.Built() | events.Calibrated():
                return self._stage(event)
            case events.Measured():
                return self._measured(event)
            case events.Steps() if chief:
                return self._steps(event)
            case events.Epoch() if chief:
                return self._epoch_ended(event)
            case events.Saved(path=path) if chief:
                self._begin()
                return self._once(f"saved: {clean(path) or 'the model'}")
            case events.Beat() if chief:
                self._validated = event.validated or self._validated
            case events.Checkpoint():
                self._saved = event.step
            case events.Restarted():
                return self._restarted(event)
            case events.Restored():
                self._step, self._validated, self._trained = event.step, 0, False
                self._calls.clear()
                where = f"from step {event.step:,}" if event.found else "from the beginning: there is no checkpoint yet"
                return [StatusMessage(f"going on {where}")]
            case events.Profiled():
                return [StatusMessage(text, lasting=True) for text in profile_lines(event.values)]
            case events.Checked(rank=0, values=check) if check.outcome == "different" and not check.noted:
                return self._once(f"warning: {clean(check.said(self._plan.workers))}", lasting=True)
            case events.Explaining():
                self._explaining = True
                return self._once("explaining what was lost: steps with parts switched off, in turn with one device")
            case events.Explained():
                return [StatusMessage(text, lasting=True) for text in explained_lines(event.values)]
            case events.Signalled(group=None):
                return self._once(CTRL_C, lasting=True)
            case events.Warned():
                return self._once(f"warning: {clean(event.text) or '(without words)'}", lasting=True)
            case events.Failed():
                return self._failure(event)
            case events.Finished() if chief:
                self._over = True
            case events.Ended():
                self._over, self._explaining = True, False
        return []

    def _stage(self, event: events.Started | events.Joined | events.Built | events.Calibrated) -> list[StatusMessage]:
        baseline = event.group == "baseline"
        group = self._groups["baseline" if baseline else "point"]
        before = group.count(event.kind)
        group.reached[event.kind].add(event.rank)
        complete = before < group.count(event.kind) == (group.expected if event.kind == "joined" else group.leaders)
        who = "the baseline" if baseline else plural(group.expected, "process")
        match event:
            case events.Started() if not baseline:
                return self._once(f"starting: {who}")
            case events.Joined() if complete:
                return self._once(f"joined: {who} after {duration(self._now - self.start)}", key=f"joined {baseline}")
            case events.Built() if not baseline:
                facts = self._sizes(event)
                return self._once(f"built: {facts or 'data and model'}", key="built") if complete else []
            case events.Calibrated() if complete and self._plan.measurement.steps != 0:
                repeats = plural(self._plan.measurement.repeats, "repeat")
                in_turn = " in turn with the baseline" * ("baseline" in self._groups)
                return self._once(f"measuring its first steps: {repeats}{in_turn}", key="measuring")
        return []

    def _sizes(self, event: events.Built) -> str:
        """Takes sizes that are known once data and model are built, and returns them in words."""
        self._epochs = event.epochs or self._epochs
        self._per_epoch = event.steps_per_epoch or self._per_epoch
        held_out = event.validation_examples
        if held_out is not None:
            self._validation_steps = event.validation_steps or math.ceil(held_out / self._plan.training.global_batch)
        return listed(
            plural(event.parameters, "parameter"),
            plural(event.train_examples, "training example"),
            plural(held_out, "validation example"),
            f"{plural(self._per_epoch, 'step')} an epoch" if self._per_epoch else "",
        )

    def _measured(self, event: events.Measured) -> list[StatusMessage]:
        group = "baseline" if event.group == "baseline" else "point"
        timed, seconds_of, repeats = self._groups[group], number(event.seconds) or 0.0, self._plan.measurement.repeats
        if (examples := number(event.examples)) is not None and seconds_of > 0:
            ranks = timed.seconds[event.repeat]
            ranks[event.rank] = seconds_of
            # Once all have told theirs, the slowest decides.
            if len(ranks) >= timed.leaders:
                timed.rates[event.repeat] = examples / max(ranks.values())
        rates = {name: sorted(each.rates.items()) for name, each in self._groups.items()}
        complete = [dict(zip(rates, both, strict=True)) for both in zip(*rates.values(), strict=False)]
        lines = []
        for of_groups in complete[self._repeats_shown :]:
            speeds = [_speed(name, speed) for name, (_, speed) in of_groups.items()]
            place = of_groups[group][0] + 1
            total = f"of {repeats}" if place <= repeats else "timed too, since other work disturbed some"
            lines.append(StatusMessage(f"repeat {place} {total}: {listed(*speeds)}"))
        self._repeats_shown = max(self._repeats_shown, len(complete))
        return lines

    def _begin(self) -> list[StatusMessage]:
        self._training = True
        length = listed(plural(self._epochs, "epoch"), plural(self._total, "step")) or "length unknown"
        return self._once(f"training: {length}", key="training")

    def _steps(self, event: events.Steps) -> list[StatusMessage]:
        if event.step >= self._step:
            self._calls.append((event.step - self._step, number(event.examples) or 0, number(event.seconds) or 0))
            while len(self._calls) > 1 and math.fsum(call[2] for call in self._calls) > WINDOW_SECONDS:
                self._calls.popleft()
            self._step, self._epoch, self._validated = event.step, event.epoch or self._epoch, 0
            self._scores = listed(named("loss", event.losses[-1] if event.losses else None), pairs(event.metrics))
        return self._begin()

    def _epoch_ended(self, event: events.Epoch) -> list[StatusMessage]:
        begins = self._begin()
        self._step, self._epoch, self._validated = max(self._step, event.step), max(self._epoch, event.epoch + 1), 0
        self._trained = event.epoch >= (self._epochs or math.inf) or self._step >= (self._total or math.inf)
        figures = listed(
            named("loss", event.loss),
            pairs(event.metrics),
            named("val_loss", event.val_loss),
            pairs(event.val_metrics, prefix="val_"),
            "" if (seconds := number(event.seconds)) is None else duration(seconds),
        )
        text = f"{_of('epoch', event.epoch, self._epochs)}: {figures or 'done'}"
        return begins + self._once(text, lasting=True, key=f"epoch {event.epoch}")

    def _restarted(self, event: events.Restarted) -> list[StatusMessage]:
        """All processes come up once more, perhaps fewer; what was measured stays measured."""
        self._failed = self._training = False
        self._groups["point"].expected, self._groups["point"].leaders = event.processes, event.leaders
        for group in self._groups.values():
            group.reached.clear()
        again = ("starting", "joined", "built", "measuring", "training", "failed")
        self._shown = {key for key in self._shown if not key.startswith(again)}
        return [StatusMessage(f"warning: {clean(event.text)}", lasting=True)]

    def _failure(self, event: events.Failed) -> list[StatusMessage]:
        self._failed, who = True, "a process"
        if event.peer:
            return []  # it only lost the process that failed, which says more itself
        if sum(key.startswith("failed") for key in self._shown) >= MOST_FAILURES:
            return self._once("More processes failed; events.jsonl has them all.", lasting=True)
        if event.group == "baseline":
            who = "the baseline"
        elif 0 <= event.rank < len(self._plan.processes):
            process = self._plan.processes[event.rank]
            who = f"{process.role} {event.rank}" + f" on host {process.host}" * (self._plan.hardware.hosts > 1)
        error = clean(event.error) or "no reason was given"
        return self._once(f"failed: {who}: {error}", lasting=True, key=f"failed {error}")

    def _all_measured(self) -> bool:
        return all(len(group.rates) >= self._plan.measurement.repeats for group in self._groups.values())

    def _turns(self) -> int:
        """Grows with each repeat that is done, and with each group that is ready for them."""
        return sum(group.calibrated + len(group.rates) for group in self._groups.values())

    @property
    def _total(self) -> int | None:
        """Optimizer steps in all, where known."""
        return self._plan.training.steps or (self._epochs or 0) * (self._per_epoch or 0) or None

    def _once(self, text: str, lasting: bool = False, key: str = "") -> list[StatusMessage]:
        """The line, unless one with its key was told before: hundreds of processes may say the same thing."""
        if (key or text) in self._shown:
            return []
        self._shown.add(key or text)
        return [StatusMessage(text, lasting)]


def _speed(group: str, value: float) -> str:
    return f"{'baseline ' * (group == 'baseline')}{rate(value)} examples/s"


def _of(noun: str, done: int, total: int | None) -> str:
    return f"{noun} {done:,} of {total:,}" if total else f"{noun} {done:,}"
