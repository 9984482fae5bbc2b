"""Turns a run's event log into an MLflow run: as it grows, by a process of its own, or later, by `sync`.

    python -m pipeline.track follow      started by a `Tracker`; told on standard input which logs to follow
    python -m pipeline.track sync        sends what MLflow does not hold yet, and ends runs of dead conductors

Both replay the log through `changes`, and note in the run's `tracking.json` how far they came. To send a
thing twice changes nothing: a run is found again by its key, and MLflow stores an equal point once. The
follower is a process because MLflow takes seconds to import and its server may hang: the conductor waits
for neither.
"""

import argparse
import contextlib
import fcntl
import json
import os
import posixpath
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from pipeline import events
from pipeline.events import Event

LOG, STATE = "events.jsonl", "tracking.json"
# How often, in seconds, a log is looked at before its run exists in MLflow, and after.
FIRST_SECONDS, NEXT_SECONDS = 0.3, 2.0
# Between attempts at a store that fails: at first, at most, and while someone waits.
RETRY_SECONDS, RETRY_SECONDS_MOST, RETRY_SECONDS_WAITED_FOR = 1.0, 30.0, 0.3
# After the conductor is gone: for sending what is left, and until the process ends whatever it is doing.
LAST_SECONDS, HARD_SECONDS = 10.0, 20.0
# How much nicer than the conductor the follower is, except while someone waits for it.
NICENESS = 10
# One request to a server, and one file sent to it.
REQUEST_SECONDS, UPLOAD_SECONDS = 5, 60
TIMEOUT_VARIABLE = "MLFLOW_HTTP_REQUEST_TIMEOUT"
# MLflow refuses more than 1000 points in a request, and more than 1 MB: 20 long parameters stay below.
POINTS_A_REQUEST, POINTS_A_REQUEST_LEAST, TEXTS_A_REQUEST = 1000, 50, 20
PARAM_CHARACTERS, TAG_CHARACTERS, NAME_CHARACTERS, DIGEST_CHARACTERS = 6000, 5000, 250, 36
KEY_TAG, NOTE_TAG = "pipeline.key", "mlflow.note.content"
# A value of result.json is a measurement where its name says a rate, a ratio or a unit.
MEASUREMENT = re.compile(r"per_second|speedup|efficiency|(^|_)(seconds|ms|gib|percent)(_|$)")
STATUSES = ("FINISHED", "FAILED", "KILLED")
# What MLflow says of a server that took too long.
LATE = r"timeout exception|timed out"

Store = Mapping[str, Any]
Kind = TypeVar("Kind")


class TrackError(RuntimeError):
    """A run that cannot be sent; the message says what was expected and what to do."""


# What an event changes in an MLflow run.


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


class End(NamedTuple):
    """The run is over."""

    status: str
    time_ms: int


Change = Point | Param | Tag | Data | End


@dataclass
class Seen:
    """What earlier events of a log said that later ones need."""

    run: Event | None = None
    time_ms: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    speakers: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    model: str | None = None
    ended: bool = False


def changes(event: Event, seen: Seen) -> Iterator[Change]:
    """What `event` changes in the MLflow run, and nothing for an event that MLflow has no place for.

    >>> event = {"event": "steps", "time": 8.0, "step": 2, "losses": [0.7, 0.6], "seconds": 1.0}
    >>> [(point.name, point.value, point.time_ms, point.step) for point in changes(event, Seen())]
    [('loss', 0.7, 7500, 1), ('loss', 0.6, 8000, 2)]
    """
    kind, group = event.get("event"), event.get("group", "point")
    if kind in _CHANGES and (group == "point" or kind == "measured"):
        seen.time_ms = max(seen.time_ms, _ms(event))
        yield from _CHANGES[kind](event, seen)


def safe_name(name: str) -> str:
    """`name` as MLflow takes it for a metric, a parameter or a tag.

    >>> safe_name("top@5 (50%)"), safe_name("/a//b/../c")
    ('top_5 _50__', 'a/b/_/c')
    """
    parts = (re.sub(r"[^\w.\- :]", "_", part) for part in str(name).split("/"))
    kept = ("_" if part in (".", "..") else part for part in parts if part)
    return posixpath.join("", *kept)[:NAME_CHARACTERS].rstrip("/") or "_"


def _run(event: Event, seen: Seen) -> Iterator[Change]:
    if seen.run is not None:
        return
    seen.run = event
    params = {safe_name(name): _text(value, PARAM_CHARACTERS) for name, value in (event.get("params") or {}).items()}
    yield from (Param(name, value) for name, value in params.items())
    for name, value in (event.get("tags") or {}).items():
        yield Tag(safe_name(name), _text(value, TAG_CHARACTERS))
    yield Tag("pipeline.folder", _text(event.get("folder"), TAG_CHARACTERS))


