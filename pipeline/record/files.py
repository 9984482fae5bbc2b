"""The small files beside logs and results, and their contents: of a run, of a sweep, and of the output folder."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pipeline.record as record
from pipeline.record.log import SECRET, objects, read_json, read_whole, write_json, written

LOG, TRACKING, AGENTS, SWEEP = "events.jsonl", "tracking.json", "agents.json", "sweep.json"
# In the output folder.
PREDICTIONS, LINKS = "predictions.jsonl", "links.json"
# Of a run's id, at the end of its name in MLflow.
ID_LETTERS = 5
# What a run is closed with that someone deleted in the store: it stays so.
DELETED = "DELETED"


@dataclass(frozen=True)
class TrackingStore:
    """An MLflow store and the experiment in it; `artifacts` is where a local one has files. No `uri`: none is sent."""

    store: str | None = None
    uri: str | None = None
    experiment: str | None = None
    artifacts: str | None = None
    log_model: bool = True


@dataclass(frozen=True)
class Copied:
    """The copy of a run in a store: its ids, bytes of the log sent, its end or DELETED, and its sender's problem."""

    run_id: str | None = None
    experiment_id: str | None = None
    offset: int = 0
    closed: str | None = None
    killed_ms: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class TrackingState:
    """The store of a run, and its copies in stores, by their URIs."""

    store: TrackingStore | None = None
    copies: dict[str, Copied] = field(default_factory=dict)

    @property
    def copied(self) -> Copied:
        """The copy in the run's own store."""
        return self.in_store(self.store.uri) if self.store else Copied()

    def in_store(self, uri: str | None) -> Copied:
        """The copy in the store at `uri`."""
        return self.copies.get(str(uri), Copied())

    def with_copied(self, uri: str | None, copied: Copied) -> "TrackingState":
        """The same, where the store at `uri` holds so much."""
        return replace(self, copies={**self.copies, str(uri): copied})


def read_tracking(folder: Path) -> TrackingState:
    """The state in `tracking.json`, where the run's own copy stands beside its store."""
    values = read_whole(folder / TRACKING)
    with suppress(record.MismatchError):
        state, copied = record.from_plain(TrackingState, values), record.from_plain(Copied, values)
        return state.with_copied(state.store.uri, copied) if state.store and copied != Copied() else state
    return TrackingState()


def run_id_of(folder: Path) -> str | None:
    """The id of a folder's run in the store that it is tracked in; None where there is none."""
    return read_tracking(folder).copied.run_id


def write_tracking(folder: Path, state: TrackingState) -> None:
    """Makes `state` what `read_tracking` returns: a reader sees the old values or these."""
    own = str(state.store.uri) if state.store else None
    others = {uri: copied for uri, copied in state.copies.items() if uri != own}
    write_json(folder / TRACKING, {"store": state.store, **asdict(state.copied), "copies": others})


@dataclass(frozen=True)
class Kept:
    """The address that agents of a gone driver dial, their token, each group's jobs in order, and who has a part."""

    address: str
    token: str
    jobs: dict[str, list[int]] = field(default_factory=dict)
    agents: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "Kept | None":
        """Reads that of the run in a folder; None if nothing outlives its driver."""
        return read_json(cls, folder / AGENTS)

    def with_job(self, group: str, number: int, agents: Iterable[str] = ()) -> "Kept":
        """The same, once another job of a group has begun."""
        jobs = self.jobs | {group: [*self.jobs.get(group, ()), number]}
        return replace(self, jobs=jobs, agents=sorted({*self.agents, *agents}))

    def write(self, folder: Path) -> None:
        """Writes it so that nobody else can read it. Raises `OSError`."""
        write_json(folder / AGENTS, self, SECRET)


def forget_agents(folder: Path) -> None:
    """Notes that nothing outlives the driver of the run in a folder."""
    (folder / AGENTS).unlink(missing_ok=True)


def trains_on(folder: Path, now: float) -> bool:
    """True if a run may be training without its driver: its processes wait for one as long as the plan says."""
    planned = read_whole(folder / "plan.json") if (folder / AGENTS).exists() else {}
    waits = planned.get("orphan_timeout")
    return planned.get("detach") is True and isinstance(waits, int | float) and now < written(folder / LOG) + waits


