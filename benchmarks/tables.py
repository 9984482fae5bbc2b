"""Turns what a benchmark measured into the lines of a table, or of what a terminal said, as README and docs show it.

A table takes the rows of the benchmark's JSON, and which of its tables is asked for.
"""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Rows as a benchmark wrote them to JSON.
Rows = Mapping[str, Any]
Table = Callable[[Rows, str], list[str]]
# What contestants of benchmarks that compare throughput are called where people read of them.
WORDS = {
    "limit": "the limit",
    "one": "one device",
    "bare-one-same": "a bare loop",
    "bare-mirrored-same": "a bare `MirroredStrategy` loop",
    "bare-multi_worker-same": "a bare `MultiWorkerMirroredStrategy` loop",
    "horovod": "multi_worker by Horovod's all-reduce",
    "bare-horovod-same": "a script of Horovod's guide",
    "bare-coordinator": "a bare `ClusterCoordinator`",
    "bare-unmeasured": "the same without a metric",
}
for _name, _ways in {
    "Keras `fit` under `MirroredStrategy`": ("fit-mirrored-arrays", "fit-mirrored-dataset", "fit-mirrored-same"),
    "Keras `fit` on both cores": (
        *("fit-global-arrays", "fit-global-dataset"),
        *("fit-replica-arrays", "fit-replica-dataset"),
    ),
    "Keras `fit`": ("keras-one-arrays", "keras-one-dataset"),
    "Keras `fit` under `DataParallel`": ("keras-mirrored-arrays", "keras-mirrored-dataset"),
}.items():
    WORDS |= dict.fromkeys(_ways, _name)
# Rivals with TensorFlow's own threads: those with our threads are harder to beat, and have names above.
EASIER = ("bare-mirrored", "bare-multi_worker", "bare-horovod")
# What `growth.py` grows.
GROWS = {
    "planning": "planning a run",
    "composing": "composing and planning a sweep",
    "noting": "noting the end of one run of a sweep",
    "starting": "starting a run among others",
    "predict": "`mode=predict`",
    "compare": "`compare` of two runs among others",
    "clean": "`clean`",
    "report": "`report`",
    "tracking": "uploading to MLflow",
    "memory": "memory of the driver",
    "checkpoints": "training waits for a checkpoint",
    "reading": "training an epoch on files of eight examples",
}
# How many lines of a transcript are shown of those that are longer.
EXCERPTS = {"predict": 4}
# What `differential.py` calls what became of a case.
VERDICTS = {
    "equal within what the order of a batch's examples changes on one device": "within the noise of batch order",
    "refused in words": "refused",
    "not trained by one device either": "untrainable",
}


# The pairs of `reading.py`.
READ = {
    "shards": "read from shards / from memory",
    "kept": "read from shards and kept in memory / from memory",
    "pictures": "read from a PNG file each / from memory",
    "photos": "photographs of 96x96 pixels, resnet20, read from a JPEG file each / from memory",
    "services": "costly examples, made by two data servers / by the process that trains",
}


def side_by_side(rows: Rows, part: str) -> list[str]:
    """Contestants and what each is compared with, and for each model the ratio and its range."""
    cells: dict[str, dict[str, str]] = {}
    for model, found in rows.items():
        for claim in found["claims"]:
            contestant, _, against = claim["claim"].partition(" >= ")[0].partition(" / ")
            against = claim.get("against") or against.partition("|")[0]
            if against not in EASIER and contestant not in EASIER:
                two = " / ".join(WORDS.get(name, name) for name in (contestant, against))
                cells.setdefault(two, {})[model] = "not measured" if claim["ratio"] is None else spread(claim["ratios"])
    return [
        f"| throughput of / of | {' | '.join(rows)} |",
        f"|---{'|---' * len(rows)}|",
        *(f"| {two} | {' | '.join(found.get(model, '') for model in rows)} |" for two, found in cells.items()),
    ]


