"""What the runs of a command share: memory that holds them, and devices that points leave each other."""

import contextlib
import io
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from unittest import mock

import pytest
from conftest import QUICK, Ran, UnderWay, finish, left_behind, logged, start, until, with_
from plans import config, machine
from rich.console import Console
from shipped_sizes import configured

from pipeline.commands import running
from pipeline.config.schema import Config, SweepConfig
from pipeline.driver import RunResult, parallel
from pipeline.driver.forecast import too_large, without_room
from pipeline.driver.parallel import moved, numbers, own_session, part_for, whole
from pipeline.driver.requests import Requests
from pipeline.driver.results import preempted
from pipeline.driver.session import PERSON_SECONDS, WAITING, Preemption, RunRequest, Session
from pipeline.driver.start import plan_run
from pipeline.launch.signals import Interrupted
from pipeline.plan import planning
from pipeline.plan.estimate import estimate
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.plan.planning import make
from pipeline.plan.size import Layer, Size, Variable
from pipeline.record import results
from pipeline.record.files import Copied, TrackingState, TrackingStore, write_tracking
from pipeline.record.results import Choices, Ending, Layout, Result, Speed, Survival
from pipeline.views.mlflow import Tracker
from pipeline.views.terminal import console_on
from pipeline.views.terminal.live import Terminal, board


def test_a_first_ctrl_c_is_left_to_the_run_for_seconds_and_a_scheduler_s_signal_for_as_long_as_it_says():
    session = session_of()
    assert not session.spares(signal.SIGINT)
    session.saves = session.busy = True
    assert session.spares(signal.SIGINT)
    assert session.preemption.by_person
    assert not session.spares(signal.SIGINT)
    assert session.spares(signal.SIGTERM)
    assert session.preemption.by_person
    scheduler, person = Preemption(), Preemption()
    scheduler.ask(signal.SIGTERM, "the conductor")
    person.ask(signal.SIGINT, "the conductor")
    assert (scheduler.patience(25.0), person.patience(25.0), person.patience(1.0)) == (25.0, PERSON_SECONDS, 1.0)
    assert preempted(person, 8).startswith("The run was ended by Ctrl-C. The last checkpoint is of step 8;")


@pytest.mark.parametrize(("steps", "config", "many", "words"), [
    ({"a": 8}, {"resume": "never"}, False, "a has a checkpoint of step 8: resume=a goes on from there."),
    ({"a": 8}, {"sweep": SweepConfig("mine")}, True, "goes on from there, and keeps the points that have finished."),
    ({"a": 8}, {}, True, "goes on from there; with sweep.name=mine it would keep other points too."),
    # Under way at once.
    (
        {"c": 8, "a": None, "b": None}, {}, False, "a has no checkpoint yet, b has no checkpoint yet and c has a "
        "checkpoint of step 8: the same command goes on from there.",
    ),
])  # fmt: skip
def test_what_goes_on_is_said(steps, config, many, words):
    session = session_of()
    own = own_session(session, session.screen, {}, Preemption(session.preemption))
    requests = Requests(session)
    for name, step in steps.items():
        own.ended_early.append(RunResult(Result(survival=Survival(checkpoint_step=step)), Path(name)))
    requests.many, requests.to_run = many, {(0, 0): RunRequest(Config(**config), Path("a"), [], None)}
    assert running._how_to_go_on(requests, session).endswith(words)


class Slow:
    """A tracker that has so many runs after so many seconds, and notes for which it was waited how long."""

    def __init__(self, *sent: str, interrupts: bool = False, seconds: float = 0.0) -> None:
        self.sent, self.interrupts, self.seconds, self.waited = {*sent}, interrupts, seconds, list[float]()

    def drain(self, folder, timeout, waits=None):
        if folder.name in self.sent:
            write_tracking(folder, TrackingState(TrackingStore(uri="there"), {"there": Copied("id")}))
            return True, None
        self.waited.append(timeout)
        if timeout and self.interrupts:
            raise Interrupted(signal.SIGINT)
        until = time.monotonic() + min(timeout, self.seconds)
        while time.monotonic() < until and waits():
            time.sleep(0.01)
        return False, "It is slow."


