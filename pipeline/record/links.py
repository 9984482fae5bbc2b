"""The speed of links between hosts as `links.json` keeps it, in the output folder, for plans and predictions.

`python -m pipeline doctor` measures it; where a config says nothing of the link, what was measured last counts.
"""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.record import plain
from pipeline.record.log import write_whole
from pipeline.record.plain import MismatchError

FILE = "links.json"
VERSION = 1


@dataclass(frozen=True)
class Measured:
    """One link: two hosts by the cluster's names for them, Gbit/s each way at once, and ms there and back."""

    hosts: tuple[str, str]
    gbps: float
    round_trip_ms: float


@dataclass(frozen=True)
class Links:
    """All links of some hosts that were measured together, and when."""

    version: int
    measured_at: float
    links: tuple[Measured, ...]


def write(output: Path, links: Sequence[Measured], now: float) -> Path:
    """Keeps what was measured, beside what is known of other hosts' links; the file that has it."""
    anew = {frozenset(link.hosts) for link in links}
    kept = [link for link in read(output) if frozenset(link.hosts) not in anew]
    output.mkdir(parents=True, exist_ok=True)
    file = output / FILE
    write_whole(file, json.dumps(plain.to_plain(Links(VERSION, now, (*kept, *links))), indent=1) + "\n")
    return file


def read(output: Path) -> tuple[Measured, ...]:
    """What is known of links; nothing where nothing was measured, or the file is spoilt."""
    with suppress(OSError, ValueError, MismatchError):
        return plain.made_of(Links, json.loads((output / FILE).read_text())).links
    return ()


def slowest(links: Collection[Measured], hosts: Collection[str]) -> float | None:
    """Gbit/s of the slowest link between two of the hosts, which a ring waits for; None where none of them is known.

    Without hosts, whose names are not known then, that of all links.

    >>> links = [Measured(("a", "b"), 10.0, 0.1), Measured(("c", "b"), 1.0, 0.1), Measured(("c", "d"), 0.1, 0.1)]
    >>> slowest(links, ["a", "b", "c"]), slowest(links, ["a"])
    (1.0, None)
    """
    known = [link.gbps for link in links if not hosts or {*link.hosts} <= {*hosts}]
    return float(f"{min(known):.3g}") if known else None
