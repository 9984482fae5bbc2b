"""Turns a run's events into lines to show and into how far the run is.

Pure: time is an argument. It survives events in any order, and odd values.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace

from pipeline.plan.plan import Plan
from pipeline.record import events
from pipeline.views.terminal.result import explained_lines, profile_lines
from pipeline.views.terminal.words import clean, duration, listed, named, number, pairs, plural, rate

MOST_FAILURES = 5  # different ones shown in full
WINDOW_SECONDS = 5.0  # of training, over which throughput and the time left are taken
CTRL_C = "Ctrl-C: leaving with a checkpoint, if that takes seconds. Ctrl-C again ends it at once."


@dataclass(frozen=True)
class StatusMessage:
    """Something to tell; a lasting one stays above the bars, others are told only where there are none."""

    text: str
    lasting: bool = False


@dataclass(frozen=True)
class Doing:
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
    reached: dict[str, set[int]] = field(default_factory=dict)
    timings: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)
    rate_of: dict[int, float] = field(default_factory=dict)

    def reach(self, stage: str, rank: int) -> bool:
        """Notes that a process has reached a stage; true where it is the last one to."""
        ranks = self.reached.setdefault(stage, set())
        before = len(ranks)
        ranks.add(rank)
        return before < self.tellers(stage) <= len(ranks)

    def tellers(self, stage: str) -> int:
        return self.expected if stage in ("started", "joined") else self.leaders

    def count(self, stage: str) -> int:
        return min(len(self.reached.get(stage, ())), self.tellers(stage))

    def measure(self, repeat: int, rank: int, examples: float, seconds: float) -> None:
        """Notes a process's timing of a repeat; once all have told theirs, the slowest decides its rate."""
        timings = self.timings.setdefault(repeat, {})
        timings[rank] = (examples, seconds)
        if len(timings) >= self.leaders:
            self.rate_of[repeat] = examples / max(event for _, event in timings.values())

    def rates(self) -> list[float]:
        return [self.rate_of[repeat] for repeat in sorted(self.rate_of)]


