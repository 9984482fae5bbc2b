"""Turns a sweep's results into a table, what went wrong with any of them, and which cannot be compared."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.analyze import comparable, measure
from pipeline.analyze.comparable import TOOK, WAITED
from pipeline.driver import RunResult
from pipeline.record.results import Result
from pipeline.views.terminal import words
from pipeline.views.terminal.plan_text import planned_rows
from pipeline.views.terminal.result import STATUS_COLOURS, explained_line, profile_lines
from pipeline.views.terminal.verdict_text import mark_texts
from pipeline.views.terminal.words import MISSING, brackets, clean, columns, listed, percent, plural, points_text

if TYPE_CHECKING:
    from rich.text import Text

HEADER = ("", "strategy", "workers", "examples/s", "speedup", "eff.", "val", "status")
PREDICTED = ("", "strategy", "workers", "batch", "examples/s", "interval", "to finish", "cost", "energy", "status")
BEST = {"time": "fastest", "cost": "cheapest for an example", "energy": "least energy for an example"}
# Of a strategy, the narrower one where a row would not fit otherwise; the overrides under it have the whole name.
STRATEGY_WIDTHS, ROW_WIDTH = (16, 15), 80
# What a speedup is over, where points are of several engines.
OWN_BASELINE = "each speedup is over one device under the same engine"
NUMBERED = re.compile(r" *\d+  ")  # a row that begins with a point's number
STATUS = r"(?m)(?<!\S)[A-Z]+$"  # a point's status, at the end of a row


def sweep_table(points: Sequence[RunResult], width: int) -> "Text":
    """The points under each other, and under them what a reader has to know to compare them."""
    from rich.text import Text

    def broken(*lines: str) -> str:
        return "\n".join(part for line in lines for part in words.fitted(line, width, len(line) - len(line.lstrip())))

    statuses = {point.result.ending.status for point in points}
    if not points:
        return Text("No points.")
    if "PLANNED" in statuses:
        (header, *rows), notes = planned_rows(points), reasons(points)
    elif "PREDICTED" in statuses:
        table = (words.cells(PREDICTED, point.result, {"": str(place)}) for place, point in enumerate(points))
        header, *rows = columns([PREDICTED, *table], (0, *range(2, 9)))
        notes = [*_outlook(points), *reasons(points)]
    else:
        header, *rows = sweep_rows(points)
        # Where the console is too narrow for its numbers, a point has a few lines without columns.
        if stacked := max(map(len, (header, *filter(NUMBERED.match, rows)))) > width:
            header, rows = "", _stacked_rows(points)
        notes = _notes(points, stacked)
    numbers = Text(broken(*rows))
    numbers.highlight_regex(STATUS, lambda status: STATUS_COLOURS.get(status, "yellow"))
    return Text.assemble((broken(header) + "\n" * bool(header), "bold"), numbers, "\n", broken("", *notes))


def _outlook(points: Sequence[RunResult]) -> list[str]:
    """The best point by time, cost and energy, and where another worker stops paying."""
    results, lines = [point.result for point in points], []
    share = next((point.foreseen.knee_share for point in points if point.foreseen), 0.5)
    for name, place in measure.best(results).items():
        layout, strategy = results[place].layout, clean(results[place].choices.called)
        which = f"point {place}, {listed(strategy, plural(layout.workers, 'worker'))}{words.marks(layout)}"
        lines.append(f"{BEST[name].capitalize()}: {which}.")
    if (knee := measure.knee_of(results, share)) is not None and knee.found is not None:
        few, _, brought = knee.found
        lines.append(
            f"Knee: {plural(few, 'worker')}. Beyond, another one brings {percent(max(0.0, brought))} of what one of "
            f"the first does, which is less than predict.knee_share={share:g}."
        )
    elif knee is not None:
        lines.append(f"Knee: none among these points, at predict.knee_share={share:g}.")
    return lines


def sweep_rows(points: Sequence[RunResult]) -> list[str]:
    """A header, and for each point its numbers, under them intervals and marks, and what was typed for it alone."""
    count, numbers, intervals, metric = len(points), [], [], _metric(points)
    for point in points:
        validation = words.or_missing(_validation(point.result, metric), words.figure)
        numbers.append(words.cells(HEADER, point.result, {"": str(point.number), "val": validation}))
        speed, wait = point.result.speed, words.or_missing(point.result.input.wait, percent, "")
        ends = (words.throughput_span(speed, "-"), words.speedup_span(speed, "-"))
        intervals.append(["", "", "", *ends, wait, "", ""])
    for width in STRATEGY_WIDTHS:
        narrow = [[place, words.shortened(strategy, width), *others] for place, strategy, *others in numbers]
        header, *lines = columns([HEADER, *narrow, *intervals], (0, *range(2, 7)))
        if max(map(len, lines)) <= ROW_WIDTH:
            break
    left, rows = " " * header.index("strategy"), [header]
    for row, ends_of, (doubts, *below) in zip(lines[:count], lines[count:], _remarks(points), strict=True):
        under = [f"{ends_of}  {doubts}" if doubts else ends_of, *(left + line for line in below)]
        rows += [row, *(line for line in under if line.strip())]
    return rows


def _stacked_rows(points: Sequence[RunResult]) -> list[str]:
    rows, metric, letters = [], _metric(points), max(len(str(point.number)) for point in points)
    for point, remarks in zip(points, _remarks(points), strict=True):
        result, speed, value = point.result, point.result.speed, _validation(point.result, metric)
        name = listed(clean(result.choices.called) or MISSING, plural(result.layout.workers, "worker"))
        rows.append(f"{point.number:>{letters}}  {name}  {clean(result.ending.status) or MISSING}")
        figures = [
            words.per_second(speed, brackets(words.throughput_span(speed, "-"))),
            "" if speed.speedup is None else words.times(speed.speedup) + brackets(words.speedup_span(speed, "-")),
            "" if (share := comparable.efficiency_of(result)) is None else f"efficiency {percent(share)}",
            "" if value is None else f"{metric} {words.figure(value)}",
            "" if (wait := result.input.wait) is None else f"{percent(wait)} of the step time waiting for input",
        ]
        rows += [" " * (letters + 2) + line for line in (*figures, *remarks) if line]
    return rows


def _remarks(points: Sequence[RunResult]) -> Iterator[tuple[str, ...]]:
    """Yields the doubts about each point, what sets its pace, what it lost, and what was typed for it alone."""
    measured = _measured(points)
    marks = dict(zip(measured, map(mark_texts, comparable.marks(list(measured.values()))), strict=True))
    for point, own in zip(points, shared_and_own(points)[1], strict=True):
        result = point.result
        doubts = listed(*marks.get(point.number, []), "input-bound" * (result.input.bound is True))
        yield doubts, "".join(profile_lines(result.profile)[:1]), explained_line(result.explained), " ".join(own)


def _notes(points: Sequence[RunResult], stacked: bool) -> list[str]:
    shared, engines = shared_and_own(points)[0], engines_text(points)
    measured, metric = [point.result for point in _measured(points).values()], _metric(points)
    shares = sorted({share for result in measured if (share := result.speed.interval_confidence)})
    where = "In brackets" if stacked else "Under throughput and speedup"
    efficiency = any(point.result.speed.efficiency is not None for point in points)
    waited = any(result.input.wait is not None for result in measured)
    bound = any(result.input.bound is True for result in measured)
    lost = "as shares of a step's time, timed once more after training"
    lines = {
        f"{where}: {' or '.join(map(percent, shares))} intervals.": shares,
        "eff.: efficiency, speedup over the number of devices.": efficiency and not stacked,
        "Under eff.: share of the step time that was spent waiting for input.": waited and not stacked,
        "input-bound: a faster input would make it faster; data.profile=true says which part of it.": bound,
        f"lost: to scaling, {lost}; eff. is of its first steps.": any(result.explained for result in measured),
        f"val: {metric} on the validation data.": metric and not stacked,
    }
    doubts = {doubt for one in measured for doubt in (*comparable.doubts(one.layout), *comparable.disturbed(one))}
    remarks = (comparable.DOUBTS | comparable.DISTURBED).items()
    return [
        *[f"All with {' '.join(shared)}."] * bool(shared),
        *(line for line, is_needed in lines.items() if is_needed),
        *(f"{doubt}: {why}" for doubt, why in remarks if doubt in doubts),
        *reasons(points),
        *noted(points, (WAITED, TOOK)),
        *[f"Of different engines ({engines}): {OWN_BASELINE}."] * bool(engines),
        *(f"Not comparable, since {text}." for text in difference_texts(points)),
    ]


def shared_and_own(points: Sequence[RunResult]) -> tuple[list[str], list[list[str]]]:
    """Returns the overrides of all points, and for each point those that not all share."""
    typed = [list(map(clean, point.overrides)) for point in points]
    first, *others = list(filter(None, typed)) or [[]]
    shared = [line for line in first if others and all(line in other for other in others)]
    return shared, [[line for line in overrides if line not in shared] for overrides in typed]


def reasons(points: Sequence[RunResult]) -> list[str]:
    """Returns the reasons why points did not finish; those with the same reason share a line."""
    whys = []
    for point in points:
        status = clean(point.result.ending.status) or "UNKNOWN"
        if status not in ("FINISHED", "PLANNED", "PREDICTED"):
            why = clean(point.result.ending.error) or " ".join(map(clean, point.result.notes))
            whys.append((f"{status.lower()}: {why or 'no reason was given'}", point.number))
    return [f"{named} {why}" for named, why in words.by_points(whys)]


def noted(points: Sequence[RunResult], but: tuple[str, ...] = ()) -> list[str]:
    """Returns the notes of finished points, but for their plans' and those that begin with any of `but`."""
    finished = [(point, point.plan.notes if point.plan else ()) for point in points if point.result.finished]
    notes = ((clean(note), point) for point, planned in finished for note in point.result.notes if note not in planned)
    numbered = ((note, point.number) for note, point in notes if not note.startswith(but))
    return [f"{points}: {note}" for points, note in words.by_points(numbered)]