def _built(event: Event, seen: Seen) -> Iterator[Change]:
    if seen.speakers.setdefault("built", event.get("rank")) != event.get("rank"):
        return
    for name in ("parameters", "input_shape", "num_classes"):
        if event.get(name) is not None:
            yield Tag(name, _text(event[name], TAG_CHARACTERS))
    params = (seen.run or {}).get("params") or {}
    counted = ("train_examples", "validation_examples", "num_classes", "input_shape", "steps_per_epoch")
    features = _tensor("float32", event.get("input_shape") or [])
    yield Data(
        name=_text(params.get("data", "data"), NAME_CHARACTERS),
        digest=_text(event.get("data_digest") or "unknown", DIGEST_CHARACTERS),
        # As mlflow.data.schema.TensorDatasetSchema writes it: JSON within JSON.
        schema=json.dumps({"mlflow_tensorspec": {"features": features, "targets": _tensor("int32", [])}}),
        profile=json.dumps({name: event[name] for name in counted if event.get(name) is not None}),
    )


def _measured(event: Event, seen: Seen) -> Iterator[Change]:
    group = event.get("group", "point")
    if seen.speakers.setdefault(f"measured {group}", event.get("rank")) == event.get("rank"):
        yield from _point(f"measure/{group}/examples_per_second", _rate(event), event, event["repeat"])


def _steps(event: Event, seen: Seen) -> Iterator[Change]:
    losses, last, seconds = (
        event.get("losses") or [],
        int(event["step"]),
        _number(event.get("seconds")) or 0.0,
    )
    for index, loss in enumerate(losses):
        # The call took `seconds` and ended now; its steps took equal parts of that.
        left = len(losses) - 1 - index
        yield from _point("loss", loss, event, last - left, seconds * left / len(losses))
    for name, value in (event.get("metrics") or {}).items():
        if name != "loss":
            yield from _point(name, value, event, last)
    yield from _point("learning_rate", event.get("learning_rate"), event, last)
    yield from _point("live/examples_per_second", _rate(event), event, last)


def _epoch(event: Event, seen: Seen) -> Iterator[Change]:
    trained = {"loss": event.get("loss"), **(event.get("metrics") or {})}
    validated = _prefixed({"loss": event.get("val_loss"), **(event.get("val_metrics") or {})})
    for name, value in {**trained, **validated}.items():
        yield from _point(f"epoch/{name}", value, event, event["epoch"])
    # By optimizer step too, so that MLflow can draw it over the training loss.
    for name, value in validated.items():
        yield from _point(name, value, event, event["step"])


def _system(event: Event, seen: Seen) -> Iterator[Change]:
    host = safe_name(str(event.get("host"))).replace("/", "_")
    step = seen.samples[host] = seen.samples.get(host, -1) + 1
    for name, value in (event.get("values") or {}).items():
        yield from _point(f"system/{host}/{name}", value, event, step)


def _warning(event: Event, seen: Seen) -> Iterator[Change]:
    note = f"- {event.get('text')}"
    if note not in seen.notes:
        seen.notes.append(note)
        yield Tag(NOTE_TAG, _text("\n".join(seen.notes), TAG_CHARACTERS))


def _saved(event: Event, seen: Seen) -> Iterator[Change]:
    seen.model = str(event["path"])
    yield from ()


def _result(event: Event, seen: Seen) -> Iterator[Change]:
    values = event.get("values") or {}
    for name, value in values.items():
        if MEASUREMENT.search(name):
            yield from _point(name, value, event, 0)
    # Beside the curves of the same names, not in them.
    trained = {"loss": values.get("loss"), **(values.get("metrics") or {})}
    validated = _prefixed({"loss": values.get("val_loss"), **(values.get("val_metrics") or {})})
    for name, value in {**trained, **validated}.items():
        yield from _point(f"final/{name}", value, event, 0)
    for name in ("status", "error", "rehearsal", "oversubscribed"):
        if values.get(name) is not None:
            yield Tag(name, _text(values[name], TAG_CHARACTERS))


def _ended(event: Event, seen: Seen) -> Iterator[Change]:
    status = event.get("status") if event.get("status") in STATUSES else "FAILED"
    seen.ended = True
    yield Tag("status", str(status))
    if event.get("error"):
        yield Tag("error", _text(event["error"], TAG_CHARACTERS))
        yield Tag(NOTE_TAG, _text("\n".join([f"**{event['error']}**\n", *seen.notes]), TAG_CHARACTERS))
    yield End(str(status), _ms(event))


_CHANGES: dict[str, Callable[[Event, Seen], Iterator[Change]]] = {
    "run": _run, "built": _built, "measured": _measured, "steps": _steps, "epoch": _epoch, "system": _system,
    "warning": _warning, "saved": _saved, "result": _result, "ended": _ended,
}  # fmt: skip


def _point(name: str, value: Any, event: Event, step: Any, seconds_before: float = 0.0) -> Iterator[Point]:
    number = _number(value)
    if number is not None:
        yield Point(safe_name(name), number, _ms(event) - round(1000 * seconds_before), int(step))


def _rate(event: Event) -> float | None:
    examples, seconds = _number(event.get("examples")), _number(event.get("seconds"))
    return examples / seconds if examples is not None and seconds else None


