"""Turns what a benchmark measured into the lines of a table, or of what a terminal said, as README and docs show it.

A table takes the rows of the benchmark's JSON, and which of its tables is asked for.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Rows as a benchmark wrote them to JSON.
Rows = Mapping[str, Any]
Table = Callable[[Rows, str], list[str]]
# What contestants of `side_by_side.py` and `on_jax.py` are called where people read of them.
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
    "keras-one-arrays": "Keras `model.fit` on JAX, the better of two ways to call it",
    "keras-mirrored-arrays": "Keras `model.fit` on JAX under `DataParallel`, the better of two ways to call it",
}
WORDS |= {
    "ring": "multi_worker by TensorFlow's ring",
    "horovod": "multi_worker by Horovod's all-reduce",
    "bare-horovod": "a script of Horovod's guide, TensorFlow's threads",
    "bare-horovod-same": "a script of Horovod's guide, our threads and steps per call",
    "bare-coordinator": "a bare ClusterCoordinator, our threads and steps per call",
    "bare-unmeasured": "the same without a metric",
}
for _name, _like in (
    ("fit-mirrored-dataset", "fit-mirrored-arrays"),
    ("fit-mirrored-same", "fit-mirrored-arrays"),
    ("fit-global-dataset", "fit-global-arrays"),
    ("fit-replica-arrays", "fit-global-arrays"),
    ("fit-replica-dataset", "fit-global-arrays"),
    ("keras-one-dataset", "keras-one-arrays"),
    ("keras-mirrored-dataset", "keras-mirrored-arrays"),
):
    WORDS[_name] = WORDS[_like]


# The pairs of `reading.py`.
READ = {
    "shards": "read from shards / from memory",
    "kept": "read from shards and kept in memory / from memory",
    "pictures": "read from a PNG file each / from memory",
    "photos": "photographs of 96x96 pixels, resnet20, read from a JPEG file each / from memory",
    "services": "costly examples, made by two data servers / by the process that trains",
}


def side_by_side(rows: Rows, part: str) -> list[str]:
    """A model's claims: the contestant, what it is compared with, the ratio and its range."""
    lines = ["| throughput of / of | ratio | range | rounds |", "|---|---|---|---|"]
    for claim in rows[part]["claims"]:
        if claim["ratio"] is None:
            lines.append(f"| {claim['claim']} | not measured | | |")
            continue
        contestant = claim["claim"].partition(" / ")[0]
        two = " / ".join(WORDS.get(name, name) for name in (contestant, claim["against"]))
        ratios = claim["ratios"]
        lines.append(f"| {two} | {claim['ratio']:.2f} | {min(ratios):.2f} to {max(ratios):.2f} | {len(ratios)} |")
    return lines


def sweep(rows: Rows, part: str) -> list[str]:
    """What a sweep takes, beside its points as commands of their own."""
    ratios = rows["ratios"]
    return [
        "| seconds of / of | ratio | range |",
        "|---|---|---|",
        f"| a sweep of six points / the same points as commands of their own | {statistics.median(ratios):.2f} "
        f"| {min(ratios):.2f} to {max(ratios):.2f} |",
    ]


def every_strategy(rows: Rows, part: str) -> list[str]:
    """How far models under a strategy are from one device."""
    titles = rows["models"]
    return [
        f"| strategy | {' | '.join(titles)} |",
        f"|---{'|---' * len(titles)}|",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows["strategies"].items()),
    ]


def differential(rows: Rows, part: str) -> list[str]:
    """What became of models that were drawn, under each strategy."""
    verdicts = list(next(iter(rows.values()))["verdicts"])
    lines = [
        f"| strategy | cases | {' | '.join(verdicts)} | furthest of the equal |",
        f"|---|---{'|---' * len(verdicts)}|---|",
    ]
    for strategy, row in rows.items():
        counts = [row["verdicts"][name] for name in verdicts]
        lines.append(f"| {strategy} | {sum(counts)} | {' | '.join(map(str, counts))} | {row['furthest']:.0e} |")
    return lines


