"""What a person sees of runs and sweeps, on a terminal and on a pipe, whatever comes in and whenever it is stopped."""

import dataclasses
import io
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console, RenderableType
from shown_runs import a_plan, a_point, a_result, a_run, a_terminal, shown, table_of, told, without_codes, written

from pipeline.driver import Ahead, RunResult
from pipeline.record import events, results
from pipeline.record.log import from_plain, stamped, to_plain
from pipeline.views.terminal import console_on, error_text, say
from pipeline.views.terminal.live import Progress, Terminal
from pipeline.views.terminal.plan_text import plan_lines
from pipeline.views.terminal.run_state import RunState
from pipeline.views.terminal.sweep_table import sweep_table

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture(autouse=True)
def _an_ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich looks at these, and whoever runs the tests may have set them."""
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_plan_is_told_in_five_lines() -> None:
    assert plan_lines(a_plan(), full=False) == [
        "plan       cnn on mnist5k, mirrored on 2cpu: 2 CPU workers",
        "processes  1 (1 chief) on 1 host; each: 2 devices, 2 cores, 1 thread",
        "batch      64 x 2 replicas = 128 a step; weak scaling (replica batch held fixed)",
        "length     3 epochs of 40 steps, 120 in all",
        "baseline   one device, no strategy, batch 64; measured in turn, 2 repeats of about 0.75 s",
    ]
    where = "batch 64; reused from outputs/s/0_mirrored; throughput from 2 repeats of about 0.75 s"
    assert plan_lines(a_plan(), False, "outputs/s/0_mirrored")[-1].endswith(where)


def test_hundreds_of_processes_are_told_in_one_line_and_in_full_in_one_each_with_what_is_not_chosen_yet() -> None:
    plan = a_plan(processes=256, devices=1, hosts=32)
    short, full = plan_lines(plan, full=False), plan_lines(plan, full=True)
    assert len(short) == 5
    assert "256 (1 chief, 255 workers) on 32 hosts; each: 1 device, 1 core, 1 thread" in short[1]
    rows = [line for line in full if "127.0.0.1:" in line]
    assert len(rows) == 256
    assert rows[-1].split() == ["255", "worker", "31", "127.0.0.1:40255", "CPU:0", "255", "0", "1", "+", "2"]
    assert "optimizer" in "\n".join(full)
    (process,) = a_plan().processes
    other = {"address": "10.0.0.1:0", "devices": ("GPU:0", "GPU:1", "GPU:3"), "cores": (), "intra_op_threads": 0}
    for changes, cells in (
        ({}, ["-", "CPU:0-1", "0-1", "0-1", "1", "+", "2"]),
        (other, ["10.0.0.1:(free", "port)", "GPU:0-1,3", "0-1", "any", "default", "+", "2"]),
    ):
        processes = (dataclasses.replace(process, **changes),)
        lines = plan_lines(dataclasses.replace(a_plan(), processes=processes), full=True)
        assert ["0", "chief", "0", *cells] in [line.split() for line in lines]


@pytest.mark.parametrize(("changes", "words"), [
    ({"train_examples": None}, "3 epochs; steps an epoch are known once the data is read"),
    ({"epochs": None, "steps": 500}, "500 steps, 40 of them an epoch"),
    ({"scaling": "strong"}, "strong scaling (global batch held fixed)|one device, no strategy, batch 128"),
    ({"baseline": "auto"}, "reused if measured before"),
    ({"baseline": "none"}, "none, so no speedup"),
    ({"measure_steps": 0}, "nothing is measured"),
    ({"measure_steps": 50}, "2 repeats of 50 steps"),
    ({"rehearsal": True, "oversubscribed": True}, "2 CPU workers (rehearsal, oversubscribed)"),
    ({"notes": ("This machine stands for 2 hosts.",)}, "note       This machine stands for 2 hosts."),
])  # fmt: skip
def test_the_plan_says_how_long_against_what_and_what_its_speed_is_not(changes: dict[str, Any], words: str) -> None:
    lines = "\n".join(plan_lines(a_plan(**changes), full=False))
    assert [part for part in words.split("|") if part not in lines] == []


def test_a_run_on_a_pipe_is_a_line_for_each_phase_repeat_and_epoch_after_the_time_of_day() -> None:
    console, plan = Console(file=io.StringIO()), a_plan(processes=2, devices=1)
    assert told(plan, a_run(plan), console).splitlines() == [
        "starting: 2 processes",
        "joined: 2 processes after 2.5 s",
        "joined: the baseline after 3.6 s",
        "built: 1,199,882 parameters, 5,120 training examples, 1,000 validation examples, 40 steps an epoch",
        "measuring its first steps: 2 repeats in turn with the baseline",
        "repeat 1 of 2: 3,200 examples/s, baseline 1,600 examples/s",
        "repeat 2 of 2: 3,200 examples/s, baseline 1,600 examples/s",
        "training: 3 epochs, 120 steps",
        "epoch 1 of 3: loss 0.6, accuracy 0.91, val_loss 0.7, val_accuracy 0.89, 2.1 s",
        "epoch 2 of 3: loss 0.3, accuracy 0.91, val_loss 0.35, val_accuracy 0.89, 2.1 s",
        "epoch 3 of 3: loss 0.2, accuracy 0.91, val_loss 0.2333, val_accuracy 0.89, 2.1 s",
        "saved: model.keras",
    ]
    console_on(console.file).print(table_of(a_result())(200))
    lines = written(console).splitlines()
    assert lines[1] == f"{datetime.fromtimestamp(1.7e9 + 2.5):%H:%M:%S} joined: 2 processes after 2.5 s"
    assert [place for place, line in enumerate(lines) if re.match(r"\d\d:\d\d:\d\d \w", line)] == [*range(12)]
    assert lines[12].startswith("FINISHED    cnn on mnist5k")
    assert not [line for line in lines if line != line.rstrip()]


def test_a_long_epoch_gets_a_line_about_every_ten_seconds() -> None:
    lines = told(a_plan(), a_run(a_plan(), epochs=1, seconds=6.0)).splitlines()
    assert [line for line in lines if "step " in line] == [
        "training: epoch 1 of 1, step 24 of 40, 171 examples/s, 12 s left, loss 0.9, accuracy 0.9",
        "training: epoch 1 of 1, step 40 of 40, 171 examples/s, 0.0 s left, loss 0.9, accuracy 0.9",
    ]


def test_training_is_told_of_once_though_its_first_steps_are_timed_and_a_baseline_that_is_reused_not_at_all() -> None:
    ran = [event for _, event in a_run(a_plan(), baseline=False, epochs=1)]
    timed = max(place for place, event in enumerate(ran) if isinstance(event, events.Measured))
    steps = [event for event in ran if isinstance(event, events.Steps)]
    rest = [event for event in ran[timed:] if not isinstance(event, events.Steps)]
    text = told(a_plan(), ((0.0, event) for event in [*ran[: timed - 1], *steps, *rest]))
    assert [line.split(":")[0] for line in text.splitlines()][3:] == [
        "measuring its first steps", "repeat 1 of 2", "training", "repeat 2 of 2", "epoch 1 of 1", "saved",
    ]  # fmt: skip
    assert "measuring its first steps: 2 repeats\nrepeat 1 of 2: 3,200 examples/s\n" in text
    assert "baseline" not in text


MANY: dict[str, tuple[dict[str, Any], list[events.Event], list[str]]] = {
    "a warning is shown once, and moves no cursor": (
        {}, [events.Warned("low \x1b[31mmemory\x1b[2J\x07\non\rthis\x1b host", rank=rank) for rank in range(300)],
        ["warning: low memory on this host"],
    ),
    "who failed is named, and those that only lost it are not": (
        {"processes": 2, "hosts": 2}, [events.Failed("Socket closed", peer=True), events.Failed("No loss.", rank=1)],
        ["failed: worker 1 on host 1: No loss."],
    ),
    "a repeat is as fast as its slowest process": (
        {"processes": 2, "devices": 1}, [events.Measured(0, 100, 1.0 + rank, rank=rank) for rank in range(2)],
        ["repeat 1 of 2: 50.0 examples/s"],
    ),
    "hundreds of failures are a few lines": (
        {"processes": 300, "devices": 1}, [events.Failed(f"out of memory at {rank}", rank=rank) for rank in range(300)],
        [*(f"failed: {'worker' if rank else 'chief'} {rank}: out of memory at {rank}" for rank in range(5)),
         "More processes failed; events.jsonl has them all."],
    ),
    "those that keep one waiting get a line about every ten seconds": (
        {}, [events.Beat()] * 100,
        [f"starting: 0 of 1 processes joined, {seconds} s so far" for seconds in (10, 20, 30, 40)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "many", "lines"), MANY.values(), ids=MANY)
def test_what_many_say_is_a_few_lines(plan: dict[str, Any], many: list[events.Event], lines: list[str]) -> None:
    timed = ((place / 2 if len(many) == 100 else 0.0, stamped(event, 0.0, "point", event.rank))
             for place, event in enumerate(many))  # fmt: skip
    assert told(a_plan(**plan), timed).splitlines() == lines


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_shows_what_is_happening_now_in_bars_that_fit_and_go_and_epochs_that_stay(width: int) -> None:
    shown_codes = told(a_plan(), a_run(a_plan()), a_terminal(width))
    text = without_codes(shown_codes)
    bars = [line for line in re.split(r"[\r\n]+", text) if line.startswith(("training ", "measuring ", "      "))]
    assert 0 < max(map(len, bars)) <= width
    assert shown_codes.index(HIDE) < shown_codes.rindex(SHOW)
    assert shown_codes.endswith("\x1b[2K" + SHOW)
    assert "repeat 1 of 2:" not in text
    if width < 80:
        return
    for label, words in {
        "starting": "0 of 2 processes joined",
        "building": "have data and model",
        "measuring": "repeat 2 of 2, the baseline",
        "training": "epoch 3 of 3, step 120 of 120",
        "validating": "step 4 of 8",
        "saving": "training is over",
    }.items():
        assert re.search(f"{label} [^\n]*{words}", text)
    assert "3,200 examples/s, baseline 1,600 examples/s" in text
    assert re.search(r"4,096 examples/s, \S+ s left, loss 0\.3, accuracy 0\.9", text)
    assert "epoch 2 of 3: loss 0.3, accuracy 0.91, val_loss 0.35, val_accuracy 0.89, 2.1 s" in text


def test_nothing_is_drawn_while_a_repeat_is_timed() -> None:
    console, ran = a_terminal(), [event for _, event in a_run(a_plan())]
    last_calibrated = max(place for place, event in enumerate(ran) if isinstance(event, events.Calibrated))
    first_steps = next(place for place, event in enumerate(ran) if isinstance(event, events.Steps))
    with Progress(a_plan(), console, 0.0) as progress:
        for place, event in enumerate(ran[:first_steps]):
            before = written(console)
            progress.update(event, float(place))
            if place > last_calibrated:
                assert (written(console) != before) == isinstance(event, events.Measured)
            before = written(console)
            progress.update(events.Warned(f"number {place}."), place + 0.5)
            if last_calibrated <= place < first_steps - 1:
                assert written(console) == before
    assert all(f"warning: number {place}." in written(console) for place in range(first_steps))


def test_bars_are_drawn_at_most_four_times_a_second_and_only_inside_the_block() -> None:
    plan, console = a_plan(processes=300, devices=1), a_terminal()
    with Progress(plan, console, 0.0) as progress:
        for tick in range(3_000):
            kind = (events.Beat, events.Started, events.Joined)[tick % 3]
            progress.update(kind(group="point", rank=tick % 299), tick / 1_000)
    assert without_codes(written(console)).count("processes joined") <= 13
    console = a_terminal()
    progress = Progress(a_plan(), console, 0.0)
    progress.update(events.Warned("early"), 1.0)
    with progress:
        pass
    progress.update(events.Warned("late"), 100.0)
    progress.update(events.Ended("KILLED"), 200.0)
    assert written(console) == "warning: early\nwarning: late\n"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_events_in_any_order_with_odd_or_missing_fields_are_survived(seed: int, terminal: bool) -> None:
    rng = random.Random(seed)
    plan = a_plan(processes=2, train_examples=None if seed % 2 else 5_000)
    odd = [None, "?", -1, 0, True, float("nan"), float("inf"), [], [None], {}, {"a": None}, {1: 2}, 1e300, "\x1b[2J"]
    plain = [
        {name: rng.choice(odd) if rng.random() < 0.3 else value for name, value in values.items() if rng.random() < 0.9}
        for values in (to_plain(event) for _, event in a_run(plan))
    ]
    rng.shuffle(plain)
    timed = ((rng.random() * place, from_plain(values)) for place, values in enumerate([*plain, {}]))
    text = told(plan, timed, a_terminal() if terminal else None)
    assert terminal or "\x1b" not in text
    assert text.rfind(HIDE) <= text.rfind(SHOW)


def test_the_cursor_comes_back_whichever_write_is_interrupted() -> None:
    def ran(at: int) -> tuple[str, int]:
        """What was written where Ctrl-C is pressed during write number `at`, from 1, and how often."""
        file, writes = io.StringIO(), count(1)

        def write(text: str) -> int:
            if next(writes) != at:
                return io.StringIO.write(file, text)
            io.StringIO.write(file, text[: len(text) // 2])
            raise KeyboardInterrupt

        file.write = write
        with pytest.raises(KeyboardInterrupt) if at else nullcontext():
            told(a_plan(), a_run(a_plan()), Console(file=file, force_terminal=True, width=80))
        return file.getvalue(), next(writes) - 1

    _, writes = ran(at=0)
    assert writes > 20
    for at in range(1, writes + 1):
        text, _ = ran(at)
        assert HIDE in text or at == 1
        assert text.rfind(HIDE) <= text.rfind(SHOW)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_that_goes_away_does_not_end_the_run(terminal: bool) -> None:
    gone = io.StringIO()
    gone.write = mock.Mock(side_effect=OSError(5, "Input/output error"))
    assert told(a_plan(), a_run(a_plan()), Console(file=gone, force_terminal=terminal, width=80)) == ""


def test_a_pipe_gets_question_marks_for_characters_that_it_lacks_is_no_terminal_and_breaks_no_path(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Progress(a_plan(), console_on(stream), 0.0) as progress:
        progress.update(events.Warned("naïve"), 0.0)
    console_on(stream).print(table_of(a_result(notes=["naïve"]))(80))
    stream.seek(0)
    assert stream.read().count("na?ve") == 2
    monkeypatch.setenv("FORCE_COLOR", "1")
    console, folder = console_on(io.StringIO()), "/".join(["a-long-folder"] * 12)
    assert HIDE not in told(a_plan(), a_run(a_plan()), console)
    console.print(table_of(a_result(folder=folder))(console.width), soft_wrap=True)
    assert f"folder      {folder}" in without_codes(written(console))


def sweep_of(points: Iterable[Mapping[str, Any]]) -> Callable[[int], RenderableType]:
    shown = [dataclasses.replace(a_point(values), number=place) for place, values in enumerate(points)]
    return partial(sweep_table, shown)


def test_a_result_says_how_fast_against_what_how_sure_and_where_to_look(monkeypatch, tmp_path):
    # Where no checkout is, there is no make.
    monkeypatch.chdir(tmp_path)
    assert [line.rstrip() for line in shown(table_of(a_result(saved="model.keras")), 100).splitlines()] == [
        "FINISHED    cnn on mnist5k, mirrored on 2cpu, 2 workers in 1 process",
        "throughput  3,412 examples/s, 94% interval 3,301 to 3,503, 5 repeats",
        "speedup     1.84x, 94% interval 1.79x to 1.88x, weak scaling",
        "efficiency  92% of 2 devices, 94% interval 89% to 94%",
        "baseline    1,852 examples/s on one device, no strategy, measured in this run",
        "batch       64 x 2 replicas = 128 a step",
        "step time   p50 37.5 ms, p95 41.2 ms, p99 149 ms",
        "training    3 epochs, loss 0.1235, accuracy 0.9612",
        "validation  loss 0.2, accuracy 0.9432",
        "time        4.2 s to start, 1 min 15 s to train",
        "folder      outputs/runs/2026-11-21_mirrored",
        "model       outputs/runs/2026-11-21_mirrored/model.keras",
        "MLflow      run 0123456789abcdef0123456789abcdef; to browse and compare: python -m pipeline ui",
    ]


NOTHING = dict.fromkeys(a_result())
FAILED = NOTHING | {"status": "FAILED", "error": "worker 1 was killed by SIGKILL.\nTry less.", "folder": "outputs/a"}
BOUND = a_result(input_wait=0.31, input_wait_by_worker={"chief 0": 0.02, "worker 1": 0.31}, input_bound=True)
NOT_BOUND = a_result(input_wait=0.0123, input_wait_by_worker={"chief 0": 0.0123}, input_bound=False)
ONE_REPEAT = a_result(
    examples_per_second=3412.3, examples_per_second_low=3412.3, examples_per_second_high=3412.3, speedup_low=1.842,
    speedup_high=1.842, interval_confidence=0.0, repeats=1,
)  # fmt: skip
# What is shown of a result, and what is not.
RESULTS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "the epochs that were planned, where a callback ended them": (
        a_result(epochs=19, planned_epochs=50, stopped_by="EarlyStopping", stopped_at=1197),
        ["training    19 of 50 epochs, "], "50 of 50",
    ),
    "who waits for input": (BOUND, ["input wait  31% of the step time, most of all worker 1, input-bound\n"], "1.2%"),
    "who hardly waits": (NOT_BOUND, ["input wait  1.2% of the step time\n"], "bound"),
    "why a run failed and where to look": (
        FAILED, ["FAILED", "worker 1 was killed by SIGKILL.", "Try less.",
                 "outputs/a: events.jsonl, and a .log of each process"], "speedup",
    ),
    "the log of what failed": (FAILED | {"log": "outputs/a/point-1.log"}, ["outputs/a/point-1.log"], "speedup"),
    "that nothing was measured": (NOTHING | {"status": "FINISHED"}, ["throughput  not measured"], "examples/s"),
    "that there was no baseline": (
        a_result(speedup=None, efficiency=None, baseline_examples_per_second=None),
        ["speedup     - (no baseline to compare with)"], "efficiency",
    ),
    "that it was a rehearsal, wherever a speedup is shown": (
        a_result(rehearsal=True, oversubscribed=True),
        ["1.84x (rehearsal, oversubscribed)", "92% of 2 devices (rehearsal, oversubscribed)"], "1.84x,",
    ),
    "one repeat without an interval": (ONE_REPEAT, ["throughput  3,412 examples/s, 1 repeat\n"], "interval"),
}  # fmt: skip


@pytest.mark.parametrize(("result", "parts", "absent"), RESULTS.values(), ids=RESULTS)
def test_a_result_says(result: dict[str, Any], parts: list[str], absent: str) -> None:
    text = re.sub(" +\n", "\n", shown(table_of(result), 80))
    assert [part for part in parts if part not in text] == []
    assert absent not in text


@pytest.mark.parametrize("seed", range(20))
def test_results_with_anything_missing_or_odd_are_shown(seed: int) -> None:
    rng = random.Random(seed)
    odd: list[Any] = [None, "?", [], {}, float("nan"), True, -1.0, 0]
    points = [
        {name: rng.choice(odd) if rng.random() < 0.4 else value for name, value in a_result().items()} for _ in range(5)
    ]
    assert shown(table_of(points[0]), 80)
    assert shown(sweep_of([*points, {}]), 80)
    assert shown(sweep_of([]), 80) == "No points.\n"


def test_a_sweep_is_a_row_a_point_with_reasons_below() -> None:
    refused = {"status": "REFUSED", "workers": 8, "error": "Too few devices. Try workers=2."}
    points = [
        a_result(
            strategy="one_device", workers=1, speedup=0.998, speedup_low=0.98, speedup_high=1.01,
            efficiency=0.998, overrides=["strategy=one_device", "workers=1"],
        ),
        BOUND | {"overrides": ["strategy=mirrored", "workers=2", "train.optimizer=sgd", "measure.repeats=5"]},
        NOT_BOUND | {
            "strategy": "multi_worker", "examples_per_second": 123456.3, "examples_per_second_low": 122301.2,
            "examples_per_second_high": 125502.9, "speedup": 15.842, "speedup_low": 14.79, "speedup_high": 15.98,
            "overrides": ["strategy=multi_worker", "workers=2"],
        },
        {"status": "FAILED", "strategy": "multi_worker", "workers": 4, "error": "worker 1 was killed."},
        refused | {"strategy": "mirrored"},
        refused | {"strategy": "multi_worker"},
    ]  # fmt: skip
    assert [line.rstrip() for line in shown(sweep_of(points), 80).splitlines()] == [
        "   strategy      workers       examples/s    speedup  eff.     val  status",
        "0  one_device          1            3,412      1.00x  100%  0.9432  FINISHED",
        "                              3,301-3,503  0.98-1.01",
        "   strategy=one_device workers=1",
        "1  mirrored            2            3,412      1.84x   92%  0.9432  FINISHED",
        "                              3,301-3,503  1.79-1.88   31%  input-bound",
        "   strategy=mirrored workers=2 train.optimizer=sgd measure.repeats=5",
        "2  multi_worker        2          123,456      15.8x   92%  0.9432  FINISHED",
        "                          122,301-125,503  14.8-16.0  1.2%",
        "   strategy=multi_worker workers=2",
        "3  multi_worker        4                -          -     -       -  FAILED",
        "4  mirrored            8                -          -     -       -  REFUSED",
        "5  multi_worker        8                -          -     -       -  REFUSED",
        "",
        "Under throughput and speedup: 94% intervals.",
        "eff.: efficiency, speedup over the number of devices.",
        "Under eff.: share of the step time that was spent waiting for input.",
        "input-bound: a faster input would make it faster; data.profile=true says which",
        "part of it.",
        "val: accuracy on the validation data.",
        "Point 3 failed: worker 1 was killed.",
        "Points 4-5 refused: Too few devices. Try workers=2.",
    ]
    assert "interval" not in shown(sweep_of([ONE_REPEAT]), 80)


def test_points_that_differ_are_called_not_comparable_but_for_a_batch_that_follows_and_what_has_failed() -> None:
    """All that they can differ in is in test_compare."""
    weak = a_result(precision="float32")
    text = shown(sweep_of([weak, weak | {"replica_batch": 128}]), 200)
    assert "since batch rule differs (replica batch 64: point 0; replica batch 128: point 1)" in text
    strong = weak | {"scaling": "strong"}
    for others in ([strong, strong | {"replica_batch": 32}], [weak, {"status": "FAILED", "model": "resnet20"}]):
        assert "Not comparable" not in shown(sweep_of(others), 200)


@pytest.mark.parametrize("width", [80, 120])
def test_a_sweep_of_wide_numbers_and_long_overrides_wraps_no_number(width: int) -> None:
    wide = a_result(
        strategy="a_strategy_with_a_long_name", workers=256, examples_per_second=1.2345e8, rehearsal=True,
        examples_per_second_low=1.2e8, examples_per_second_high=1.3e8, speedup=240.4, speedup_low=238.9,
        speedup_high=250.1, overrides=[f"group.key_{place}=value" for place in range(20)],
    )  # fmt: skip
    lines = shown(sweep_of([wide] * 12), width).splitlines()
    assert max(map(len, lines)) <= width
    assert "rehearsal: logical devices stand for others" in " ".join(lines)
    assert sum("123.450M" in line and "240x" in line and "FINISHED" in line for line in lines) == 12
    assert sum("120.000M-130.000M  239-250" in line for line in lines) == 12


def test_an_error_is_one_message() -> None:
    assert error_text("first\n\n  second\x1b[2J") == "pipeline: first\n    second"
    assert error_text("") == "pipeline: stopped, and no reason was given"


def test_a_run_that_is_started_again_says_so_and_shows_its_steps_from_where_it_goes_on() -> None:
    seen = RunState(a_plan(), 0.0)
    steps = events.Steps(9, [1.0], 1, seconds=1.0, examples=8.0)
    for event in (events.Started(), events.Joined(), events.Built(), steps, events.Checkpoint(8)):
        seen.take(event, 1.0)
    assert "saved at 8" in seen.view().figures
    assert seen.take(events.Restarted("It was lost.", processes=2, leaders=2), 2.0) == [("warning: It was lost.", True)]
    assert seen.view().where == "0 of 2 processes joined"
    for event, text in (
        (events.Started(), "starting: 2 processes"),
        (events.Restored(8, True), "going on from step 8"),
        (events.Restored(), "going on from the beginning: there is no checkpoint yet"),
    ):
        assert seen.take(event, 3.0) == [(text, False)]


WIDTHS = (100, 60, 40)
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
        overrides = (f"strategy={strategy}", f"workers={workers}", "data=digits", "train.epochs=2")
        runs.append(RunResult(results.from_values(values), Path(FOLDER.format(number, strategy)), overrides, number))
    return tuple(runs)


def test_a_point_is_called_by_one_number_from_its_beginning_to_the_table() -> None:
    console = Console(file=io.StringIO(), width=200)
    screen = Terminal(console, lambda: 1.7e9)
    screen.shares(points(0))
    screen.begins(Ahead(2, points(2), 65.0))
    screen.ended(points()[2], 19.0)
    now = f"{datetime.fromtimestamp(1.7e9):%H:%M:%S}"
    assert written(console).splitlines() == [
        "all        data=digits train.epochs=2",
        "",
        f"{now} -- point 2: strategy=mirrored workers=1 (2 of 6 done, about 1 min 05 s left)",
        f"{now} point 2: FINISHED, 3,412 examples/s (3,301 to 3,503), 1.84x, efficiency 92%, val_accuracy 0.9432, 19 s",
    ]
    # Some of them, as where the command was interrupted: each keeps its number.
    table = shown(partial(sweep_table, [points()[number] for number in (0, 2, 4)]), 100)
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
    console.print(table_of(a_result(saved="model.keras", folder=FOLDER.format(0, "mirrored")))(width), soft_wrap=True)
    say(console, error_text(f"Point 1 refused: {points()[1].result.ending.error}"))
    console.print(sweep_table(points(), width), soft_wrap=True)
    yield from written(console).splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_longer_than_the_console_or_broken_inside_a_word(width: int) -> None:
    lines = [*everything(width)]
    assert max(map(len, lines)) <= width
    whole = {word for line in everything(300) for word in line.split()} | STACKED
    # A path that fits into no line is broken at its slashes.
    paths = [word for word in whole if len(word) > width]
    for part in (re.escape(word) for line in lines for word in line.split() if word not in whole):
        assert any(re.search(rf"(^|/){part}(?<=/)|/{part}$", path) for path in paths)
    # So are epochs and warnings.
    text = without_codes(told(a_plan(), a_run(a_plan()), a_terminal(40)))
    assert "epoch 2 of 3: loss 0.3, accuracy 0.91,\n    val_loss 0.35, val_accuracy 0.89,\n    2.1 s\n" in text