def engines_text(points: Sequence[RunResult]) -> str:
    """Returns the measured points of each engine; "" where all are of one."""
    measured = _measured(points)
    return _having(comparable.engines(list(measured.values())), list(measured))


def difference_texts(points: Sequence[RunResult]) -> list[str]:
    """Returns in what points that were measured differ so that they cannot be compared, and which."""
    measured = _measured(points)
    differences = comparable.differences(list(measured.values()))
    return [f"{name} differs ({_having(values, list(measured))})" for name, values in differences]


def _having(values: Mapping[str, Sequence[int]], numbers: Sequence[int]) -> str:
    return "; ".join(f"{clean(value)}: {points_text([numbers[at] for at in where])}" for value, where in values.items())


def _measured(points: Sequence[RunResult]) -> dict[int, RunResult]:
    return {point.number: point for point in points if point.result.speed.examples_per_second is not None}


def _metric(points: Sequence[RunResult]) -> str:
    trained = [point.result.training for point in points]
    names = (name for each in trained for name, value in each.val_metrics.items() if words.number(value) is not None)
    loss = "loss" * any(words.number(each.val_loss) is not None for each in trained)
    return clean(next(names, loss))


def _validation(result: Result, metric: str) -> float | None:
    metrics = {clean(name): value for name, value in result.training.val_metrics.items()}
    return words.number((metrics | {"loss": result.training.val_loss}).get(metric))