def _number(value: Any) -> float | None:
    """`value` where it is a finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _ms(event: Event) -> int:
    return round(1000 * float(event["time"]))


def _text(value: Any, most: int) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    # Lone surrogates, from file names that are not UTF-8, and NUL end a request or a database's insert.
    return text.encode(errors="replace").decode().replace("\0", "")[:most]


def _prefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name if name.startswith("val_") else f"val_{name}": value for name, value in values.items()}


def _tensor(dtype: str, shape: Sequence[int]) -> str:
    return json.dumps([{"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": [-1, *shape]}}])


# What a run's folder knows of its copies in MLflow.


def without_password(uri: str | None) -> str | None:
    """`uri` without user and password.

    >>> without_password("http://ann:secret@mlflow.example:5000/a")
    'http://mlflow.example:5000/a'
    """
    return None if uri is None else re.sub(r"(?<=://)[^/\s]*@|(?<=[?&])password=[^&\s]*", "", uri)


def remember(folder: Path, store: Store) -> None:
    """Notes in the run's folder where it is tracked. How far it was sent to another store is forgotten."""
    kept, wanted = recall(folder), {**store, "uri": without_password(store.get("uri"))}
    same = (kept.get("store") or {}).get("uri") == wanted["uri"]
    _write_whole(folder / STATE, {**_FRESH, **(kept if same else {}), "store": wanted})


def recall(folder: Path) -> dict[str, Any]:
    """What `tracking.json` holds.

    `store` is where the run is tracked; `run_id`, `experiment_id`, `offset` (bytes of the log that are sent),
    `closed` (the status, once all is sent) and `killed_ms` are its copy there. `copies` has the same for
    other stores that it was sent to, by URI.
    """
    try:
        kept = json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return {"store": None, **_FRESH}
    return {"store": None, **_FRESH, **kept} if isinstance(kept, dict) else {"store": None, **_FRESH}


_FRESH: dict[str, Any] = {
    "run_id": None,
    "experiment_id": None,
    "offset": 0,
    "closed": None,
    "killed_ms": None,
}


class Deleted(TrackError):
    """The run was deleted in MLflow by someone, who does not want it back."""


def _write_whole(path: Path, values: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(values, indent=2, default=str))
    partial.replace(path)


