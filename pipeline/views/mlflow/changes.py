"""Turns an event into what it changes in an MLflow run: points, parameters, tags, the data set, the end.

A pure mapping: it imports no MLflow, and leaves the sending to `pipeline.views.mlflow.copies`.
"""

import json
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

from pipeline.analyze import comparable
from pipeline.record import results
from pipeline.record.events import (
    Beat,
    Built,
    Calibrated,
    Checked,
    Checkpoint,
    Ended,
    Epoch,
    Event,
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
    Told,
    Unknown,
    Unreachable,
    Warned,
)  # fmt: skip
from pipeline.views.mlflow.change import Begin, Change, Data, End, Param, Point, Tag

# What MLflow takes.
PARAM_CHARACTERS, TAG_CHARACTERS, NAME_CHARACTERS, DIGEST_CHARACTERS = 6000, 5000, 250, 36
NOTE_TAG = "mlflow.note.content"
# A value of result.json is a measurement where its name says a rate, a ratio or a unit.
MEASUREMENT = re.compile(
    r"per_second|speedup|efficiency|staleness|(^|_)(seconds|ms|gib|percent|joules|cost|price)(_|$)|goodput|^(input_wait|updates|restarts|rollbacks|steps_repeated)$"
)
# What of it are tags.
TOLD = ("status", "error", "rehearsal", "oversubscribed", "asynchronous", "input_bound")
STATUSES = ("FINISHED", "FAILED", "KILLED")


@dataclass
class Replay:
    """What earlier events of a log said that later ones need.

    `conductor` is the event of the command that wrote last, the `commands`-th. Of steps, epochs and repeats that are
    made again, those up to the highest so far are known.
    """

    run: Run | None = None
    conductor: Run | Resumed | None = None
    commands: int = 0
    step: int = 0
    epoch: int = 0
    repeats: dict[str, int] = field(default_factory=dict)
    time_ms: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    speakers: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    model: str | None = None
    # Of a sweep's report: paths in the sweep's folder, by the folder of the artifacts that they belong in.
    report: dict[str, list[str]] = field(default_factory=dict)
    ended: bool = False


def changes(event: Event, seen: Replay) -> Iterator[Change]:
    """What `event` changes in the MLflow run, and nothing for an event that MLflow has no place for.

    >>> event = Steps(2, [0.7, 0.6], seconds=1.0, time=8.0)
    >>> [(point.name, point.value, point.time_ms, point.step) for point in changes(event, Replay())]
    [('loss', 0.7, 7500, 1), ('loss', 0.6, 8000, 2)]
    """
    made = _changes(event, seen) if event.of_point or isinstance(event, Measured) else None
    if made is not None:
        seen.time_ms = max(seen.time_ms, ms(event))
        yield from made


def safe_name(name: str) -> str:
    """`name` as MLflow takes it for a metric, a parameter or a tag.

    >>> safe_name("top@5 (50%)"), safe_name("/a//b/../c")
    ('top_5 _50__', 'a/b/_/c')
    """
    parts = (re.sub(r"[^\w.\- :]", "_", part) for part in str(name).split("/"))
    kept = ("_" if part in (".", "..") else part for part in parts if part)
    return posixpath.join("", *kept)[:NAME_CHARACTERS].rstrip("/") or "_"


def text(value: object, most: int) -> str:
    """`value` in `most` characters, as MLflow takes it for a value or a name."""
    whole = str(value).lower() if isinstance(value, bool) else str(value)
    # Lone surrogates, from file names that are not UTF-8, and NUL end a request or a database's insert.
    return whole.encode(errors="replace").decode().replace("\0", "")[:most]


def ms(event: Told) -> int:
    """The time of `event` in milliseconds since 1970."""
    return round(1000 * event.time)


