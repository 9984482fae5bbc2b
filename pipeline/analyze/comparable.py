"""Tells which speeds say something of each other and which are doubtful alone, for every place that shows one.

Two speeds compare where model, data, batch rule, scaling, precision, machine, versions and the settings that decide
speed under every strategy are the same. An asynchronous step and another engine are said and not refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from pipeline.config import parts
from pipeline.config.parts import Part, leaves
from pipeline.errors import as_typed
from pipeline.plan.plan import DATA_SERVER, TENSORFLOW, Plan
from pipeline.plan.size import of_shape
from pipeline.record.results import IN_THIS_RUN, MOST_EFFICIENCY, Layout, Result

if TYPE_CHECKING:
    from pipeline.analyze.history import LoggedRun

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
# A note of a run that waits for its input begins so; under a table of many, a mark says it.
WAITED = "Input-bound:"
# So does that of one that other programs disturbed.
TOOK = "Other programs took"
# What makes a speed less than it seems, and why; which of these keep it from being compared.
DOUBTS = {
    "rehearsal": "logical devices stand for others, so the speed is not theirs.",
    "oversubscribed": "there are more devices or threads than cores, so the speed is not that of as many devices.",
    "asynchronous": "a step is one worker's, on weights that others may have changed meanwhile.",
    "fewer workers": "some were lost before all was timed, so the speed is that of those that were left.",
}
REFUSED = frozenset({"rehearsal", "oversubscribed", "fewer workers"})
# What shows that a machine was not quiet, and what is said of it.
DISTURBED = {
    "busy": "other programs used the cores while it was timed.",
    "unsteady": "its repeats lie far apart.",
    "disturbed baseline": "the speedup is more than there are devices, so something has slowed the baseline.",
}
# The share of the cores' time that other programs take from which a run is busy, and how many times the upper end of an
# interval is the lower one from which it is unsteady.
BUSY, UNSTEADY = 0.1, 1.25
# Two runs are as fast where their ratio lies within this.
MARGIN = 0.05
# Facts that have other names than their fields, beside others and alone.
NAMES = {"kind": "device kind", "service": "data service"}
SAID = {"strategy_build": "strategy", "data_build": "data", "kind": "kind of device"}
# Whose versions all engines share; the others that a run tells are its engine's own, of which another has none.
SHARED = frozenset({"python", "keras", "numpy"})
# In what runs differ that keeps their speeds from being compared, and the places with each value; a doubt has none.
Difference = tuple[str, dict[str, list[int]]]


@dataclass(frozen=True)
class Marks:
    """The remarks beside a speed: its doubts, where its run differs from others, its engine if there are several."""

    doubts: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    engine: str = ""

    @property
    def compares(self) -> bool:
        """True if the speed can be compared with the others."""
        return not self.differs and REFUSED.isdisjoint(self.doubts)


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Returns the values of each key, in their order."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def doubts(layout: Layout) -> list[str]:
    """The names in `DOUBTS` that apply to a result, or to a plan."""
    fewer = layout.timed_workers not in (None, layout.workers)
    return [*(name for name in DOUBTS if getattr(layout, name, False)), *["fewer workers"] * fewer]


def sound(run: LoggedRun) -> bool:
    """True if a run's speed is its hardware's."""
    return REFUSED.isdisjoint(doubts(run.result.layout))


def devices_of(result: Result) -> int:
    """The number of devices that a run was timed on."""
    layout = result.layout
    each = (layout.devices or layout.workers or 1) // (layout.workers or 1)
    return (layout.timed_workers or layout.workers or 1) * each


def disturbed_baseline(result: Result) -> bool:
    """True if the speedup is more than the devices: something has slowed the baseline."""
    speed = result.speed
    share = speed.efficiency if speed.efficiency is not None else (speed.speedup or 0.0) / devices_of(result)
    return share > MOST_EFFICIENCY


def efficiency_of(result: Result) -> float | None:
    """The speedup over the number of devices; None where it is not known, or more than can be."""
    return None if disturbed_baseline(result) else result.speed.efficiency


def disturbed(result: Result) -> list[str]:
    """The names in `DISTURBED` that show that a run was not timed on a quiet machine."""
    speed = result.speed
    ends = (speed.speedup_low, speed.speedup_high)
    if speed.baseline_source != IN_THIS_RUN or None in ends:
        ends = (speed.examples_per_second_low, speed.examples_per_second_high)
    shows = {
        "busy": (speed.other_work or 0.0) >= BUSY,
        "unsteady": bool(ends[0] and ends[1] and ends[1] > UNSTEADY * ends[0]),
        "disturbed baseline": disturbed_baseline(result),
    }
    return [name for name, shown in shows.items() if shown]


def engine_of(result: Result) -> str | None:
    """The engine that trained, or was to; None if it is not known."""
    choices = result.choices
    return choices.backend or (TENSORFLOW if choices.strategy else None)


def engines(runs: Sequence[LoggedRun]) -> dict[str, list[int]]:
    """The places of the runs that each engine trained, where these are several."""
    places = grouped((engine, place) for place, run in enumerate(runs) if (engine := engine_of(run.result)))
    return places if len(places) > 1 else {}


def facts(run: LoggedRun) -> dict[str, str]:
    """The facts that two runs must share for their speeds to compare, by name, as text; unknown ones are left out."""
    result, settings = run.result, run.settings
    versions = result.versions
    held = "global" if result.layout.scaling == "strong" else "replica"
    batch = getattr(result.layout, f"{held}_batch")
    values = {
        "model": _built(result.choices.model, settings.get("model_build")),
        "data": _built(result.choices.data, settings.get("data_build")),
        "precision": result.layout.precision,
        "scaling": result.layout.scaling,
        "batch rule": None if batch is None else f"{held} batch {batch:,}",
        "machine": result.machine,
        "versions": {name: number for name, number in versions.items() if name in SHARED} or None,
        f"versions of {engine_of(result)}": {name: versions[name] for name in versions if name not in SHARED} or None,
        "examples left out": result.input.train_examples_skipped,
        "data servers": run.plan and len(run.plan.ranks(DATA_SERVER)) // (run.plan.hardware.hosts or 1),
    }
    # There null is a choice as well: the model's own optimizer.
    names = [name for name in leaves(Plan, Part.COMPARABILITY) if name in settings]
    texts = {name: _text(value) for name, value in values.items() if value is not None}
    return texts | {NAMES.get(name, name.replace("_", " ")): _text(settings[name]) for name in names}


def unlike(one: LoggedRun, two: LoggedRun) -> list[Difference]:
    """The reasons why the speeds of two runs do not compare."""
    doubtful = {doubt for run in (one, two) for doubt in doubts(run.result.layout)}
    return [*differences([one, two]), *((name, {}) for name in DOUBTS if name in doubtful & REFUSED)]


def differences(runs: Sequence[LoggedRun]) -> list[Difference]:
    """The differences that keep speeds from being compared, and the places of the runs with each value."""
    all_facts, rows = [facts(run) for run in runs], list[Difference]()
    for name in _differing(all_facts):
        values = {place: one[name] for place, one in enumerate(all_facts) if name in one}
        # Arguments are left out of "mlp(hidden=[128])" where no other value is of that name.
        whole = {value: value.partition("(")[0] for value in values.values()}
        names = Counter(whole.values())
        texts = {value: value if names[short] > 1 else short for value, short in whole.items()}
        rows.append((name, grouped((texts[value], place) for place, value in values.items())))
    return rows


def groups(runs: Sequence[LoggedRun]) -> list[list[int]]:
    """The places of the runs whose speeds compare, the largest group first: sound runs count, then all, then the order.

    A rehearsal is in the group that it would compare with otherwise, and an unknown fact sets no run apart.
    """
    groups: list[tuple[dict[str, str], list[int]]] = []
    for place, run in enumerate(runs):
        own = facts(run)
        shared, places = next((group for group in groups if not _differing([group[0], own])), ({}, []))
        if not places:
            groups.append((shared, places))
        shared |= own
        places.append(place)
    sizes = [((sum(sound(runs[place]) for place in places), len(places)), places) for _, places in groups]
    return [places for _, places in sorted(sizes, key=itemgetter(0), reverse=True)]


def marks(runs: Sequence[LoggedRun]) -> list[Marks]:
    """The remarks beside the speed of each run, which compare it with the largest group."""
    all_facts, largest = [facts(run) for run in runs], dict[str, str]()
    for place in groups(runs)[0] if runs else ():
        largest |= all_facts[place]
    differs = [tuple(_differing([largest, one])) for one in all_facts]
    engine = {place: name for name, places in engines(runs).items() for place in places}
    doubtful = [(*doubts(run.result.layout), *disturbed(run.result)) for run in runs]
    return [Marks(doubtful[place], differs[place], engine.get(place, "")) for place in range(len(runs))]


def flat(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of all that is in nested values; of named parts, by their names.

    >>> list(flat({"a": {"b": 1}, "c": [2], "parts": [{"name": "other", "share": 0.1}]}))
    [('a.b', 1), ('c', [2]), ('parts.other.share', 0.1)]
    """
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(node, list | tuple) and node and all(isinstance(item, Mapping) for item in node):
        for place, item in enumerate(node):
            inner = {name: value for name, value in item.items() if name != "name"}
            yield from flat(inner, f"{prefix}.{item.get('name', place)}")
    else:
        yield prefix, node


