"""A sweep as a person sees it go on, on consoles of several widths."""

import dataclasses
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from shown_runs import a_plan, a_result, a_run, a_terminal, shown, table_of, told, without_codes, written

from pipeline.driver import Ahead, RunResult
from pipeline.record import results
from pipeline.record.results import Choices, Layout, Result
from pipeline.views.terminal import error_text, say
from pipeline.views.terminal.live import Progress, Terminal
from pipeline.views.terminal.sweep_table import sweep_table
from pipeline.views.terminal.words import time_of_day

WIDTHS = (100, 60, 40)
SHARED = ("data=digits", "train.epochs=2")
# Words of the table that only the rows of a narrow console have.
STACKED = set(
    "one_device, mirrored, multi_worker, worker workers (3,301-3,503) 1.84x (1.79-1.88) efficiency accuracy".split()
)
STACKED |= {"0.9432", "In", "brackets:"}
FOLDER = "outputs/sweeps/2026-11-25_10-14-58-123456/{}_{}"


def points(ended: int = 6) -> tuple[RunResult, ...]:
    """Six points of two keys, of which so many have ended: one was refused, one failed."""
    made = []
    for number, (strategy, workers) in enumerate(
        [(s, w) for s in ("one_device", "mirrored", "multi_worker") for w in (1, 2)]
    ):
        overrides = (f"strategy={strategy}", f"workers={workers}", *SHARED)
        result = Result(choices=Choices(strategy), layout=Layout(workers=workers))
        if number < ended:
            values = a_result(strategy=strategy, workers=workers, rehearsal=number == 5)
            if number == 1:
                values = {"status": "REFUSED", "strategy": strategy, "workers": 2, "error": "Expected workers=1, since "
                          "one_device trains on one device, received workers=2. Try workers=1."}  # fmt: skip
            if number == 4:
                values = {"status": "FAILED", "strategy": strategy, "workers": 1, "error": "worker 0 was killed."}
            result = results.from_values(values)
        made.append(RunResult(result, Path(FOLDER.format(number, strategy)), overrides, number))
    return tuple(made)


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
    before = len(written(console).splitlines())
    screen.planned(a_plan(), False, "outputs/sweeps/s/0_mirrored")
    assert [line.split()[0] for line in written(console).splitlines()[before:]] == ["baseline"]
    before = len(written(console).splitlines())
    screen.planned(a_plan(processes=2, devices=1), False, "outputs/sweeps/s/0_mirrored")
    assert [line.split()[0] for line in written(console).splitlines()[before:]] == ["processes"]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_fills_above_the_bars_as_points_end(width: int) -> None:
    drawn = []
    for ended in range(6):
        console = a_terminal(width)
        with Progress(a_plan(), console, 0.0, Ahead(ended, points(ended), None)) as progress:
            for now, event in a_run(a_plan(), epochs=1):
                progress.update(event, now)
        drawn.append(without_codes(written(console)))
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
    many = tuple(
        dataclasses.replace(points(0)[0], number=place, overrides=(f"workers={place}",)) for place in range(50)
    )
    console = a_terminal()
    with Progress(a_plan(), console, 0.0, Ahead(30, many, None)) as progress:
        for now, event in a_run(a_plan(), epochs=1):
            progress.update(event, now)
    numbers = {int(number) for number in re.findall(r"^ ?(\d+)  \d+ +\S", without_codes(written(console)), re.M)}
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
    say(
        console,
        error_text("Point 1 refused: Expected workers=1, since one_device trains on one, received 2. Try workers=1."),
    )
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
