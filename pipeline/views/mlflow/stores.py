"""Opens MLflow stores by their URI, examines them, removes runs from them, and says in a line what goes wrong there.

It leaves what is sent to `pipeline.views.mlflow.copies`. MLflow is imported when a store is opened.
"""

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.schema import Store, TrackingConfig, holds_password
from pipeline.doctor.judge import Finding, Severity
from pipeline.record.files import read_tracking

# For one request to a server, and by which its clock may be off before runs seem to end before they begin.
REQUEST_SECONDS, CLOCK_SECONDS = 5, 5.0
TIMEOUT_VARIABLE = "MLFLOW_HTTP_REQUEST_TIMEOUT"
LATE = r"timeout exception|timed out"  # what MLflow says of a server that took too long
SEARCH = "api/2.0/mlflow/experiments/search"
SERVER = "python -m pipeline ui, which starts one; tracking=sqlite, or tracking=none and python -m pipeline sync later"
# MLflow's changes to its tables, each a file that names the one before.
CHANGES, CHANGE = "store/db_migrations/versions/*.py", re.compile(r"^(down_)?revision\s*=\s*['\"](\w+)['\"]", re.M)


def prepare(environ: MutableMapping[str, str]) -> None:
    """Sets what MLflow reads from the environment of this process, before it is imported."""
    environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    # MLflow would repeat a request to create a run whose answer was lost. Here it is looked for first.
    environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    environ.setdefault(TIMEOUT_VARIABLE, str(REQUEST_SECONDS))
    # What goes wrong is told in a line of ours, not in a traceback, which may hold a password.
    environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
    warnings.simplefilter("ignore")


def without_password(uri: str | None) -> str | None:
    """`uri` without user and password."""
    return None if uri is None else re.sub(r"(?<=://)[^/\s]*@|(?<=[?&])password=[^&\s]*", "", uri)


