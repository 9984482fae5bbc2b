"""Turns an event into what it changes in an MLflow run: points, parameters, tags, the data set, the end.

A pure mapping: it imports no MLflow, and leaves the sending to `pipeline.views.mlflow.copies`.
"""

import json
import posixpath
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.analyze import comparable
from pipeline.record.events import Event

# What MLflow takes.
PARAM_CHARACTERS, TAG_CHARACTERS, NAME_CHARACTERS, DIGEST_CHARACTERS = 6000, 5000, 250, 36
NOTE_TAG = "mlflow.note.content"
# A value of result.json is a measurement where its name says a rate, a ratio or a unit.
MEASUREMENT = re.compile(
    r"per_second|speedup|efficiency|staleness|(^|_)(seconds|ms|gib|percent|joules|cost|price)(_|$)|goodput|^(input_wait|updates|restarts|rollbacks|steps_repeated)$"
)
STATUSES = ("FINISHED", "FAILED", "KILLED")


class Point(NamedTuple):
    """One value of a metric, at a time in milliseconds since 1970."""

    name: str
    value: float
    time_ms: int
    step: int


class Param(NamedTuple):
    """A parameter, fixed for the run."""

    name: str
    value: str


class Tag(NamedTuple):
    """A tag, which a later one of its name replaces."""

    name: str
    value: str


class Data(NamedTuple):
    """The data set that the run read."""

    name: str
    digest: str
    schema: str
    profile: str


class Begin(NamedTuple):
    """The run goes on after all."""


class End(NamedTuple):
    """The run is over."""

    status: str
    time_ms: int


Change = Point | Param | Tag | Data | Begin | End


@dataclass
class Replay:
    """What earlier events of a log said that later ones need.

    `conductor` is the event of the command that wrote last, the `commands`-th. Of steps, epochs and repeats that are
    made again, those up to the highest so far are known.
    """

    run: Event | None = None
    conductor: Event | None = None
    commands: int = 0
    step: int = 0
    epoch: int = 0
    repeats: dict[str, int] = field(default_factory=dict)
    time_ms: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    speakers: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    model: str | None = None
    # Of a sweep's report: paths in the sweep's folder, by the folder of the artifacts that they belong in.
    report: dict[str, list[str]] = field(default_factory=dict)
    ended: bool = False


def changes(event: Event, seen: Replay) -> Iterator[Change]:
    """What `event` changes in the MLflow run, and nothing for an event that MLflow has no place for.

    >>> event = {"event": "steps", "time": 8.0, "step": 2, "losses": [0.7, 0.6], "seconds": 1.0}
    >>> [(point.name, point.value, point.time_ms, point.step) for point in changes(event, Replay())]
    [('loss', 0.7, 7500, 1), ('loss', 0.6, 8000, 2)]
    """
    kind, group = event.get("event"), event.get("group", "point")
    if kind in _CHANGES and (group == "point" or kind == "measured"):
        seen.time_ms = max(seen.time_ms, ms(event))
        yield from _CHANGES[kind](event, seen)


def safe_name(name: str) -> str:
    """`name` as MLflow takes it for a metric, a parameter or a tag.

    >>> safe_name("top@5 (50%)"), safe_name("/a//b/../c")
    ('top_5 _50__', 'a/b/_/c')
    """
    parts = (re.sub(r"[^\w.\- :]", "_", part) for part in str(name).split("/"))
    kept = ("_" if part in (".", "..") else part for part in parts if part)
    return posixpath.join("", *kept)[:NAME_CHARACTERS].rstrip("/") or "_"


def text(value: Any, most: int) -> str:
    """`value` in `most` characters, as MLflow takes it for a value or a name."""
    whole = str(value).lower() if isinstance(value, bool) else str(value)
    # Lone surrogates, from file names that are not UTF-8, and NUL end a request or a database's insert.
    return whole.encode(errors="replace").decode().replace("\0", "")[:most]


def ms(event: Event) -> int:
    """The time of `event` in milliseconds since 1970."""
    return round(1000 * float(event["time"]))


def _run(event: Event, seen: Replay) -> Iterator[Change]:
    if seen.run is not None:
        return
    seen.run = seen.conductor = event
    seen.commands = 1
    params = {safe_name(name): text(value, PARAM_CHARACTERS) for name, value in (event.get("params") or {}).items()}
    yield from (Param(name, value) for name, value in params.items())
    for name, value in (event.get("tags") or {}).items():
        yield Tag(safe_name(name), text(value, TAG_CHARACTERS))
    yield Tag("pipeline.folder", text(event.get("folder"), TAG_CHARACTERS))
    # MLflow sorts parameters as text, and draws metrics alone.
    for name in ("workers", "replica_batch", "global_batch"):
        yield from _point(f"config/{name}", (event.get("params") or {}).get(name), event, 0)
    yield from _noted(_about(event.get("tags") or {}), seen)


