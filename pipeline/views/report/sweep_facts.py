"""Turns a sweep into what was run, for the head of its report: of which model, on what, and how to run it again."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from pipeline.analyze import comparable
from pipeline.analyze.verdict import Use, Verdict
from pipeline.record.events import Run
from pipeline.record.results import IN_THIS_RUN
from pipeline.run.tags import PROGRAM, command_of
from pipeline.views.report.gather import ReportedRun, ReportedSweep
from pipeline.views.terminal.sweep_table import OWN_BASELINE, engines_text
from pipeline.views.terminal.words import clean, listed, percent, plural, points_text, rate, span

# More would hide the page below them.
MOST_COMMANDS = 6


@dataclass(frozen=True)
class Fact:
    """A fact about a whole sweep under its name; `commands` are shown a line each."""

    name: str
    said: str = ""
    commands: tuple[str, ...] = ()


def facts(sweep: ReportedSweep) -> list[Fact]:
    """Engines, model, data, batch, precision, baseline, intervals, versions, commit, command: those that are known."""
    engines = engines_text((point.place, point.run) for point in sweep.measured)
    texts = [
        Fact("engines", engines and f"{engines}; {OWN_BASELINE}"),
        Fact("model", _once_or_each(sweep, _model)),
        Fact("data", _once_or_each(sweep, _data)),
        Fact("batch", _once_or_each(sweep, _batch)),
        Fact("precision", _once_or_each(sweep, lambda point: point.result.layout.precision)),
        Fact("baseline", _baseline(sweep)),
        Fact("intervals", _intervals(sweep)),
        Fact("versions", _once_or_each(sweep, _versions)),
        Fact("commit", _once_or_each(sweep, _commit) or "not known: no run was started in a folder of git"),
        _command(sweep),
    ]
    return [fact for fact in texts if fact.said or fact.commands]


def commands(points: Sequence[Sequence[str]], options: Sequence[str] = ()) -> list[str]:
    """Returns the commands that run points with these overrides: one where they are all combinations of some values.

    >>> commands([["a=1", "b=[2, 3]"], ["a=4", "b=[2, 3]"]], ["--config-dir=mine"])
    ["python -m pipeline -m --config-dir=mine a=1,4 'b=[2, 3]'"]
    >>> commands([["a=1", "b=2"], ["a=2", "b=1"]])
    ['python -m pipeline -m a=1 b=2', 'python -m pipeline -m a=2 b=1']
    """
    distinct = list(dict.fromkeys(map(tuple, points)))
    rows = [dict(override.partition("=")[::2] for override in overrides) for overrides in distinct]
    keys = list(rows[0]) if rows else []
    values = {key: list(dict.fromkeys(row.get(key, "") for row in rows)) for key in keys}
    if all(set(row) == set(keys) for row in rows) and prod(map(len, values.values())) == len(rows):
        distinct = (
            [tuple(f"{key}={','.join(group)}" if any(group) else key for key, group in values.items())] if rows else []
        )
    return [shlex.join([*PROGRAM, "-m", *options, *overrides]) for overrides in distinct]


def next_command(sweep: ReportedSweep, decided: Verdict) -> str:
    """Returns the command to type next: it trains as the verdict says or, where that is not known, measures more.

    "" where that takes several commands.
    """
    if decided.best is None:
        return ""
    options = _options(map(_began, sweep.points))
    if decided.use is Use.NOT_KNOWN:
        often = f"sweep.repeats={max(3, len(decided.best.runs) + 2)}"
        overrides = [[*_but(point.overrides, "sweep.repeats"), often] for point in sweep.points if point.overrides]
        folder = commands(overrides, options)
        return folder[0] if len(folder) == 1 else ""
    best, (place, *_) = decided.best, decided.best.places
    typed = next((point.overrides for point in sweep.points if point.place == place), ())
    choices = best.result.choices
    typed = typed or tuple(
        f"{key}={value}"
        for key, value in (
            ("backend", choices.backend), ("strategy", choices.strategy), ("workers", best.result.layout.workers),
            ("model", choices.model), ("data", choices.data),
        )
        if value is not None
    )  # fmt: skip
    if decided.use is Use.ONE_DEVICE and best.devices > 1:
        typed = (*_but(typed, "strategy", "workers"), "strategy=one_device", "workers=1")
    return command_of(typed, options)


def _but(overrides: Iterable[str], *keys: str) -> list[str]:
    """The overrides of all but these keys, and of what is in them."""
    overrides_list = [(override.lstrip("+~").partition("=")[0], override) for override in overrides]
    return [override for key, override in overrides_list if key.partition(".")[0] not in keys and key not in keys]


def _once_or_each(sweep: ReportedSweep, describe: Callable[[ReportedRun], str | None]) -> str:
    """Returns `of` the measured points, or of all where none is: once where it is the same for all that have it."""
    places: dict[str, list[int]] = {}
    for point in sweep.measured or sweep.points:
        if text := clean(describe(point)):
            places.setdefault(text, []).append(point.place)
    if len(places) == 1:
        return next(iter(places))
    return "; ".join(f"{text} ({points_text(where)})" for text, where in places.items())


def _model(point: ReportedRun) -> str | None:
    parameters = point.result.training.parameters
    return _with(comparable.facts(point.run).get("model"), plural(parameters, "parameter"))


def _data(point: ReportedRun) -> str | None:
    return _with(comparable.facts(point.run).get("data"), plural(point.run.train_examples, "training example"))


def _with(name: str | None, more: str) -> str | None:
    return name and listed(name, more)


def _batch(point: ReportedRun) -> str | None:
    layout = point.result.layout
    if layout.scaling == "strong" and layout.global_batch is not None:
        return f"{plural(layout.global_batch, 'example')} a step over all replicas, held fixed: strong scaling"
    if layout.replica_batch is None:
        return None
    held = ", held fixed: weak scaling" if layout.scaling == "weak" else ""
    return f"{plural(layout.replica_batch, 'example')} a step on each replica{held}"


def _baseline(sweep: ReportedSweep) -> str:
    """Returns the baseline of the speedups."""
    speeds = {point.place: point.result.speed for point in sweep.measured}
    sources: dict[str, list[float]] = {}
    for point in sweep.measured:
        if speed := point.result.speed.baseline_examples_per_second:
            sources.setdefault(f"{clean(point.marks.engine)} ".lstrip(), []).append(speed)
    if not sources:
        return ""
    reached = " and ".join(
        f"{engine}{span(min(places), max(places), rate, ' to ') or rate(places[0])}"
        for engine, places in sources.items()
    )
    in_turn = [place for place, speed in speeds.items() if speed.baseline_source == IN_THIS_RUN]
    measured = f"measured in turn with {points_text(in_turn)}" if in_turn else ""
    if not in_turn and any(speed.baseline_source for speed in speeds.values()):
        measured = "measured in an earlier run"
    return listed(f"one device without a strategy: {reached} examples/s", measured)


def _intervals(sweep: ReportedSweep) -> str:
    """Explains the intervals under a throughput and a speedup."""
    if not sweep.confidences:
        return ""
    counts = sorted({point.result.speed.repeats for point in sweep.measured if point.result.speed.repeats})
    repeats = f"{' or '.join(map(str, counts))} repeats" if counts else "the repeats"
    probable = " or ".join(map(percent, sweep.confidences))
    return f"from the lowest to the highest of {repeats}, which holds the true median with a probability of {probable}"


def _versions(point: ReportedRun) -> str:
    return ", ".join(f"{name} {version}" for name, version in point.result.environment.versions.items())


def _began(point: ReportedRun) -> Run:
    return point.run.began or Run()


def _commit(point: ReportedRun) -> str | None:
    commit = _began(point).tags.get("git_commit")
    return None if commit is None else str(commit)


def _command(sweep: ReportedSweep) -> Fact:
    values = commands(
        [point.overrides for point in sweep.points if point.overrides], _options(map(_began, sweep.points))
    )
    more = len(values) - MOST_COMMANDS
    rest = values if more <= 0 else [*values[:MOST_COMMANDS], f"# and {more} more, by the overrides below"]
    return Fact("command" if len(rest) < 2 else "commands", commands=tuple(map(clean, rest)))


def _options(runs: Iterable[Run]) -> list[str]:
    """The options with which points were run, beside what was asked for."""
    for run in runs:
        if command := run.tags.get("command"):
            return [word for word in shlex.split(str(command)) if word.startswith("--")]
    return []
