"""The stores that a run is sent to, and how much of it each has: `tracking.json` in its folder."""

import dataclasses
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.record import codec
from pipeline.record.codec import MismatchError
from pipeline.record.log import read_whole, write_json

LOG, STATE = "events.jsonl", "tracking.json"
# Of a run's id, at the end of its name in MLflow.
ID_LETTERS = 5
# What a run is closed with that someone deleted in the store: it stays so.
DELETED = "DELETED"


@dataclass(frozen=True)
class TrackingStore:
    """An MLflow store that runs are sent to, by its URI, and the experiment in it.

    `store` is its kind; `artifacts` a URI for the files of a local one; with `log_model` the trained model is one of
    them. Without `uri` nothing is sent.
    """

    store: str | None = None
    uri: str | None = None
    experiment: str | None = None
    artifacts: str | None = None
    log_model: bool = True


@dataclass(frozen=True)
class Copied:
    """The copy of a run in a store: its id and its experiment's, and how many bytes of the log were sent.

    `closed` is the status, once all is sent, or DELETED. `killed_ms` is when it was ended there since nobody else would
    end it, and `problem` what its sender has met last.
    """

    run_id: str | None = None
    experiment_id: str | None = None
    offset: int = 0
    closed: str | None = None
    killed_ms: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class TrackingState:
    """The store of a run, its copy there, and its copies in other stores, by their URIs."""

    store: TrackingStore | None = None
    copied: Copied = Copied()
    copies: dict[str, Copied] = field(default_factory=dict)

    def in_store(self, uri: str | None) -> Copied:
        """The copy in the store at `uri`."""
        return self.copied if self._is_own(uri) else self.copies.get(str(uri), Copied())

    def with_copied(self, uri: str | None, copied: Copied) -> "TrackingState":
        """The same, where the store at `uri` holds so much."""
        if self._is_own(uri):
            return dataclasses.replace(self, copied=copied)
        return dataclasses.replace(self, copies={**self.copies, str(uri): copied})

    def _is_own(self, uri: str | None) -> bool:
        return self.store is not None and self.store.uri == uri


def recall(folder: Path) -> TrackingState:
    """The state in `tracking.json`."""
    values = read_whole(folder / STATE)
    with suppress(MismatchError):
        # Beside the store stands what is there.
        copied = codec.from_plain(Copied, values)
        return dataclasses.replace(codec.from_plain(TrackingState, values), copied=copied)
    return TrackingState()


def run_id_of(folder: Path) -> str | None:
    """The id of a folder's run in the store that it is tracked in; None where there is none."""
    return recall(folder).copied.run_id


def write(folder: Path, state: TrackingState) -> None:
    """Makes `state` what `recall` returns: a reader sees the old values or these."""
    copied = dataclasses.asdict(state.copied)
    write_json(folder / STATE, {"store": state.store, **copied, "copies": state.copies})