def collectives(rows: Rows, part: str) -> list[str]:
    """What `side_by_side` says, without the limit, which that benchmark compares with."""
    others = {
        model: {"claims": [claim for claim in found["claims"] if claim.get("against") != "limit"]}
        for model, found in rows.items()
    }
    return side_by_side(others, part)


def spread(ratios: Sequence[float]) -> str:
    """The median of ratios, and their range if there are several.

    >>> spread([0.91, 0.9, 1.0]), spread([0.5])
    ('0.91 (0.90–1.00)', '0.50')
    """
    median = f"{statistics.median(ratios):.2f}"
    return f"{median} ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else median


def every_strategy(rows: Rows, part: str) -> list[str]:
    """How far weights and metrics are from one device at most, for strategies that promise to be equal."""
    lines = ["| strategy | largest difference |", "|---|---|"]
    for name, cells in rows["strategies"].items():
        if differences := [float(found) for cell in cells for found in re.findall(r"\de[+-]\d+", cell)]:
            lines.append(f"| {name} | {max(differences):.0e} |")
    return [*lines, "", f"Models: {'; '.join(rows['models'])}."]


def differential(rows: Rows, part: str) -> list[str]:
    """What became of models that were drawn, under each strategy."""
    verdicts = list(next(iter(rows.values()))["verdicts"])
    lines = [
        f"| strategy | {' | '.join(VERDICTS.get(name, name) for name in verdicts)} | furthest of the equal |",
        f"|---{'|---' * len(verdicts)}|---|",
    ]
    for strategy, row in rows.items():
        counts = [row["verdicts"][name] for name in verdicts]
        lines.append(f"| {strategy} | {' | '.join(map(str, counts))} | {row['furthest']:.0e} |")
    return lines


def predict(rows: Rows, part: str) -> list[str]:
    """How far predictions are off, by the number of workers, beside how far another run of the same point is."""
    lines = ["| | within 10% | median error | runs inside the interval |", "|---|---|---|---|"]
    for workers in sorted({point["workers"] for point in rows["points"]}):
        points = [point for point in rows["points"] if point["workers"] == workers]
        errors = [abs(point["ratio"] - 1) for point in points]
        held = [held for point in points for held in point["held"]]
        lines.append(f"| workers={workers} | {_near(errors)} | {sum(held)} of {len(held)} |")
    again = rows["another_run"]  # none in a single round
    lines += [f"| another run of the same point | {_near(again)} | |"] if again else []
    if apart := rows.get("equal_runs_apart"):
        wide = f"intervals reach {rows['half_width']:.1%} to either side, and equal runs lie {apart:.1%} apart"
        lines.append(f"| {wide} (a standard deviation) | | | |")
    return lines


def _near(errors: Sequence[float]) -> str:
    return f"{sum(error <= 0.1 for error in errors)} of {len(errors)} | {statistics.median(errors):.1%}"


def ties(rows: Rows, part: str) -> list[str]:
    """How often two equal points are called a tie."""
    return [
        f"Of {len(rows['apart'])} pairs, {rows['ties']} were called a tie; "
        f"equal runs lie {rows['deviation']:.1%} apart (a standard deviation)."
    ]


def ratio_of(title: str) -> Table:
    """A line with the ratio of a benchmark that measures one."""
    return lambda rows, part: [f"{title}: {spread(rows['ratios'])}."]


def ratios_of(title: str, kinds: Callable[[Rows], Mapping[str, Sequence[float]]]) -> Table:
    """A table of ratios, a line a kind: their median and range."""

    def table(rows: Rows, part: str) -> list[str]:
        return [
            f"| {title} | ratio |",
            "|---|---|",
            *(f"| {name} | {spread(ratios)} |" for name, ratios in kinds(rows).items()),
        ]

    return table


def overlap(rows: Rows, part: str) -> list[str]:
    """How long a step takes by how gradients leave, with what was predicted."""
    return [
        f"| `cnn`, link of {rows['rate']}, gradients sent | exposed communication | a step | predicted |",
        "|---|---|---|---|",
        *(
            f"| {how} | {row['exposed_ms']:.1f} ms | {row['step_ms']:.1f} ms | {row['predicted_ms']:.1f} ms |"
            for how, row in rows["sends"].items()
        ),
    ]


