"""Asks the helpers on all hosts at once, and turns what they tell, and what is between them, into findings."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pipeline.doctor import between
from pipeline.doctor.facts import Exchanged, Facts, Look
from pipeline.doctor.findings import Finding, Severity
from pipeline.doctor.judge import Expected, judge
from pipeline.launch.asking import Helpers, Line, LineError
from pipeline.record import plain
from pipeline.record.links import Measured
from pipeline.record.plain import MismatchError

# All that a host is asked at once, of which the import of TensorFlow takes longest.
LOOK_SECONDS = 300.0
REMEDY = "the same environment on {0}, and python -m pipeline doctor there"


@dataclass(frozen=True)
class Examined:
    """What is to be said of some hosts, and the links between them as they were measured."""

    findings: tuple[Finding, ...]
    links: tuple[Measured, ...] = ()


def examine(
    hosts: Helpers,
    looks: Mapping[str, Look],
    expected: Expected,
    checks: frozenset[str],
    link_gbps: float | None = None,
) -> Examined:
    """Asks each host what `looks` has for it, and what is between those that have an address; judges by `expected`."""
    findings = [
        Finding("python", name, Severity.FAULT, why, "the pipeline there", REMEDY.format(name))
        for name, why in hosts.absent.items()
    ]
    facts: dict[str, Facts] = {}
    with ThreadPoolExecutor(max(1, len(hosts.lines))) as threads:
        asked = {name: threads.submit(_look, line, looks[name]) for name, line in hosts.lines.items()}
    for name, answer in asked.items():
        try:
            facts[name] = answer.result()
        except LineError as error:
            findings.append(_silent("python", name, error))
    for name, seen in facts.items():
        findings += judge(name, seen, expected, checks)
    there = {name: hosts.lines[name] for name in facts if name in hosts.addresses}
    if "clocks" in checks:
        findings += _clocks(there, expected.conductor)
    links: list[tuple[str, str, Exchanged]] = []
    if "link" in checks:
        links = list(between.measure_links(there, hosts.addresses))
        findings += [between.judge_link(*link, link_gbps) for link in links]
    return Examined(tuple(findings), tuple(between.measured(links)))


def _look(line: Line, asked: Look) -> Facts:
    """Raises `LineError`."""
    try:
        return plain.made_of(Facts, line.ask({"do": "look", "asked": plain.to_plain(asked)}, LOOK_SECONDS))
    except MismatchError as error:
        raise LineError(f"an answer of another version of the pipeline: {error}") from error


def _clocks(lines: Mapping[str, Line], conductor: str) -> Iterator[Finding]:
    """What is to be said of the clocks of hosts, which are held against the conductor's."""
    for name, line in lines.items():
        try:
            yield between.judge_clock(name, conductor, between.clock_of(line))
        except LineError as error:
            yield _silent("clocks", name, error)


def _silent(check: str, host: str, error: LineError) -> Finding:
    return Finding(check, host, Severity.FAULT, str(error), "the pipeline there", REMEDY.format(host))