class Copy:
    """One run's log, and what one MLflow store holds of it. What fails raises, and can be done again."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.log, self._store = folder, folder / LOG, store
        self._lock: int | None = None
        self._client: Any = None
        self._points_a_request, self.sent = POINTS_A_REQUEST, 0
        self._pending: list[Change]
        self._count: int
        self._load()

    @property
    def run_id(self) -> str | None:
        """The run in MLflow, once it exists."""
        run_id: str | None = self._record["run_id"]
        return run_id

    @property
    def closed(self) -> bool:
        """Does MLflow show the run as over, and hold its files?"""
        return self._record["closed"] is not None

    def name(self) -> dict[str, str | None]:
        """The run and its experiment, as MLflow knows them."""
        return {"run_id": self._record["run_id"], "experiment_id": self._record["experiment_id"]}

    def lock(self) -> bool:
        """Keeps other processes from sending this log; False where there is none or another one is at it."""
        if self._lock is None:
            try:
                descriptor = os.open(self.log, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            self._lock = descriptor
            self._load()
        return True

    def release(self) -> None:
        """Lets others send this log."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def behind(self) -> bool:
        """Does the log hold bytes that are not sent?"""
        sent: int = self._record["offset"]
        return self.log.exists() and self.log.stat().st_size > sent

    def missing(self) -> int:
        """How many events are not sent."""
        sent: int = self._record["offset"]
        return sum(1 for _ in events.read(self.log, sent))

    def has_ended(self) -> bool:
        """Is the log complete?"""
        return self.seen.ended or any(event.get("event") == "ended" for event, _ in events.read(self.log))

    def verify(self) -> None:
        """Starts over where the store has lost the run. Raises `Deleted` where someone deleted it."""
        if self.run_id is not None:
            run = _found(lambda: self._open().get_run(self.run_id))
            if run is None:
                self._record.update(_FRESH)
                self._rewind()
            elif run.info.lifecycle_stage == "deleted":
                raise Deleted(f"Run {self.run_id} was deleted in MLflow.")
        self._verified = True

    def catch_up(self, stop: Callable[[], bool]) -> None:
        """Sends what the log holds until that ends or `stop` says so. `sent` counts the events."""
        try:
            if not self._verified:
                self.verify()
            while not stop() and self._read():
                self._send()
                self.sent += self._count
                self._record["offset"] = self._position
                self._keep()
                self._pending, self._count = [], 0
                self._points_a_request = min(POINTS_A_REQUEST, 2 * self._points_a_request)
        except Exception:
            # A server that took too long may manage less at a time; one that came back may have lost the run.
            self._points_a_request = max(POINTS_A_REQUEST_LEAST, self._points_a_request // 2)
            self._verified = False
            raise

    def kill(self, time_ms: int | None = None) -> None:
        """Ends the run as KILLED, at `time_ms` or its last event's time: for a log that nobody will end."""
        if self.run_id is None:
            return
        self._record["killed_ms"] = self._record["killed_ms"] or time_ms or self.seen.time_ms
        client = self._open()
        client.set_terminated(self.run_id, "KILLED", self._record["killed_ms"])
        client.set_tag(self.run_id, "status", "KILLED")
        self._upload()
        self._record["closed"] = "KILLED"
        self._keep()

    def _load(self) -> None:
        self._state, bare = recall(self.folder), without_password(str(self._store["uri"]))
        meant = (self._state["store"] or {}).get("uri")
        copies = self._state.setdefault("copies", {})
        self._record = self._state if meant == bare else copies.setdefault(bare, dict(_FRESH))
        self._verified = False
        self._rewind()

    def _rewind(self) -> None:
        """Goes back to the start, for what later events need of earlier ones. Nothing is sent again."""
        self.seen, self._position = Seen(), 0
        self._pending, self._count = [], 0

    def _keep(self) -> None:
        _write_whole(self.folder / STATE, self._state)

    def _read(self) -> bool:
        """Fills `_pending` with what the next stretch of the log changes; False where the log has no more."""
        if self._count:
            return True
        for event, end in events.read(self.log, self._position):
            new: list[Change] = []
            try:
                new.extend(changes(event, self.seen))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                print(f"{self.log}: an event is left out, since {error!r}: {str(event)[:200]}", file=sys.stderr)
            self._position = end
            if end <= self._record["offset"]:
                continue
            self._pending += new
            self._count += 1
            if len(self._pending) >= POINTS_A_REQUEST or self.seen.ended:
                break
        return self._count > 0

    def _send(self) -> None:
        from mlflow.entities import Metric, RunTag
        from mlflow.entities import Param as Parameter

        client = self._open()
        if self.run_id is None:
            self._create()
        points = [Metric(each.name, each.value, each.time_ms, each.step) for each in self._of(Point)]
        params = [Parameter(each.name, each.value) for each in self._of(Param)]
        tags = [RunTag(name, value) for name, value in {each.name: each.value for each in self._of(Tag)}.items()]
        for part in _parts(params, TEXTS_A_REQUEST):
            client.log_batch(self.run_id, params=part, synchronous=True)
        for part in _parts(tags, TEXTS_A_REQUEST):
            client.log_batch(self.run_id, tags=part, synchronous=True)
        for part in _parts(points, self._points_a_request):
            client.log_batch(self.run_id, metrics=part, synchronous=True)
        for data in self._of(Data):
            client.log_inputs(self.run_id, [_input(data)])
        for end in self._of(End):
            try:
                self._upload()
            finally:
                client.set_terminated(self.run_id, end.status, end.time_ms)
            self._delete_twins()
            self._record["closed"] = end.status

    def _of(self, kind: type[Kind]) -> list[Kind]:
        return [change for change in self._pending if isinstance(change, kind)]

    def _open(self) -> Any:
        if self._client is None:
            self._client = _client(str(self._store["uri"]), self._store.get("artifacts"))
        return self._client

    def _create(self) -> None:
        """Finds the run by its key, or creates it: a lost answer must not make a second one."""
        run = self.seen.run
        if run is None:
            raise TrackError(f"Expected {self.log} to begin with a `run` event, received none. It cannot be sent.")
        client, experiment = self._open(), self._experiment(run)
        known = self._with_this_key(experiment)
        tags = {KEY_TAG: _key(run)}
        name = _text(run.get("name") or self.folder.name, NAME_CHARACTERS)
        run_id = known[0] if known else client.create_run(experiment, _ms(run), tags, name).info.run_id
        self._record.update(run_id=run_id, experiment_id=experiment)
        self._keep()

    def _experiment(self, run: Event) -> str:
        client, name = self._open(), self._store.get("experiment") or run.get("experiment") or "pipeline"
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(client.create_experiment(name, artifact_location=self._store.get("artifacts")))
            except Exception:
                # Someone else may just have created it.
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise TrackError(
                f"Expected the MLflow experiment {name!r} to be active, received a deleted one. "
                f"Try `mlflow experiments restore --experiment-id {found.experiment_id}`."
            )
        return str(found.experiment_id)

    def _with_this_key(self, experiment: str) -> list[str]:
        wanted = f"tags.`{KEY_TAG}` = '{_key(self.seen.run or {})}'"
        return sorted(run.info.run_id for run in self._open().search_runs([experiment], wanted))

    def _delete_twins(self) -> None:
        """Deletes runs that a server made after it had been given up on: empty, and never to end."""
        for twin in self._with_this_key(self._record["experiment_id"]):
            if twin != self.run_id:
                self._open().delete_run(twin)

    def _upload(self) -> None:
        client = self._open()
        with _requests_may_take(UPLOAD_SECONDS):
            for name in (
                "plan.json",
                "result.json",
                LOG,
                *([self.seen.model] if self._store.get("log_model", True) else ()),
            ):
                # A path from the log must not reach out of the folder.
                path = self.folder / (name or STATE)
                if name and path.is_file() and path.resolve().is_relative_to(self.folder.resolve()):
                    client.log_artifact(self.run_id, str(path))
            for log in sorted(self.folder.glob("*.log")):
                client.log_artifact(self.run_id, str(log), "logs")
            if (self.folder / "hydra").is_dir():
                client.log_artifacts(self.run_id, str(self.folder / "hydra"), "hydra")


def reason(error: BaseException, uri: str) -> str:
    """What went wrong, in a line without passwords, for a person who knows `uri`."""
    text, where = str(without_password(" ".join(str(error).split()))), without_password(uri)
    if isinstance(error, ImportError):
        return f"Expected MLflow to be installed, received: {text}. Try `pip install mlflow`."
    if refused := re.search(r"too many (\d+) error responses", text):
        return f"The MLflow server at {where} answers with error {refused[1]}."
    if not unreachable(error):
        return text[:300] if " " in text else f"{type(error).__name__}: {text[:300]}"
    if re.search(LATE, text, re.IGNORECASE):
        return f"The MLflow server at {where} does not answer in time."
    return f"No MLflow server answers at {where}."


def unreachable(error: BaseException) -> bool:
    """Would another request fail in the same way?"""
    signs = rf"API request to .*({LATE}|Max retries exceeded|Connection (refused|aborted|reset)|RemoteDisconnected)"
    return isinstance(error, ImportError) or re.search(signs, str(error), re.IGNORECASE | re.DOTALL) is not None


def _client(uri: str, artifacts: str | None) -> Any:
    from mlflow import MlflowClient

    path = _sqlite_path(uri)
    if path is None:
        return MlflowClient(tracking_uri=uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _make_sqlite(path, artifacts)
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


def _make_sqlite(path: Path, artifacts: str | None) -> None:
    """Makes the store beside its place, then moves it there: one that is half made stays broken for good."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    new = path.with_name(f"{path.name}.new")
    for leftover in (new, path.with_name(f"{new.name}-journal")):
        leftover.unlink(missing_ok=True)
    SqlAlchemyStore(f"sqlite:///{new}", artifacts or str(path.parent / "mlartifacts")).engine.dispose()
    new.rename(path)


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite:///") else None


def _found(ask: Callable[[], Any]) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return ask()
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _input(data: Data) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"tags": {"name": data.name}})
    dataset = Dataset(data.name, data.digest, "code", source, data.schema, data.profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


def _key(run: Event) -> str:
    """The run's key, fit for a quoted string in a search."""
    return re.sub(r"[^\w.@:/ -]", "_", str(run.get("key") or f"{run.get('folder')}@{run.get('time')}"))[
        :NAME_CHARACTERS
    ]


def _parts(items: Sequence[Kind], size: int) -> Iterator[Sequence[Kind]]:
    return (items[start : start + size] for start in range(0, len(items), size))


@contextlib.contextmanager
def _requests_may_take(seconds: int) -> Iterator[None]:
    """Inside, MLflow waits at least that long for a server's answer."""
    kept = os.environ.get(TIMEOUT_VARIABLE)
    os.environ[TIMEOUT_VARIABLE] = str(max(seconds, int(kept or 0)))
    try:
        yield
    finally:
        if kept is None:
            del os.environ[TIMEOUT_VARIABLE]
        else:
            os.environ[TIMEOUT_VARIABLE] = kept


# The process that follows.


@dataclass
class Followed:
    """One log that the follower looks after. `given_up`: still tried, but nobody waits for it any more."""

    copy: Copy
    uri: str
    due: float = 0.0
    told: bool = False
    given_up: bool = False
    error: str | None = None


class Follower:
    """Sends the logs it was given, a little behind their writers; tells how that goes."""

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._runs: list[Followed] = []
        self._retry_at, self._retry_seconds = 0.0, RETRY_SECONDS

    def add(self, folder: Path, store: Store) -> None:
        """Follows the log in `folder` from now on."""
        if any(run.copy.folder == folder for run in self._runs):
            return
        store = {**store, "uri": _logged_in(str(store["uri"]), os.environ)}
        with contextlib.suppress(OSError):
            remember(folder, store)
        self._runs.append(Followed(Copy(folder, store), store["uri"]))

    def turn(self, stop: Callable[[], bool], waited_for: bool = False) -> None:
        """Sends what is due, or everything where someone waits for it."""
        for run in list(self._runs):
            now = time.monotonic()
            if stop() or (now < self._retry_at and not waited_for):
                return
            if (waited_for or run.due <= now) and not self._advance(run, stop):
                # The others come first next time.
                self._runs.append(self._runs.pop(self._runs.index(run)))
                self._retry_at = time.monotonic() + self._retry_seconds
                self._retry_seconds = min(RETRY_SECONDS_MOST, 2 * self._retry_seconds)
                return

    def drain(self, seconds: float, impatient: Callable[[], bool]) -> tuple[bool, int, str | None]:
        """Sends all there is now, for `seconds` at most; returns (done, events missing, what was wrong)."""
        until = time.monotonic() + seconds
        asked = [run for run in self._runs if not run.given_up]

        def stop() -> bool:
            return time.monotonic() >= until or impatient()

        while True:
            self.turn(stop, waited_for=True)
            behind = [run for run in asked if run in self._runs and run.copy.behind()]
            if not behind or stop():
                break
            time.sleep(RETRY_SECONDS_WAITED_FOR)
        for run in behind:
            run.given_up = True
        errors = [run.error for run in asked if run.error]
        return (
            not behind and not errors,
            sum(run.copy.missing() for run in behind),
            errors[0] if errors else None,
        )

    def end(self, time_ms: int) -> None:
        """Sends what is left, then ends as KILLED in MLflow every run that nobody will end any more."""
        for run in self._runs:
            run.given_up = run.given_up and run.copy.has_ended()
        if not all(run.given_up for run in self._runs):
            self.drain(LAST_SECONDS, lambda: False)
        for run in self._runs:
            if not run.copy.has_ended() and run.copy.lock():
                try:
                    run.copy.kill(time_ms)
                except Exception as error:
                    print(f"{run.copy.folder}: not set to KILLED: {reason(error, run.uri)}", file=sys.stderr)

    def _advance(self, run: Followed, stop: Callable[[], bool]) -> bool:
        """Brings one copy forward; False where that failed and is worth trying again."""
        problem, again = None, False
        try:
            if run.copy.lock():
                run.copy.catch_up(stop)
                self._retry_seconds = RETRY_SECONDS
        except Deleted as error:
            problem = str(error)
            self._drop(run)
        except Exception as error:
            problem, again = reason(error, run.uri), True
        run.due = time.monotonic() + (NEXT_SECONDS if run.copy.run_id else FIRST_SECONDS)
        if run.copy.run_id and not run.told:
            run.told = True
            self._tell({"run": str(run.copy.folder), **run.copy.name()})
        if problem != run.error:
            run.error = problem
            self._tell({"run": str(run.copy.folder), "error": problem})
            print(f"{run.copy.folder}: {problem or 'the store answers again'}", file=sys.stderr, flush=True)
        if run.copy.closed:
            self._drop(run)
        return not again

    def _drop(self, run: Followed) -> None:
        run.copy.release()
        if run in self._runs:
            self._runs.remove(run)


def follow(commands: IO[bytes], tell: Callable[[Event], None]) -> None:
    """Obeys the commands, JSON lines, until they end; then ends what is left to end.

    Commands: {"follow": folder, "store": {...}} and {"drain": seconds, "id": any}. What it tells: {"run",
    "run_id", "experiment_id"} once a run exists, {"run", "error"} when a store fails or answers again, and
    {"drained", "missing", "error", "id"}.
    """
    inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands, inbox), daemon=True).start()
    follower, conductor = Follower(tell), os.getppid()
    # The conductor is gone when its end of the pipe closes, or when this process has another parent: what the
    # conductor forked may hold the pipe open.
    while os.getppid() == conductor:
        with contextlib.suppress(queue.Empty):
            command = inbox.get(timeout=FIRST_SECONDS)
            if command is None:
                break
            if "follow" in command:
                follower.add(Path(command["follow"]), command["store"])
            if "drain" in command:
                # Training is over, and someone waits.
                with _niceness(-NICENESS):
                    drained, missing, error = follower.drain(float(command["drain"]), lambda: not inbox.empty())
                tell({"drained": drained, "missing": missing, "error": error, "id": command.get("id")})
        follower.turn(lambda: not inbox.empty())
    limit = threading.Timer(HARD_SECONDS, os._exit, (1,))
    limit.daemon = True
    limit.start()
    with _niceness(-NICENESS):
        follower.end(round(1000 * time.time()))


