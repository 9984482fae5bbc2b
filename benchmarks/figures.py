"""Writes the tables of README and docs from `benchmarks/results/`, the last full run of each benchmark.

    make figures                    # or: python benchmarks/figures.py
    python benchmarks/figures.py --check

A table stands between `<!-- figures: NAME -->` and `<!-- end -->`, where NAME is a file of `benchmarks/results/`, and
after a colon, where there are several, which of its tables.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w:]+) -->\n).*?(<!-- end -->)", re.S)
# What contestants of `side_by_side.py` are called where people read of them.
WORDS = {
    "limit": "the limit: as many processes that never talk",
    "one": "one device",
    "bare-one-same": "a bare loop, the same threads and steps per call",
    "bare-mirrored": "bare MirroredStrategy, TensorFlow's threads",
    "bare-multi_worker": "bare MultiWorkerMirroredStrategy, TensorFlow's threads",
    "bare-mirrored-same": "a bare MirroredStrategy loop, our threads and steps per call",
    "bare-multi_worker-same": "a bare MultiWorkerMirroredStrategy loop, our threads and steps per call",
    "fit-mirrored-arrays": "Keras `model.fit` under MirroredStrategy, the best of three ways to call it",
    "fit-global-arrays": "Keras `model.fit` without a strategy on both cores, the best of four ways to call it",
}
for _name, _like in (
    ("fit-mirrored-dataset", "fit-mirrored-arrays"),
    ("fit-mirrored-same", "fit-mirrored-arrays"),
    ("fit-global-dataset", "fit-global-arrays"),
    ("fit-replica-arrays", "fit-global-arrays"),
    ("fit-replica-dataset", "fit-global-arrays"),
):
    WORDS[_name] = WORDS[_like]


# The pairs of `reading.py`.
READ = {
    "shards": "read from shards / from memory",
    "kept": "read from shards and kept in memory / from memory",
    "services": "costly examples, made by two data servers / by the process that trains",
}
# Makes a table's lines of a file's rows, and of which of its tables is asked for.
Table = Callable[[Mapping[str, Any], str], list[str]]


def main() -> None:
    """Writes every table, or with `--check` exits with 1 where one is not what its file says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say which tables are not up to date")
    arguments = parser.parse_args()
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
    if stale and arguments.check:
        sys.exit(1)


def pages() -> list[Path]:
    """The pages that may show figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str, results: Path) -> str:
    """A page with its tables as the files in `results` say. Raises `OSError`, `KeyError` for what is not there."""

    def table(found: re.Match[str]) -> str:
        name, _, part = found["name"].partition(":")
        values = json.loads((results / f"{name}.json").read_text())
        lines = [*TABLES[name](values["rows"], part), "", measured_on(values)]
        return f"{found[1]}" + "\n".join(lines) + f"\n{found[3]}"

    return BLOCK.sub(table, text)


def measured_on(values: Mapping[str, Any]) -> str:
    """When, where and of what version a benchmark's figures are."""
    machine, rounds = values["machine"], values["rounds"]
    day = datetime.fromtimestamp(values["time"], UTC).date()
    typed = " ".join(["python", f"benchmarks/{values['benchmark']}.py", *_shown(values["arguments"])])
    versions = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    return (
        f"`{typed}`, {rounds} round{'s' * (rounds != 1)}, at commit {str(values['commit'])[:12]} on {day}: "
        f"{machine['cpu']}, {machine['cores']} cores; {versions}."
    )


def _shown(arguments: Sequence[str]) -> list[str]:
    """What was typed, without where it was written to."""
    left, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--json"):
            left.append(argument)
        skip = argument == "--json"
    return left


def side_by_side(rows: Mapping[str, Any], part: str) -> list[str]:
    """A model's claims: the contestant, what it is compared with, the ratio and its range."""
    lines = ["| throughput of / of | ratio | range | rounds |", "|---|---|---|---|"]
    for claim in rows[part]["claims"]:
        if claim["ratio"] is None:
            lines.append(f"| {claim['claim']} | not measured | | |")
            continue
        contestant = claim["claim"].partition(" / ")[0]
        ratios = claim["ratios"]
        lines.append(
            f"| {WORDS.get(contestant, contestant)} / {WORDS[claim['against']]} | {claim['ratio']:.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} | {len(ratios)} |"
        )
    return lines


