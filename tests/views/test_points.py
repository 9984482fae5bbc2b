"""A sweep as a person sees it go on, on consoles of several widths."""

import dataclasses
import io
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from shown_runs import a_plan, a_result, a_run, a_terminal, shown, table_of, told, without_codes, written

from pipeline.driver import Ahead, RunResult
from pipeline.record import results
from pipeline.views.terminal import error_text, say
from pipeline.views.terminal.live import Terminal
from pipeline.views.terminal.sweep_table import sweep_table
from pipeline.views.terminal.words import time_of_day

WIDTHS = (100, 60, 40)
SHARED = ("data=digits", "train.epochs=2")
# Words of the table that only the rows of a narrow console have.
STACKED = set(
    "one_device, mirrored, multi_worker, worker workers (3,301-3,503) 1.84x (1.79-1.88) efficiency accuracy "
    "0.9432 In brackets:".split()
)
FOLDER = "outputs/sweeps/2026-11-25_10-14-58-123456/{}_{}"


def points(ended: int = 6) -> tuple[RunResult, ...]:
    """Six points of two keys, of which so many have ended: one was refused, one failed."""
    refused = "Expected workers=1, since one_device trains on one device, received workers=2. Try workers=1."
    unfinished = {1: ("REFUSED", refused), 4: ("FAILED", "worker 0 was killed.")}
    runs = []
    for number, (strategy, workers) in enumerate(product(("one_device", "mirrored", "multi_worker"), (1, 2))):
        values: dict[str, Any] = {"strategy": strategy, "workers": workers}
        if number < ended and number in unfinished:
            values |= dict(zip(("status", "error"), unfinished[number], strict=True))
        elif number < ended:
            values = a_result(**values, rehearsal=number == 5)
        overrides = (f"strategy={strategy}", f"workers={workers}", *SHARED)
        runs.append(RunResult(results.from_values(values), Path(FOLDER.format(number, strategy)), overrides, number))
    return tuple(runs)


def test_a_point_is_called_by_one_number_from_its_beginning_to_the_table() -> None:
    console = Console(file=io.StringIO(), width=200)
    screen = Terminal(console, lambda: 1.7e9)
    screen.shares(points(0))
    screen.begins(Ahead(2, points(2), 65.0))
    screen.ended(points()[2], 19.0)
    now = time_of_day(1.7e9)
    assert written(console).splitlines() == [
        "all        data=digits train.epochs=2",
        "",
        f"{now} -- point 2: strategy=mirrored workers=1 (2 of 6 done, about 1 min 05 s left)",
        f"{now} point 2: FINISHED, 3,412 examples/s (3,301 to 3,503), 1.84x, efficiency 92%, val_accuracy 0.9432, 19 s",
    ]
    # Some of them, as where the command was interrupted: each keeps its number.
    table = shown(sweep_table([points()[number] for number in (0, 2, 4)]), 100)
    assert re.findall(r"^(\d)  (\w+)", table, re.M) == [("0", "one_device"), ("2", "mirrored"), ("4", "multi_worker")]
    assert "Point 4 failed: worker 0 was killed." in table
    assert "All with workers=1 data=digits train.epochs=2." in table
    assert table.count("data=digits") == 1


def test_the_plan_of_the_next_point_says_only_what_is_other() -> None:
    console = Console(file=io.StringIO(), width=200)
    screen = Terminal(console)
    screen.planned(a_plan(), False, None)
    for plan, label in ((a_plan(), "baseline"), (a_plan(processes=2, devices=1), "processes")):
        before = len(written(console).splitlines())
        screen.planned(plan, False, "outputs/sweeps/s/0_mirrored")
        assert [line.split()[0] for line in written(console).splitlines()[before:]] == [label]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_fills_above_the_bars_as_points_end(width: int) -> None:
    drawn = []
    for ended in range(6):
        text = told(a_plan(), a_run(a_plan(), epochs=1), a_terminal(width), Ahead(ended, points(ended), None))
        drawn.append(without_codes(text))
        assert max(map(len, re.split(r"[\r\n]+", drawn[-1]))) <= width
    for ended, text in enumerate(drawn):
        rows = dict(re.findall(r"^(\d) {1,2}(\w+ +\d +\S+)", text, re.M))
        assert [row.split()[2] for row in rows.values()] == [
            *["3,412", "REFUSED", "3,412", "3,412", "FAILED", "3,412"][:ended], "running", *["-"] * (5 - ended),
        ]  # fmt: skip
        assert f"{ended} of 6" in text
        # Epochs are in the bars, and of a sweep do not stay.
        assert "val_accuracy 0.89" not in text


def test_of_more_points_than_lines_those_around_the_one_under_way_are_shown() -> None:
    many = (dataclasses.replace(points(0)[0], number=place, overrides=(f"workers={place}",)) for place in range(50))
    text = told(a_plan(), a_run(a_plan(), epochs=1), a_terminal(), Ahead(30, tuple(many), None))
    numbers = {int(number) for number in re.findall(r"^ ?(\d+)  \d+ +\S", without_codes(text), re.M)}
    assert 30 in numbers
    assert len(numbers) == 16


def everything(width: int) -> Iterator[str]:
    """All that is printed of a sweep, on a console of a width."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    screen = Terminal(console)
    screen.shares(points(0))
    screen.planned(a_plan(notes=("This machine stands for 2 hosts, so that its speed is not theirs.",)), False, FOLDER)
    for point in points():
        screen.begins(Ahead(point.number or 0, points(point.number or 0), 65.0))
        screen.ended(point, 19.0)
    console.print(table_of(a_result(saved="model.keras", folder=FOLDER.format(0, "mirrored"))))
    say(console, error_text(f"Point 1 refused: {points()[1].result.ending.error}"))
    console.print(sweep_table(points()))
    yield from written(console).splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_longer_than_the_console_or_broken_inside_a_word(width: int) -> None:
    lines = [*everything(width)]
    assert max(map(len, lines)) <= width
    whole = {word for line in everything(300) for word in line.split()} | STACKED
    # A path that fits into no line is broken at its slashes.
    parts = [word for line in lines for word in line.split() if word not in whole]
    paths = [word for word in whole if len(word) > width]
    assert all(
        any(re.search(rf"(^|/){re.escape(part)}(?<=/)|/{re.escape(part)}$", path) for path in paths) for part in parts
    )


def test_epochs_and_warnings_are_broken_between_words_too() -> None:
    text = without_codes(told(a_plan(), a_run(a_plan()), a_terminal(40)))
    assert "epoch 2 of 3: loss 0.3, accuracy 0.91,\n    val_loss 0.35, val_accuracy 0.89,\n    2.1 s\n" in text