class RunState:
    """The state of a run: a fold over its events.

    `timing`: repeats are being timed. `turned`: the last event ended one of them, or what comes before them.
    `failing`: the last event told of a failure, or of a Ctrl-C.
    """

    def __init__(self, plan: Plan, now: float) -> None:
        self.start = self._now = now
        self.timing = self.turned = self.failing = False
        self._plan = plan
        self._groups = {"point": _ProcessGroup(max(1, len(plan.processes)), max(1, len(plan.leaders)))}
        self._shown: set[str] = set()
        self._repeats_shown = 0
        self._training = _TrainingState(plan)
        self._failed = self._over = self._explaining = False

    def take(self, event: events.Event, now: float) -> list[StatusMessage]:
        """Adds one event, and returns the lines to show for it."""
        if event.group == "baseline":
            self._groups.setdefault("baseline", _ProcessGroup(1, 1))
        turns = self._turns()
        self._now = now
        lines = self._lines(event)
        self.timing = self._is_timing()
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
        if self.timing:
            return self._measuring()
        if self._training.begun:
            return self._training.view()
        groups = self._groups.values()
        expected = sum(group.expected for group in groups)
        leaders = sum(group.leaders for group in groups)
        joined, built = (sum(group.count(stage) for group in groups) for stage in ("joined", "built"))
        if joined < expected and not built:
            return Doing("starting", joined, expected, f"{joined:,} of {expected:,} processes joined")
        if built < leaders:
            return Doing("building", built, leaders, f"{built:,} of {leaders:,} have data and model")
        if self._all_measured():
            return Doing("training", 0, self._training.total, "the first steps")
        return Doing("preparing", where="tracing the training step")

    def _lines(self, event: events.Event) -> list[StatusMessage]:
        training = self._training
        match event:
            case events.Started() | events.Joined() | events.Built() | events.Calibrated():
                return self._stage(event)
            case events.Measured():
                return self._measured(event)
            case events.Beat() if _is_chief(event):
                training.validated = event.validated or training.validated
            case events.Steps() | events.Epoch() | events.Saved() if _is_chief(event):
                return self._trained(event)
            case events.Restarted():
                return self._restarted(event)
            case events.Restored():
                training.go_back(event.step)
                where = f"from step {event.step:,}" if event.found else "from the beginning: there is no checkpoint yet"
                return [StatusMessage(f"going on {where}")]
            case events.Checkpoint():
                training.saved = event.step
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
            case events.Finished() if _is_chief(event):
                self._over = True
            case events.Ended():
                self._over, self._explaining = True, False
        return []

    def _group(self, event: events.EventBase) -> _ProcessGroup:
        return self._groups["baseline" if event.group == "baseline" else "point"]

    def _stage(self, event: events.Started | events.Joined | events.Built | events.Calibrated) -> list[StatusMessage]:
        group, baseline = self._group(event), event.group == "baseline"
        complete = group.reach(event.kind, event.rank)
        who = "the baseline" if baseline else plural(group.expected, "process")
        match event:
            case events.Started() if not baseline:
                return self._once(f"starting: {who}")
            case events.Joined() if complete:
                return self._once(f"joined: {who} after {duration(self._now - self.start)}", key=f"joined {baseline}")
            case events.Built() if not baseline:
                self._training.take_built(event)
                if complete:
                    return self._once(f"built: {self._training.facts or 'data and model'}", key="built")
            case events.Calibrated() if complete and self._plan.measurement.steps != 0:
                in_turn = " in turn with the baseline" if "baseline" in self._groups else ""
                return self._once(
                    f"measuring its first steps: {plural(self._plan.measurement.repeats, 'repeat')}{in_turn}",
                    key="measuring",
                )
        return []

    def _measured(self, event: events.Measured) -> list[StatusMessage]:
        group, examples, seconds = self._group(event), number(event.examples), number(event.seconds)
        if examples is not None and seconds is not None and seconds > 0:
            group.measure(event.repeat, event.rank, examples, seconds)
        rates = {name: one.rates() for name, one in self._groups.items()}
        complete = min(map(len, rates.values()))
        lines = []
        for place in range(self._repeats_shown, complete):
            speeds = [_speed(name, of_group[place]) for name, of_group in rates.items()]
            number_of = sorted(group.rate_of)[place] + 1
            repeats = self._plan.measurement.repeats
            total = f"of {repeats}" if number_of <= repeats else "timed too, since other work disturbed some"
            lines.append(StatusMessage(f"repeat {number_of} {total}: {listed(*speeds)}"))
        self._repeats_shown = max(self._repeats_shown, complete)
        return lines

    def _trained(self, event: events.Steps | events.Epoch | events.Saved) -> list[StatusMessage]:
        training = self._training
        length = listed(plural(training.epochs, "epoch"), plural(training.total, "step")) or "length unknown"
        begins = self._once(f"training: {length}", key="training")
        training.begun = True
        match event:
            case events.Steps():
                training.take_steps(event)
                return begins
            case events.Saved(path=path):
                return self._once(f"saved: {clean(path) or 'the model'}")
        training.take_epoch(event)
        figures = listed(
            named("loss", event.loss),
            pairs(event.metrics),
            named("val_loss", event.val_loss),
            pairs(event.val_metrics, prefix="val_"),
            "" if (seconds := number(event.seconds)) is None else duration(seconds),
        )
        text = f"{training.epoch_of(event.epoch)}: {figures or 'done'}"
        return [*begins, *self._once(text, lasting=True, key=f"epoch {event.epoch}")]

    def _restarted(self, event: events.Restarted) -> list[StatusMessage]:
        """All processes come up once more, perhaps fewer; what was measured stays measured."""
        self._failed = False
        self._training.begun = False
        point = self._groups["point"]
        self._groups["point"] = replace(point, expected=event.processes, leaders=event.leaders, reached={})
        if "baseline" in self._groups:
            self._groups["baseline"].reached = {}
        again = ("starting", "joined", "built", "measuring", "training", "failed")
        self._shown = {key for key in self._shown if not key.startswith(again)}
        return [StatusMessage(f"warning: {clean(event.text)}", lasting=True)]

    def _failure(self, event: events.Failed) -> list[StatusMessage]:
        self._failed = True
        if event.peer:
            return []  # it only lost the process that failed, which says more itself
        error = clean(event.error) or "no reason was given"
        if sum(key.startswith("failed") for key in self._shown) >= MOST_FAILURES:
            return self._once("More processes failed; events.jsonl has them all.", lasting=True)
        return self._once(f"failed: {self._who(event)}: {error}", lasting=True, key=f"failed {error}")

    def _measuring(self) -> Doing:
        done = {name: len(group.rate_of) for name, group in self._groups.items()}
        repeats = self._plan.measurement.repeats
        where = f"repeat {min(min(done.values()) + 1, repeats):,} of {repeats:,}"
        # Which of the two goes first is the driver's choice; who goes second is plain.
        if len(set(done.values())) > 1:
            where += f", {'the baseline' if done['baseline'] < done['point'] else self._plan.strategy.name}"
        figures = listed(*(_speed(name, rates[-1]) for name, group in self._groups.items() if (rates := group.rates())))
        return Doing("measuring", sum(done.values()), repeats * len(done), where, figures)

    def _is_timing(self) -> bool:
        if self._plan.measurement.steps == 0 or self._failed or self._over:
            return False
        groups = self._groups.values()
        ready = all(group.count("calibrated") >= group.leaders for group in groups)
        return (ready or any(group.timings for group in groups)) and not self._all_measured()

    def _all_measured(self) -> bool:
        return all(len(group.rate_of) >= self._plan.measurement.repeats for group in self._groups.values())

    def _turns(self) -> int:
        """Grows with each repeat that is done, and with each group that is ready for them."""
        return sum((group.count("calibrated") >= group.leaders) + len(group.rate_of) for group in self._groups.values())

    def _who(self, event: events.Failed) -> str:
        if event.group == "baseline":
            return "the baseline"
        if not 0 <= event.rank < len(self._plan.processes):
            return "a process"
        process = self._plan.processes[event.rank]
        return f"{process.role} {event.rank}" + (f" on host {process.host}" if self._plan.hardware.hosts > 1 else "")

    def _once(self, text: str, lasting: bool = False, key: str = "") -> list[StatusMessage]:
        """The line, unless one with its key was told before: hundreds of processes may say the same thing."""
        if (key or text) in self._shown:
            return []
        self._shown.add(key or text)
        return [StatusMessage(text, lasting)]


