"""`sweep.parallel`: points of a sweep at once, on devices of one machine that they leave each other."""

import contextlib
import io
import os
import re
import signal
import threading
import time
from itertools import combinations
from pathlib import Path

import pytest
from conftest import QUICK, Ran, finish, left_behind, start
from plans import config, machine
from rich.console import Console
from run_events import logged
from under_way import UnderWay, until

from pipeline.driver import RunResult, parallel
from pipeline.driver.parallel import moved, numbers, part_for, whole
from pipeline.driver.requests import Requests
from pipeline.driver.session import RunRequest, Session
from pipeline.launch.signals import Interrupted
from pipeline.plan.planning import make
from pipeline.record.results import Choices, Ending, Layout, Result, Speed
from pipeline.views.mlflow import Tracker
from pipeline.views.terminal import console_on
from pipeline.views.terminal.live import Terminal, board

SWEEP = Path("outputs/sweeps/beside")
# Long enough to be killed in the middle of two.
POINTS = (
    "-m", "strategy=one_device", "train.seed=0,1,2", "sweep.name=beside", "sweep.parallel=2", "data=digits",
    "model=mlp", "train.steps=600", "train.steps_per_call=5", "checkpoint.every_steps=20", *QUICK,
    "train.callbacks=[{_target_: own.Pausing, seconds: 0.05}]",
)  # fmt: skip


def test_a_part_has_what_a_plan_needs_and_no_core_of_another():
    eight = machine(8)
    everything = whole(eight)
    two, three = (make(config("mirrored", "8cpu", count), eight) for count in (2, 3))
    first = part_for(two, everything, everything)
    assert numbers(first, "core") == [0, 1]
    second = part_for(three, everything - first, everything)
    assert numbers(second, "core") == [2, 3, 4]
    left = everything - first - second
    assert part_for(make(config("mirrored", "8cpu", 4), eight), left, everything) is None
    assert left | second | first == everything
    assert [process.cores for process in moved(three, everything, second).processes] == [(2, 3, 4)]
    processes = make(config("multi_worker", "8cpu", 3), eight)
    assert [process.cores for process in moved(processes, everything, second).processes] == [(2,), (3,), (4,)]


def test_gpus_are_dealt_out_and_what_takes_any_core_runs_alone():
    four = machine(8, 4)
    everything = whole(four)
    two = make(config("mirrored", "4gpu", 2), four)
    first = part_for(two, everything, everything)
    assert numbers(first, "GPU") == [0, 1]
    second = part_for(two, everything - first, everything)
    assert numbers(second, "GPU") == [2, 3]
    assert moved(two, everything, second).processes[0].devices == ("GPU:2", "GPU:3")
    assert part_for(two, whole(machine(8)), everything) is None
    # Eight devices of one core each on two cores are pinned to none.
    crowded, small = make(config("mirrored", "8cpu", 8), machine(2)), whole(machine(2))
    assert part_for(crowded, small, small) == small
    assert part_for(crowded, frozenset([("core", 1)]), small) is None


def test_a_table_on_a_terminal_fills_as_points_end():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, legacy_windows=False)

    def point(status: str, **speed: float) -> RunResult:
        return RunResult(
            Result(Ending(status), Choices("mirrored"), Layout(workers=2), Speed(**speed)), Path(), ("workers=2",)
        )

    rows = {(0, 0): point("WAITING"), (1, 0): point("WAITING")}
    with board(console, rows):
        rows[0, 0] = point("FINISHED", examples_per_second=1234.0, speedup=1.5)
    last = shown.getvalue().split("status")[-1]
    assert "1,234" in last
    assert "FINISHED" in last
    assert "WAITING" in last


class Job:
    """A cluster that counts how often it was closed."""

    closed = 0

    def serve(self, say, asked):
        return None

    def close(self, code):
        self.closed += 1


