"""Removes runs from the MLflow stores that hold them, before their folders go."""

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.record.tracking import recall
from pipeline.views.mlflow.stores import open_client, sqlite_path


def remove(folder: Path) -> int:
    """Removes the run that a folder was sent as, from each store that holds it; returns from how many.

    From a local store it is gone with its files. On a server it is deleted, as its page does it. What fails raises.
    """
    state = recall(folder)
    kept = {uri: copied.run_id for uri, copied in state.copies.items()}
    if state.store is not None and state.store.uri is not None:
        kept[state.store.uri] = state.copied.run_id
    held = [(uri, run_id) for uri, run_id in kept.items() if run_id is not None]
    return sum(_remove_from(uri, run_id) for uri, run_id in held)


def local_artifacts(artifact_uri: str) -> Path | None:
    """The folder of a run's files where that is on this machine; None where a server has them.

    >>> local_artifacts("file:///there/1/abc/artifacts"), local_artifacts("mlflow-artifacts:/1/abc/artifacts")
    (PosixPath('/there/1/abc/artifacts'), None)
    """
    parts = urlsplit(artifact_uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    return Path(artifact_uri) if parts.scheme == "" else None


def _remove_from(uri: str, run_id: str) -> bool:
    """Is there such a run no more that was there?"""
    from mlflow.exceptions import MlflowException

    path = sqlite_path(uri)
    if path is not None and not path.exists():
        return False
    client = open_client(uri, None)
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    if run.info.lifecycle_stage != "deleted":
        client.delete_run(run_id)
    if path is not None:
        _purge(uri, run)
    return True


def _purge(uri: str, run: Any) -> None:
    """Takes a deleted run out of a local store, as `mlflow gc` does, which would take all deleted experiments too."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    artifacts = local_artifacts(run.info.artifact_uri)
    if artifacts is not None and artifacts.parent.name == run.info.run_id:
        shutil.rmtree(artifacts.parent, ignore_errors=True)
    store = SqlAlchemyStore(uri, "")
    try:
        store._hard_delete_run(run.info.run_id)
    finally:
        store.engine.dispose()