@pytest.fixture
def folders(tmp_path):
    """Those of three runs that have ended, in one sweep."""
    for name in "abc":
        (tmp_path / name).mkdir()
        results.write(tmp_path / name, Result(Ending("FINISHED")))
    return [tmp_path / name for name in "abc"]


def session_of(tracker: Slow | None = None, folders: Sequence[Path] = (), seconds: float = 60.0) -> Session:
    """One whose tracker still sends the runs in some folders."""
    session = Session((os.getcwd(),), {}, lambda: Terminal(console_on(io.StringIO()), lambda: 0.0), lambda *_: tracker)
    if tracker is not None:
        session.tracker(Path())
    session.pending.update(dict.fromkeys(folders, seconds))
    return session


def tracked_of(folder: Path) -> tuple[str | None, str | None]:
    result = results.read(folder)
    assert result.finished
    return result.mlflow_run_id, result.tracking_note


def test_between_two_runs_nothing_is_waited_for_and_those_that_mlflow_holds_get_their_ids(folders):
    tracker = Slow("a", seconds=60.0)
    session = session_of(tracker, folders)
    session.note_uploads()
    assert tracker.waited == [0.0]
    assert [tracked_of(folder)[0] for folder in folders] == ["id", None, None]
    tracker.sent = {"b", "c"}
    assert session.settle() == (None, None)
    assert [tracked_of(folder) for folder in folders] == [("id", None)] * 3


@pytest.mark.parametrize(("tracker", "waited", "words", "number"), [
    (Slow("b"), [0.1, 0.0], "2 runs yet (It is slow.). `python -m pipeline sync ", None),
    (Slow(interrupts=True), [0.1, 0.0, 0.0, 0.0], "3 runs", signal.SIGINT),
], ids=["down", "ctrl-c"])  # fmt: skip
def test_a_store_is_waited_for_once_or_until_ctrl_c_and_each_run_says_what_to_type(
    folders, tmp_path, tracker, waited, words, number
):
    lacks, interrupted = session_of(tracker, folders, 0.1).settle()
    assert (tracker.waited, interrupted and interrupted.number) == (waited, number)
    assert words in lacks
    assert f"{tmp_path}`" in lacks
    for folder in folders:
        run_id, note = tracked_of(folder)
        assert (
            (run_id, note) == ("id", None)
            if folder.name in tracker.sent
            else f"`python -m pipeline sync {folder}`" in note
        )


def test_who_is_hurried_waits_no_longer_than_that_and_a_person_is_told_why_it_waits(folders, monkeypatch):
    monkeypatch.setattr("pipeline.driver.session.HURRIED_SECONDS", 1.5)
    session, said, began = session_of(Slow(seconds=60.0), folders[:1]), list[str](), time.monotonic()
    monkeypatch.setattr(session.screen, "say", said.append)
    # Of a run that another command has resumed meanwhile nothing is noted.
    (folders[0] / results.FILE).unlink()
    session.settle(hurried=True)
    assert 1.0 < time.monotonic() - began < 30.0
    assert (said, (folders[0] / results.FILE).exists()) == ([WAITING], False)


def test_runs_of_the_same_data_look_at_them_once_and_those_of_others_anew(monkeypatch):
    looked = list[str]()
    monkeypatch.setattr("pipeline.data.folders.expect_data", lambda arguments: looked.append(arguments["path"]))
    monkeypatch.setattr("pipeline.data.folders.may_be_few", lambda arguments, least: False)
    session = session_of()
    for path in ("here", "here", "there"):
        build = {"_target_": "pipeline.data.csv", "path": path}
        plan_run(config("one_device", workers=1, data__build=build, data__name="csv"), session)
    assert looked == ["here", "there"]


SWEEP = Path("outputs/sweeps/beside")
# Long enough to be killed in the middle of two.
POINTS = (
    "-m", "strategy=one_device", "train.seed=0,1,2", "sweep.name=beside", "sweep.parallel=2", "data=digits",
    "model=mlp", "train.steps=600", "train.steps_per_call=5", "checkpoint.every_steps=20", *QUICK,
    "train.callbacks=[{_target_: own.pausing, seconds: 0.05}]",
)  # fmt: skip


