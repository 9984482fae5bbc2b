"""Turns an event into what it changes in an MLflow run: points, parameters, tags, the data set, the end.

A pure mapping: it imports no MLflow, and leaves the sending to `pipeline.views.mlflow.copies`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.analyze import comparable
from pipeline.record import results
from pipeline.record.events import (
    Attached,
    Built,
    Checked,
    Ended,
    Epoch,
    Event,
    EventBase,
    Explained,
    Measured,
    Profiled,
    Report,
    Restarted,
    Result,
    Resumed,
    Run,
    Saved,
    Steps,
    System,
    Warned,
)
from pipeline.record.log import to_plain
from pipeline.views.mlflow import fields
from pipeline.views.mlflow.fields import (
    DIGEST_CHARACTERS,
    NAME_CHARACTERS,
    NOTE_TAG,
    PARAM_CHARACTERS,
    TAG_CHARACTERS,
    Change,
    DatasetUsed,
    End,
    MetricValue,
    Param,
    Reopen,
    Tag,
    ms,
    safe_name,
    tensors,
    text,
)
from pipeline.views.mlflow.pages import About, sentence
from pipeline.views.terminal.words import bare_times, rate, span

# A value of result.json is a measurement where its name says a rate, a ratio or a unit.
MEASUREMENT = re.compile(
    r"per_second|speedup|efficiency|staleness|(^|_)(seconds|ms|gib|percent|joules|cost|price)(_|$)|goodput|^(input_wait|other_work|updates|restarts|rollbacks|steps_repeated)$"
)
# The values of result.json that are tags.
RESULT_TAGS = ("status", "error", "rehearsal", "oversubscribed", "asynchronous", "input_bound", "xla", "stopped_by")
STATUSES = ("FINISHED", "FAILED", "KILLED")


@dataclass
class LogState:
    """State of a log's events so far, as later events need it.

    `driver` is the event of the command that wrote last, the `commands`-th. Of steps, epochs and repeats that are
    made again, those up to the highest so far are sent already.
    """

    run: Run | None = None
    driver: Run | Resumed | Attached | None = None
    commands: int = 0
    step: int = 0
    epoch: int = 0
    repeats: dict[str, int] = field(default_factory=dict)
    # When training reported its first steps, and the last step of each curve.
    training_ms: int | None = None
    curves: dict[str, int] = field(default_factory=dict)
    time_ms: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    speakers: dict[str, int] = field(default_factory=dict)
    about: About = field(default_factory=About)
    model: str | None = None
    # The files of a sweep's report: paths in the sweep's folder, by the folder of the artifacts that they belong in.
    report: dict[str, list[str]] = field(default_factory=dict)
    ended: bool = False


def changes(event: Event, state: LogState) -> Iterator[Change]:
    """Yields what `event` changes in the MLflow run: nothing for an event that MLflow has no place for.

    >>> event = Steps(2, [0.7, 0.6], seconds=1.0, time=8.0)
    >>> [(point.name, point.value, point.time_ms, point.step) for point in changes(event, LogState())]
    [('train/loss', 0.7, 7500, 1), ('train/loss', 0.6, 8000, 2)]
    """
    make = CHANGES.get(type(event))
    if make is not None and (event.of_point or isinstance(event, Measured)):
        state.time_ms = max(state.time_ms, ms(event))
        yield from make(event, state)


def _run(event: Run, state: LogState) -> Iterator[Change]:
    if state.run is not None:
        return
    state.run = state.driver = event
    state.commands = 1
    params = {safe_name(name): text(value, PARAM_CHARACTERS) for name, value in event.params.items()}
    yield from (Param(name, value) for name, value in params.items())
    for name, value in event.tags.items():
        yield Tag(safe_name(name), text(value, TAG_CHARACTERS))
    yield Tag("pipeline.folder", text(event.folder, TAG_CHARACTERS))
    # MLflow sorts parameters as text, and draws metrics alone.
    for name in ("workers", "replica_batch", "global_batch"):
        yield from _point(fields.trained(name), event.params.get(name), event, 0)
    state.about.command = str(event.tags.get("command") or event.tags.get("overrides") or "")
    state.about.commit = str(event.tags.get("git_commit") or "")
    for name, why in comparable.DOUBTS.items():
        if event.tags.get(name) == "true":
            state.about.note(f"**{name}**: {why}")
    yield _described(state)


def _resumed(event: Resumed, state: LogState) -> Iterator[Change]:
    state.driver, state.ended = event, False
    state.commands += 1
    yield Tag("status", "RUNNING")
    yield Tag("preempted", "false")
    # What the command before ended with holds no longer.
    yield Tag("error", "")
    state.about.error = ""
    yield _described(state)
    yield Tag("resumed", str(state.commands - 1))
    # Parameters are fixed for a run in MLflow; what another command had otherwise is a tag.
    then = {} if state.run is None else state.run.params
    for name, value in event.params.items():
        if then.get(name) != value:
            yield Tag(safe_name(f"resumed/{name}"), text(value, TAG_CHARACTERS))
    yield Reopen()


def _attached(event: Attached, state: LogState) -> Iterator[Change]:
    state.driver = event
    # Nobody may have been left to say that it goes on.
    yield Tag("status", "RUNNING")
    yield Reopen()


def _built(event: Built, state: LogState) -> Iterator[Change]:
    if "built" in state.speakers:
        return
    state.speakers["built"], plain = event.rank, to_plain(event)
    for name in ("parameters", "input_shape", "num_classes"):
        if plain.get(name) is not None:
            yield Tag(name, text(plain[name], TAG_CHARACTERS))
    data = "data" if state.run is None else state.run.params.get("data", "data")
    counted = ("train_examples", "validation_examples", "num_classes", "input_shape", "steps_per_epoch")
    features = tensors(event.input_dtype or "float32", event.input_shape or [])
    yield DatasetUsed(
        name=text(data, NAME_CHARACTERS),
        digest=text(event.data_digest or "unknown", DIGEST_CHARACTERS),
        # As mlflow.data.schema.TensorDatasetSchema writes it: JSON within JSON.
        schema=json.dumps({"mlflow_tensorspec": {"features": features, "targets": tensors("int32", [])}}),
        profile=json.dumps({name: plain[name] for name in counted if plain.get(name) is not None}),
    )


def _measured(event: Measured, state: LogState) -> Iterator[Change]:
    group = event.group or "point"
    speaker = state.speakers.setdefault(f"measured {group}", event.rank)
    if speaker == event.rank and event.repeat > state.repeats.get(group, -1):
        state.repeats[group] = event.repeat
        yield from _point(fields.timed(group), _rate(event), event, event.repeat)


def _steps(event: Steps, state: LogState) -> Iterator[Change]:
    losses, last, seconds = event.losses, event.step, fields.number(event.seconds) or 0.0
    before, state.step = state.step, max(state.step, last)
    if last <= before:
        return
    if state.training_ms is None:
        state.training_ms = ms(event)
    for index, loss in enumerate(losses):
        if last - len(losses) + index + 1 <= before:
            continue
        # The call took `seconds` and ended now; its steps took equal parts of that.
        left = len(losses) - 1 - index
        yield from _point(fields.trained("loss"), loss, event, last - left, seconds * left / len(losses))
    for name, value in event.metrics.items():
        if name != "loss":
            yield from _curve(fields.trained(name), value, event, last, state)
    yield from _point(fields.trained("learning_rate"), event.learning_rate, event, last)
    yield from _point(fields.trained("examples_per_second"), _rate(event), event, last)


def _epoch(event: Epoch, state: LogState) -> Iterator[Change]:
    if event.epoch <= state.epoch:
        return
    state.epoch = event.epoch
    # By optimizer step, so that MLflow can draw it over the training loss; by epoch where that is the axis.
    yield from _point(fields.trained("epoch"), event.epoch, event, event.step)
    yield from _learnt(event.loss, event.metrics, event.val_loss, event.val_metrics, event, event.step, state)


def _learnt(
    loss: float | None,
    metrics: Mapping[str, float],
    val_loss: float | None,
    val_metrics: Mapping[str, float],
    event: EventBase,
    step: int,
    state: LogState,
) -> Iterator[MetricValue]:
    """Yields an epoch's metrics; a value that is sent already for that step is left out."""
    train = {fields.trained("epoch_loss"): loss} | {fields.trained(name): value for name, value in metrics.items()}
    held_out = {fields.validated(name): value for name, value in {"loss": val_loss, **val_metrics}.items()}
    for name, value in (train | held_out).items():
        yield from _curve(name, value, event, step, state)