def _listen(commands: IO[bytes], inbox: "queue.SimpleQueue[Event | None]") -> None:
    for line in commands:
        with contextlib.suppress(ValueError):
            command = json.loads(line)
            if isinstance(command, dict):
                inbox.put(command)
    inbox.put(None)


@contextlib.contextmanager
def _niceness(more: int) -> Iterator[None]:
    """Inside, this process leaves the cores to others, as far as `more` says and it may change that."""
    kept = os.getpriority(os.PRIO_PROCESS, 0)
    _set_niceness(kept + more)
    try:
        yield
    finally:
        _set_niceness(kept)


def _set_niceness(niceness: int) -> None:
    # Where Linux schedules sessions as groups, niceness counts only within a session, and the group's niceness
    # against others (sched(7), "The autogroup feature"): without it, half of a core was gone from training. The
    # group's can be taken back by anyone, a process's own only with privileges.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def _logged_in(uri: str, environ: MutableMapping[str, str]) -> str:
    """A server's `uri` without user and password, which MLflow reads from its environment instead."""
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.username is None:
        return uri
    environ["MLFLOW_TRACKING_USERNAME"] = urllib.parse.unquote(parts.username)
    environ["MLFLOW_TRACKING_PASSWORD"] = urllib.parse.unquote(parts.password or "")
    return str(without_password(uri))