def _prepared(rows: Rows) -> dict[str, Sequence[float]]:
    """Ratios of whole commands by data."""
    return {label: row["whole"] for label, row in rows.items()}


def deep(rows: Rows, part: str) -> list[str]:
    """Deep models beside a bare loop under each strategy: to the first step, and a step."""
    cells: dict[str, dict[str, str]] = {}
    for name, row in rows.items():
        model, strategy = name.split(", ")
        first, step = ([ours / bare for ours, bare in row[kind]] for kind in ("first", "step_ms"))
        cells.setdefault(model, {})[strategy] = f"{spread(first)} | {spread(step)}"
    strategies = list(dict.fromkeys(strategy for found in cells.values() for strategy in found))
    return [
        f"| ours / a bare loop | {' | '.join(f'{name}: to the first step | a step' for name in strategies)} |",
        f"|---{'|---|---' * len(strategies)}|",
        *(
            f"| {model} | {' | '.join(found.get(name, ' | ') for name in strategies)} |"
            for model, found in cells.items()
        ),
    ]


def estimates(rows: Rows, part: str) -> list[str]:
    """What `mode=plan` estimates beside what runs do."""
    lines = ["| `cnn` on `mnist5k` unless named | estimated | measured |", "|---|---|---|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {_bytes(row['estimated'])} | {_bytes(row['measured'])} |")
    return lines


def memory(rows: Rows, part: str) -> list[str]:
    """What a process is estimated to hold over what was measured, by case and backend."""
    cells: dict[str, dict[str, str]] = {}
    for name, row in rows.items():
        backend, _, case = name.partition(": ")
        cells.setdefault(case, {})[backend] = f"{row['estimated'] / row['measured']:.2f}"
    backends = list(dict.fromkeys(backend for found in cells.values() for backend in found))
    return [
        f"| estimated / measured | {' | '.join(backends)} |",
        f"|---{'|---' * len(backends)}|",
        *(f"| {case} | {' | '.join(found.get(name, '') for name in backends)} |" for case, found in cells.items()),
    ]


def perplexity(rows: Rows, part: str) -> list[str]:
    """What ours and Keras's fit have learnt in the same time."""
    lines = ["| backend | ours | steps | Keras `fit` | steps |", "|---|---|---|---|---|"]
    for backend, row in rows.items():
        cells = [f"{row[who]['perplexity']:.2f} | {row[who]['steps']:,}" for who in ("ours", "fit")]
        lines.append(f"| {backend} | {' | '.join(cells)} |")
    return lines


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def explain(rows: Sequence[Rows], part: str) -> list[str]:
    """What cases lose, and to what: medians over rounds, the largest part first, and the bounds that were told."""
    lines = ["| | lost | to (from 3% on) | bound |", "|---|---|---|---|"]
    for case in dict.fromkeys(row["case"] for row in rows):
        found = [row for row in rows if row["case"] == case]
        shares: dict[str, list[float]] = {}
        for row in found:
            for one in row["parts"]:
                shares.setdefault(one["name"], []).append(one["share"])
        middle = sorted(((statistics.median(shares[name]), name) for name in shares), reverse=True)
        parts = ", ".join(f"{name} {share:.0%}" for share, name in middle if abs(share) >= 0.025)
        bounds = ", ".join(dict.fromkeys(str(row["bound"] or "none") for row in found))
        lines.append(f"| {case} | {statistics.median(row['lost'] for row in found):.0%} | {parts} | {bounds} |")
    return lines


def scale(rows: Rows, part: str) -> list[str]:
    """What a driver takes by the number of processes."""
    runs = rows["runs"]
    silent = f"a silent one, `launch.heartbeat_timeout={runs[0]['silent_limit']:g}`"
    lines = [
        f"| processes | events a second | cores | memory | notices a killed one after | {silent} |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        lines.append(
            f"| {run['processes']:,} | {run['events_per_second']:,.0f} | {run['cores']:.2f} "
            f"| {run['memory_mib']:.0f} MiB | {run['killed_seconds']:.1f} s | {run['silent_seconds']:.1f} s |"
        )
    return lines