def sweep(rows: Mapping[str, Any], part: str) -> list[str]:
    """What a sweep takes, beside its points as commands of their own."""
    ratios = rows["ratios"]
    return [
        "| seconds of / of | ratio | range |",
        "|---|---|---|",
        f"| a sweep of six points / the same points as commands of their own | {statistics.median(ratios):.2f} "
        f"| {min(ratios):.2f} to {max(ratios):.2f} |",
    ]


def every_strategy(rows: Mapping[str, Any], part: str) -> list[str]:
    """How far models under a strategy are from one device."""
    titles = rows["models"]
    return [
        f"| strategy | {' | '.join(titles)} |",
        f"|---{'|---' * len(titles)}|",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows["strategies"].items()),
    ]


def checkpoints(rows: Mapping[str, Any], part: str) -> list[str]:
    """What a checkpoint costs."""
    low, high = rows["quartiles"]
    return [
        "| seconds of / of | ratio | quartiles | pairs |",
        "|---|---|---|---|",
        f"| 50 steps with a checkpoint / 50 steps without | {rows['median']:.3f} | {low:.3f} to {high:.3f} "
        f"| {len(rows['ratios'])} |",
    ]


def predict(rows: Mapping[str, Any], part: str) -> list[str]:
    """How far predictions are off, by the number of workers, beside how far another run of the same point is."""
    lines = ["| | within 10% | median error | intervals that held the run that followed |", "|---|---|---|---|"]
    for workers in sorted({point["workers"] for point in rows["points"]}):
        points = [point for point in rows["points"] if point["workers"] == workers]
        errors, held = (
            [abs(point["ratio"] - 1) for point in points],
            [held for point in points for held in point["held"]],
        )
        lines.append(f"| predicted, workers={workers} | {_near(errors)} | {sum(held)} of {len(held)} |")
    return [*lines, f"| another run of the same point | {_near(rows['another_run'])} | |"]


def _near(errors: Sequence[float]) -> str:
    return f"{sum(error <= 0.1 for error in errors)} of {len(errors)} | {statistics.median(errors):.1%}"


def ties(rows: Mapping[str, Any], part: str) -> list[str]:
    """How often two equal points are called a tie."""
    return [
        "| pairs of equal points | called a tie | equal runs lie apart by, a standard deviation |",
        "|---|---|---|",
        f"| {len(rows['apart'])} | {rows['ties']} | {rows['deviation']:.1%} |",
    ]


def ratios_of(title: str, kinds: Callable[[Mapping[str, Any]], Mapping[str, Sequence[float]]]) -> Table:
    """A table of ratios, a line a kind: their median and range."""

    def table(rows: Mapping[str, Any], part: str) -> list[str]:
        return [
            f"| {title} | ratio | range | rounds |",
            "|---|---|---|---|",
            *(
                f"| {name} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} | {len(ratios)} |"
                for name, ratios in kinds(rows).items()
            ),
        ]

    return table


def _prepared(rows: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Ratios by data and what of the command they are of."""
    words = {"shards": "the shards alone", "whole": "the whole command"}
    return {f"{label}, {words[kind]}": row[kind] for label, row in rows.items() for kind in words}


def estimates(rows: Mapping[str, Any], part: str) -> list[str]:
    """What `mode=plan` estimates beside what runs do."""
    lines = ["| `cnn` on `mnist5k` unless named | estimated | measured |", "|---|---|---|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {_bytes(row['estimated'], row['unit'])} | {_bytes(row['measured'], row['unit'])} |")
    return lines


def _bytes(count: float, unit: str) -> str:
    if unit == "bytes more":
        return f"{count / 2**20:.0f} MiB more"
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


TABLES: Mapping[str, Callable[[Any, str], list[str]]] = {
    "side_by_side": side_by_side,
    "sweep": sweep,
    "every_strategy": every_strategy,
    "checkpoints": checkpoints,
    "predict": predict,
    "ties": ties,
    "input": ratios_of(
        "throughput of / of", lambda rows: {"training without the slow map / as predicted with it": rows["ratios"]}
    ),
    "reading": ratios_of("throughput of / of", lambda rows: {READ[kind]: ratios for kind, ratios in rows.items()}),
    "prepare": ratios_of("seconds with one process / with two", _prepared),
    "estimates": estimates,
}


if __name__ == "__main__":
    main()
