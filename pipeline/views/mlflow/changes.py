"""Turns an event into what it changes in an MLflow run: points, parameters, tags, the data set, the end.

A pure mapping: it imports no MLflow, and leaves the sending to `pipeline.views.mlflow.copies`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from pipeline.analyze import comparable
from pipeline.record import results
from pipeline.record.events import (
    Attached,
    Beat,
    Built,
    Calibrated,
    Checked,
    Checkpoint,
    Ended,
    Epoch,
    Event,
    EventBase,
    Exited,
    Explained,
    Explaining,
    Failed,
    Finished,
    Joined,
    Left,
    Loaded,
    Measured,
    Profiled,
    Profiling,
    Report,
    Restarted,
    Restored,
    Result,
    Resumed,
    Run,
    Saved,
    Signalled,
    Sized,
    Started,
    Steps,
    Stopped,
    System,
    Unknown,
    Unreachable,
    Warned,
)
from pipeline.record.log import to_plain
from pipeline.views.mlflow import names
from pipeline.views.mlflow.change import Begin, Change, Data, End, Param, Point, Tag
from pipeline.views.mlflow.description import About, sentence
from pipeline.views.mlflow.texts import (
    DIGEST_CHARACTERS,
    NAME_CHARACTERS,
    PARAM_CHARACTERS,
    TAG_CHARACTERS,
    ms,
    safe_name,
    tensors,
    text,
)
from pipeline.views.terminal.words import bare_times, rate, span

NOTE_TAG = "mlflow.note.content"
# A value of result.json is a measurement where its name says a rate, a ratio or a unit.
MEASUREMENT = re.compile(
    r"per_second|speedup|efficiency|staleness|(^|_)(seconds|ms|gib|percent|joules|cost|price)(_|$)|goodput|^(input_wait|other_work|updates|restarts|rollbacks|steps_repeated)$"
)
# What of it are tags.
TOLD = ("status", "error", "rehearsal", "oversubscribed", "asynchronous", "input_bound", "stopped_by")
STATUSES = ("FINISHED", "FAILED", "KILLED")


@dataclass
class Replay:
    """What earlier events of a log said that later ones need.

    `conductor` is the event of the command that wrote last, the `commands`-th. Of steps, epochs and repeats that are
    made again, those up to the highest so far are known.
    """

    run: Run | None = None
    conductor: Run | Resumed | Attached | None = None
    commands: int = 0
    step: int = 0
    epoch: int = 0
    repeats: dict[str, int] = field(default_factory=dict)
    # When training told of its first steps, and of what it has told up to which step.
    training_ms: int | None = None
    told: dict[str, int] = field(default_factory=dict)
    time_ms: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    speakers: dict[str, int] = field(default_factory=dict)
    about: About = field(default_factory=About)
    model: str | None = None
    # Of a sweep's report: paths in the sweep's folder, by the folder of the artifacts that they belong in.
    report: dict[str, list[str]] = field(default_factory=dict)
    ended: bool = False


def changes(event: Event, seen: Replay) -> Iterator[Change]:
    """What `event` changes in the MLflow run, and nothing for an event that MLflow has no place for.

    >>> event = Steps(2, [0.7, 0.6], seconds=1.0, time=8.0)
    >>> [(point.name, point.value, point.time_ms, point.step) for point in changes(event, Replay())]
    [('train/loss', 0.7, 7500, 1), ('train/loss', 0.6, 8000, 2)]
    """
    made = _changes(event, seen) if event.of_point or isinstance(event, Measured) else None
    if made is not None:
        seen.time_ms = max(seen.time_ms, ms(event))
        yield from made


def _changes(event: Event, seen: Replay) -> Iterable[Change] | None:
    """The same, made as it is gone through; None where MLflow has no place for such an event."""
    match event:
        case Run():
            return _run(event, seen)
        case Resumed():
            return _resumed(event, seen)
        case Attached():
            return _attached(event, seen)
        case Built():
            return _built(event, seen)
        case Measured():
            return _measured(event, seen)
        case Profiled():
            return _profiled(event)
        case Steps():
            return _steps(event, seen)
        case Epoch():
            return _epoch(event, seen)
        case System():
            return _system(event, seen)
        case Warned(text=note) | Restarted(text=note):
            return _noted(note, seen)
        case Saved():
            return _saved(event, seen)
        case Checked():
            return _checked(event)
        case Explained():
            return _explained(event)
        case Result():
            return _result(event, seen)
        case Report():
            return _reported(event, seen)
        case Ended():
            return _ended(event, seen)
        case (
            Started() | Joined() | Loaded() | Sized() | Profiling() | Calibrated() | Restored() | Checkpoint() | Left()
            | Signalled() | Failed() | Finished() | Explaining() | Beat() | Stopped() | Unreachable() | Exited()
            | Unknown()
        ):  # fmt: skip
            return None
    assert_never(event)


def _run(event: Run, seen: Replay) -> Iterator[Change]:
    if seen.run is not None:
        return
    seen.run = seen.conductor = event
    seen.commands = 1
    params = {safe_name(name): text(value, PARAM_CHARACTERS) for name, value in event.params.items()}
    yield from (Param(name, value) for name, value in params.items())
    for name, value in event.tags.items():
        yield Tag(safe_name(name), text(value, TAG_CHARACTERS))
    yield Tag("pipeline.folder", text(event.folder, TAG_CHARACTERS))
    # MLflow sorts parameters as text, and draws metrics alone.
    for name in ("workers", "replica_batch", "global_batch"):
        yield from _point(names.trained(name), event.params.get(name), event, 0)
    seen.about.command = str(event.tags.get("command") or event.tags.get("overrides") or "")
    seen.about.commit = str(event.tags.get("git_commit") or "")
    for name, why in comparable.DOUBTS.items():
        if event.tags.get(name) == "true":
            seen.about.note(f"**{name}**: {why}")
    yield _described(seen)


def _resumed(event: Resumed, seen: Replay) -> Iterator[Change]:
    seen.conductor, seen.ended = event, False
    seen.commands += 1
    yield Tag("status", "RUNNING")
    yield Tag("preempted", "false")
    # What the command before ended with holds no longer.
    yield Tag("error", "")
    seen.about.error = ""
    yield _described(seen)
    yield Tag("resumed", str(seen.commands - 1))
    # Parameters are fixed for a run in MLflow; what another command had otherwise is a tag.
    then = {} if seen.run is None else seen.run.params
    for name, value in event.params.items():
        if then.get(name) != value:
            yield Tag(safe_name(f"resumed/{name}"), text(value, TAG_CHARACTERS))
    yield Begin()


def _attached(event: Attached, seen: Replay) -> Iterator[Change]:
    seen.conductor = event
    # Nobody may have been left to say that it goes on.
    yield Tag("status", "RUNNING")
    yield Begin()


def _built(event: Built, seen: Replay) -> Iterator[Change]:
    if "built" in seen.speakers:
        return
    seen.speakers["built"], plain = event.rank, to_plain(event)
    for name in ("parameters", "input_shape", "num_classes"):
        if plain.get(name) is not None:
            yield Tag(name, text(plain[name], TAG_CHARACTERS))
    data = "data" if seen.run is None else seen.run.params.get("data", "data")
    counted = ("train_examples", "validation_examples", "num_classes", "input_shape", "steps_per_epoch")
    features = tensors(event.input_dtype or "float32", event.input_shape or [])
    yield Data(
        name=text(data, NAME_CHARACTERS),
        digest=text(event.data_digest or "unknown", DIGEST_CHARACTERS),
        # As mlflow.data.schema.TensorDatasetSchema writes it: JSON within JSON.
        schema=json.dumps({"mlflow_tensorspec": {"features": features, "targets": tensors("int32", [])}}),
        profile=json.dumps({name: plain[name] for name in counted if plain.get(name) is not None}),
    )


def _measured(event: Measured, seen: Replay) -> Iterator[Change]:
    group = event.group or "point"
    speaker = seen.speakers.setdefault(f"measured {group}", event.rank)
    if speaker == event.rank and event.repeat > seen.repeats.get(group, -1):
        seen.repeats[group] = event.repeat
        yield from _point(names.timed(group), _rate(event), event, event.repeat)


def _steps(event: Steps, seen: Replay) -> Iterator[Change]:
    losses, last, seconds = event.losses, event.step, names.number(event.seconds) or 0.0
    before, seen.step = seen.step, max(seen.step, last)
    if last <= before:
        return
    if seen.training_ms is None:
        seen.training_ms = ms(event)
    for index, loss in enumerate(losses):
        if last - len(losses) + index + 1 <= before:
            continue
        # The call took `seconds` and ended now; its steps took equal parts of that.
        left = len(losses) - 1 - index
        yield from _point(names.trained("loss"), loss, event, last - left, seconds * left / len(losses))
    for name, value in event.metrics.items():
        if name != "loss":
            yield from _curve(names.trained(name), value, event, last, seen)
    yield from _point(names.trained("learning_rate"), event.learning_rate, event, last)
    yield from _point(names.trained("examples_per_second"), _rate(event), event, last)


def _epoch(event: Epoch, seen: Replay) -> Iterator[Change]:
    if event.epoch <= seen.epoch:
        return
    seen.epoch = event.epoch
    # By optimizer step, so that MLflow can draw it over the training loss; by epoch where that is the axis.
    yield from _point(names.trained("epoch"), event.epoch, event, event.step)
    yield from _learnt(event.loss, event.metrics, event.val_loss, event.val_metrics, event, event.step, seen)


def _learnt(
    loss: float | None,
    metrics: Mapping[str, float],
    val_loss: float | None,
    val_metrics: Mapping[str, float],
    event: EventBase,
    step: int,
    seen: Replay,
) -> Iterator[Point]:
    """What an epoch came to. What was told of that step is not told again."""
    train = {names.trained("epoch_loss"): loss} | {names.trained(name): value for name, value in metrics.items()}
    held_out = {names.validated(name): value for name, value in {"loss": val_loss, **val_metrics}.items()}
    for name, value in (train | held_out).items():
        yield from _curve(name, value, event, step, seen)


def _curve(name: str, value: object, event: EventBase, step: int, seen: Replay) -> Iterator[Point]:
    """A point of a curve that has none of that step, or of a later one."""
    for point in _point(name, value, event, step):
        if seen.told.get(point.name, -1) < step:
            seen.told[point.name] = step
            yield point


def _system(event: System, seen: Replay) -> Iterator[Change]:
    host = safe_name(event.host).replace("/", "_")
    step = seen.samples[host] = seen.samples.get(host, -1) + 1
    for name, value in event.values.items():
        yield from _point(f"system/{host}/{name}", value, event, step)


def _noted(note: str, seen: Replay) -> Iterator[Tag]:
    """The run's description with the note in it."""
    seen.about.note(note)
    yield _described(seen)


