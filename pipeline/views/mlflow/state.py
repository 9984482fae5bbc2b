"""Notes in a run's folder where it is tracked; what the values mean is left to `pipeline.views.mlflow.copies`."""

import dataclasses
from pathlib import Path

from pipeline.record.tracking import Copied, Store, recall, write
from pipeline.views.mlflow.stores import without_password


def remember(folder: Path, store: Store) -> None:
    """Notes in the run's folder where it is tracked. How far it was sent to another store is forgotten."""
    state, wanted = recall(folder), dataclasses.replace(store, uri=without_password(store.uri))
    same = (state.store.uri if state.store else None) == wanted.uri
    write(folder, dataclasses.replace(state, store=wanted, copied=state.copied if same else Copied()))
