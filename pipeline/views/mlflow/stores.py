"""Turns a store's URI into an MLflow client, and what goes wrong there into a line for a person.

It leaves what is sent to `pipeline.views.mlflow.copies`. MLflow is imported when a store is opened.
"""

import base64
import contextlib
import fcntl
import os
import re
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

# One request to a server.
REQUEST_SECONDS = 5
TIMEOUT_VARIABLE = "MLFLOW_HTTP_REQUEST_TIMEOUT"
# What MLflow says of a server that took too long.
LATE = r"timeout exception|timed out"


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
    """`uri` without user and password.

    >>> without_password("http://ann:secret@mlflow.example:5000/a")
    'http://mlflow.example:5000/a'
    """
    return None if uri is None else re.sub(r"(?<=://)[^/\s]*@|(?<=[?&])password=[^&\s]*", "", uri)


def without_login(text: str, environ: Mapping[str, str]) -> str:
    """`text` without what a server is logged in to with, which a server's answer may repeat.

    >>> without_login("Who is Bearer 5e1f?", {"MLFLOW_TRACKING_TOKEN": "5e1f"})
    'Who is Bearer ***?'
    """
    name, password = (environ.get(f"MLFLOW_TRACKING_{what}", "") for what in ("USERNAME", "PASSWORD"))
    basic = base64.b64encode(f"{name}:{password}".encode()).decode()
    for secret in (password, environ.get("MLFLOW_TRACKING_TOKEN"), basic):
        text = text.replace(secret, "***") if secret else text
    return text


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
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


@contextlib.contextmanager
def requests_may_take(seconds: int) -> Iterator[None]:
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


def reason(error: BaseException, uri: str) -> str:
    """What went wrong, in a line without passwords, for a person who knows `uri`."""
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
    """Would another request fail in the same way?"""
    signs = rf"API request to .*({LATE}|Max retries exceeded|Connection (refused|aborted|reset)|RemoteDisconnected)"
    return isinstance(error, ImportError) or re.search(signs, str(error), re.IGNORECASE | re.DOTALL) is not None


def _make_sqlite(path: Path, artifacts: str | None) -> None:
    """Makes the store beside its place, then moves it there: one that is half made stays broken for good."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    new = path.with_name(f"{path.name}.new")
    for leftover in (new, path.with_name(f"{new.name}-journal")):
        leftover.unlink(missing_ok=True)
    SqlAlchemyStore(f"sqlite:///{new}", artifacts or str(path.parent / "mlartifacts")).engine.dispose()
    new.rename(path)