def _curve(name: str, value: object, event: EventBase, step: int, state: LogState) -> Iterator[MetricValue]:
    """A point of a curve that has none of that step, or of a later one."""
    for point in _point(name, value, event, step):
        if state.curves.get(point.name, -1) < step:
            state.curves[point.name] = step
            yield point


def _system(event: System, state: LogState) -> Iterator[Change]:
    host = safe_name(event.host).replace("/", "_")
    step = state.samples[host] = state.samples.get(host, -1) + 1
    for name, value in event.values.items():
        yield from _point(f"system/{host}/{name}", value, event, step)


def _noted(event: Warned | Restarted, state: LogState) -> Iterator[Tag]:
    state.about.note(event.text)
    yield _described(state)


def _described(state: LogState) -> Tag:
    return Tag(NOTE_TAG, text(state.about.text, TAG_CHARACTERS))


def _saved(event: Saved, state: LogState) -> Iterator[Change]:
    state.model = event.path
    return iter(())


def _result(event: Result, state: LogState) -> Iterator[Change]:
    for name, value in event.values.items():
        if MEASUREMENT.search(name):
            called = fields.measurement(name)
            # After the repeats that it is the median of.
            repeats = {fields.timed(group): repeat + 1 for group, repeat in state.repeats.items()}
            yield from _point(called, value, event, repeats.get(called, 0) + state.commands - 1)
        elif name in RESULT_TAGS and (value is not None or state.commands > 1):
            # What the result of an earlier command said holds no longer.
            yield Tag(name, "" if value is None else text(value, TAG_CHARACTERS))
    result = results.from_values(event.values)
    yield from _ranges(result.speed)
    # What no epoch has told.
    training = result.training
    held_out = training.val_loss, training.val_metrics
    yield from _learnt(
        training.loss, training.metrics, *held_out, event, max(state.step, *state.curves.values(), 0), state
    )
    state.about.result = sentence(result)
    for note in result.notes:
        state.about.note(note)
    yield _described(state)