def test_a_part_has_what_a_plan_needs_and_no_core_or_gpu_of_another():
    eight = machine(8)
    everything = whole(eight)
    two, three, four = (make(config("mirrored", "8cpu", count), eight) for count in (2, 3, 4))
    first = part_for(two, everything, everything)
    second = part_for(three, everything - first, everything)
    assert [numbers(part, "core") for part in (first, second)] == [[0, 1], [2, 3, 4]]
    assert part_for(four, everything - first - second, everything) is None
    assert [process.cores for process in moved(three, everything, second).processes] == [(2, 3, 4)]
    processes = make(config("multi_worker", "8cpu", 3), eight)
    assert [process.cores for process in moved(processes, everything, second).processes] == [(2,), (3,), (4,)]
    # GPUs are dealt out, and what takes any core runs alone.
    four = machine(8, 4)
    everything = whole(four)
    two = make(config("mirrored", "4gpu", 2), four)
    first = part_for(two, everything, everything)
    second = part_for(two, everything - first, everything)
    assert [numbers(part, "GPU") for part in (first, second)] == [[0, 1], [2, 3]]
    assert moved(two, everything, second).processes[0].devices == ("GPU:2", "GPU:3")
    assert part_for(two, whole(machine(8)), everything) is None
    # Eight devices of one core each on two cores are pinned to none.
    crowded, small = make(config("mirrored", "8cpu", 8), machine(2)), whole(machine(2))
    assert part_for(crowded, small, small) == small
    assert part_for(crowded, frozenset([("core", 1)]), small) is None


def test_a_table_on_a_terminal_fills_as_points_end():
    console = Console(file=(shown := io.StringIO()), force_terminal=True, width=100, legacy_windows=False)

    def point(status: str, **speed: float) -> RunResult:
        parts = Ending(status), Choices("mirrored"), Layout(workers=2), Speed(**speed)
        return RunResult(Result(*parts), Path(), ("workers=2",))

    rows = {(0, 0): point("WAITING"), (1, 0): point("WAITING")}
    with board(console, rows):
        rows[0, 0] = point("FINISHED", examples_per_second=1234.0, speedup=1.5)
    last = shown.getvalue().split("status")[-1]
    assert all(word in last for word in ("1,234", "FINISHED", "WAITING"))


@pytest.mark.parametrize("early", [True, False], ids=["its job was there", "its job comes later"])
def test_a_point_that_outlasts_the_end_of_its_sweep_leaves_no_job(tmp_path, monkeypatch, early):
    jobs: list[mock.Mock] = []
    began, go_on, over = threading.Event(), threading.Event(), threading.Event()

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

    def ended(*_):
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr("pipeline.driver.session.cluster_of", lambda *_: jobs.append(mock.Mock()) or jobs[-1])
    monkeypatch.setattr(parallel.start, "run", ran)
    monkeypatch.setattr(Session, "serve", lambda self, config: None)
    monkeypatch.setattr(parallel, "END_SECONDS", 0.1)
    session = Session((), {}, lambda: Terminal(console_on(io.StringIO())), Tracker)
    requests = Requests(session)
    for seed in (0, 1):
        (folder := tmp_path / f"{seed}").mkdir()
        one = config("one_device", workers=1, cluster__name="slurm", train__seed=seed)
        requests.to_run[(seed, 0)] = RunRequest(one, folder, [], "sweep")
    opened = contextlib.nullcontext(session.screen)
    with pytest.raises(Interrupted):
        parallel.Parallel(requests, session, 2, lambda path: opened, lambda *_: None, ended).run()
    assert [job.close.call_count for job in jobs] == [1] * early
    go_on.set()
    assert over.wait(20)
    until(lambda: all(job.close.called for job in jobs), 20)
    assert {job.close.call_count for job in jobs} == {1}


def ended_by(number: int, folder: Path) -> Ran:
    """The command, once two points of it have saved a checkpoint."""
    with UnderWay(folder, *POINTS) as sweep:
        now = time.time()
        saved = lambda run: any(event["time"] > now for event in logged(run, "checkpoint"))  # noqa: E731
        sweep.until(lambda: sum(map(saved, sweep.runs)) > 1, 120)
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