def _described(seen: Replay) -> Tag:
    return Tag(NOTE_TAG, text(seen.about.text, TAG_CHARACTERS))


def _saved(event: Saved, seen: Replay) -> Iterator[Change]:
    seen.model = event.path
    return iter(())


def _result(event: Result, seen: Replay) -> Iterator[Change]:
    for name, value in event.values.items():
        if MEASUREMENT.search(name):
            called = names.measurement(name)
            # After the repeats that it is the median of.
            repeats = {names.timed(group): repeat + 1 for group, repeat in seen.repeats.items()}
            yield from _point(called, value, event, repeats.get(called, 0) + seen.commands - 1)
        elif name in TOLD and (value is not None or seen.commands > 1):
            # What the result of an earlier command said holds no longer.
            yield Tag(name, "" if value is None else text(value, TAG_CHARACTERS))
    result = results.from_values(event.values)
    yield from _ranges(result.speed)
    # What no epoch has told.
    training = result.training
    held_out = training.val_loss, training.val_metrics
    yield from _learnt(training.loss, training.metrics, *held_out, event, max(seen.step, *seen.told.values(), 0), seen)
    seen.about.result = sentence(result)
    for note in result.notes:
        seen.about.note(note)
    yield _described(seen)


def _ranges(speed: results.Speed) -> Iterator[Tag]:
    """The intervals of what is compared, each in one column of MLflow's table."""
    throughput = span(speed.examples_per_second_low, speed.examples_per_second_high, rate, " to ")
    for name, told in (
        ("speedup", span(speed.speedup_low, speed.speedup_high, bare_times, " to ")),
        (names.FIRST, throughput),
    ):
        if told:
            yield Tag(f"{name}_range", told)


