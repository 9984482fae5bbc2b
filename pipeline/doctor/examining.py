"""Asks the helpers on all hosts at once, and turns what they tell, and what is between them, into findings."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pipeline.doctor import between
from pipeline.doctor.facts import Exchanged, Facts, Look
from pipeline.doctor.findings import Finding, Severity
from pipeline.doctor.judge import Expected, judge
from pipeline.doctor.lines import Line, LineError
from pipeline.record import plain
from pipeline.record.links import Measured
from pipeline.record.plain import MismatchError

# All that a host is asked at once, of which the import of TensorFlow takes longest.
LOOK_SECONDS = 300.0


@dataclass(frozen=True)
class Hosts:
    """The hosts of a cluster by name: a line to each helper, its address as the others have it, and `absent` ones, each
    with why none could be started there. `conductor` is the name of the one that conducts, in `lines` or not."""

    conductor: str
    lines: Mapping[str, Line]
    addresses: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    def close(self) -> None:
        """Ends the helpers."""
        for line in self.lines.values():
            line.close()


@dataclass(frozen=True)
class Examined:
    """What is to be said of some hosts, and the links between them as they were measured."""

    findings: tuple[Finding, ...]
    links: tuple[Measured, ...] = ()


def examine(
    hosts: Hosts,
    looks: Mapping[str, Look],
    expect: Callable[[Facts | None], Expected],
    checks: frozenset[str],
    link_gbps: float | None,
) -> Examined:
    """Asks each host what `looks` has for it; `expect` is told what the one that conducts has, if it is one of them."""
    findings = [
        Finding("python", name, Severity.FAULT, why, "the pipeline there", f"the same environment on {name}")
        for name, why in hosts.absent.items()
    ]
    facts: dict[str, Facts] = {}
    with ThreadPoolExecutor(max(1, len(hosts.lines))) as threads:
        asked = {name: threads.submit(_look, line, looks[name]) for name, line in hosts.lines.items()}
    for name, answer in asked.items():
        try:
            facts[name] = answer.result()
        except LineError as error:
            remedy = f"python -m pipeline doctor on {name} itself"
            findings.append(Finding("python", name, Severity.FAULT, str(error), "the pipeline there", remedy))
    expected = expect(facts.get(hosts.conductor))
    for name, seen in facts.items():
        findings += judge(name, seen, expected, checks)
    there = {name: hosts.lines[name] for name in facts}
    if "clocks" in checks:
        findings += _clocks(there, hosts.conductor)
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


def _clocks(lines: Mapping[str, Line], conductor: str) -> Sequence[Finding]:
    """What is to be said of the clocks of all hosts but the one whose clock they are held against."""
    found = []
    for name, line in lines.items():
        if name == conductor:
            continue
        try:
            found.append(between.judge_clock(name, conductor, between.clock_of(line)))
        except LineError as error:
            remedy = f"python -m pipeline doctor on {name} itself"
            found.append(Finding("clocks", name, Severity.FAULT, str(error), "an answer", remedy))
    return found
