"""Turns one run's log into its copy in one MLflow store: what is not there yet is sent, in order.

It leaves to its callers when that is done, and what to do about a store that fails.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.driver.run_folders import Lock
from pipeline.errors import UserError
from pipeline.record import log
from pipeline.record.events import SAMPLE, Run
from pipeline.record.files import DELETED, ID_LETTERS, LOG, Copied, TrackingStore, read_tracking, write_tracking
from pipeline.views.mlflow.changes import Changes, LogState
from pipeline.views.mlflow.stores import local_artifacts, open_client, requests_may_take, run_in, without_password
from pipeline.views.mlflow.texts import FIRST, NAME_CHARACTERS, missing, ms, text

# MLflow refuses more than 1000 points in a request, and more than 1 MB: 20 long parameters stay below.
POINTS_A_REQUEST, POINTS_A_REQUEST_LEAST, TEXTS_A_REQUEST = 1000, 50, 20
UPLOAD_SECONDS = 60  # one file sent to a server
KEY_TAG = "pipeline.key"
FILES = {"logs": "*.log", "hydra": "hydra/*"}  # more files of a run's folder, by their folder among the artifacts
# MLflow's compare page opens on the first metric logged: hold others back this long so that throughput comes first.
FIRST_MS = 30_000


class Deleted(UserError):
    """The run was deleted in MLflow by someone, who does not want it back."""


class Copy:
    """One run's log, and what one MLflow store holds of it. What fails raises, and can be done again."""

    def __init__(self, folder: Path, store: TrackingStore) -> None:
        self.folder, self.log, self.uri, self._store = folder, folder / LOG, str(store.uri), store
        self._lock: Lock | None = None
        self._client: Any = None
        # For a follower: when it is due, the wait after its next failure (0: the least), and whether one waits for it.
        self.due, self.retry_seconds, self.is_waited_for = 0.0, 0.0, False
        # How many events were sent, and from how many what is to be sent now is.
        self._points_a_request, self.sent, self._count = POINTS_A_REQUEST, 0, 0
        self.copied = Copied()
        self._load()

    @property
    def complete(self) -> bool:
        """True if MLflow shows the run as over, and holds its files and all of the log."""
        return self.copied.closed not in (None, DELETED) and not self.behind()

    def lock(self) -> bool:
        """Keeps other processes from sending this log; False where there is no log, or another process sends it."""
        if self._lock is None and self.log.exists():
            with contextlib.suppress(BlockingIOError):
                self._lock = Lock(self.folder, LOG)
                self._load()
        return self._lock is not None

    def release(self) -> None:
        """Lets others send this log."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def behind(self) -> bool:
        """True if the log holds events that are not sent."""
        return next(log.read(self.log, self.copied.offset), None) is not None

    def note(self, **changed: Any) -> None:
        """Notes for the driver what has changed of `copied`."""
        self.copied = replace(self.copied, **changed)
        write_tracking(self.folder, read_tracking(self.folder).with_copied(without_password(self.uri), self.copied))

    def verify(self) -> None:
        """Starts over where the store has lost the run. Raises `Deleted` where someone deleted it."""
        if self.copied.run_id is not None:
            run = run_in(self._open(), self.copied.run_id)
            if run is None:
                self.copied = Copied()
                self._rewind()
            elif run.info.lifecycle_stage == "deleted":
                raise Deleted(f"Run {self.copied.run_id} was deleted in MLflow.")
        self._verified = True

    def advance(self, patient: bool = False) -> bool:
        """Sends the next stretch of the log; False where there is nothing to send. `sent` counts the events.

        Where nobody waits for it (`patient`), the first metrics come once a repeat was timed.
        """
        try:
            if not self._verified:
                self.verify()
            if not self._read():
                return False
            since = self.state.time_ms - (self.state.training_ms or self.state.time_ms)
            measured = self.state.ended or FIRST in self.state.last
            if patient and self.copied.offset == 0 and since < FIRST_MS and not measured:
                # All is read once more when its metrics are sent.
                if self.copied.run_id is None:
                    self._send_texts()
                self._rewind()
                return False
            self._send()
            self.sent += self._count
            self.note(offset=self._position, problem=None)
            self.state.changes, self._count = Changes(), 0
            self._points_a_request = min(POINTS_A_REQUEST, 2 * self._points_a_request)
            return True
        except Exception:
            # A server that took too long may manage less at a time; one that came back may have lost the run.
            self._points_a_request = max(POINTS_A_REQUEST_LEAST, self._points_a_request // 2)
            self._verified = False
            raise

    def kill(self, time_ms: int | None = None) -> None:
        """Ends the run as KILLED, at `time_ms` or its last event's time: for a log that nobody will end."""
        if self.copied.run_id is None:
            return
        killed_ms = self.copied.killed_ms or time_ms or self.state.time_ms
        self.copied = replace(self.copied, killed_ms=killed_ms)
        self._open().set_terminated(self.copied.run_id, "KILLED", killed_ms)
        self._open().set_tag(self.copied.run_id, "status", "KILLED")
        self._upload()
        self.note(closed="KILLED")

    def _load(self) -> None:
        self.copied, self._verified = read_tracking(self.folder).in_store(without_password(self.uri)), False
        self._rewind()

    def _rewind(self) -> None:
        """Goes back to the start, for what later events need of earlier ones. Nothing is sent again."""
        self.state, self._position, self._count = LogState(), 0, 0

    def _read(self) -> bool:
        if self._count:
            return True
        for event, end in log.read(self.log, self._position):
            try:
                self.state.take(event)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                print(f"{self.log}: an event is left out, since {error!r}: {str(event)[:200]}", file=sys.stderr)
            self._position = end
            if end <= self.copied.offset:
                self.state.changes = Changes()
                continue
            self._count += 1
            if len(self.state.changes.metrics) >= POINTS_A_REQUEST or self.state.ended:
                break
        return self._count > 0

    def _send(self) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

        client, changes = self._open(), self.state.changes
        self._send_texts()
        points = sorted(changes.metrics, key=lambda point: point.name != FIRST)
        self._log("metrics", [Metric(*point) for point in points], self._points_a_request)
        if changes.reopened:
            client.update_run(self.copied.run_id, status="RUNNING")
            self.copied = replace(self.copied, closed=None, killed_ms=None)
        for data in changes.datasets:
            dataset = Dataset(**data, source_type="code", source=json.dumps({"tags": {"name": data["name"]}}))
            trained_on = DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
            client.log_inputs(self.copied.run_id, [trained_on])
        if changes.end:
            status, time_ms = changes.end
            try:
                self._upload()
            finally:
                client.set_terminated(self.copied.run_id, status, time_ms)
            # Runs that a server made after it had been given up on: empty, and never to end.
            for twin in self._with_this_key(str(self.copied.experiment_id)):
                if twin.info.run_id != self.copied.run_id:
                    client.delete_run(twin.info.run_id)
            self.copied = replace(self.copied, closed=status)

    def _send_texts(self) -> None:
        from mlflow.entities import Param, RunTag

        if self.copied.run_id is None:
            self._create()
        self._log("params", [Param(*param) for param in self.state.changes.params.items()], TEXTS_A_REQUEST)
        self._log("tags", [RunTag(*tag) for tag in self.state.changes.tags.items()], TEXTS_A_REQUEST)

    def _log(self, kind: str, items: Sequence[Any], size: int) -> None:
        for start in range(0, len(items), size):
            self._open().log_batch(self.copied.run_id, synchronous=True, **{kind: items[start : start + size]})

    def _open(self) -> Any:
        if self._client is None:
            self._client = open_client(self.uri, self._store.artifacts)
        return self._client

    def _create(self) -> None:
        """Finds the run by its key, or creates it: a lost answer must not make a second one."""
        if (run := self.state.run) is None:
            remedy = "moving its folder out of output_dir, since it cannot be sent"
            raise UserError(f"{self.log} to begin with a `run` event", "none", remedy)
        client, experiment = self._open(), self._experiment(run)
        name = text(run.name or self.folder.name, NAME_CHARACTERS)
        # Of these MLflow keeps more than the tag.
        tags = {tag: str(value) for tag, value in run.tags.items() if tag.startswith("mlflow.")}
        tags[KEY_TAG] = self._key()
        info = (self._with_this_key(experiment) or [client.create_run(experiment, ms(run), tags, name)])[0].info
        if info.run_name == name:
            # A name that no other run has: its mark, such as (rehearsal), stays at its end.
            short, bracket, marked = name.partition(" (")
            ending = f"-{info.run_id[:ID_LETTERS]}{bracket}{marked}"
            client.update_run(info.run_id, name=f"{short[: NAME_CHARACTERS - len(ending)]}{ending}")
        self.note(run_id=info.run_id, experiment_id=experiment)

    def _experiment(self, run: Run) -> str:
        from mlflow.exceptions import MlflowException

        client, name = self._open(), self._store.experiment or run.experiment or "pipeline"
        experiment = client.get_experiment_by_name(name)
        try:
            if experiment is None:
                return str(client.create_experiment(name, self._store.artifacts, missing({}, ms(run))))
        except Exception:
            # Someone else may just have created it.
            if (experiment := client.get_experiment_by_name(name)) is None:
                raise
        if experiment.lifecycle_stage == "deleted":
            restore = f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`"
            raise UserError(f"the MLflow experiment {name!r} to be active", "a deleted one", restore)
        # One that others made gets its page, where they let us.
        with contextlib.suppress(MlflowException):
            for tag, content in missing(experiment.tags, ms(run)).items():
                client.set_experiment_tag(experiment.experiment_id, tag, content)
        return str(experiment.experiment_id)

    def _key(self) -> str:
        run = self.state.run or Run()
        return re.sub(r"[^\w.@:/ -]", "_", run.key or f"{run.folder}@{run.time}")[:NAME_CHARACTERS]

    def _with_this_key(self, experiment: str) -> list[Any]:
        runs = self._open().search_runs([experiment], f"tags.`{KEY_TAG}` = '{self._key()}'")
        return sorted(runs, key=lambda run: str(run.info.run_id))

    def _upload(self) -> None:
        client, folder = self._open(), self.folder.resolve()
        model = [self.state.model] if self.state.model and self._store.log_model else []
        places = [("", folder, ["plan.json", "result.json", LOG, SAMPLE, *model])]
        # A report lies beside the points of its sweep.
        places += [(place, folder.parent, paths) for place, paths in self.state.report.items()]
        places += [(place, folder, sorted(map(str, folder.glob(files)))) for place, files in FILES.items()]
        with requests_may_take(UPLOAD_SECONDS):
            # A local store has links to this run's files: so they are on the disk once.
            uri = client.get_run(self.copied.run_id).info.artifact_uri if self._store.artifacts else None
            linked = local_artifacts(uri) if uri else None
            for place, base, path in ((place, base, base / name) for place, base, names in places for name in names):
                # A path from the log must not reach out of its folder.
                inside, links = path.is_file() and path.resolve().is_relative_to(base), not place and base is folder
                if inside and not (linked and links and _linked(path, linked / path.name)):
                    client.log_artifact(self.copied.run_id, str(path), place or None)


def _linked(path: Path, other: Path) -> bool:
    """Makes `other` a second name of a file; False where that cannot be, as on another disk."""
    with contextlib.suppress(OSError):
        other.parent.mkdir(parents=True, exist_ok=True)
        other.unlink(missing_ok=True)
        os.link(path, other)
        return True
    return False
