"""Measures what is between hosts, their clocks and the link of each pair, and turns that into findings."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pipeline.doctor.facts import Exchanged
from pipeline.doctor.findings import Finding, Severity
from pipeline.launch.asking import Line, LineError
from pipeline.record import plain
from pipeline.record.links import Measured

CLOCK_SAMPLES = 7
# Events of processes and lines of logs are put in order by their times; certificates hold from a time on.
CLOCKS_SECONDS, CLOCKS_FAULT_SECONDS = 1.0, 60.0
# Of more hosts, each is measured with the next one only: 16 of them are 120 pairs, which take 15 turns.
MOST_ALL_PAIRS = 16
MEASURE_SECONDS = 60.0
# Gigabit Ethernet, which is what a link is held to where the config says nothing.
GIGABIT = 1.0
# TCP over Ethernet carries 0.94 of a link's bits; what else is on it takes some more.
SHARE, SHARE_FAULT = 0.8, 0.5
# A round trip within a building takes no longer.
ROUND_TRIP_SECONDS = 0.005
TOKEN_BYTES = 32


@dataclass(frozen=True)
class Clock:
    """How many seconds a host's clock is ahead of the conductor's, give or take `within`."""

    ahead: float
    within: float


def clock_of(line: Line, clock: Callable[[], float] = time.time) -> Clock:
    """A host's clock beside `clock`, by the quickest of some questions (Cristian, 1989). Raises `LineError`."""
    found: list[Clock] = []
    for _ in range(CLOCK_SAMPLES):
        asked = clock()
        theirs = float(line.ask({"do": "clock"}))
        answered = clock()
        found.append(Clock(theirs - (asked + answered) / 2, abs(answered - asked) / 2))
    return min(found, key=lambda sample: sample.within)


def judge_clock(host: str, conductor: str, found: Clock) -> Finding:
    """What is to be said of a host's clock."""
    # What the way took is not held against it.
    off = max(0.0, abs(found.ahead) - found.within)
    severity = Severity.FAULT if off > CLOCKS_FAULT_SECONDS else Severity.WARNING if off > CLOCKS_SECONDS else 0
    remedy = "chronyc makestep, or timedatectl set-ntp true, on both" if severity else ""
    way = "ahead of" if found.ahead > 0 else "behind"
    text = f"{abs(found.ahead):,.3f} s {way} {conductor}"
    expected = f"within {CLOCKS_SECONDS:g} s"
    return Finding("clocks", host, Severity(severity), text, expected, remedy, {"ahead_seconds": found.ahead})


def turns(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Pairs of hosts in turns, in each of which a host is once at most: all pairs, or of many hosts neighbours alone.

    >>> turns(["a", "b", "c"])
    [[('b', 'c')], [('a', 'c')], [('a', 'b')]]
    """
    if len(hosts) > MOST_ALL_PAIRS:
        ring = [(host, hosts[(place + 1) % len(hosts)]) for place, host in enumerate(hosts)]
        # The last of an odd number is a turn of its own: its neighbours are busy in both others.
        even = len(ring) // 2 * 2
        return [turn for turn in (ring[0:even:2], ring[1:even:2], ring[even:]) if turn]
    # The circle method: one stays, the others move on by a place each turn.
    places: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def measure_links(lines: Mapping[str, Line], addresses: Mapping[str, str]) -> Iterator[tuple[str, str, Exchanged]]:
    """(One host, another, what they have measured) of pairs of hosts, which `addresses` has the addresses of."""
    with ThreadPoolExecutor(max(1, len(lines) // 2)) as threads:
        for turn in turns(list(lines)):
            measured = threads.map(lambda pair: _measure(pair[0], pair[1], lines, addresses), turn)
            yield from ((*pair, found) for pair, found in zip(turn, measured, strict=True))


def _measure(one: str, other: str, lines: Mapping[str, Line], addresses: Mapping[str, str]) -> Exchanged:
    token, at = secrets.token_hex(TOKEN_BYTES), addresses[other]
    try:
        # Its own address, where it goes by that; a name that leads back to itself says nothing of what others reach.
        listen = at if at.replace(".", "").isdigit() or ":" in at else ""
        port = lines[other].ask({"do": "answer", "host": listen, "token": token})
        told = lines[one].ask({"do": "measure", "host": at, "port": port, "token": token}, MEASURE_SECONDS)
        return plain.made_of(Exchanged, told)
    except LineError as error:
        return Exchanged(error=str(error))


def judge_link(one: str, other: str, found: Exchanged, link_gbps: float | None) -> Finding:
    """What is to be said of a link that the config says `link_gbps` of, or nothing."""
    pair = f"{one} - {other}"
    said = f"{link_gbps:g} Gbit/s, as hardware.link_gbps says" if link_gbps else f"{GIGABIT:g} Gbit/s or more"
    if found.error or not found.trips:
        remedy = f"a firewall that lets the hosts reach all ports of each other; on {one}: ping {other}"
        return Finding("link", pair, Severity.FAULT, found.error or "nothing was measured", said, remedy)
    gbps = found.gbps
    sizes = ", ".join(f"{trip.size / trip.seconds / 1e9:.3g}" for trip in found.trips)
    of = ", ".join(f"{trip.size >> 10:,}" for trip in found.trips)
    text = f"{gbps:.3g} Gbit/s each way ({sizes} GB/s of {of} KiB), {1e3 * found.round_trip:.3g} ms there and back"
    figures = {"gbps": gbps, "round_trip_ms": 1e3 * found.round_trip}
    share = gbps / (link_gbps or GIGABIT)
    if share < SHARE:
        severity = Severity.FAULT if link_gbps and share < SHARE_FAULT else Severity.WARNING
        remedy = (
            f"hardware.link_gbps={gbps:.2g} if that is all it can do; else ethtool, and who else uses it"
            if link_gbps
            else "a faster network, or less on it: train.gradient_bits=16, a larger train.replica_batch"
        )
        return Finding("link", pair, severity, text, said, remedy, figures)
    if found.round_trip > ROUND_TRIP_SECONDS:
        near = f"{said}, {1e3 * ROUND_TRIP_SECONDS:g} ms"
        return Finding("link", pair, Severity.WARNING, text, near, "hosts that are nearer to each other", figures)
    return Finding("link", pair, Severity.FINE, text, said, figures=figures)


def measured(found: Sequence[tuple[str, str, Exchanged]]) -> list[Measured]:
    """The links of which there are figures, as they are kept."""
    return [Measured((one, other), link.gbps, 1e3 * link.round_trip) for one, other, link in found if link.trips]
