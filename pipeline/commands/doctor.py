"""Turns the command line of `python -m pipeline doctor` into findings on the hosts of a cluster, and an exit code.

It asks all hosts at once what they find (`pipeline.doctor`), and has them measure what is between them.
"""

import argparse
import dataclasses
import json
import os
import platform
import re
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from pipeline.config.composing import config_of
from pipeline.config.parts import typed
from pipeline.config.schema import Config, Kind
from pipeline.doctor.judge import BACKENDS, CHECKS, Expected, Finding, LinkFacts, Severity, judge_clock, judge_link
from pipeline.doctor.look import installed
from pipeline.driver.start import planned_on
from pipeline.errors import UserError, refuse
from pipeline.launch import Cluster, Helpers, LaunchError, Line, cluster_of, line_to, signals
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.record.files import LINKS, LinkSpeed, write_links
from pipeline.views import terminal as show
from pipeline.views.mlflow import stores
from pipeline.views.terminal.words import clean, columns, listed, plural

# A plan, why there is none, or the hosts to plan on if no training was typed.
Planned = Plan | Machine | UserError
# Keys that say where something is trained, and not what.
OF_CLUSTER = ("cluster", "tracking", "output_dir", "launch", "checkpoint", "hydra", "views", "resume")
# What is looked at on a host that only drives.
OF_DRIVER = ("python", "packages", "files", "disk", "names")
REFUSED = 2
MARKS = {Severity.FINE: "fine", Severity.WARNING: "WARNING", Severity.FAULT: "FAULT"}
VERSION = 1
PACKAGE = "distributed-keras-pipeline"
# All that a host is asked at once, of which the import of TensorFlow takes longest.
LOOK_SECONDS = 300.0
CLOCK_SAMPLES = 7
# Of more hosts, each is measured with the next one only: 16 of them are 120 pairs, which take 15 turns.
MOST_ALL_PAIRS = 16
MEASURE_SECONDS = 60.0
HELP = f"""python -m pipeline doctor [cluster=...] [key=value ...] [--only CHECK,...] [--json] [--config-dir FOLDER]

Checks this host, or every host of the cluster, and prints what it found, what it expected and what to type.
It takes the keys of a run, plans it, and starts nothing.

The exit code is the worst finding's:
  0  no fault
  1  WARNING: training works, but something could be better
  2  the command was refused, nothing was checked
  3  FAULT: training, or something you asked for, fails

--only selects checks: {", ".join(CHECKS)}
--json prints one JSON object: `code`, and `findings` with check, host, severity, found, expected, remedy, figures.

{LINKS} in output_dir keeps the measured link speeds, for plans and predictions without hardware.link_gbps.
"""


def doctor(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipeline doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(CHECKS))
    parser.add_argument("--config-dir", "-cd")
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return 0
    options, overrides = parser.parse_known_args(arguments)
    checks = [check.strip() for check in options.only.split(",")]
    try:
        refuse(*((one not in CHECKS, "--only to name checks", one, f"--only {','.join(CHECKS)}") for one in checks))
        config = config_of(Config, overrides, options.config_dir)
        with signals.interrupt():
            return _doctor(config, checks, _of_training(overrides), options.json)
    except UserError as error:
        show.say_error(str(error))
        return REFUSED
    except signals.Interrupted as interrupted:
        return 128 + interrupted.number


def _doctor(config: Config, checks: Sequence[str], of_training: bool, as_json: bool) -> int:
    cluster, code = cluster_of(config.cluster, os.environ), REFUSED

    def say(text: str) -> None:
        if not as_json:
            print(text, file=sys.stderr)

    try:
        if (served := cluster.serve(say, lambda: None)) is not None:
            code = served
            return code
        findings, measured = _examine(config, cluster, checks, of_training, say)
        code = int(max((finding.severity for finding in findings), default=Severity.FINE))
    finally:
        cluster.close(code)
    notes = []
    if measured:
        try:
            file = write_links(Path(config.output_dir), measured, time.time())
            notes = [f"{file} keeps the links, for plans and predictions whose hardware.link_gbps is null."]
        except OSError as error:
            notes = [f"What was measured of links could not be kept: {error.strerror or error}."]
    if as_json:
        values = [{**dataclasses.asdict(one), "severity": one.severity.name.lower()} for one in findings]
        print(json.dumps({"version": VERSION, "code": code, "findings": values}, indent=1))
        return code
    console = show.console_on(sys.stdout)
    for line in (*_lines(findings), *notes):
        console.print(line, soft_wrap=True)
    return code


def _lines(findings: Sequence[Finding]) -> list[str]:
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        # Figures that came to the same words are told by them.
        key = dataclasses.replace(finding, host="", figures=())  # type: ignore[arg-type]
        hosts.setdefault(key, []).append(finding.host)
    joined = sorted(hosts, key=lambda finding: CHECKS.index(finding.check))
    rows = [
        (MARKS[one.severity], *map(clean, (one.check, ", ".join(hosts[one]), one.found, f"expected {one.expected}")))
        for one in joined
    ]
    lines = []
    for finding, line in zip(joined, columns(rows, ()) if rows else (), strict=True):
        lines += [line, *[f"{'':9}Try {clean(finding.remedy)}."] * bool(finding.remedy)]
    counts = Counter(finding.severity for finding in findings)
    worse = (plural(counts[Severity.FAULT], "fault"), plural(counts[Severity.WARNING], "warning"))
    return [*lines, "", f"{listed(*worse, f'{counts[Severity.FINE]:,} fine')}."]