def _resumed(event: Event, seen: Replay) -> Iterator[Change]:
    seen.conductor, seen.ended = event, False
    seen.commands += 1
    yield Tag("status", "RUNNING")
    yield Tag("preempted", "false")
    # What the command before ended with holds no longer.
    yield Tag("error", "")
    yield Tag(NOTE_TAG, text("\n".join(seen.notes), TAG_CHARACTERS))
    yield Tag("resumed", str(seen.commands - 1))
    # Parameters are fixed for a run in MLflow; what another command had otherwise is a tag.
    then, now = ((each or {}).get("params") or {} for each in (seen.run, event))
    for name, value in now.items():
        if then.get(name) != value:
            yield Tag(safe_name(f"resumed/{name}"), text(value, TAG_CHARACTERS))
    yield Begin()


def _built(event: Event, seen: Replay) -> Iterator[Change]:
    if "built" in seen.speakers:
        return
    seen.speakers["built"] = event.get("rank")
    for name in ("parameters", "input_shape", "num_classes"):
        if event.get(name) is not None:
            yield Tag(name, text(event[name], TAG_CHARACTERS))
    params = (seen.run or {}).get("params") or {}
    counted = ("train_examples", "validation_examples", "num_classes", "input_shape", "steps_per_epoch")
    features = _tensors(event.get("input_dtype") or "float32", event.get("input_shape") or [])
    yield Data(
        name=text(params.get("data", "data"), NAME_CHARACTERS),
        digest=text(event.get("data_digest") or "unknown", DIGEST_CHARACTERS),
        # As mlflow.data.schema.TensorDatasetSchema writes it: JSON within JSON.
        schema=json.dumps({"mlflow_tensorspec": {"features": features, "targets": _tensors("int32", [])}}),
        profile=json.dumps({name: event[name] for name in counted if event.get(name) is not None}),
    )


def _measured(event: Event, seen: Replay) -> Iterator[Change]:
    group = event.get("group", "point")
    known = seen.repeats.get(group, -1)
    if (
        seen.speakers.setdefault(f"measured {group}", event.get("rank")) == event.get("rank")
        and event["repeat"] > known
    ):
        seen.repeats[group] = event["repeat"]
        yield from _point(f"measure/{group}/examples_per_second", _rate(event), event, event["repeat"])


def _steps(event: Event, seen: Replay) -> Iterator[Change]:
    losses, last, seconds = event.get("losses") or [], int(event["step"]), _number(event.get("seconds")) or 0.0
    before, seen.step = seen.step, max(seen.step, last)
    if last <= before:
        return
    for index, loss in enumerate(losses):
        if last - len(losses) + index + 1 <= before:
            continue
        # The call took `seconds` and ended now; its steps took equal parts of that.
        left = len(losses) - 1 - index
        yield from _point("loss", loss, event, last - left, seconds * left / len(losses))
    for name, value in (event.get("metrics") or {}).items():
        if name != "loss":
            yield from _point(name, value, event, last)
    yield from _point("learning_rate", event.get("learning_rate"), event, last)
    yield from _point("live/examples_per_second", _rate(event), event, last)


def _epoch(event: Event, seen: Replay) -> Iterator[Change]:
    if event["epoch"] <= seen.epoch:
        return
    seen.epoch = event["epoch"]
    for name, value in (_trained(event) | _validated(event)).items():
        yield from _point(f"epoch/{name}", value, event, event["epoch"])
    # By optimizer step too, so that MLflow can draw it over the training loss.
    for name, value in _validated(event).items():
        yield from _point(name, value, event, event["step"])


def _system(event: Event, seen: Replay) -> Iterator[Change]:
    host = safe_name(str(event.get("host"))).replace("/", "_")
    step = seen.samples[host] = seen.samples.get(host, -1) + 1
    for name, value in (event.get("values") or {}).items():
        yield from _point(f"system/{host}/{name}", value, event, step)


def _warning(event: Event, seen: Replay) -> Iterator[Change]:
    return _noted([str(event.get("text"))], seen)


def _noted(notes: Iterable[str], seen: Replay) -> Iterator[Tag]:
    """The run's description, where `notes` are new to it."""
    new = [f"- {note}" for note in dict.fromkeys(notes) if f"- {note}" not in seen.notes]
    seen.notes += new
    if new:
        yield Tag(NOTE_TAG, text("\n".join(seen.notes), TAG_CHARACTERS))


def _about(tags: Mapping[str, Any]) -> Iterator[str]:
    """What was asked for, and what its speed is to be taken for.

    >>> list(_about({"overrides": "workers=2", "rehearsal": "true", "oversubscribed": "false"}))
    ['`workers=2`', '**rehearsal**: logical devices stand for others, so the speed is not theirs.']
    """
    if tags.get("overrides"):
        yield f"`{str(tags['overrides']).replace('`', '?')}`"
    for name, why in comparable.DOUBTS.items():
        if tags.get(name) == "true":
            yield f"**{name}**: {why}"


