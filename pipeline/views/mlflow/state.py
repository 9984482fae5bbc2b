"""Notes in a run's folder where it is tracked; what the values mean is left to `pipeline.views.mlflow.copies`."""

from pathlib import Path

from pipeline.record.tracking import FRESH, recall, write
from pipeline.views.mlflow.stores import Store, without_password


def remember(folder: Path, store: Store) -> None:
    """Notes in the run's folder where it is tracked. How far it was sent to another store is forgotten."""
    kept, wanted = recall(folder), {**store, "uri": without_password(store.get("uri"))}
    if (kept["store"] or {}).get("uri") != wanted["uri"]:
        kept |= FRESH
    write(folder, kept | {"store": wanted})
