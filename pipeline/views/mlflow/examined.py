"""Finds out whether the store that runs are tracked in takes them, without MLflow's waiting, and without a trace."""

import base64
import contextlib
import email.utils
import json
import os
import re
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from pipeline.config.schema import Store, TrackingConfig, holds_password
from pipeline.doctor.facts import Finding, Severity
from pipeline.views.mlflow.stores import sqlite_path, without_login, without_password

ANSWER_SECONDS = 5.0
# By which a server's clock may be off before runs seem to end before they begin.
CLOCK_SECONDS = 5.0
SEARCH = "api/2.0/mlflow/experiments/search"
SERVER = "python -m pipeline ui, which starts one; tracking=sqlite, or tracking=none and python -m pipeline sync later"
# MLflow's changes to its tables, each a file that names the one before.
CHANGES, CHANGE = "store/db_migrations/versions", re.compile(r"^(down_)?revision\s*=\s*['\"](\w+)['\"]", re.M)


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
        return _file(store or output / "mlflow.db", host)
    return _server(str(tracking.uri), environ, host, clock)


def _server(uri: str, environ: Mapping[str, str], host: str, clock: Callable[[], float]) -> Finding:
    where = str(without_password(uri))
    expected = f"an MLflow server at {where}"
    if holds_password(uri) or not uri.startswith(("http://", "https://")):
        return Finding("store", host, Severity.FAULT, where, "http://HOST:PORT", "tracking.uri=http://127.0.0.1:5000")
    request = urllib.request.Request(
        f"{uri.rstrip('/')}/{SEARCH}", b'{"max_results": 1}', {"Content-Type": "application/json", **_login(environ)}
    )
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            json.load(answer)
            told_at = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            login = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            return Finding("store", host, Severity.FAULT, f"{where} refuses the login ({error.code})", expected, login)
        return Finding("store", host, Severity.FAULT, f"{where} answers with error {error.code}", expected, SERVER)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        reason = without_login(str(getattr(why, "strerror", None) or why), environ)
        return Finding("store", host, Severity.FAULT, f"no answer of {where}: {reason}", expected, SERVER)
    seconds = time.monotonic() - began
    figures = {"answer_seconds": seconds}
    figure = f"{where} answers in {1000 * seconds:.0f} ms"
    with contextlib.suppress(TypeError, ValueError):
        # Its header has whole seconds.
        off = clock() - email.utils.parsedate_to_datetime(told_at).timestamp() - 0.5
        if abs(off) > CLOCK_SECONDS:
            figure, expected = f"{figure}, its clock is {off:+,.0f} s from this one", f"within {CLOCK_SECONDS:g} s"
            remedy = "timedatectl set-ntp true, there and here"
            return Finding("store", host, Severity.WARNING, figure, expected, remedy, figures)
    return Finding("store", host, Severity.FINE, figure, expected, figures=figures)


def _file(store: Path, host: str) -> Finding:
    expected = f"a store in {store}"
    if not store.exists():
        return Finding("store", host, Severity.FINE, f"none yet: the first run makes {store}", expected)
    try:
        with contextlib.closing(sqlite3.connect(f"{store.resolve().as_uri()}?mode=rw", uri=True, timeout=1)) as opened:
            (version,) = opened.execute("SELECT version_num FROM alembic_version").fetchone()
            runs = opened.execute("SELECT count(*) FROM runs").fetchone()[0]
            # A lock to write, which is given back at once.
            opened.execute("BEGIN IMMEDIATE")
            opened.rollback()
    except (sqlite3.Error, TypeError) as error:
        remedy = f"lsof {store}, if it is locked; mv {store} {store}.broken, and python -m pipeline sync"
        return Finding("store", host, Severity.FAULT, f"{store}: {error}", expected, remedy)
    if not os.access(store, os.W_OK):
        return Finding("store", host, Severity.FAULT, f"{store} cannot be written", expected, f"chmod u+w {store}")
    newest = newest_change()
    if newest is not None and version != newest:
        remedy = f"mlflow db upgrade sqlite:///{store}, or the MLflow that made it"
        return Finding("store", host, Severity.FAULT, f"tables of another MLflow ({version})", newest, remedy)
    return Finding("store", host, Severity.FINE, f"{store} has {runs:,} run{'s' * (runs != 1)}", expected)


def newest_change() -> str | None:
    """The state of tables that the installed MLflow wants, read from its files; None where they do not tell."""
    spec = find_spec("mlflow")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / CHANGES
    if folder is None or not folder.is_dir():
        return None
    revisions, before = set[str](), set[str]()
    for file in folder.glob("*.py"):
        for down, change in CHANGE.findall(file.read_text()):
            (before if down else revisions).add(change)
    left = revisions - before
    return left.pop() if len(left) == 1 else None


def _login(environ: Mapping[str, str]) -> dict[str, str]:
    """The header that logs in to a server, if the environment has what with."""
    name, token = environ.get("MLFLOW_TRACKING_USERNAME"), environ.get("MLFLOW_TRACKING_TOKEN")
    if name:
        both = f"{name}:{environ.get('MLFLOW_TRACKING_PASSWORD', '')}".encode()
        return {"Authorization": f"Basic {base64.b64encode(both).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}