def _changes(event: Event, seen: Replay) -> Iterable[Change] | None:
    """The same, made as it is gone through; None where MLflow has no place for such an event."""
    match event:
        case Run():
            return _run(event, seen)
        case Resumed():
            return _resumed(event, seen)
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
            return _noted([note], seen)
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
        yield from _point(f"config/{name}", event.params.get(name), event, 0)
    yield from _noted(_about(event.tags), seen)


def _resumed(event: Resumed, seen: Replay) -> Iterator[Change]:
    seen.conductor, seen.ended = event, False
    seen.commands += 1
    yield Tag("status", "RUNNING")
    yield Tag("preempted", "false")
    # What the command before ended with holds no longer.
    yield Tag("error", "")
    yield Tag(NOTE_TAG, text("\n".join(seen.notes), TAG_CHARACTERS))
    yield Tag("resumed", str(seen.commands - 1))
    # Parameters are fixed for a run in MLflow; what another command had otherwise is a tag.
    then = {} if seen.run is None else seen.run.params
    for name, value in event.params.items():
        if then.get(name) != value:
            yield Tag(safe_name(f"resumed/{name}"), text(value, TAG_CHARACTERS))
    yield Begin()


def _built(event: Built, seen: Replay) -> Iterator[Change]:
    if "built" in seen.speakers:
        return
    seen.speakers["built"], plain = event.rank, event.own()
    for name in ("parameters", "input_shape", "num_classes"):
        if plain.get(name) is not None:
            yield Tag(name, text(plain[name], TAG_CHARACTERS))
    data = "data" if seen.run is None else seen.run.params.get("data", "data")
    counted = ("train_examples", "validation_examples", "num_classes", "input_shape", "steps_per_epoch")
    features = _tensors(event.input_dtype or "float32", event.input_shape or [])
    yield Data(
        name=text(data, NAME_CHARACTERS),
        digest=text(event.data_digest or "unknown", DIGEST_CHARACTERS),
        # As mlflow.data.schema.TensorDatasetSchema writes it: JSON within JSON.
        schema=json.dumps({"mlflow_tensorspec": {"features": features, "targets": _tensors("int32", [])}}),
        profile=json.dumps({name: plain[name] for name in counted if plain.get(name) is not None}),
    )


def _measured(event: Measured, seen: Replay) -> Iterator[Change]:
    group = event.group or "point"
    speaker = seen.speakers.setdefault(f"measured {group}", event.rank)
    if speaker == event.rank and event.repeat > seen.repeats.get(group, -1):
        seen.repeats[group] = event.repeat
        yield from _point(f"measure/{group}/examples_per_second", _rate(event), event, event.repeat)


def _steps(event: Steps, seen: Replay) -> Iterator[Change]:
    losses, last, seconds = event.losses, event.step, _number(event.seconds) or 0.0
    before, seen.step = seen.step, max(seen.step, last)
    if last <= before:
        return
    for index, loss in enumerate(losses):
        if last - len(losses) + index + 1 <= before:
            continue
        # The call took `seconds` and ended now; its steps took equal parts of that.
        left = len(losses) - 1 - index
        yield from _point("loss", loss, event, last - left, seconds * left / len(losses))
    for name, value in event.metrics.items():
        if name != "loss":
            yield from _point(name, value, event, last)
    yield from _point("learning_rate", event.learning_rate, event, last)
    yield from _point("live/examples_per_second", _rate(event), event, last)


def _epoch(event: Epoch, seen: Replay) -> Iterator[Change]:
    if event.epoch <= seen.epoch:
        return
    seen.epoch, held_out = event.epoch, _validated(event.val_loss, event.val_metrics)
    for name, value in ({"loss": event.loss, **event.metrics} | held_out).items():
        yield from _point(f"epoch/{name}", value, event, event.epoch)
    # By optimizer step too, so that MLflow can draw it over the training loss.
    for name, value in held_out.items():
        yield from _point(name, value, event, event.step)