def _differing(all_facts: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for one in all_facts for name in one)
    return [name for name in names if len({one[name] for one in all_facts if name in one}) > 1]


def _built(name: str | None, build: object) -> str | None:
    """A model or data set with its arguments: "mlp(hidden=[128])"."""
    if name is None or not isinstance(build, Mapping):
        return name
    arguments = ", ".join(f"{key}={value}" for key, value in build.items() if key != "_target_")
    return f"{name}({arguments})"


def of_step(plan: Plan) -> dict[str, object]:
    """The facts that decide the time of a step, beside workers, batch, size and links; a model's is its function."""
    return parts.flat(plan, Part.STEP_TIME) | {
        "strategy_build": {key: value for key, value in plan.strategy.build.items() if key != "address"},
        "data_build": of_shape(plan.data.build),
        "model": plan.model.build.get("_target_"),
        "data servers": len(plan.ranks(DATA_SERVER)) // (plan.hardware.hosts or 1),
    }


def apart(one: Plan, two: Plan) -> list[str]:
    """The reasons why the step times of two plans do not compare, with the values of each."""
    ours, theirs = of_step(one), of_step(two)
    return [
        f"{SAID.get(name, name)} ({_text(ours[name])}; here {_text(theirs[name])})"
        for name in ours
        if json.dumps(ours[name], sort_keys=True) != json.dumps(theirs[name], sort_keys=True)
    ]


def _text(value: object) -> str:
    """A value as a user reads it.

    >>> _text({"keras": "3", "numpy": "2"}), _text(False), _text(None)
    ('keras 3, numpy 2', 'false', 'null')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return str(list(value)) if isinstance(value, list | tuple) else as_typed(value)