# The conductor's side.


class Tracker:
    """Starts the following process and talks to it. Nothing here raises, or takes longer than it is given."""

    def __init__(self, environ: Mapping[str, str], log: Path) -> None:
        self._environ, self._log = environ, log
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._news = threading.Condition()
        self._run_ids: dict[str, str] = {}
        self._errors: dict[str, str | None] = {}
        self._answers: dict[int, Event] = {}
        self._asked = 0
        self._problem: str | None = None

    def follow(self, folder: Path, store: Store) -> None:
        """Has the log in `folder` sent to `store` from now on, and notes in the folder that it belongs there.

        `store` has `uri` (resolved), `experiment`, `artifacts` (a URI for a local store's files, or None) and
        `log_model`; a `uri` of None is noted and not followed.
        """
        try:
            remember(folder, store)
            if store.get("uri") is None:
                return
            if self._process is None or self._process.poll() is not None:
                self._start()
        except OSError as error:
            self._problem = f"The tracking process could not start: {error}."
            return
        self._say({"follow": str(folder), "store": dict(store)})

    def run_id(self, folder: Path, timeout: float) -> str | None:
        """The MLflow run of `folder`; None if there is none after `timeout` seconds, or the store fails."""
        with self._news:
            self._news.wait_for(
                lambda: str(folder) in self._run_ids or self._errors.get(str(folder)) or not self._listening(),
                timeout,
            )
            return self._run_ids.get(str(folder))

    def drain(self, timeout: float) -> tuple[bool, str | None]:
        """(Is all that the logs hold in MLflow, what was wrong), after `timeout` seconds at most."""
        if self._process is None:
            return self._problem is None, self._problem
        self._asked += 1
        asked = self._asked
        # It is told to be done a little earlier, so that its answer comes in time.
        said = self._say({"drain": max(0.0, timeout - 0.2), "id": asked})
        with self._news:
            if said:
                self._news.wait_for(lambda: asked in self._answers or not self._listening(), timeout)
            answer = self._answers.pop(asked, None)
            if answer:
                return bool(answer["drained"]), answer["error"]
            if not said or not self._listening():
                return False, self._problem or f"The tracking process has ended; see {self._log}."
            errors = [error for error in self._errors.values() if error]
            return False, errors[-1] if errors else f"The tracking process was not done in {timeout:g} s."

    def close(self, timeout: float = 12.0) -> None:
        """Ends the process, which first sends what is left and ends as KILLED the runs that have no end."""
        process, self._process = self._process, None
        if process is None or process.stdin is None or process.stdout is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join()
        process.stdout.close()

    def _start(self) -> None:
        self.close()
        package = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [package, self._environ.get("PYTHONPATH")]))
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.track", "follow"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self._environ, "PYTHONPATH": path},
                start_new_session=True,
                bufsize=0,
            )
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self._reader = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _listening(self) -> bool:
        return self._reader is not None and self._reader.is_alive()

    def _say(self, command: Event) -> bool:
        process = self._process
        if process is None or process.stdin is None:
            return False
        try:
            # Whole or not at all: a pipe takes a line as short as this in one piece (pipe(7), PIPE_BUF).
            os.write(process.stdin.fileno(), json.dumps(command, default=str).encode() + b"\n")
        except (OSError, ValueError):
            return False
        return True

    def _listen(self, lines: IO[bytes]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError), self._news:
                news = json.loads(line)
                if "run_id" in news:
                    self._run_ids[news["run"]] = news["run_id"]
                elif "drained" in news:
                    self._answers[news["id"]] = news
                else:
                    self._errors[news["run"]] = news["error"]
                self._news.notify_all()


