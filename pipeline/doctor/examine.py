"""Asks all hosts at once, and turns what they report, and what is between them, into findings."""

import ipaddress
import platform
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata

import msgspec
from packaging.requirements import Requirement

from pipeline.config.schema import Config, Kind
from pipeline.doctor.facts import BACKENDS, Expected, Finding, LinkFacts, Severity
from pipeline.doctor.judge import judge_clock, judge_link
from pipeline.doctor.look import installed
from pipeline.launch import Helpers, LaunchError, Line
from pipeline.record.files import LinkSpeed

PACKAGE = "distributed-keras-pipeline"
# What is looked at on a host that only drives.
OF_DRIVER = ("python", "packages", "files", "disk", "names")
# All that a host is asked at once, of which the import of TensorFlow takes longest.
LOOK_SECONDS = 300.0
CLOCK_SAMPLES = 7
# Of more hosts, each is measured with the next one only: 16 of them are 120 pairs, which take 15 turns.
MOST_ALL_PAIRS = 16
MEASURE_SECONDS = 60.0


def expected_of(
    config: Config, checks: Sequence[str], addresses: Sequence[str], others: Sequence[str], driver: str, here: bool
) -> Expected:
    """The demands on a host, which drives if it is `here`: `addresses` must be free on it, and `others` found."""
    # Of a backend that a package offers nothing is known.
    hardware, backend = config.hardware, config.backend if config.backend in BACKENDS else "tensorflow"
    python, required = _required(backend)
    packages = required if "packages" in checks else {}
    devices, on_cpu = hardware.devices_per_host or 1, hardware.kind is Kind.cpu
    folders = [config.output_dir] if here else []
    if config.checkpoint.folder and "://" not in config.checkpoint.folder:
        folders.append(config.checkpoint.folder)
    folders.append(tempfile.gettempdir())
    return Expected(
        checks=tuple(checks),
        python=python,
        packages=packages,
        versions={name: installed(name) for name in packages},
        python_version=platform.python_version(),
        driver=driver,
        backend=backend,
        gpus=devices if hardware.kind is Kind.gpu and not hardware.rehearse else 0,
        cores=devices * (hardware.threads_per_device or 1) if on_cpu else 1,
        on_cpu=on_cpu or hardware.rehearse,
        others=tuple(others),
        folders=tuple(dict.fromkeys(folders)) if "disk" in checks else (),
        addresses=tuple(addresses) if "ports" in checks else (),
        names=tuple(dict.fromkeys(("localhost", *filter(_is_name, others)))) if "names" in checks else (),
    )


def _required(backend: str) -> tuple[str, dict[str, str]]:
    """(versions of Python, those of packages) that this one requires under a backend; a few if it is not installed."""
    chosen = BACKENDS[backend]
    try:
        about, lines = metadata.metadata(PACKAGE), metadata.requires(PACKAGE) or ()
    except metadata.PackageNotFoundError:
        return "", dict.fromkeys(chosen.alike, "")
    packages = {
        one.name: _in_order(str(one.specifier))
        for one in map(Requirement, lines)
        if one.name not in chosen.spared
        and (one.marker is None or one.marker.evaluate() or one.marker.evaluate({"extra": chosen.extra}))
    }
    return _in_order(about["Requires-Python"]) if "Requires-Python" in about else "", packages