def without_login(text: str, environ: Mapping[str, str]) -> str:
    """`text` without what a server is logged in to with, which a server's answer may repeat."""
    header = _login(environ).get("Authorization", "").partition(" ")[2]
    secrets = filter(None, (*map(environ.get, ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")), header))
    return re.sub("|".join(map(re.escape, secrets)) or "(?!)", "***", text)


def logged_in(uri: str, environ: MutableMapping[str, str]) -> str:
    """A server's `uri` without user and password, which MLflow reads from its environment instead."""
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.username is None:
        return uri
    environ["MLFLOW_TRACKING_USERNAME"] = urllib.parse.unquote(parts.username)
    environ["MLFLOW_TRACKING_PASSWORD"] = urllib.parse.unquote(parts.password or "")
    return str(without_password(uri))


def sqlite_path(uri: str) -> Path | None:
    """The file of a local store; None for a server."""
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite:///") else None


def open_client(uri: str, artifacts: str | None) -> Any:
    """MLflow's client for the store at `uri`; a local one is made where there is none."""
    from mlflow import MlflowClient

    path = sqlite_path(uri)
    if path is None:
        return MlflowClient(tracking_uri=uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _make_sqlite(path, artifacts)
        # A folder, or a file that may not be read, MLflow would try to open for two minutes.
        path.open("rb").close()
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


def examine(
    tracking: TrackingConfig,
    output: Path,
    environ: Mapping[str, str],
    host: str,
    clock: Callable[[], float] = time.time,
) -> Finding:
    """Returns the finding about a config's store, seen from this host; its output folder is `output`."""
    if tracking.store is Store.none:
        return Finding("store", host, Severity.FINE, "none is asked for", "tracking=none")
    if tracking.store is Store.sqlite:
        store = None if tracking.uri is None else sqlite_path(tracking.uri)
        return _examine_file(store or output / "mlflow.db", host)
    return _examine_server(str(tracking.uri), environ, host, clock)


def run_in(client: Any, run_id: str) -> Any:
    """A run in a store, also one that was deleted there; None where the store has lost it."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def remove(folder: Path) -> int:
    """Removes the run that a folder was sent as, from local stores with its files; returns from how many it was."""
    copies = read_tracking(folder).copies.items()
    return sum(_remove_from(uri, copied.run_id) for uri, copied in copies if copied.run_id is not None)


def local_artifacts(artifact_uri: str) -> Path | None:
    """The folder of a run's files where that is on this machine; None where a server has them."""
    parts = urllib.parse.urlsplit(artifact_uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(urllib.parse.unquote(parts.path))
    return Path(artifact_uri) if parts.scheme == "" else None


@contextlib.contextmanager
def requests_may_take(seconds: int) -> Iterator[None]:
    """Inside, MLflow waits at least that long for a server's answer, in a process that `prepare` has prepared."""
    before = os.environ[TIMEOUT_VARIABLE]
    os.environ[TIMEOUT_VARIABLE] = str(max(seconds, int(before)))
    try:
        yield
    finally:
        os.environ[TIMEOUT_VARIABLE] = before


def reason(error: BaseException, uri: str) -> str:
    """Returns what went wrong in a line without passwords, for a person who knows `uri`."""
    text, where = without_login(str(without_password(" ".join(str(error).split()))), os.environ), without_password(uri)
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
    """True if another request would fail in the same way."""
    signs = rf"API request to .*({LATE}|Max retries exceeded|Connection (refused|aborted|reset)|RemoteDisconnected)"
    return isinstance(error, ImportError) or re.search(signs, str(error), re.IGNORECASE | re.DOTALL) is not None


def _make_sqlite(path: Path, artifacts: str | None) -> None:
    """Makes the store beside its place, unsynced until it is moved there: one half made stays broken for good."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy import Engine, event

    def connected(connection: Any, record: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    new = path.with_name(f"{path.name}.new")
    for leftover in (new, path.with_name(f"{new.name}-journal")):
        leftover.unlink(missing_ok=True)
    event.listen(Engine, "connect", connected)
    try:
        SqlAlchemyStore(f"sqlite:///{new}", artifacts or str(path.parent / "mlartifacts")).engine.dispose()
    finally:
        event.remove(Engine, "connect", connected)
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    new.rename(path)


def _remove_from(uri: str, run_id: str) -> bool:
    path = sqlite_path(uri)
    if path is not None and not path.exists():
        return False
    client = open_client(uri, None)
    if (run := run_in(client, run_id)) is None:
        return False
    if run.info.lifecycle_stage != "deleted":
        client.delete_run(run_id)
    if path is not None:
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        # As `mlflow gc` does, which would take all deleted experiments too.
        artifacts, store = local_artifacts(run.info.artifact_uri), SqlAlchemyStore(uri, "")
        if artifacts is not None and artifacts.parent.name == run_id:
            shutil.rmtree(artifacts.parent, ignore_errors=True)
        try:
            store._hard_delete_run(run_id)
        finally:
            store.engine.dispose()
    return True


def _examine_server(uri: str, environ: Mapping[str, str], host: str, clock: Callable[[], float]) -> Finding:
    import email.utils
    import urllib.error
    import urllib.request

    where, fault = str(without_password(uri)), partial(Finding, "store", host, Severity.FAULT)
    expected = f"an MLflow server at {where}"
    if holds_password(uri) or not uri.startswith(("http://", "https://")):
        return fault(where, "http://HOST:PORT", "tracking.uri=http://127.0.0.1:5000")
    headers = {"Content-Type": "application/json", **_login(environ)}
    request = urllib.request.Request(f"{uri.rstrip('/')}/{SEARCH}", b'{"max_results": 1}', headers)
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
            json.load(answer)
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            login = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            return fault(f"{where} refuses the login ({error.code})", expected, login)
        return fault(f"{where} answers with error {error.code}", expected, SERVER)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        reason = without_login(str(getattr(why, "strerror", None) or why), environ)
        return fault(f"no answer of {where}: {reason}", expected, SERVER)
    figures, severity, remedy = {"answer_seconds": time.monotonic() - began}, Severity.FINE, ""
    figure = f"{where} answers in {1000 * figures['answer_seconds']:.0f} ms"
    with contextlib.suppress(TypeError, ValueError):
        # Its header has whole seconds.
        off = clock() - email.utils.parsedate_to_datetime(date).timestamp() - 0.5
        if abs(off) > CLOCK_SECONDS:
            figure, expected = f"{figure}, its clock is {off:+,.0f} s from this one", f"within {CLOCK_SECONDS:g} s"
            severity, remedy = Severity.WARNING, "timedatectl set-ntp true, there and here"
    return Finding("store", host, severity, figure, expected, remedy, figures)


def _examine_file(store: Path, host: str) -> Finding:
    import sqlite3

    expected, fault = f"a store in {store}", partial(Finding, "store", host, Severity.FAULT)
    if not store.exists():
        return Finding("store", host, Severity.FINE, f"none yet: the first run makes {store}", expected)
    try:
        with contextlib.closing(sqlite3.connect(f"{store.resolve().as_uri()}?mode=rw", uri=True, timeout=1)) as opened:
            query = "SELECT version_num, (SELECT count(*) FROM runs) FROM alembic_version"
            version, runs = opened.execute(query).fetchone()
            opened.execute("BEGIN IMMEDIATE")  # a lock to write, which is given back at once
            opened.rollback()
    except (sqlite3.Error, TypeError) as error:
        remedy = f"lsof {store}, if it is locked; mv {store} {store}.broken, and python -m pipeline sync"
        return fault(f"{store}: {error}", expected, remedy)
    if not os.access(store, os.W_OK):
        return fault(f"{store} cannot be written", expected, f"chmod u+w {store}")
    if (newest := _newest_change()) not in (None, version):
        remedy = f"mlflow db upgrade sqlite:///{store}, or the MLflow that made it"
        return fault(f"tables of another MLflow ({version})", newest, remedy)
    return Finding("store", host, Severity.FINE, f"{store} has {runs:,} run{'s' * (runs != 1)}", expected)


def _newest_change() -> str | None:
    """The state of tables that the installed MLflow wants, read from its files; None where they do not tell."""
    from importlib.util import find_spec

    spec = find_spec("mlflow")
    files = Path(spec.origin).parent.glob(CHANGES) if spec is not None and spec.origin else ()
    changes = [change for file in files for change in CHANGE.findall(file.read_text())]
    newest = {change for down, change in changes if not down} - {change for down, change in changes if down}
    return newest.pop() if len(newest) == 1 else None


def _login(environ: Mapping[str, str]) -> dict[str, str]:
    name, token = environ.get("MLFLOW_TRACKING_USERNAME"), environ.get("MLFLOW_TRACKING_TOKEN")
    if name:
        both = f"{name}:{environ.get('MLFLOW_TRACKING_PASSWORD', '')}".encode()
        return {"Authorization": f"Basic {base64.b64encode(both).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}
