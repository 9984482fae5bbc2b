"""Turns a run's events into lines to show and into how far the run is.

Pure: time is an argument. It survives events in any order, and odd values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeline.plan.plan import Plan
from pipeline.record import events
from pipeline.views.terminal.result import explained_lines, profile_lines
from pipeline.views.terminal.training_state import Doing, TrainingState
from pipeline.views.terminal.words import clean, duration, listed, named, number, pairs, plural, rate

MOST_FAILURES = 5  # different ones shown in full
CTRL_C = "Ctrl-C: leaving with a checkpoint, if that takes seconds. Ctrl-C again ends it at once."


@dataclass(frozen=True)
class StatusMessage:
    """Something to tell; a lasting one stays above the bars, others are told only where there are none."""

    text: str
    lasting: bool = False


@dataclass
class ProcessGroup:
    """Progress of the processes of the run ("point") or of its baseline, by rank.

    All of them are `expected` to join, and `leaders` of them to tell the rest.
    """

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
        """Returns how many processes will reach a stage."""
        return self.expected if stage in ("started", "joined") else self.leaders

    def count(self, stage: str) -> int:
        """Returns how many processes have reached a stage."""
        return min(len(self.reached.get(stage, ())), self.tellers(stage))

    def measure(self, repeat: int, rank: int, examples: float, seconds: float) -> None:
        """Notes a process's timing of a repeat; once all have told theirs, the slowest decides its rate."""
        timings = self.timings.setdefault(repeat, {})
        timings[rank] = (examples, seconds)
        if len(timings) >= self.leaders:
            self.rate_of[repeat] = examples / max(event for _, event in timings.values())

    def rates(self) -> list[float]:
        """Examples per second of each repeat that is done."""
        return [self.rate_of[repeat] for repeat in sorted(self.rate_of)]