def checkpoints(rows: Rows, part: str) -> list[str]:
    """What a checkpoint costs."""
    low, high = rows["quartiles"]
    return [
        "| seconds of / of | ratio | quartiles | pairs |",
        "|---|---|---|---|",
        f"| 50 steps with a checkpoint / 50 steps without | {rows['median']:.3f} | {low:.3f} to {high:.3f} "
        f"| {len(rows['ratios'])} |",
    ]


def predict(rows: Rows, part: str) -> list[str]:
    """How far predictions are off, by the number of workers, beside how far another run of the same point is."""
    lines = ["| | within 10% | median error | intervals that held the run that followed |", "|---|---|---|---|"]
    for workers in sorted({point["workers"] for point in rows["points"]}):
        points = [point for point in rows["points"] if point["workers"] == workers]
        errors = [abs(point["ratio"] - 1) for point in points]
        held = [held for point in points for held in point["held"]]
        lines.append(f"| predicted, workers={workers} | {_near(errors)} | {sum(held)} of {len(held)} |")
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
        "| pairs of equal points | called a tie | equal runs lie apart by, a standard deviation |",
        "|---|---|---|",
        f"| {len(rows['apart'])} | {rows['ties']} | {rows['deviation']:.1%} |",
    ]


def ratios_of(title: str, kinds: Callable[[Rows], Mapping[str, Sequence[float]]]) -> Table:
    """A table of ratios, a line a kind: their median and range."""

    def table(rows: Rows, part: str) -> list[str]:
        return [
            f"| {title} | ratio | range | rounds |",
            "|---|---|---|---|",
            *(
                f"| {name} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} | {len(ratios)} |"
                for name, ratios in kinds(rows).items()
            ),
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
    """Ratios by data and what of the command they are of."""
    words = {"shards": "the shards alone", "whole": "the whole command"}
    return {f"{label}, {words[kind]}": row[kind] for label, row in rows.items() for kind in words}


def deep(rows: Rows, part: str) -> list[str]:
    """Deep models beside a bare loop: to the first step, and a step."""
    lines = [
        "| seconds of ours / a bare loop's | to the first step | a step | range of steps | starts |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        first, step = ([ours / bare for ours, bare in row[kind]] for kind in ("first", "step_ms"))
        lines.append(
            f"| {name} | {statistics.median(first):.2f} | {statistics.median(step):.2f} "
            f"| {min(step):.2f} to {max(step):.2f} | {len(first)} |"
        )
    return lines


def estimates(rows: Rows, part: str) -> list[str]:
    """What `mode=plan` estimates beside what runs do."""
    lines = ["| `cnn` on `mnist5k` unless named | estimated | measured |", "|---|---|---|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {_bytes(row['estimated'])} | {_bytes(row['measured'])} |")
    return lines


def memory(rows: Rows, part: str) -> list[str]:
    """What a host is estimated to hold beside what was measured, of cases whose names hold the part."""
    lines = ["| | estimated | measured | estimated / measured |", "|---|---|---|---|"]
    for name, row in rows.items():
        if ("100m" in name) == (part == "large"):
            estimated, measured = (f"{row[key] / 2**20:,.0f} MiB" for key in ("estimated", "measured"))
            lines.append(f"| {name} | {estimated} | {measured} | {row['estimated'] / row['measured']:.2f} |")
    return lines


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
    lines = ["| | lost | to | bound | rounds |", "|---|---|---|---|---|"]
    for case in dict.fromkeys(row["case"] for row in rows):
        found = [row for row in rows if row["case"] == case]
        shares: dict[str, list[float]] = {}
        for row in found:
            for one in row["parts"]:
                shares.setdefault(one["name"], []).append(one["share"])
        middle = sorted(((statistics.median(shares[name]), name) for name in shares), reverse=True)
        parts = ", ".join(f"{name} {share:.0%}" for share, name in middle if abs(share) >= 0.005)
        bounds = ", ".join(dict.fromkeys(str(row["bound"] or "none") for row in found))
        lost = statistics.median(row["lost"] for row in found)
        lines.append(f"| {case} | {lost:.0%} | {parts} | {bounds} | {len(found)} |")
    return lines


def scale(rows: Rows, part: str) -> list[str]:
    """What a driver takes by the number of processes, how that grows, and what a plan for many takes."""
    runs = rows["runs"]
    limit = runs[0]["silent_limit"]
    lines = [
        "| processes | hosts | events a second | cores of the driver | its memory | a process "
        f"| a killed one is noticed after | a silent one, `launch.heartbeat_timeout={limit:g}` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        lines.append(
            f"| {run['processes']:,} | {run['hosts']} | {run['events_per_second']:,.0f} | {run['cores']:.2f} "
            f"| {run['memory_mib']:.0f} MiB | {run['memory_mib'] * 1024 / run['processes']:.0f} KiB "
            f"| {run['killed_seconds']:.1f} s | {run['silent_seconds']:.1f} s |"
        )
    first, last = runs[0], runs[-1]
    grown = [
        f"{last[name] / first[name]:.1f} times" if first[name] else ""
        for name in ("processes", "hosts", "events_per_second", "cores", "memory_mib")
    ]
    lines.append(f"| {' | '.join(grown)} | | | |")
    plan = rows["plan"]
    return [*lines, "", f"A plan for {plan['workers']:,} workers, each a process, takes {plan['seconds']:.1f} s."]


def growth(rows: Rows, part: str) -> list[str]:
    """What grows with the size of what is done, at the smallest and the largest size, and by which exponent."""
    lines = ["| what is done | sizes | at the smallest | at the largest | exponent |", "|---|---|---|---|---|"]
    for row in rows.values():
        (first, *_, last), values = row["sizes"], row["values"]
        low, high = (
            f"{value:.2g} {row['unit']}" if value < 1 else f"{value:.1f} {row['unit']}"
            for value in (values[0], values[-1])
        )
        lines.append(f"| {row['about']} | {first:,} to {last:,} {row['of']} | {low} | {high} | {row['exponent']:.2f} |")
    return lines


def transcripts(rows: Rows, part: str) -> list[str]:
    """What a terminal said, as a block of code, and how long that took."""
    said = rows[part]
    return [*(f"    {line}".rstrip() for line in said["lines"]), "", f"It took {said['seconds']:.0f} seconds in all."]


def gpu(rows: Rows, part: str) -> list[str]:
    """A model's rate on a GPU, the share of the GPU's operations, and ratios to Keras's fit and a loop by hand."""
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
    if not rows["checks"]:
        return [*lines, "", "The machine that this was typed on has no GPU."]
    device, furthest = rows["device"], max(rows["checks"].values())
    return [*lines, "", f"{device['kind']}, JAX {device['jax']}; its checks were {furthest:.0e} apart at most."]


def xla(rows: Rows, part: str) -> list[str]:
    """A model's throughput with XLA over that without, what `train.xla=auto` chose, and how far losses are apart."""
    lines = ["| model | XLA / TensorFlow | range | `auto` chose | losses apart |", "|---|---|---|---|---|"]
    for name, found in rows.items():
        ratios, chosen = found["ratios"], "XLA" if found["chosen"] else "TensorFlow"
        cells = (f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", chosen)
        lines.append(f"| {name} | {' | '.join(cells)} | {found['apart']:.0e} |")
    return lines


TABLES: Mapping[str, Callable[[Any, str], list[str]]] = {
    "side_by_side": side_by_side,
    "on_jax": side_by_side,
    "collectives": side_by_side,
    "asynchronous": side_by_side,
    "sweep": sweep,
    "every_strategy": every_strategy,
    "differential": differential,
    "checkpoints": checkpoints,
    "predict": predict,
    "ties": ties,
    "input": ratios_of(
        "throughput of / of", lambda rows: {"training without the slow map / as predicted with it": rows["ratios"]}
    ),
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