GIB = 2**30
# Of 1 GiB of weights in eight blocks, and 64 MiB an example, of which blocks that compute again keep an eighth.
PATHS = tuple(f"block_{place}/kernel" for place in range(8))
VARIABLES = tuple(Variable(path, (2**12, 2**13), "float32", True, 2 * 2**27, cut=(2, 4, 8)) for path in PATHS)
BIG = Size(
    VARIABLES, 0, ((GIB, 0), (2**20, 2**26)), 1024, operations=1000, forgetful_step=((GIB, 0), (2**20, 2**23)),
    layers=tuple(Layer(path[:-7], 4 * 2**27, 9, True, (path,)) for path in PATHS),
)  # fmt: skip
TWO = ("strategy=mirrored", "workers=2", "hardware=2cpu")
COMMON = ("model=transformer", "data=text", "train.replica_batch=64", "checkpoint.every_minutes=null")


def plan_on(gib: float, gpus: int, *overrides: str, config: Config | None = None) -> Plan:
    machine = Machine("host", tuple(range(8)), gib, "A processor", ("H100",) * gpus)
    return planning.make(config or configured(*COMMON, *overrides), machine, present=False)


def refused(gib: float, gpus: int, *overrides: str) -> str | None:
    config = configured(*COMMON, *overrides)
    plan = plan_on(gib, gpus, config=config)
    return too_large(plan, BIG, config, lambda changed: plan_on(gib, gpus, config=changed))


def named(said: str) -> list[str]:
    return said.rpartition("Try ")[2].removesuffix(".").split(", or ")


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize(("gib", "gpus", "overrides", "first"), [
    # Two copies of 4 GiB and of activations in one memory.
    (14, 0, TWO, "train.remat=true"),
    (8, 0, TWO, "strategy="),
    # A device of its own memory for each.
    (64, 8, ("strategy=mirrored", "hardware=8gpu", "hardware.memory_gib=6"), "train.remat=true"),
    (64, 8, ("strategy=mirrored", "hardware=8gpu", "hardware.memory_gib=3.5"), "strategy=model_parallel"),
])  # fmt: skip
def test_a_model_that_no_device_has_room_for_is_refused_and_what_is_named_is_held(backend, gib, gpus, overrides, first):
    said = refused(gib, gpus, f"backend={backend}", *overrides)
    assert "Expected a model that fits the" in said
    assert "under strategy=mirrored, received one that takes" in said
    assert any(one.startswith(first) for one in named(said)), said
    for typed in named(said):
        instead = {given.partition("=")[0]: given for given in (*overrides, *typed.split())}
        other = plan_on(gib, gpus, f"backend={backend}", *instead.values())
        assert estimate(other, BIG).fits, typed
    assert not estimate(plan_on(gib, gpus, f"backend={backend}", *overrides), BIG).fits


def test_what_fits_is_not_refused_and_where_nothing_holds_it_or_only_once_it_is_built_that_is_said():
    assert refused(64, 0, *TWO) is None
    assert named(refused(2, 0, *TWO)) == ["a smaller model: no strategy, train.remat or batch tried holds it"]
    plan = plan_on(8, 0, *TWO)
    assert without_room(plan, 3 * GIB) is None
    said = without_room(plan, 5 * GIB)
    assert "fits 8 GiB under strategy=mirrored" in said
    assert "Try mode=plan, which names what holds it." in said
    assert without_room(with_(plan, "hardware", kind="gpu"), 5) is None


def test_a_command_is_refused_before_any_process_is_started(asked):
    small = ("strategy=mirrored", "workers=2", "hardware.memory_gib=0.03")
    ran = asked(*QUICK, "model=cnn", "data=mnist5k", *small).failed(2)
    assert "Expected a model that fits the 0.03 GiB of a device" in ran.err + ran.out
    assert "Try train.replica_batch=" in ran.err + ran.out
    assert not list(ran.folder.glob("outputs/runs/*/events.jsonl"))