class _TrainingState:
    def __init__(self, plan: Plan) -> None:
        self.begun = False
        self.saved: int | None = None  # the step of the last checkpoint
        self.validated = 0  # steps of a validation that is under way
        self.facts = ""
        self._plan = plan
        self.epochs = plan.training.epochs
        self._per_epoch = plan.steps_per_epoch(plan.data.train_examples) if plan.data.train_examples else None
        self._validation_steps: int | None = None
        self._step, self._epoch, self._over = 0, 1, False
        self._last: events.Steps | None = None
        self._calls: deque[tuple[int, float, float]] = deque()  # (steps, examples, seconds), the last few

    def go_back(self, step: int) -> None:
        self._step, self.validated, self._over = step, 0, False
        self._calls.clear()

    @property
    def total(self) -> int | None:
        """Optimizer steps in all, where known."""
        if self._plan.training.steps:
            return self._plan.training.steps
        return self.epochs * self._per_epoch if self.epochs and self._per_epoch else None

    def epoch_of(self, epoch: int) -> str:
        return _of("epoch", epoch, self.epochs)

    def take_built(self, event: events.Built) -> None:
        """Takes sizes that are known once data and model are built."""
        self.epochs = event.epochs or self.epochs
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

    def take_steps(self, event: events.Steps) -> None:
        """One call of the loop."""
        if event.step < self._step:
            return
        self._calls.append((event.step - self._step, number(event.examples) or 0, number(event.seconds) or 0))
        while len(self._calls) > 1 and math.fsum(call[2] for call in self._calls) > WINDOW_SECONDS:
            self._calls.popleft()
        self._step, self.validated = event.step, 0
        self._epoch = event.epoch or self._epoch
        self._last = event

    def take_epoch(self, event: events.Epoch) -> None:
        """The end of an epoch."""
        self._epoch = max(self._epoch, event.epoch + 1)
        self._step = max(self._step, event.step)
        self.validated = 0
        self._over = event.epoch >= (self.epochs or math.inf) or self._step >= (self.total or math.inf)

    def view(self) -> Doing:
        if self.validated:
            done = _of("step", self.validated, self._validation_steps)
            where = listed(self.epoch_of(self._epoch), done)
            return Doing("validating", self.validated, self._validation_steps, where, self._scores())
        if self._over:
            return Doing("saving" if self._plan.training.save else "ending", 1, 1, "training is over")
        where = listed(self.epoch_of(self._epoch), _of("step", self._step, self.total))
        steps, examples, seconds = (math.fsum(call[place] for call in self._calls) for place in range(3))
        left = ""
        if self.total and steps and seconds:
            left = f"{duration(max(0, self.total - self._step) * seconds / steps)} left"
        speed = f"{rate(examples / seconds)} examples/s" if examples > 0 and seconds > 0 else ""
        saved = f"saved at {self.saved:,}" if self.saved else ""
        return Doing("training", self._step, self.total, where, listed(speed, left, self._scores(), saved))

    def _scores(self) -> str:
        if self._last is None:
            return ""
        return listed(named("loss", self._last.losses[-1] if self._last.losses else None), pairs(self._last.metrics))


def _is_chief(event: events.EventBase) -> bool:
    return event.group != "baseline" and event.rank == 0


def _speed(group: str, value: float) -> str:
    return f"{'baseline ' * (group == 'baseline')}{rate(value)} examples/s"


def _of(noun: str, done: int, total: int | None) -> str:
    return f"{noun} {done:,} of {total:,}" if total else f"{noun} {done:,}"