def _examine(
    config: Config, cluster: Cluster, checks: Sequence[str], of_training: bool, say: Callable[[str], None]
) -> tuple[list[Finding], list[LinkSpeed]]:
    """(Findings on the hosts of a cluster and on this one, which drives; the links between them)."""
    hosts = cluster.helpers()
    here = hosts.here or platform.node()
    lines = dict(hosts.lines)
    if hosts.here is None:
        lines[here] = line_to(os.environ)
    say(f"Looking at {', '.join(lines)}, which takes some seconds.")
    planned: Planned | None = None
    try:
        if ("plan" in checks or "ports" in checks) and not hosts.absent:
            try:
                planned = planned_on(config, cluster)
            except UserError as error:
                planned = error if of_training or isinstance(error, LaunchError) else cluster.inventory()
        expected = _expected(config, here, list(dict.fromkeys([config.cluster.host, *hosts.addresses.values()])))
        of_hosts = {
            name: dataclasses.replace(
                expected,
                # A host that only drives trains nothing.
                checks=tuple(check for check in checks if name in hosts.lines or check in OF_DRIVER),
                folders=tuple(dict.fromkeys(expected.folders[name != here :])),
                addresses=_addresses(config, planned, hosts.addresses.get(name)),
            )
            for name in lines
        }
        helpers = Helpers(lines, hosts.addresses if len(hosts.addresses) > 1 else {}, hosts.absent)
        findings, measured = examine(helpers, of_hosts, here, checks, config.hardware.link_gbps)
    finally:
        for line in lines.values():
            line.close()
    if "store" in checks:
        findings.append(stores.examine(config.tracking, Path(config.output_dir), os.environ, here))
    if planned is not None and "plan" in checks:
        findings.append(Finding("plan", here, *_judged(planned)))
    return findings, measured


def _of_training(overrides: Sequence[str]) -> bool:
    """True if any key that was typed says what is trained, or how.

    >>> _of_training(["cluster=hosts", "hardware.link_gbps=10"]), _of_training(["model.build.width=3"])
    (False, True)
    """
    keys = [override.lstrip("+~").partition("=")[0] for override in overrides]
    return any(re.split(r"[.@]", key)[0] not in OF_CLUSTER for key in keys if key != "hardware.link_gbps")


def _judged(planned: Planned) -> tuple[Severity, str, str] | tuple[Severity, str, str, str]:
    if isinstance(planned, Plan):
        workers, hosts = planned.workers, planned.hardware.hosts
        text = f"{planned.strategy.name}, {workers} worker{'s' * (workers > 1)} on {hosts} host{'s' * (hosts > 1)}"
        return Severity.FINE, text, "a plan"
    if isinstance(planned, Machine):
        return Severity.FINE, f"{planned.hosts} hosts, and no strategy was typed", "hosts"
    if not planned.try_this:
        return Severity.FAULT, str(planned), "a plan", "python -m pipeline mode=plan"
    return Severity.FAULT, str(planned.received), planned.expected, planned.try_this


def _addresses(config: Config, planned: Planned | None, host: str | None) -> tuple[str, ...]:
    """HOST:PORT that must be free on a host, at its address if it has one: those that the config names, or any."""
    base, at = config.cluster.base_port, host or config.cluster.host
    if base is None:
        return (f"{at}:0",)
    processes = planned.processes if isinstance(planned, Plan) else ()
    if isinstance(planned, Plan) and planned.hardware.host_names:
        processes = tuple(process for process in processes if planned.host_of(process) == host)
    return tuple(f"{at}:{base + process.rank}" for process in processes) or (f"{at}:{base}",)


def _expected(config: Config, driver: str, others: Sequence[str]) -> Expected:
    """The demands on the driver's host, whose first folder is its alone; on all of them `others` must be found."""
    # Of a backend that a package offers nothing is known.
    hardware, backend = config.hardware, config.backend if config.backend in BACKENDS else "tensorflow"
    python, packages = _required(backend)
    devices, on_cpu = hardware.devices_per_host or 1, hardware.kind is Kind.cpu
    folders = [config.checkpoint.folder or "://", tempfile.gettempdir()]
    return Expected(
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
        folders=(config.output_dir, *(folder for folder in folders if "://" not in folder)),
        names=tuple(dict.fromkeys(("localhost", *(host for host in others if not _is_address(host))))),
    )


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


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
            findings += typed(report.result(), list[Finding])
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
    """(Seconds that a host's clock is ahead, give or take how many), by the quickest request (Cristian, 1989)."""
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
        own = address if _is_address(address) else ""
        port = other.ask({"do": "answer", "host": own, "token": token})
        report = one.ask({"do": "measure", "host": address, "port": port, "token": token}, MEASURE_SECONDS)
        return typed(report, LinkFacts)
    except LaunchError as error:
        return LinkFacts(error=str(error))
