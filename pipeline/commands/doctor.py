"""Turns the command line of `python -m pipeline doctor` into findings on the hosts of a cluster, and an exit code.

0: all is well. 1: a training works, and something could be better. 2: the command was refused. 3: a training fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.config.composing import config_of
from pipeline.config.schema import Config
from pipeline.doctor.examine import OF_DRIVER, examine, expected_of
from pipeline.doctor.facts import CHECKS, Finding, Severity
from pipeline.driver.planner import planned_on
from pipeline.errors import UserError, refuse
from pipeline.launch import Cluster, Helpers, LaunchError, asking, cluster_of, signals
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
REFUSED = 2
MARKS = {Severity.FINE: "fine", Severity.WARNING: "WARNING", Severity.FAULT: "FAULT"}
VERSION = 1
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
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(CHECKS))
    parser.add_argument("--config-dir", "-cd")
    options, overrides = parser.parse_known_args(arguments)
    if options.help:
        print(HELP, end="")
        return 0
    checks = [check.strip() for check in options.only.split(",")]
    unknown = next((one for one in checks if one not in CHECKS), None)
    try:
        refuse((unknown is not None, "--only to name checks", unknown, f"--only {','.join(CHECKS)}"))
        config = config_of(Config, overrides, options.config_dir)
        with signals.interrupt():
            return _doctor(config, checks, _of_training(overrides), options.json)
    except (UserError, LaunchError) as error:
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
        lines[here] = asking.here(os.environ)
    say(f"Looking at {', '.join(lines)}, which takes some seconds.")
    planned: Planned | None = None
    try:
        if ("plan" in checks or "ports" in checks) and not hosts.absent:
            try:
                planned = planned_on(config, cluster)
            except UserError as error:
                planned = error if of_training or isinstance(error, LaunchError) else cluster.inventory()
        others = list(dict.fromkeys([config.cluster.host, *hosts.addresses.values()]))
        expected = {}
        for name in lines:
            # A host that only drives trains nothing.
            of_host = [check for check in checks if name in hosts.lines or check in OF_DRIVER]
            addresses = _addresses(config, planned, hosts.addresses.get(name))
            expected[name] = expected_of(config, of_host, addresses, others, here, name == here)
        helpers = Helpers(lines, hosts.addresses if len(hosts.addresses) > 1 else {}, hosts.absent)
        findings, measured = examine(helpers, expected, here, checks, config.hardware.link_gbps)
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


def _addresses(config: Config, planned: Planned | None, host: str | None) -> list[str]:
    """HOST:PORT that must be free on a host, at its address if it has one: those that the config names, or any."""
    base, at = config.cluster.base_port, host or config.cluster.host
    if base is None:
        return [f"{at}:0"]
    processes = planned.processes if isinstance(planned, Plan) else ()
    if isinstance(planned, Plan) and planned.hardware.host_names:
        processes = tuple(process for process in processes if planned.host_of(process) == host)
    return [f"{at}:{base + process.rank}" for process in processes] or [f"{at}:{base}"]