# What was not sent is sent later.


def sync(folders: Sequence[Path], output_dir: Path, uri: str | None, say: Callable[[str], None]) -> bool:
    """Sends what the store of each run below `folders`, or `uri`, does not hold yet. Was everything sent?"""
    counts = {True: 0, None: 0, False: 0}
    failed: dict[str, str] = {}
    untracked: list[Path] = []
    for folder in (found for root in folders or [output_dir] for found in run_folders(root)):
        store = _store_of(folder, uri)
        if store is None:
            untracked.append(folder)
        else:
            counts[_sync_one(Copy(folder, store), str(store["uri"]), failed, say)] += 1
    say(f"Runs sent: {counts[True]}; nothing new: {counts[None]}; not sent: {counts[False]}.")
    if untracked:
        say(f"Runs without tracking: {len(untracked)}. Try --uri {_local(output_dir)} for a local store.")
    # A run that was asked for by name is not sent by skipping it.
    return not counts[False] and not set(untracked) & set(folders)


def run_folders(root: Path) -> list[Path]:
    """The folders of runs at and below `root`, but not the copies of their logs among MLflow's artifacts."""
    if (root / LOG).exists():
        return [root]
    found = sorted(log.parent for log in root.rglob(LOG))
    return [folder for folder in found if (folder / STATE).exists() or _home(folder) == folder.name]