def _is_name(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return False
    return True


def _in_order(specifier: str) -> str:
    """The least version first: ">=3.15,<3.16"."""
    return ",".join(sorted(specifier.split(","), reverse=True))


def examine(
    hosts: Helpers, expected: Mapping[str, Expected], driver: str, checks: Sequence[str], link_gbps: float | None = None
) -> tuple[list[Finding], list[LinkSpeed]]:
    """(Findings on each host, and between those that have an address; the links between these, as measured)."""
    findings = [_silent("python", name, why) for name, why in hosts.absent.items()]
    lines: dict[str, Line] = {}
    with ThreadPoolExecutor(max(1, len(hosts.lines))) as threads:
        plain = {name: msgspec.to_builtins(of_host) for name, of_host in expected.items()}
        requests = {name: {"do": "look", "host": name, "expected": plain[name]} for name in hosts.lines}
        reports = {name: threads.submit(line.ask, requests[name], LOOK_SECONDS) for name, line in hosts.lines.items()}
    for name, report in reports.items():
        try:
            findings += msgspec.convert(report.result(), list[Finding])
            lines |= {name: hosts.lines[name]} if name in hosts.addresses else {}
        except msgspec.ValidationError as error:
            findings.append(_silent("python", name, f"an answer of another version of the pipeline: {error}"))
        except LaunchError as error:
            findings.append(_silent("python", name, error))
    for name, line in lines.items() if "clocks" in checks else ():
        try:
            findings.append(judge_clock(name, driver, *clock_of(line)))
        except LaunchError as error:
            findings.append(_silent("clocks", name, error))
    links: list[LinkSpeed] = []
    for one, other, link in measure_links(lines, hosts.addresses) if "link" in checks else ():
        findings.append(judge_link(one, other, link, link_gbps))
        if link.exchanges:
            links.append(LinkSpeed((one, other), link.gbps, 1e3 * link.round_trip))
    return findings, links


def _silent(check: str, host: str, error: object) -> Finding:
    remedy = f"the same environment on {host}, and python -m pipeline doctor there"
    return Finding(check, host, Severity.FAULT, str(error), "the pipeline there", remedy)


def clock_of(line: Line, clock: Callable[[], float] = time.time) -> tuple[float, float]:
    """(Seconds that a host's clock is ahead of `clock`, give or take how many), by the quickest of some requests
    (Cristian, 1989). Raises `LaunchError`."""
    samples = []
    for _ in range(CLOCK_SAMPLES):
        sent = clock()
        theirs = float(line.ask({"do": "clock"}))
        received = clock()
        samples.append((theirs - (sent + received) / 2, abs(received - sent) / 2))
    return min(samples, key=lambda sample: sample[1])


def turns(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Pairs of hosts in turns, with each host in a turn once at most: all pairs, or of many hosts neighbours alone."""
    if len(hosts) > MOST_ALL_PAIRS:
        ring = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
        # The last of an odd number is a turn of its own: its neighbours are busy in both others.
        even = len(ring) // 2 * 2
        return [turn for turn in (ring[0:even:2], ring[1:even:2], ring[even:]) if turn]
    # The circle method: one stays, the others move on by a place each turn.
    places, pairs_by_turn = [*hosts, *[""] * (len(hosts) % 2)], []
    for _ in places[1:]:
        pairs = list(zip(places, reversed(places), strict=True))[: len(places) // 2]
        pairs_by_turn.append([pair for pair in pairs if all(pair)])
        places = [places[0], places[-1], *places[1:-1]]
    return pairs_by_turn


def measure_links(lines: Mapping[str, Line], addresses: Mapping[str, str]) -> Iterator[tuple[str, str, LinkFacts]]:
    """(One host, another, what they have measured) of pairs of hosts, at their `addresses`."""
    with ThreadPoolExecutor(max(1, len(lines) // 2)) as threads:
        for turn in turns(list(lines)):
            links = threads.map(lambda pair: _measure(lines[pair[0]], lines[pair[1]], addresses[pair[1]]), turn)
            yield from ((*pair, link) for pair, link in zip(turn, links, strict=True))


def _measure(one: Line, other: Line, address: str) -> LinkFacts:
    token = secrets.token_hex(32)
    try:
        # Its own address, where it goes by that; a name that leads back to itself says nothing of what others reach.
        own = address if address.replace(".", "").isdigit() or ":" in address else ""
        port = other.ask({"do": "answer", "host": own, "token": token})
        report = one.ask({"do": "measure", "host": address, "port": port, "token": token}, MEASURE_SECONDS)
        return msgspec.convert(report, LinkFacts)
    except LaunchError as error:
        return LinkFacts(error=str(error))