def _saved(event: Event, seen: Replay) -> Iterator[Change]:
    seen.model = str(event["path"])
    return iter(())


def _result(event: Event, seen: Replay) -> Iterator[Change]:
    values = event.get("values") or {}
    for name, value in values.items():
        if MEASUREMENT.search(name):
            yield from _point(name, value, event, seen.commands - 1)
    # Beside the curves of the same names, not in them.
    for name, value in (_trained(values) | _validated(values)).items():
        yield from _point(f"final/{name}", value, event, seen.commands - 1)
    for name in ("status", "error", "rehearsal", "oversubscribed", "asynchronous", "input_bound"):
        if values.get(name) is not None:
            yield Tag(name, text(values[name], TAG_CHARACTERS))
    yield from _noted(values.get("notes") or (), seen)


def _reported(event: Event, seen: Replay) -> Iterator[Change]:
    """A sweep's report, written once more: what it says, and the numbers of its best point."""
    seen.report = event.get("files") or {}
    for name, value in (event.get("values") or {}).items():
        yield from _point(name, value, event, seen.commands - 1)
    for name, value in (event.get("tags") or {}).items():
        yield Tag(safe_name(name), text("" if value is None else value, TAG_CHARACTERS))
    yield Tag(NOTE_TAG, text(event.get("text") or "", TAG_CHARACTERS))


def _profiled(event: Event, seen: Replay) -> Iterator[Change]:
    values = event.get("values") or {}
    if values.get("bound"):
        yield Tag("profile.bound", text(values["bound"], TAG_CHARACTERS))
    for name in ("input_examples_per_second", "model_examples_per_second", "ceiling_examples_per_second"):
        yield from _point(f"profile/{name}", values.get(name), event, 0)


def _explained(event: Event, seen: Replay) -> Iterator[Change]:
    values = event.get("values") or {}
    for name in ("bound", "straggler"):
        if values.get(name):
            yield Tag(f"explain.{name}", text(values[name], TAG_CHARACTERS))
    yield from _point("explain/lost", values.get("lost"), event, 0)
    for part in values.get("parts") or ():
        yield from _point(f"explain/{part['name'].replace(' ', '_')}", part["share"], event, 0)


def _ended(event: Event, seen: Replay) -> Iterator[Change]:
    preempted = event.get("status") == "PREEMPTED"
    status = "KILLED" if preempted else event.get("status") if event.get("status") in STATUSES else "FAILED"
    seen.ended = True
    if preempted:
        yield Tag("preempted", "true")
    yield Tag("status", str(status))
    if event.get("error"):
        yield Tag("error", text(event["error"], TAG_CHARACTERS))
        yield Tag(NOTE_TAG, text("\n".join([f"**{event['error']}**\n", *seen.notes]), TAG_CHARACTERS))
    yield End(str(status), ms(event))


_CHANGES: dict[str, Callable[[Event, Replay], Iterator[Change]]] = {
    "run": _run, "built": _built, "measured": _measured, "steps": _steps, "epoch": _epoch, "system": _system,
    "warning": _warning, "resumed": _resumed, "restarted": _warning, "profiled": _profiled, "saved": _saved,
    "explained": _explained, "result": _result, "report": _reported, "ended": _ended,
}  # fmt: skip


def _point(name: str, value: Any, event: Event, step: Any, seconds_before: float = 0.0) -> Iterator[Point]:
    number = _number(value)
    if number is not None:
        yield Point(safe_name(name), number, ms(event) - round(1000 * seconds_before), int(step))


def _rate(event: Event) -> float | None:
    examples, seconds = _number(event.get("examples")), _number(event.get("seconds"))
    return examples / seconds if examples is not None and seconds else None


def _number(value: Any) -> float | None:
    """`value` where it is a finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _trained(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"loss": values.get("loss"), **(values.get("metrics") or {})}


def _validated(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {"loss": values.get("val_loss"), **(values.get("val_metrics") or {})}
    return {name if name.startswith("val_") else f"val_{name}": value for name, value in found.items()}


def _tensors(dtype: Any, shape: Any) -> str:
    """MLflow's words for a tensor of one example's `shape`, or for several, named as in the two mappings.

    >>> _tensors("int32", [3])
    '[{"type": "tensor", "tensor-spec": {"dtype": "int32", "shape": [-1, 3]}}]'
    """
    named = shape if isinstance(shape, Mapping) else {None: shape}
    dtypes = dtype if isinstance(dtype, Mapping) else {}
    return json.dumps(
        [
            ({} if name is None else {"name": str(name)})
            | {"type": "tensor", "tensor-spec": {"dtype": str(dtypes.get(name, dtype)), "shape": [-1, *each]}}
            for name, each in named.items()
        ]
    )
