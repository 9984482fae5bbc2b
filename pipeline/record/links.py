"""The measured speed of links between hosts: `links.json` in the output folder, for plans and predictions.

`python -m pipeline doctor` measures it; where a config says nothing of the link, what was measured last counts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.record.log import read_json, write_json

FILE = "links.json"
VERSION = 1


@dataclass(frozen=True)
class LinkSpeed:
    """One link: two hosts by the cluster's names for them, Gbit/s each way at once, and ms there and back."""

    hosts: tuple[str, str]
    gbps: float
    round_trip_ms: float


@dataclass(frozen=True)
class Links:
    """All links of some hosts that were measured together, and when."""

    version: int
    measured_at: float
    links: tuple[LinkSpeed, ...]


def write(output: Path, links: Sequence[LinkSpeed], now: float) -> Path:
    """Keeps what was measured, beside what is known of other hosts' links; the file that has it."""
    anew = {frozenset(link.hosts) for link in links}
    others = [link for link in read(output) if frozenset(link.hosts) not in anew]
    output.mkdir(parents=True, exist_ok=True)
    file = output / FILE
    write_json(file, Links(VERSION, now, (*others, *links)))
    return file


def read(output: Path) -> tuple[LinkSpeed, ...]:
    """The links that were measured; none if the file is missing or spoilt."""
    links = read_json(Links, output / FILE)
    return links.links if links else ()


def slowest(links: Collection[LinkSpeed], hosts: Collection[str]) -> float | None:
    """Gbit/s of the slowest link between two of the hosts, which a ring waits for; None where none of them is known.

    Without hosts, whose names are not known then, that of all links.

    >>> links = [LinkSpeed(("a", "b"), 10.0, 0.1), LinkSpeed(("c", "b"), 1.0, 0.1), LinkSpeed(("c", "d"), 0.1, 0.1)]
    >>> slowest(links, ["a", "b", "c"]), slowest(links, ["a"])
    (1.0, None)
    """
    speeds = [link.gbps for link in links if not hosts or {*link.hosts} <= {*hosts}]
    return float(f"{min(speeds):.3g}") if speeds else None
