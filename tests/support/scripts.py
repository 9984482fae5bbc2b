"""Runs scripts of this folder, which print what they come to as JSON, in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import ROOT, SUPPORT, warm
from warm_start import Command


def begun(
    script: str, *arguments: object, python: Path | str = sys.executable, before: Sequence[str] = (),
    imported: bool | None = None, **environ: str,
) -> subprocess.Popen[str]:  # fmt: skip
    """Starts a script with arguments; `before` is what starts its Python, if anything else does.

    With TensorFlow `imported` before (`warm_start`), which takes longer than most scripts, where it does at its top.
    """
    if imported is None:
        imported = "\nimport tensorflow" in (SUPPORT / f"{script}.py").read_text() and not before
    command = [*before, str(python), str(SUPPORT / f"{script}.py"), *map(str, arguments)]
    paths = os.pathsep.join(filter(None, (str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH"))))
    given = os.environ | {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"} | environ
    if imported and sys.platform == "linux":
        return Command(warm(), command, ROOT, given)
    return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(*running: subprocess.Popen[str], timeout: float = 500) -> list[str]:
    """Returns what each script printed, once all have ended well."""
    try:
        said = [process.communicate(timeout=timeout) for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(process.returncode for process in running), said
    return [out for out, _ in said]


def answers(*running: subprocess.Popen[str], timeout: float = 500) -> list[Any]:
    """Returns what each script came to: the JSON in its last line."""
    return [json.loads(out.splitlines()[-1]) for out in printed(*running, timeout=timeout)]


def came(script: str, *arguments: object, timeout: float = 500, **named: Any) -> Any:
    return answers(begun(script, *arguments, **named), timeout=timeout)[0]