def growth(rows: Rows, part: str) -> list[str]:
    """What the largest size takes of what is done, and by which exponent that grows."""
    lines = ["| | sizes | at the largest | exponent |", "|---|---|---|---|"]
    for name, row in rows.items():
        (first, *_, last), value = row["sizes"], row["values"][-1]
        largest = f"{value:.2g}" if value < 1 else f"{value:.1f}"
        lines.append(
            f"| {GROWS.get(name, row['about'])} | {first:,}–{last:,} {row['of']} "
            f"| {largest} {row['unit']} | {row['exponent']:.2f} |"
        )
    return lines


def transcripts(rows: Rows, part: str) -> list[str]:
    """What a terminal said, as a block of code, and how long that took."""
    said = rows[part]
    shown = EXCERPTS.get(part, len(said["lines"]))
    lines = [*said["lines"][:shown], *["..."] * (shown < len(said["lines"]))]
    return [*(f"    {line}".rstrip() for line in lines), "", f"It took {said['seconds']:.0f} seconds in all."]


def gpu(rows: Rows, part: str) -> list[str]:
    """A model's rate on a GPU, the share of the GPU's operations, and ratios to Keras's fit and a loop by hand."""
    if not any(rows["table"].values()):
        return ["Not measured: the machine has no GPU."]
    lines = [
        "| model, precision | a second | MFU | peak memory | / Keras's `fit` | / a loop by hand |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in rows["table"].items():
        ours = found and found["rates"].get("ours")
        if not ours:
            lines.append(f"| {name} | not measured | | | | |")
            continue
        mfu, peak = found["mfu"], found["peak_bytes"]["ours"]
        cells = [f"{statistics.median(ours):,.0f} {found['unit']}", f"{mfu:.0%}" if mfu else "not known"]
        cells.append(f"{peak / 2**30:.1f} GiB" if peak else "not told")
        for other in ("fit", "by hand"):
            pairs = zip(ours, found["rates"].get(other, ()), strict=False)
            ratios = [one / another for one, another in pairs]
            cells.append(f"{statistics.median(ratios):.2f}" if ratios else "failed")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    device, furthest = rows["device"], max(rows["checks"].values())
    return [*lines, "", f"{device['kind']}, JAX {device['jax']}; its checks were {furthest:.0e} apart at most."]


def xla(rows: Rows, part: str) -> list[str]:
    """A model's throughput with XLA over that without, what `train.xla=auto` chose, and how far losses are apart."""
    lines = ["| model | XLA / TensorFlow | `auto` chose | losses apart |", "|---|---|---|---|"]
    for name, found in rows.items():
        chosen = "XLA" if found["chosen"] else "TensorFlow"
        lines.append(f"| {name} | {spread(found['ratios'])} | {chosen} | {found['apart']:.0e} |")
    return lines


TABLES: Mapping[str, Callable[[Any, str], list[str]]] = {
    "side_by_side": side_by_side,
    "on_jax": side_by_side,
    "collectives": collectives,
    "asynchronous": side_by_side,
    "sweep": ratio_of("Seconds of a sweep of six points / of the same points as commands of their own"),
    "every_strategy": every_strategy,
    "differential": differential,
    "checkpoints": ratio_of("Seconds of 50 steps with a checkpoint / without"),
    "predict": predict,
    "ties": ties,
    "input": ratio_of("Throughput without the slow map / as predicted with it"),
    "reading": ratios_of("throughput of / of", lambda rows: {READ[kind]: ratios for kind, ratios in rows.items()}),
    "prepare": ratios_of("seconds with one process / with two", _prepared),
    "estimates": estimates,
    "memory": memory,
    "perplexity": perplexity,
    "deep": deep,
    "gpu": gpu,
    "xla": xla,
    "explain": explain,
    "scale": scale,
    "growth": growth,
    "overlap": overlap,
    "transcripts": transcripts,
}