@dataclass
class Entry:
    """A point of a sweep: its number, its repeat, its folder from the sweep's, how it ended, and its seconds."""

    place: int
    repeat: int
    fingerprint: str
    folder: str
    overrides: tuple[str, ...]
    status: str | None = None
    error: str | None = None
    seconds: float | None = None


def read_sweep(folder: Path) -> list[Entry]:
    """The points of the sweep in a folder; none where it does not list them, or a file that is broken."""
    with suppress(record.MismatchError):
        return record.from_plain(list[Entry], read_whole(folder / SWEEP).get("points"))
    return []


def write_sweep(folder: Path, entries: Sequence[Entry]) -> None:
    """Writes the points of the sweep in a folder, whole. Raises `OSError`."""
    points = sorted(entries, key=lambda entry: (entry.place, entry.repeat))
    write_json(folder / SWEEP, {"name": folder.name, "points": points})


@dataclass(frozen=True)
class FittedOn:
    """The runs that a prediction was fitted on, what they were of, how many others were left out, and a timed step."""

    runs: int
    left_out: int = 0
    strategies: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    replica_batches: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    timed_step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The predicted examples per second of a plan, their interval, and when and for what they were predicted.

    `correction` is what a fit was multiplied by, since runs and earlier predictions were off, and `unsure` how sure it
    was, as a standard deviation of the logarithm; None of versions that did not tell.
    """

    time: float | None = None
    examples_per_second: float
    low: float
    high: float
    confidence: float | None = None
    strategy: str | None = None
    workers: int | None = None
    parameters: int | None = None
    fitted_on: FittedOn | None = None
    correction: float = 1.0
    unsure: float | None = None


@dataclass(frozen=True, kw_only=True)
class PredictionLine(Predicted):
    """A line of predictions.jsonl: `identity` names the plan that it is of, see `step_model.identity`."""

    identity: str


@dataclass(frozen=True, kw_only=True)
class Scored(Predicted):
    """A prediction of a run that has `measured` so much: their ratio less 1, and whether the interval holds that."""

    measured: float | None = None
    error: float
    held: bool


def append_prediction(output: Path, line: PredictionLine) -> None:
    """Keeps a prediction, to be scored by a run that comes after it."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / PREDICTIONS).open("ab") as lines:
        lines.write(record.to_json(line) + b"\n")


def read_predictions(output: Path) -> list[PredictionLine]:
    """The predictions that were made, oldest first."""
    lines: list[PredictionLine] = []
    for values, _ in objects(output / PREDICTIONS):
        with suppress(record.MismatchError):
            lines.append(record.from_plain(PredictionLine, values))
    return lines


@dataclass(frozen=True)
class LinkSpeed:
    """One link: two hosts by the cluster's names for them, Gbit/s each way at once, and ms there and back."""

    hosts: tuple[str, str]
    gbps: float
    round_trip_ms: float


def write_links(output: Path, links: Sequence[LinkSpeed], now: float) -> Path:
    """Keeps what was measured, beside what is known of other hosts' links; the file that has it."""
    anew = {frozenset(link.hosts) for link in links}
    others = [link for link in read_links(output) if frozenset(link.hosts) not in anew]
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / LINKS, {"version": 1, "measured_at": now, "links": [*others, *links]})
    return output / LINKS


def read_links(output: Path) -> list[LinkSpeed]:
    """The links that were measured; none if the file is missing or spoilt."""
    with suppress(record.MismatchError):
        return record.from_plain(list[LinkSpeed], read_whole(output / LINKS).get("links"))
    return []


def slowest_link(links: Collection[LinkSpeed], hosts: Collection[str]) -> float | None:
    """Gbit/s of the slowest link between two of the hosts, which a ring waits for; None where none of them is known.

    Without hosts, whose names are not known then, that of all links.

    >>> links = [LinkSpeed(("a", "b"), 10.0, 0.1), LinkSpeed(("c", "b"), 1.0, 0.1), LinkSpeed(("c", "d"), 0.1, 0.1)]
    >>> slowest_link(links, ["a", "b", "c"]), slowest_link(links, ["a"])
    (1.0, None)
    """
    speeds = [link.gbps for link in links if not hosts or {*link.hosts} <= {*hosts}]
    return float(f"{min(speeds):.3g}") if speeds else None