def conductor_lives(run: Event) -> bool | None:
    """Does the process that writes the log still run? None where that cannot be seen from here."""
    if run.get("host") != os.uname().nodename or not isinstance(run.get("pid"), int):
        return None
    try:
        text = Path(f"/proc/{run['pid']}/stat").read_text()
    except OSError:
        return False
    # proc_pid_stat(5): after the name come the state and, 19 further on, the start in ticks since boot.
    values = text.rpartition(")")[2].split()
    booted = int(re.findall(r"^btime (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)[0])
    began = booted + int(values[19]) / os.sysconf("SC_CLK_TCK")
    # A process that began later only has the same number; a minute is for a clock that was set meanwhile.
    return values[0] not in "ZX" and began < run["time"] + 60


def _sync_one(copy: Copy, uri: str, failed: dict[str, str], say: Callable[[str], None]) -> bool | None:
    """True: sent something; None: there was nothing to send; False: could not."""
    try:
        if uri in failed:
            raise TrackError(failed[uri])
        path = _sqlite_path(uri)
        if path and not path.parent.is_dir():
            raise TrackError(f"Expected a folder {path.parent} for the store, received none. Try --uri.")
        if not copy.lock():
            say(f"{copy.folder}: another process is sending it now.")
            return None
        return _bring_up(copy, say)
    except Deleted as error:
        say(f"{copy.folder}: left alone. {error}")
        return None
    except Exception as error:
        problem = reason(error, uri)
        if unreachable(error):
            failed[uri] = problem
        say(f"{copy.folder}: not sent. {problem}")
        return False
    finally:
        copy.release()


def _bring_up(copy: Copy, say: Callable[[str], None]) -> bool | None:
    if copy.closed and not copy.missing():
        with contextlib.suppress(Exception):
            # A store that was thrown away is filled again; one that cannot be asked is believed.
            copy.verify()
        if copy.closed:
            return None
    _patiently(lambda: copy.catch_up(lambda: False))
    run, about = copy.seen.run, ""
    if run is None:
        return None
    if not copy.closed and not copy.seen.ended:
        lives = conductor_lives(run)
        about = " It still runs."
        if lives is None:
            about = f" It has no end, and only {run.get('host')} knows whether it still runs: sync there."
        elif not lives:
            _patiently(copy.kill)
            about = " It has no end and its process is gone: set to KILLED."
    if copy.sent or about:
        say(f"{copy.folder}: {copy.sent} event{'s' * (copy.sent != 1)} sent, run {copy.run_id}.{about}")
    return True if copy.sent else None


def _patiently(do: Callable[[], Any]) -> Any:
    """Tries three times where trying again may help: a locked database, a server that is busy."""
    for seconds in (RETRY_SECONDS, 2 * RETRY_SECONDS):
        try:
            return do()
        except TrackError:
            raise
        except Exception as error:
            if unreachable(error):
                raise
            time.sleep(seconds)
    return do()


def _home(folder: Path) -> str | None:
    """The name of the folder that a log says it was written in."""
    first = next(events.read(folder / LOG), ({}, 0))[0]
    return Path(str(first["folder"])).name if "folder" in first else None


def _store_of(folder: Path, uri: str | None) -> Store | None:
    kept = recall(folder)["store"] or {}
    if uri is None or without_password(uri) == kept.get("uri"):
        return {**kept, "uri": uri or kept["uri"]} if kept.get("uri") else None
    path = _sqlite_path(uri)
    return {**kept, "uri": uri, "artifacts": (path.parent / "mlartifacts").as_uri() if path else None}


def _local(output_dir: Path) -> str:
    return f"sqlite:///{output_dir.resolve() / 'mlflow.db'}"


def _store_uri(text: str) -> str:
    """An argument as the URI of a store, with an absolute path in it."""
    if not re.match(r"https?://|(sqlite|postgresql|mysql|mssql)(\+\w+)?://", text):
        raise argparse.ArgumentTypeError(
            f"expected an MLflow store, received {without_password(text)!r}. "
            f"Try http://127.0.0.1:5000, or {_local(Path('outputs'))}"
        )
    path = _sqlite_path(text)
    return text if path is None else f"sqlite:///{path.resolve()}"


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a run's folder, or one that holds some, received {text}")
    return Path(text)


def _prepare_mlflow(environ: MutableMapping[str, str]) -> None:
    """Sets what MLflow reads from the environment of this process, before it is imported."""
    environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    # MLflow would repeat a request to create a run whose answer was lost. Here it is looked for first.
    environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    environ.setdefault(TIMEOUT_VARIABLE, str(REQUEST_SECONDS))
    # What goes wrong is told in a line of ours, not in a traceback, which may hold a password.
    environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
    warnings.simplefilter("ignore")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 all sent, 1 something was not, 2 a wrong argument."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.track", description="Sends event logs to MLflow.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("follow", help="started by a run: follows the logs named on standard input")
    later = commands.add_parser("sync", help="send what MLflow does not hold yet; repeating it changes nothing")
    later.add_argument("folders", nargs="*", type=_folder, metavar="FOLDER", help="of a run, or above some")
    later.add_argument(
        "--output-dir", type=Path, default=Path("outputs"), help="where to look without FOLDER: %(default)s"
    )
    later.add_argument("--uri", type=_store_uri, help="of another store than the one that each run was meant for")
    given = parser.parse_args(arguments)
    _prepare_mlflow(os.environ)
    if given.command == "follow":
        # Ctrl-C and a scheduler's signals are for the conductor, whose end this process then sees.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # What a library prints must not come between the answers.
        answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        # While TensorFlow is imported too, and nothing is measured; a failure is told when MLflow is needed.
        with contextlib.suppress(Exception):
            import mlflow.tracking  # noqa: F401
        with _niceness(NICENESS):
            follow(sys.stdin.buffer, lambda news: _tell(answers, news))
        return 0
    uri = given.uri and _logged_in(given.uri, os.environ)
    try:
        return 0 if sync(given.folders, given.output_dir, uri, lambda line: print(line, flush=True)) else 1
    except KeyboardInterrupt:
        return 130


def _tell(answers: IO[str], news: Event) -> None:
    # A conductor that is gone does not listen.
    with contextlib.suppress(OSError):
        answers.write(json.dumps(news) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.exit(main())