class RunState:
    """The state of a run: a fold over its events.

    `timing`: repeats are being timed. `turned`: the last event ended one of them, or what comes before them.
    `failing`: the last event told of a failure, or of a Ctrl-C.
    """

    def __init__(self, plan: Plan, now: float) -> None:
        self.start = now
        self.timing = self.turned = self.failing = False
        self._plan = plan
        self._groups = {"point": ProcessGroup(max(1, len(plan.processes)), max(1, len(plan.leaders)))}
        self._shown: set[str] = set()
        self._repeats_shown = 0
        self._training = TrainingState(plan)
        self._failed = self._over = self._explaining = False
        self._now = now

    def take(self, event: events.Event, now: float) -> list[StatusMessage]:
        """Adds one event, and returns the lines to show for it."""
        if event.group == "baseline":
            self._groups.setdefault("baseline", ProcessGroup(1, 1))
        turns = self._turns()
        self._now = now
        handle = HANDLERS.get(type(event))
        lines = [] if handle is None else handle(self, event)
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
        return self._coming_up()

    def _restored(self, event: events.Restored) -> list[StatusMessage]:
        self._training.go_back(event.step)
        where = f"from step {event.step:,}" if event.found else "from the beginning: there is no checkpoint yet"
        return [StatusMessage(f"going on {where}")]

    def _checkpoint(self, event: events.Checkpoint) -> list[StatusMessage]:
        self._training.saved = event.step
        return []

    def _checked(self, event: events.Checked) -> list[StatusMessage]:
        check = event.values
        if event.rank != 0 or check.outcome != "different" or check.noted:
            return []
        return self._once(f"warning: {clean(check.said(self._plan.workers))}", lasting=True)

    def _explains(self, event: events.Explaining) -> list[StatusMessage]:
        self._explaining = True
        return self._once("explaining what was lost: steps with parts switched off, in turn with one device")

    def _finished(self, event: events.Finished) -> list[StatusMessage]:
        self._over = self._over or self._is_chief(event)
        return []

    def _ended(self, event: events.Ended) -> list[StatusMessage]:
        self._over, self._explaining = True, False
        return []

    def _is_chief(self, event: events.EventBase) -> bool:
        return event.group != "baseline" and event.rank == 0

    def _group(self, event: events.EventBase) -> ProcessGroup:
        return self._groups["baseline" if event.group == "baseline" else "point"]

    def _stage(self, event: events.Started | events.Joined | events.Built | events.Calibrated) -> list[StatusMessage]:
        group, baseline = self._group(event), event.group == "baseline"
        complete = group.reach(event.kind, event.rank)
        who = "the baseline" if baseline else plural(group.expected, "process")
        if isinstance(event, events.Started) and not baseline:
            return self._once(f"starting: {who}")
        if isinstance(event, events.Built) and not baseline:
            self._training.take_built(event)
        if not complete:
            return []
        match event:
            case events.Joined():
                return self._once(f"joined: {who} after {duration(self._now - self.start)}", key=f"joined {baseline}")
            case events.Built() if not baseline:
                return self._once(f"built: {self._training.facts or 'data and model'}", key="built")
            case events.Calibrated() if self._plan.measurement.steps != 0:
                in_turn = " in turn with the baseline" if "baseline" in self._groups else ""
                return self._once(
                    f"measuring its first steps: {plural(self._plan.measurement.repeats, 'repeat')}{in_turn}",
                    key="measuring",
                )
        return []

    def _measured(self, event: events.Measured) -> list[StatusMessage]:
        """A line for each repeat that is now told by the run and, where there is one, by its baseline."""
        group, examples, seconds = self._group(event), number(event.examples), number(event.seconds)
        if examples is not None and seconds is not None and seconds > 0:
            group.measure(event.repeat, event.rank, examples, seconds)
        rates = {name: one.rates() for name, one in self._groups.items()}
        complete = min(map(len, rates.values()))
        lines = []
        for place in range(self._repeats_shown, complete):
            speeds = [
                f"{'baseline ' * (name == 'baseline')}{rate(one_rates[place])} examples/s"
                for name, one_rates in rates.items()
            ]
            number_of = sorted(group.rate_of)[place] + 1
            repeats = self._plan.measurement.repeats
            total = f"of {repeats}" if number_of <= repeats else "timed too, since other work disturbed some"
            lines.append(StatusMessage(f"repeat {number_of} {total}: {listed(*speeds)}"))
        self._repeats_shown = max(self._repeats_shown, complete)
        return lines

    def _trained(self, event: events.Steps | events.Epoch | events.Saved | events.Beat) -> list[StatusMessage]:
        training = self._training
        if not self._is_chief(event):
            return []
        if isinstance(event, events.Beat):
            training.take_validated(event)
            return []
        begins = self._once(f"training: {training.length}", key="training")
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
        timings, repeats = self._groups["point"].timings, self._groups["point"].rate_of
        self._groups["point"] = ProcessGroup(event.processes, event.leaders, timings=timings, rate_of=repeats)
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

    def _coming_up(self) -> Doing:
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

    def _measuring(self) -> Doing:
        done = {name: len(group.rate_of) for name, group in self._groups.items()}
        repeats = self._plan.measurement.repeats
        where = f"repeat {min(min(done.values()) + 1, repeats):,} of {repeats:,}"
        # Which of the two goes first is the driver's choice; who goes second is plain.
        if len(set(done.values())) > 1:
            where += f", {'the baseline' if done['baseline'] < done['point'] else self._plan.strategy.name}"
        last = {name: rates[-1] for name, group in self._groups.items() if (rates := group.rates())}
        figures = listed(
            f"{rate(last['point'])} examples/s" if "point" in last else "",
            f"baseline {rate(last['baseline'])} examples/s" if "baseline" in last else "",
        )
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


HANDLERS: dict[type[events.Event], Callable[[RunState, Any], list[StatusMessage]]] = {
    events.Started: RunState._stage,
    events.Joined: RunState._stage,
    events.Built: RunState._stage,
    events.Calibrated: RunState._stage,
    events.Measured: RunState._measured,
    events.Steps: RunState._trained,
    events.Epoch: RunState._trained,
    events.Saved: RunState._trained,
    events.Beat: RunState._trained,
    events.Restarted: RunState._restarted,
    events.Restored: RunState._restored,
    events.Checkpoint: RunState._checkpoint,
    events.Profiled: lambda state, event: [StatusMessage(text, lasting=True) for text in profile_lines(event.values)],
    events.Checked: RunState._checked,
    events.Explaining: RunState._explains,
    events.Explained: lambda state, event: [
        StatusMessage(text, lasting=True) for text in explained_lines(event.values)
    ],
    events.Signalled: lambda state, event: [] if event.group is not None else state._once(CTRL_C, lasting=True),
    events.Warned: lambda state, event: state._once(f"warning: {clean(event.text) or '(without words)'}", lasting=True),
    events.Failed: RunState._failure,
    events.Finished: RunState._finished,
    events.Ended: RunState._ended,
}
