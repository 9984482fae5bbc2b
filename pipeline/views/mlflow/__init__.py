"""Turns a run's event log into an MLflow run: as it grows, by a process of its own, or later, by `sync`.

    python -m pipeline.views.mlflow.sync_runs  started by a `Tracker`, which names to it the folders of runs to follow
    python -m pipeline sync                 sends what MLflow does not hold yet, and ends runs whose driver is gone

Both fold the log through `changes`, and note in the run's `tracking.json` how far they came, where the driver reads it.
To send a thing twice changes nothing: a run is found again by its key, and MLflow stores an equal point once. The
follower is a process because MLflow takes seconds to import and its server may hang: the driver waits for neither, and
imports no more than `Tracker`.
"""

from pipeline.views.mlflow.tracker import Tracker

__all__ = ["Tracker"]