def _system(event: System, seen: Replay) -> Iterator[Change]:
    host = safe_name(event.host).replace("/", "_")
    step = seen.samples[host] = seen.samples.get(host, -1) + 1
    for name, value in event.values.items():
        yield from _point(f"system/{host}/{name}", value, event, step)


def _noted(notes: Iterable[str], seen: Replay) -> Iterator[Tag]:
    """The run's description, where `notes` are new to it."""
    new = [f"- {note}" for note in dict.fromkeys(notes) if f"- {note}" not in seen.notes]
    seen.notes += new
    if new:
        yield Tag(NOTE_TAG, text("\n".join(seen.notes), TAG_CHARACTERS))


def _about(tags: Mapping[str, object]) -> Iterator[str]:
    """What was asked for, and what its speed is to be taken for.

    >>> list(_about({"overrides": "workers=2", "rehearsal": "true", "oversubscribed": "false"}))
    ['`workers=2`', '**rehearsal**: logical devices stand for others, so the speed is not theirs.']
    """
    if tags.get("overrides"):
        yield f"`{str(tags['overrides']).replace('`', '?')}`"
    for name, why in comparable.DOUBTS.items():
        if tags.get(name) == "true":
            yield f"**{name}**: {why}"


def _saved(event: Saved, seen: Replay) -> Iterator[Change]:
    seen.model = event.path
    return iter(())


def _result(event: Result, seen: Replay) -> Iterator[Change]:
    for name, value in event.values.items():
        if MEASUREMENT.search(name):
            yield from _point(name, value, event, seen.commands - 1)
        elif name in TOLD and value is not None:
            yield Tag(name, text(value, TAG_CHARACTERS))
    result = results.from_values(event.values)
    training = result.training
    # Beside the curves of the same names, not in them.
    trained = {"loss": training.loss, **training.metrics}
    for name, value in (trained | _validated(training.val_loss, training.val_metrics)).items():
        yield from _point(f"final/{name}", value, event, seen.commands - 1)
    yield from _noted(result.notes, seen)


def _reported(event: Report, seen: Replay) -> Iterator[Change]:
    """A sweep's report, written once more: what it says, and the numbers of its best point."""
    seen.report = event.files
    for name, value in event.values.items():
        yield from _point(name, value, event, seen.commands - 1)
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
            yield from _point("check/largest_difference", event.values.largest, event, 0)


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
        yield Tag(NOTE_TAG, text("\n".join([f"**{event.error}**\n", *seen.notes]), TAG_CHARACTERS))
    yield End(status, ms(event))


def _point(name: str, value: object, event: Told, step: int, seconds_before: float = 0.0) -> Iterator[Point]:
    number = _number(value)
    if number is not None:
        yield Point(safe_name(name), number, ms(event) - round(1000 * seconds_before), step)


def _rate(event: Measured | Steps) -> float | None:
    examples, seconds = _number(event.examples), _number(event.seconds)
    return examples / seconds if examples is not None and seconds else None


def _number(value: object) -> float | None:
    """`value` where it is a finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _validated(loss: float | None, metrics: Mapping[str, float]) -> dict[str, float | None]:
    found = {"loss": loss, **metrics}
    return {name if name.startswith("val_") else f"val_{name}": value for name, value in found.items()}


def _tensors(dtype: object, shape: Any) -> str:
    """MLflow's words for a tensor of one example's `shape`, or for several, named as in the two mappings.

    >>> _tensors("int32", [3])
    '[{"type": "tensor", "tensor-spec": {"dtype": "int32", "shape": [-1, 3]}}]'
    """
    named = shape if isinstance(shape, Mapping) else {None: shape}
    dtypes = dtype if isinstance(dtype, Mapping) else {}
    return json.dumps(
        [
            ({} if name is None else {"name": str(name)})
            | {"type": "tensor", "tensor-spec": {"dtype": str(dtypes.get(name, dtype)), "shape": [-1, *axes]}}
            for name, axes in named.items()
        ]
    )
