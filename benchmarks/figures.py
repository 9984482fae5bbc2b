"""Writes the tables of README and docs from `benchmarks/results/`, the last full run of each benchmark.

    make figures                    # or: python benchmarks/figures.py
    python benchmarks/figures.py --check

A table stands between `<!-- figures: NAME -->` and `<!-- end -->`, where NAME is a file of `benchmarks/results/`, and
after a colon, where there are several, which of its tables. What it looks like, `tables.py` says.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tables import TABLES, Rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Options that say where something is written to.
ELSEWHERE = ("--json", "--keep")
BLOCK = re.compile(r"(<!-- figures: (?P<name>\w+)(:(?P<part>\w+))? -->\n)(?P<table>.*?)(<!-- end -->)", re.S)


def main() -> int:
    """Writes every table, or with `--check` none; returns 1 where one is stale, or its benchmark has not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say which tables are not up to date")
    arguments = parser.parse_args()
    missing = not_measured(RESULTS)
    for name in missing:
        print(f"Expected benchmarks/results/{name}.json, received none. Try python benchmarks/{name}.py.")
    stale = []
    for page in pages():
        text = page.read_text()
        made = filled(text, RESULTS)
        if made != text:
            stale.append(str(page.relative_to(ROOT)))
            if not arguments.check:
                page.write_text(made)
    if stale:
        print(f"{'Not up to date' if arguments.check else 'Written'}: {', '.join(stale)}")
    return 1 if missing or (stale and arguments.check) else 0


def pages() -> list[Path]:
    """The pages that may show figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def not_measured(results: Path) -> list[str]:
    """The benchmarks that pages show figures of, and of which `results` has no file."""
    shown = {found["name"] for page in pages() for found in BLOCK.finditer(page.read_text())}
    return sorted(name for name in shown if not (results / f"{name}.json").exists())


def filled(text: str, results: Path) -> str:
    """A page with its tables as the files in `results` say; one that has no file stays. Raises `KeyError`.

    A machine with its versions is named under the first of the tables that follow each other.
    """
    before = ""

    def table(found: re.Match[str]) -> str:
        nonlocal before
        path = results / f"{found['name']}.json"
        if not path.exists():
            return found[0]
        values = json.loads(path.read_text())
        machine = machine_of(values)
        where = "" if machine == before else f": {machine}"
        before = machine
        lines = [*TABLES[found["name"]](values["rows"], found["part"] or ""), "", f"{measured_by(values)}{where}."]
        return f"{found[1]}" + "\n".join(lines) + "\n<!-- end -->"

    return BLOCK.sub(table, text)


def measured_by(values: Rows) -> str:
    """The command that measured a benchmark's figures, of which commit, and when."""
    rounds, day = values["rounds"], datetime.fromtimestamp(values["time"], UTC).date()
    typed = " ".join([f"benchmarks/{values['benchmark']}.py", *_shown(values["arguments"])])
    times = "" if "--rounds" in values["arguments"] else f"{rounds} round{'s' * (rounds != 1)}, "
    return f"`{typed}`, {times}commit {str(values['commit'])[:12]}, {day}"


def machine_of(values: Rows) -> str:
    """The machine that measured a benchmark's figures, and its libraries."""
    machine = values["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    return f"{machine['cpu']}, {machine['cores']} cores; {versions}"


def _shown(arguments: Sequence[str]) -> list[str]:
    """What was typed, without where it was written to."""
    left, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith(ELSEWHERE):
            left.append(argument)
        skip = argument in ELSEWHERE
    return left


if __name__ == "__main__":
    sys.exit(main())
