"""Who is to blame, decided from what processes told and from invented times."""

import random
import signal

import pytest
from conftest import with_
from plans import config, machine

from pipeline.plan.planning import make
from pipeline.record.events import Beat, Event, Exited, Failed, Finished, Joined, Started, Steps, Stopped, System
from pipeline.record.log import stamped
from pipeline.run.watch import BLAME_SECONDS, BUSY_PATIENCE, SILENT_SECONDS, TRACING_PATIENCE, RunFailed, Watch

STARTUP, HEARTBEAT, PROGRESS = 60.0, 30.0, 50.0
BEGIN = 100.0


class Story:
    """Processes that are told about at invented times."""

    def __init__(self, workers: int = 3, join: bool = True, strategy: str = "multi_worker") -> None:
        made = config(strategy, "8cpu", workers)
        made.launch.startup_timeout = STARTUP
        made.launch.heartbeat_timeout = HEARTBEAT
        made.launch.progress_timeout = PROGRESS
        self.watch = Watch(make(made, machine(8)))
        self.ranks = [process.rank for process in self.watch.plan.processes]
        self.counters = dict.fromkeys(self.ranks, 0)
        self.now = BEGIN
        for rank in self.ranks:
            self.tell(rank, Started(pid=rank))
            if join:
                self.tell(rank, Joined())

    def tell(self, rank: int, event: Event) -> None:
        self.watch.note(stamped(event, self.now, "point", rank), self.now)

    def beat(self, rank: int, cpu_seconds: float = 0.0, progress: bool = False) -> None:
        self.counters[rank] += progress
        self.tell(rank, Beat(progress=self.counters[rank], cpu_seconds=cpu_seconds))

    def alive(self, seconds: float, *ranks: int, progress: bool = True, cpu_share: float = 0.0) -> RunFailed | None:
        """Lets time pass in half seconds while `ranks` beat; returns the first failure."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for rank in ranks:
                self.beat(rank, cpu_share * self.now, progress)
            failure = self.watch.failure(self.now)
            if failure:
                return failure
        return None


def found(failure: RunFailed | None) -> RunFailed:
    assert failure is not None
    return failure


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_blamed_while_everybody_beats_and_progresses(seed):
    rng = random.Random(seed)
    story = Story(workers=rng.randint(1, 8))
    story.watch.commanded(story.now)
    # Delays are below the limits, and moments come in any order; the conductor looks whenever it likes.
    due = dict.fromkeys(story.ranks, BEGIN)
    moved = dict.fromkeys(story.ranks, BEGIN)
    while story.now < BEGIN + 1_000:
        story.now += rng.uniform(0.01, 2.0)
        for rank in story.ranks:
            if story.now >= due[rank]:
                progress = rng.random() < 0.5 or story.now - moved[rank] > PROGRESS - 25
                moved[rank] = story.now if progress else moved[rank]
                story.beat(rank, progress=progress)
                due[rank] = story.now + rng.uniform(0.2, 20.0)
        assert story.watch.failure(story.now) is None


LOST, ABORTED = (
    Failed(error="UnavailableError: connection reset", peer=True),
    "InternalError: collective ops is aborted",
)


@pytest.mark.parametrize(
    ("events", "error", "rank", "lost"),
    [
        # What processes end with is named.
        ([(2, Exited(code=-signal.SIGKILL))], "worker 2 was killed by SIGKILL.", 2, True),
        ([(2, Exited(code=-signal.SIGSEGV))], "worker 2 was killed by SIGSEGV.", 2, True),
        ([(2, Exited(code=-64))], "worker 2 was killed by SIGRTMAX.", 2, True),
        ([(2, Exited(code=-99))], "worker 2 was killed by signal 99.", 2, True),
        ([(2, Exited(code=3))], "worker 2 ended with exit code 3.", 2, True),
        ([(2, Exited(code=0))], "worker 2 ended with exit code 0.", 2, True),
        # Of several that died, the killed one is blamed.
        (
            [(0, Exited(code=-signal.SIGABRT)), (2, Exited(code=-signal.SIGKILL))],
            "worker 2 was killed by SIGKILL.", 2, True,
        ),
        # Who has said why is blamed with its own words, but for a peer's end in other words.
        ([(1, Failed(error="the moon is not full")), (1, Exited(code=1))], "the moon is not full", 1, False),
        ([(0, Failed(error=ABORTED)), (2, Exited(code=-9))], "worker 2 was killed by SIGKILL.", 2, True),
        # Where everybody only lost everybody, the run still ends.
        ([(0, LOST), (1, LOST), (2, LOST)], "chief 0 lost the connection to the other processes.", 0, True),
    ],
)  # fmt: skip
def test_who_is_to_blame_is_named_with_how_it_ended(events, error, rank, lost):
    story = Story()
    for of, event in events:
        story.tell(of, event)
    failure = found(story.watch.failure(story.now))
    assert (failure.error, failure.rank, failure.lost) == (error, rank, lost)


@pytest.mark.parametrize(
    ("code", "joined", "words"),
    [
        (0, True, None), (1, True, "ended with exit code 1"), (-9, True, "was killed by SIGKILL"),
        # Before it joins, and while nobody is to leave.
        (1, False, "ended with exit code 1"),
    ],
)  # fmt: skip
def test_an_orderly_end_while_leaving_is_no_failure_and_a_bad_one_is(code, joined, words):
    story = Story(join=joined)
    story.watch.leaving = joined
    for rank in story.ranks if code == 0 else [1]:
        story.tell(rank, Exited(code=code))
    failure = story.watch.failure(story.now + 1_000 * (code == 0))
    assert (failure and failure.error) == (words and f"worker 1 {words}.")


def test_peers_that_lost_a_killed_process_take_no_blame():
    story = Story()
    for rank in (0, 2):
        story.tell(rank, LOST)
    assert story.watch.failure(story.now) is None
    story.now += 1.0
    for rank in (0, 2):
        story.tell(rank, Exited(code=1))
    assert story.watch.failure(story.now) is None
    story.tell(1, Exited(code=-signal.SIGKILL))
    failure = found(story.watch.failure(story.now))
    assert (failure.error, failure.rank, failure.lost) == ("worker 1 was killed by SIGKILL.", 1, True)


def test_peers_that_lost_a_stopped_process_take_no_blame():
    story = Story()
    assert story.alive(5.0, *story.ranks) is None
    story.tell(0, LOST)
    failure = found(story.alive(BLAME_SECONDS, 0, 2))
    assert failure.rank == 1
    assert "gave no sign of life" in failure.error
    assert story.now < BEGIN + 5.0 + SILENT_SECONDS + 2.0


def test_a_process_that_aborts_where_another_is_stopped_has_lost_that_one():
    story = Story()
    assert story.alive(SILENT_SECONDS + 1.0, 0, 2) is None
    story.tell(0, Exited(code=-signal.SIGABRT))
    failure = found(story.watch.failure(story.now))
    assert (failure.error, failure.rank) == (
        "worker 1 gave no sign of life for 4 s: it is stopped, or its host is gone.",
        1,
    )


def test_where_nobody_else_shows_a_fault_the_one_that_lost_the_others_is_named_after_a_while():
    story = Story()
    story.tell(1, LOST)
    story.tell(1, Exited(code=1))
    assert story.alive(BLAME_SECONDS - 1.0, 0, 2) is None
    failure = found(story.alive(3.0, 0, 2))
    assert (failure.error, failure.rank) == ("worker 1 lost the connection to the other processes.", 1)


def test_a_process_that_never_speaks_is_blamed_for_not_joining():
    story = Story(join=False)
    for rank in (0, 1):
        story.beat(rank)
    story.now += STARTUP
    assert story.watch.failure(story.now) is None
    story.now += 0.1
    failure = found(story.watch.failure(story.now))
    assert failure.rank == 2
    assert failure.stuck
    assert failure.error == ("worker 2 did not join within 60 s. If it needs longer, try launch.startup_timeout=120.")


def test_a_process_stopped_before_it_joins_is_blamed_though_others_are_silent_longer():
    story = Story(join=False)
    story.now += 10.0
    story.beat(1)
    story.tell(1, Stopped())
    story.now += STARTUP
    failure = found(story.watch.failure(story.now))
    assert failure.rank == 1
    assert "it is stopped" in failure.error


def test_one_that_joins_while_another_does_not_is_not_blamed():
    story = Story(join=False)
    story.tell(0, Joined())
    story.tell(1, Joined())
    assert found(story.alive(STARTUP + 5.0, 0, 1)).rank == 2


def test_a_stopped_process_is_named_after_the_heartbeat_timeout_and_not_before():
    story = Story()
    assert story.alive(10.0, *story.ranks) is None
    assert story.alive(HEARTBEAT - 0.5, 0, 2) is None
    story.tell(1, Stopped())
    failure = found(story.alive(2.0, 0, 2))
    assert failure.rank == 1
    assert failure.error.startswith("worker 1 gave no sign of life for 3")
    assert failure.error.endswith("s: it is stopped.")
    assert not failure.stuck


def test_a_process_that_goes_on_in_time_is_forgiven():
    story = Story()
    story.tell(1, Stopped())
    assert story.alive(HEARTBEAT - 1.0, 0, 2) is None
    assert story.alive(100.0, *story.ranks) is None


def test_processes_that_neither_step_nor_compute_are_stuck():
    story = Story()
    story.watch.commanded(story.now)
    assert story.alive(20.0, *story.ranks) is None
    failure = found(story.alive(PROGRESS + 2.0, *story.ranks, progress=False))
    assert failure.stuck
    assert failure.error == (
        "chief 0 and worker 1 and worker 2 made no progress for 50 s; where each stands is in its log. "
        "If a step takes that long, try launch.progress_timeout=200."
    )
    assert story.now > BEGIN + 20.0 + PROGRESS


@pytest.mark.parametrize(("stepped", "patience"), [(False, TRACING_PATIENCE), (True, BUSY_PATIENCE)])
def test_a_process_that_computes_is_tracing_for_ten_times_as_long_until_steps_are_told_and_twice_as_long_then(
    stepped, patience
):
    story = Story(workers=2)
    story.watch.commanded(story.now)
    if stepped:
        story.tell(0, Steps(1, [0.5]))
    assert story.alive(patience * PROGRESS - 5.0, 0, 1, progress=False, cpu_share=0.9) is None
    failure = found(story.alive(10.0, 0, 1, progress=False, cpu_share=0.9))
    assert failure.stuck
    computed = f"computed for {patience * PROGRESS:.0f} s without a step; where each stands"
    assert failure.error.startswith(f"chief 0 and worker 1 {computed}")
    assert story.now < BEGIN + patience * PROGRESS + 2.0


def test_another_command_may_trace_anew():
    story = Story(workers=2)
    story.tell(0, Steps(1, [0.5]))
    story.watch.commanded(story.now)
    assert story.alive(3 * PROGRESS, 0, 1, progress=False, cpu_share=0.9) is None


def test_one_that_computes_excuses_those_that_wait_for_it():
    story = Story(workers=2)
    story.watch.commanded(story.now)
    while story.now < BEGIN + 4 * PROGRESS:
        story.now += 0.5
        story.beat(0)
        story.beat(1, cpu_seconds=story.now)
        assert story.watch.failure(story.now) is None


def test_a_process_that_has_answered_owes_nothing_and_who_has_not_is_named():
    story = Story()
    story.watch.commanded(story.now)
    story.watch.responded(0)
    story.watch.responded(2)
    failure = found(story.alive(PROGRESS + 2.0, *story.ranks, progress=False))
    assert failure.rank == 1
    assert failure.error.startswith("worker 1 made no progress for 50 s;")


def test_who_stood_still_first_is_blamed():
    story = Story()
    story.watch.commanded(story.now)
    assert story.alive(10.0, 0, 2) is None
    for _ in range(8):
        story.now += 0.5
        story.beat(0, progress=True)
        story.beat(1)
        story.beat(2, progress=True)
    assert found(story.alive(PROGRESS + 5.0, *story.ranks, progress=False)).rank == 1


def test_processes_that_wait_for_a_command_are_not_stuck_and_a_command_starts_the_clock_anew():
    story = Story()
    for rank in story.ranks:
        story.watch.responded(rank)
    assert story.alive(10 * PROGRESS, *story.ranks, progress=False) is None
    story.watch.commanded(story.now)
    assert story.alive(PROGRESS - 1.0, *story.ranks, progress=False) is None


@pytest.mark.parametrize("event", [System(host="host0", values={}), Steps(1, [0.5])], ids=["load", "steps"])
def test_an_event_is_progress_but_the_machine_s_load_is_only_a_sign_of_life(event):
    story = Story(workers=1)
    story.watch.commanded(story.now)
    while story.now <= BEGIN + 3 * PROGRESS and not (failure := story.watch.failure(story.now)):
        story.now += PROGRESS / 4
        story.tell(0, event)
    assert (failure is None) == isinstance(event, Steps)
    assert failure is None or (failure.stuck and "made no progress" in failure.error)


def racing(restarts: int = 3) -> Story:
    """A coordinator (0), two workers (1, 2) and a parameter server (3), in the midst of training."""
    story = Story(2, strategy="parameter_server")
    story.watch.plan = with_(story.watch.plan, "launch", max_restarts=restarts)
    story.watch.replacing = True
    story.watch.commanded(story.now)
    return story


def test_a_racing_worker_that_died_is_replaced_and_nobody_blamed():
    story = racing()
    story.tell(1, Exited(code=-signal.SIGKILL))
    assert story.watch.failure(story.now) is None
    assert story.watch.to_replace(story.now) == {1: "worker 1 was killed by SIGKILL"}
    assert story.watch.to_replace(story.now) == {}
    story.tell(1, Joined())
    assert story.alive(PROGRESS, 0, 1, 2, 3) is None


def test_a_racing_worker_that_is_stopped_is_replaced_after_the_heartbeat_timeout():
    story = racing()
    assert story.alive(HEARTBEAT, 0, 1, 3) is None
    assert story.watch.to_replace(story.now) == {}
    story.tell(2, Stopped())
    assert story.alive(1.0, 0, 1, 3) is None
    assert story.watch.to_replace(story.now) == {2: "worker 2 gave no sign of life for 31 s: it is stopped"}


def test_a_racing_worker_is_replaced_so_often_and_no_more():
    story = racing(restarts=2)
    for _ in range(2):
        story.tell(1, Exited(code=1))
        assert story.watch.to_replace(story.now)
    story.tell(1, Exited(code=1))
    assert story.watch.to_replace(story.now) == {}
    error = found(story.watch.failure(story.now)).error
    assert error == "worker 1 ended with exit code 1, after it was started again 2 times (launch.max_restarts)."


def test_before_training_begins_a_racing_worker_is_a_loss():
    story = racing()
    story.watch.replacing = False
    story.tell(1, Exited(code=-signal.SIGKILL))
    assert story.watch.to_replace(story.now) == {}
    assert found(story.watch.failure(story.now)).rank == 1


@pytest.mark.parametrize(("rank", "name"), [(0, "coordinator 0"), (3, "parameter server 3")])
def test_a_coordinator_or_a_parameter_server_is_never_replaced(rank, name):
    story = racing()
    story.tell(rank, Exited(code=-signal.SIGKILL))
    assert story.watch.to_replace(story.now) == {}
    assert found(story.watch.failure(story.now)).error == f"{name} was killed by SIGKILL."


def test_a_replaced_worker_that_never_joins_again_is_named():
    story = racing()
    story.tell(1, Exited(code=1))
    story.watch.to_replace(story.now)
    failure = found(story.alive(STARTUP + 1, 0, 2, 3))
    assert failure.error.startswith("worker 1 did not join within 60 s")


def test_where_all_racing_workers_stand_still_the_run_is_stuck_though_servers_have_nothing_to_do():
    story = racing()
    assert story.alive(PROGRESS - 1, *story.ranks, progress=False) is None
    failure = found(story.alive(3.0, *story.ranks, progress=False))
    assert failure.error.startswith("coordinator 0 and worker 1 and worker 2 made no progress")


def test_a_coordinator_that_waits_for_a_stopped_worker_is_not_blamed_and_has_its_time_anew():
    story = racing()
    # The worker beat once more.
    story.beat(2)
    assert story.alive(HEARTBEAT, 1, 3) is None
    story.now += 0.5
    assert story.watch.failure(story.now) is None
    story.tell(2, Stopped())
    assert story.alive(0.5, 1, 3) is None
    assert list(story.watch.to_replace(story.now)) == [2]
    story.tell(2, Joined())
    assert story.alive(HEARTBEAT, 1, 2, 3) is None
    assert found(story.alive(1.0, 1, 2, 3)).error.startswith("coordinator 0 gave no sign of life for")


@pytest.mark.parametrize("first", [0, 3])
def test_a_coordinator_that_waits_for_a_stopped_server_is_not_blamed(first):
    story = racing()
    story.now += 0.2
    story.beat(0 if first == 3 else 3)
    assert found(story.alive(HEARTBEAT + 1, 1, 2)).error.startswith("parameter server 3 gave no sign of life for")


def test_a_worker_that_may_not_be_replaced_any_more_is_blamed_before_a_coordinator_that_waits_for_it():
    story = racing(restarts=0)
    assert found(story.alive(HEARTBEAT + 1, 1, 3)).rank == 2


def test_workers_that_serve_owe_nothing_once_their_coordinator_has_answered():
    story = racing()
    assert story.alive(PROGRESS - 1, *story.ranks, progress=False) is None
    story.tell(0, Finished())
    story.watch.responded(0)
    assert story.alive(5.0, *story.ranks, progress=False) is None