def _reported(event: Report, seen: Replay) -> Iterator[Change]:
    """A sweep's report, written once more, and what it says: its points have the numbers, which it would double."""
    seen.report = event.files
    for name, said in event.tags.items():
        yield Tag(safe_name(name), text("" if said is None else said, TAG_CHARACTERS))
    yield Tag(NOTE_TAG, text(event.text, TAG_CHARACTERS))


def _profiled(event: Profiled) -> Iterator[Change]:
    found = event.values
    yield Tag("profile.bound", text(found.bound, TAG_CHARACTERS))
    yield from _point("profile/input_examples_per_second", found.input_examples_per_second, event, 0)
    yield from _point("profile/model_examples_per_second", found.model_examples_per_second, event, 0)
    yield from _point("profile/ceiling_examples_per_second", found.ceiling_examples_per_second, event, 0)


def _checked(event: Checked) -> Iterator[Change]:
    """What came of the check; the sentence about it is a note of the result."""
    if event.rank == 0:
        yield Tag("check", event.values.outcome)
        if event.values.outcome != "not made":
            yield from _point(f"{names.ONE_DEVICE}/largest_difference", event.values.largest, event, 0)


def _explained(event: Explained) -> Iterator[Change]:
    found = event.values
    for name, said in (("bound", found.bound), ("straggler", found.straggler)):
        if said:
            yield Tag(f"explain.{name}", text(said, TAG_CHARACTERS))
    yield from _point("explain/lost", found.lost, event, 0)
    for part in found.parts:
        yield from _point(f"explain/{part.name.replace(' ', '_')}", part.share, event, 0)


def _ended(event: Ended, seen: Replay) -> Iterator[Change]:
    preempted = event.status == "PREEMPTED"
    status = "KILLED" if preempted else event.status if event.status in STATUSES else "FAILED"
    seen.ended = True
    if preempted:
        yield Tag("preempted", "true")
    yield Tag("status", status)
    if event.error:
        yield Tag("error", text(event.error, TAG_CHARACTERS))
        seen.about.error = event.error
        yield _described(seen)
    yield End(status, ms(event))


def _point(name: str, value: object, event: EventBase, step: int, seconds_before: float = 0.0) -> Iterator[Point]:
    number, called = names.number(value), safe_name(name)
    if number is not None:
        yield Point(called, names.significant(called, number), ms(event) - round(1000 * seconds_before), step)


def _rate(event: Measured | Steps) -> float | None:
    examples, seconds = names.number(event.examples), names.number(event.seconds)
    return examples / seconds if examples is not None and seconds else None