def _ranges(speed: results.Speed) -> Iterator[Tag]:
    """The intervals of what is compared, each in one column of MLflow's table."""
    throughput = span(speed.examples_per_second_low, speed.examples_per_second_high, rate, " to ")
    for name, ends in (
        ("speedup", span(speed.speedup_low, speed.speedup_high, bare_times, " to ")),
        (fields.FIRST, throughput),
    ):
        if ends:
            yield Tag(f"{name}_range", ends)


def _reported(event: Report, state: LogState) -> Iterator[Change]:
    """A sweep's report, written once more, and what it says: its points have the numbers, which it would double."""
    state.report = event.files
    for name, value in event.tags.items():
        yield Tag(safe_name(name), text("" if value is None else value, TAG_CHARACTERS))
    yield Tag(NOTE_TAG, text(event.text, TAG_CHARACTERS))


def _profiled(event: Profiled, state: LogState) -> Iterator[Change]:
    profile = event.values
    yield Tag("profile.bound", text(profile.bound, TAG_CHARACTERS))
    yield from _point("profile/input_examples_per_second", profile.input_examples_per_second, event, 0)
    yield from _point("profile/model_examples_per_second", profile.model_examples_per_second, event, 0)
    yield from _point("profile/ceiling_examples_per_second", profile.ceiling_examples_per_second, event, 0)


def _checked(event: Checked, state: LogState) -> Iterator[Change]:
    """Yields the outcome of the check; the sentence about it is a note of the result."""
    if event.rank == 0:
        yield Tag("check", event.values.outcome)
        if event.values.outcome != "not made":
            yield from _point(f"{fields.ONE_DEVICE}/largest_difference", event.values.largest, event, 0)


def _explained(event: Explained, state: LogState) -> Iterator[Change]:
    explanation = event.values
    for name, words in (("bound", explanation.bound), ("straggler", explanation.straggler)):
        if words:
            yield Tag(f"explain.{name}", text(words, TAG_CHARACTERS))
    yield from _point("explain/lost", explanation.lost, event, 0)
    for part in explanation.parts:
        yield from _point(f"explain/{part.name.replace(' ', '_')}", part.share, event, 0)


def _ended(event: Ended, state: LogState) -> Iterator[Change]:
    preempted = event.status == "PREEMPTED"
    status = "KILLED" if preempted else event.status if event.status in STATUSES else "FAILED"
    state.ended = True
    if preempted:
        yield Tag("preempted", "true")
    yield Tag("status", status)
    if event.error:
        yield Tag("error", text(event.error, TAG_CHARACTERS))
        state.about.error = event.error
        yield _described(state)
    yield End(status, ms(event))


def _point(name: str, value: object, event: EventBase, step: int, seconds_before: float = 0.0) -> Iterator[MetricValue]:
    number, called = fields.number(value), safe_name(name)
    if number is not None:
        yield MetricValue(called, fields.significant(called, number), ms(event) - round(1000 * seconds_before), step)


def _rate(event: Measured | Steps) -> float | None:
    examples, seconds = fields.number(event.examples), fields.number(event.seconds)
    return examples / seconds if examples is not None and seconds else None


CHANGES: dict[type[Event], Callable[[Any, LogState], Iterable[Change]]] = {
    Run: _run,
    Resumed: _resumed,
    Attached: _attached,
    Built: _built,
    Measured: _measured,
    Profiled: _profiled,
    Steps: _steps,
    Epoch: _epoch,
    System: _system,
    Warned: _noted,
    Restarted: _noted,
    Saved: _saved,
    Checked: _checked,
    Explained: _explained,
    Result: _result,
    Report: _reported,
    Ended: _ended,
}