@pytest.mark.parametrize("early", [True, False], ids=["its job was there", "its job comes later"])
def test_a_point_that_outlasts_the_end_of_its_sweep_leaves_no_job(tmp_path, monkeypatch, early):
    jobs: list[Job] = []
    began, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def cluster_of(*_):
        jobs.append(Job())
        return jobs[-1]

    def ran(request, session):
        if request.config.train.seed == 0:
            assert began.wait(20)
            return request.ended(Result(Ending("FAILED")))
        if early:
            session.cluster(request.config)
        began.set()
        go_on.wait(20)
        session.cluster(request.config)
        over.set()
        return request.ended(Result(Ending("FINISHED")))

    monkeypatch.setattr("pipeline.driver.session.cluster_of", cluster_of)
    monkeypatch.setattr(parallel.start, "run", ran)
    monkeypatch.setattr(Session, "serve", lambda self, config: None)
    monkeypatch.setattr(parallel, "END_SECONDS", 0.1)
    session = Session((), {}, lambda: Terminal(console_on(io.StringIO())), Tracker)
    requests = Requests(session)
    for seed in (0, 1):
        (tmp_path / f"{seed}").mkdir()
        one = config("one_device", workers=1, cluster__name="slurm", train__seed=seed)
        requests.to_run[(seed, 0)] = RunRequest(one, tmp_path / f"{seed}", [], "sweep")

    def ended(*_):
        raise Interrupted(signal.SIGINT)

    opened = contextlib.nullcontext(session.screen)
    with pytest.raises(Interrupted):
        parallel.Parallel(requests, session, 2, lambda path: opened, lambda *_: None, ended).run()
    assert [job.closed for job in jobs] == [1] * early
    go_on.set()
    assert over.wait(20)
    until(lambda: all(job.closed for job in jobs), 20)
    assert {job.closed for job in jobs} == {1}


def ended_by(number: int, folder: Path) -> Ran:
    """The command, once two points of it are on their way."""
    with UnderWay(folder, *POINTS) as sweep:
        now = time.time()

        def saved() -> int:
            """How many points have saved a checkpoint since."""
            return sum(any(event["time"] > now for event in logged(run, "checkpoint")) for run in sweep.runs)

        sweep.until(lambda: saved() > 1, 120)
        sweep.harm(number)
        return sweep.ended(60)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two points at once need two cores")
def test_points_run_at_once_and_after_a_kill_none_of_them_twice(tmp_path):
    interrupted = ended_by(signal.SIGINT, tmp_path).failed(130)
    assert "Nothing was under way" not in interrupted.err
    assert not left_behind(tmp_path)
    # The first two, or where one of those has been quick, the third.
    assert re.search(r"beside/[01]_one_device has .* and outputs/sweeps/beside/[12]_one_.* has .*on", interrupted.err)
    ended_by(signal.SIGKILL, tmp_path)
    assert not left_behind(tmp_path)
    ran = finish(start(tmp_path, *POINTS), tmp_path, time.monotonic(), 240).ok()
    logs = sorted((tmp_path / SWEEP).glob("*/events.jsonl"))
    events = [logged(log.parent) for log in logs]
    # Each is one run, and those that were under way have gone on.
    assert [sum(event["event"] == "run" for event in point) for point in events] == [1, 1, 1]
    assert sum(any(event["event"] == "resumed" for event in point) for point in events) >= 2
    # Two were under way at once, on a core each.
    times = [[event["time"] for event in point if event["event"] == "steps"] for point in events]
    assert any(one[0] < other[-1] and other[0] < one[-1] for one, other in combinations(times, 2))
    for result in ran.results:
        assert result["status"] == "FINISHED"
        assert "Up to 2 points ran at once on this machine" in " ".join(result["notes"])
    assert len(re.findall(r"point \d: FINISHED, ", ran.out)) == 3
    assert "train.seed=2" in ran.out.split("status")[-1]
    assert (logs[0].parent / "driver.log").read_text().startswith("plan")
