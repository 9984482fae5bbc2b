"""A writer of logs, the process that copies them to MLflow, and servers of MLflow that fail as they are told to."""

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import until
from ports import free_port

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient
    from mlflow.entities import ViewType  # noqa: F401  which tests import with the client, from here

from pipeline.record.files import TrackingStore
from pipeline.record.log import EventLog, from_plain
from pipeline.views.mlflow import Tracker, remember
from pipeline.views.mlflow import sync_runs as syncing
from pipeline.views.mlflow.stores import open_client

BEGAN = 1_700_000_000.0
NEVER = 2**22 + 1  # More than the kernel's largest process number.
Value = tuple[str, float, int, int]


@pytest.fixture(autouse=True)
def _mlflow_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MLFLOW_LOGGING_LEVEL": "CRITICAL",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        monkeypatch.setenv(name, value)
    # MLflow tests its own sessions where it finds this.
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    monkeypatch.setattr(syncing, "RETRY_SECONDS", 0.1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose local store tests share."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def tracker(home: Path) -> Iterator[Tracker]:
    """One that tests share, as the points of a sweep do."""
    with tracking(home / "tracker.log") as tracker:
        yield tracker


@pytest.fixture
def own_tracker(tmp_path: Path) -> Iterator[Tracker]:
    with tracking(tmp_path / "tracker.log") as tracker:
        yield tracker


@contextlib.contextmanager
def tracking(log: Path, **environ: str) -> Iterator[Tracker]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    tracker = Tracker(kept | environ, log)
    yield tracker
    tracker.close()


class Server:
    """A real MLflow server on a free port, with its store in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Server":
        store = f"sqlite:///{self.folder}/server.db"
        open_client(store, None)  # A second faster than the server makes it.
        command = (
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--backend-store-uri", store, "--workers", "1", "--artifacts-destination", f"{self.folder}/served"),
        )
        environ = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
        until(self._answers, 60)
        return self

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
            return True
        return False

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            for each in (number, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, each)
                self._process.wait(20)
            self._process = None


@contextlib.contextmanager
def serving(answer: Callable[["Request"], tuple[int, bytes] | None]) -> Iterator[str]:
    """The address of a server of our own: a status and a body for each request; None for no answer."""

    class Handler(Request):
        def do_GET(self) -> None:
            if (answered := answer(self)) is None:
                self.close_connection = True
                return
            status, body = answered
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as ours:
        ours.daemon_threads = True
        thread = threading.Thread(target=ours.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{ours.server_address[1]}"
        finally:
            ours.shutdown()
            thread.join()


class Request(http.server.BaseHTTPRequestHandler):
    """A request to a server of our own."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def passed_on(self, uri: str) -> tuple[int, bytes]:
        """(status, body) of the answer of the real server at `uri`."""
        length = int(self.headers.get("Content-Length") or 0)
        kept = {name: text for name, text in self.headers.items() if name in ("Content-Type", "Accept")}
        data = self.rfile.read(length) if length else None
        real = urllib.request.Request(uri + self.path, data, kept, method=self.command)
        try:
            with urllib.request.urlopen(real, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError:
            return 502, b""


def store(uri: str | None, experiment: str = "pipeline") -> TrackingStore:
    return TrackingStore("any", uri, experiment)


class Writer:
    """A run's folder and log, written as a driver does."""

    def __init__(self, folder: Path, **run: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / "events.jsonl"
        self.key = f"key of {folder}"
        tell = {"key": self.key, "name": folder.name, "folder": str(folder), "pid": os.getpid()}
        self.write({"time": BEGAN, "event": "run", **tell, "host": os.uname().nodename, "params": {}, "tags": {}} | run)

    def write(self, *lines: dict[str, Any]) -> "Writer":
        log = EventLog(self.log)
        for values in lines:
            log.append(from_plain(values))
        log.close()
        return self

    def steps(self, first: int, last: int) -> list[Value]:
        """Writes a call of the loop for each step, and returns the losses that MLflow must hold."""
        steps, kind = range(first, last + 1), {"event": "steps", "group": "point"}
        self.write(*(kind | {"time": BEGAN + step, "step": step, "losses": [1 / step]} for step in steps))
        return [("train/loss", float(f"{1 / step:.6g}"), round(1000 * (BEGAN + step)), step) for step in steps]

    def end(self, status: str = "FINISHED", error: str | None = None) -> None:
        self.write({"time": BEGAN + 9999, "event": "ended", "status": status, "error": error})


def local(folder: Path, experiment: str = "pipeline") -> TrackingStore:
    uri, artifacts = f"sqlite:///{folder}/mlflow.db", (folder / "mlartifacts").as_uri()
    return TrackingStore("any", uri, experiment, artifacts)


def sent(writer: Writer, folder: Path, experiment: str = "pipeline") -> Any:
    """The run of a log, once it was sent to the local store in a folder."""
    remember(writer.folder, local(folder, experiment))
    assert sync(writer.folder)[0]
    return only_run(str(local(folder).uri), writer.key)


def only_run(uri: str, key: str) -> Any:
    """The one run with this key, deleted ones aside."""
    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.`pipeline.key` = '{key}'")
    return run


def values(uri: str, run: Any) -> Counter[Value]:
    """How often each value of each metric is stored."""
    client = MlflowClient(uri)
    return Counter(
        (each.key, each.value, each.timestamp, each.step)
        for name in run.data.metrics
        for each in client.get_metric_history(run.info.run_id, name)
    )


def sync(*folders: Path, uri: str | None = None) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return syncing.sync(folders, Path("outputs"), uri, lines.append), lines


def files(uri: str, run: Any, path: str | None = None) -> set[str]:
    listed = MlflowClient(uri).list_artifacts(run.info.run_id, path)
    return {name for each in listed for name in (files(uri, run, each.path) if each.is_dir else {each.path})}
