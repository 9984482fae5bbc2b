"""Every key of the schema with what cannot be its value, as a command: one message, exit code 2, nothing begun."""

import json
import os
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
from bad_input import Case, cases, keys, of_key, untypeable
from conftest import ROOT, SUPPORT, sampled

# In how many processes, each of which runs its cases one after the other.
PROCESSES = 2
PATIENCE = 240


def ended(folder: Path, wanted: list[Case]) -> list[dict[str, Any]]:
    """How the command ended for each case, in the code that a person's command runs."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "bad_input", str(folder / str(part)), *map(json.dumps, wanted[part::PROCESSES])],
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in range(PROCESSES)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(line) for part in said for line in part.splitlines()]


def fault(ran: dict[str, Any]) -> str | None:
    """What is wrong with how a case was refused; None where it was refused as it should be."""
    err: str = ran["err"]
    if ran["code"] != 2 or ran["out"] or ran["started"]:
        return f"exit code {ran['code']}, started {ran['started']}, printed {ran['out']!r}"
    if len(err.splitlines()) != 1 or not err.startswith("pipeline: Expected "):
        return "not one message"
    if not re.search(r", received:? .*\. Try ", err):
        return "not what was received, or what to type instead"
    if untypeable(err):
        return f"{untypeable(err)} cannot be typed"
    return None


def faults(folder: Path, wanted: list[Case]) -> list[str]:
    found = ended(folder, wanted)
    assert len(found) == len(wanted)
    return [f"{' '.join(ran['case'])}: {fault(ran)}: {ran['err']}" for ran in found if fault(ran)]


def test_every_key_of_the_schema_has_a_case():
    said = {case[0].lstrip("+~").partition("=")[0] for case in cases()}
    assert {name for name, _ in keys()} <= said
    assert len(cases()) >= 200


def one_for_each_key() -> list[Case]:
    """A case for each key that holds a value, another kind of mistake for each."""
    each = [of_key(name, kind) for name, kind in keys() if not is_dataclass(kind)]
    return [wrong[place % len(wrong)] for place, wrong in enumerate(each)]


def quick() -> list[Case]:
    """A quarter of those, others in each run: a case is a command's composing."""
    return sampled(one_for_each_key(), len(one_for_each_key()) // 4)


def test_something_that_is_wrong_for_a_quarter_of_the_keys_is_refused_in_one_message(tmp_path):
    assert not faults(tmp_path, quick())


@pytest.mark.slow
def test_something_that_is_wrong_for_every_other_key_is_refused_in_one_message(tmp_path):
    assert not faults(tmp_path, [case for case in one_for_each_key() if case not in quick()])


@pytest.mark.slow
def test_an_eighth_of_all_else_that_is_wrong_for_a_key_group_or_override_is_refused_in_one_message(tmp_path):
    others = sorted(set(cases()) - set(one_for_each_key()))
    assert len(others) >= 200
    assert not faults(tmp_path, sampled(others, len(others) // 8))
