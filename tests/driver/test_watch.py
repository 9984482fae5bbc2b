"""Who is to blame, decided from what processes told and from invented times."""

import random
import re
import signal
from collections.abc import Callable, Container
from functools import partial
from operator import methodcaller

import pytest
from conftest import with_
from plans import config, machine

from pipeline.driver.watch import BLAME_SECONDS, BUSY_PATIENCE, SILENT_SECONDS, TRACING_PATIENCE, RunFailed, Watch
from pipeline.plan.planning import make
from pipeline.record.events import Beat, Event, Exited, Failed, Finished, Joined, Started, Steps, Stopped, System
from pipeline.record.log import stamped

STARTUP, HEARTBEAT, PROGRESS = 60.0, 30.0, 50.0
BEGIN = 100.0


class Story:
    """Processes that are told about at invented times."""

    def __init__(self, workers: int = 3, join: bool = True, strategy: str = "multi_worker") -> None:
        limits = {"startup_timeout": STARTUP, "heartbeat_timeout": HEARTBEAT, "progress_timeout": PROGRESS}
        self.watch = Watch(with_(make(config(strategy, "8cpu", workers), machine(8)), "launch", **limits))
        self.ranks = [process.rank for process in self.watch.plan.processes]
        self.counters = dict.fromkeys(self.ranks, 0)
        for rank in self.ranks:
            # One after the other.
            self.now = BEGIN + rank / 50
            self.tell(rank, Started(pid=rank))
            if join:
                self.tell(rank, Joined())
        self.now = BEGIN

    def tell(self, rank: int, event: Event) -> None:
        self.watch.note(stamped(event, self.now, "point", rank), self.now)

    def beat(self, rank: int, cpu_seconds: float = 0.0, progress: bool = False) -> None:
        self.counters[rank] += progress
        self.tell(rank, Beat(progress=self.counters[rank], cpu_seconds=cpu_seconds))

    def alive(
        self, seconds: float, *ranks: int, still: Container[int] = (), computing: Container[int] = ()
    ) -> RunFailed | None:
        """Lets time pass in half seconds while `ranks` beat; those that are `still` make no progress."""
        end, failure = self.now + seconds, None
        while self.now < end and failure is None:
            self.now += 0.5
            for rank in ranks:
                self.beat(rank, 0.9 * self.now * (rank in computing), rank not in still)
            failure = self.watch.failure(self.now)
        return failure

    def passes(self, seconds: float) -> RunFailed | None:
        self.now += seconds
        return self.watch.failure(self.now)

    def commanded(self) -> None:
        self.watch.commanded(self.now)

    def answers(self, *ranks: int) -> None:
        for rank in ranks:
            self.watch.processes[rank].responded = True

    def replaces(self, **why: str) -> None:
        """By rank as `rank1`, how the reason begins for which a worker is started again."""
        told = {f"rank{rank}": text for rank, text in self.watch.to_replace(self.now).items()}
        assert told.keys() == why.keys()
        assert all(told[rank].startswith(text) for rank, text in why.items()), told


ALL, STILL = (0, 1, 2), range(4)
OWN = "the moon is not full"
Happens = Callable[[Story], RunFailed | None]
# Of a story: an event of a rank, a beat of one, seconds in which some live or that only pass, and so on.
tells, beats, lives, passes, answers, replaces = (
    partial(methodcaller, name) for name in ("tell", "beat", "alive", "passes", "answers", "replaces")
)
commanded = methodcaller("commanded")


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


def leaving() -> Story:
    """Processes that were told to end."""
    story = Story()
    story.watch.leaving = True
    return story


def racing(restarts: int = 3, begun: bool = True) -> Story:
    """A coordinator (0), two workers (1, 2) and a parameter server (3), in the midst of training."""
    story = Story(2, strategy="parameter_server")
    story.watch.plan = with_(story.watch.plan, "launch", max_restarts=restarts)
    story.watch.replacing = begun
    story.watch.commanded(story.now)
    return story


LOST, KILLED, DIED = Failed(error="UnavailableError: connection reset", peer=True), Exited(-signal.SIGKILL), Exited(1)
QUIET, QUARTER = "gave no sign of life for", PROGRESS / 4
TWO, UNJOINED = partial(Story, 2), partial(Story, join=False)
# What happens, none of which is a failure, and then the failure that the last of it is: whose, and in which words.
STORIES: dict[str, tuple[Callable[[], Story], list[Happens], tuple[int, str] | None]] = {
    **{
        f"what a process ends with is named: {words}": (
            Story, [tells(2, Exited(code)), passes(0)], (2, f"worker 2 {words}.$"),
        )
        for code, words in (
            (-signal.SIGKILL, "was killed by SIGKILL"), (-signal.SIGSEGV, "was killed by SIGSEGV"),
            (-64, "was killed by SIGRTMAX"), (-99, "was killed by signal 99"), (3, "ended with exit code 3"),
            (0, "ended with exit code 0"),
        )
    },
    "of several that died the killed one is blamed": (
        Story, [tells(0, Exited(-signal.SIGABRT)), tells(2, KILLED), passes(0)], (2, "worker 2 was killed by SIGKILL"),
    ),
    "who has said why is blamed with its own words": (
        Story, [tells(1, Failed(error=OWN)), tells(1, DIED), passes(0)], (1, f"{OWN}$"),
    ),
    "but not where it said a peer's end in other words": (
        Story, [tells(0, Failed(error="InternalError: collective ops is aborted")), tells(2, KILLED), passes(0)],
        (2, "worker 2 was killed by SIGKILL.$"),
    ),
    "where everybody only lost everybody the run still ends": (
        Story, [*(tells(rank, LOST) for rank in ALL), passes(0)],
        (0, "chief 0 lost the connection to the other processes.$"),
    ),
    "an orderly end while leaving is no failure": (
        leaving, [*(tells(rank, Exited(0)) for rank in ALL), passes(1_000)], None,
    ),
    "a bad end while leaving is one": (leaving, [tells(1, DIED), passes(0)], (1, "worker 1 ended with exit code 1.$")),
    "a kill while leaving is one": (leaving, [tells(1, KILLED), passes(0)], (1, "worker 1 was killed by SIGKILL.$")),
    "an end before it joins is one": (UNJOINED, [tells(1, DIED), passes(0)], (1, "worker 1 ended with exit code 1.$")),
    "steps are progress": (
        Story, [commanded, *[passes(QUARTER), *(tells(rank, Steps(1, [0.5])) for rank in ALL)] * 12, passes(1)], None,
    ),
    "the machine's load is only a sign of life": (
        Story,
        [commanded, *[passes(QUARTER), *(tells(rank, System(host="host0", values={})) for rank in ALL)] * 4, passes(1)],
        (0, "chief 0 and worker 1 and worker 2 made no progress"),
    ),
    "peers that lost a killed process take no blame": (
        Story,
        [tells(0, LOST), tells(2, LOST), passes(0), passes(1), tells(0, DIED), tells(2, DIED), passes(0),
         tells(1, KILLED), passes(0)],
        (1, "worker 1 was killed by SIGKILL.$"),
    ),
    "peers that lost a stopped process take no blame": (
        Story, [lives(5, *ALL), tells(0, LOST), lives(SILENT_SECONDS + 2, 0, 2)], (1, f"worker 1 {QUIET}"),
    ),
    "one that aborts where another is stopped has lost that one": (
        Story, [lives(SILENT_SECONDS + 1, 0, 2), tells(0, Exited(-signal.SIGABRT)), passes(0)],
        (1, f"worker 1 {QUIET} 4 s: it is stopped, or its host is gone.$"),
    ),
    "where nobody else shows a fault the one that lost the others is named after a while": (
        Story, [tells(1, LOST), tells(1, DIED), lives(BLAME_SECONDS - 1, 0, 2), lives(3, 0, 2)],
        (1, "worker 1 lost the connection to the other processes.$"),
    ),
    "one that never speaks is blamed for not joining": (
        UNJOINED, [beats(0), beats(1), passes(STARTUP), passes(0.1)],
        (2, "worker 2 did not join within 60 s. If it needs longer, try launch.startup_timeout=120.$"),
    ),
    "one stopped before it joins is blamed though others are silent longer, or were started before it": (
        UNJOINED, [passes(10), beats(1), tells(1, Stopped()), passes(STARTUP - 9.99)],
        (1, "worker 1 did not join within 60 s: it is stopped"),
    ),
    "one that joins while another does not is not blamed": (
        UNJOINED, [tells(0, Joined()), tells(1, Joined()), lives(STARTUP + 5, 0, 1)], (2, ""),
    ),
    "a stopped process is named after the heartbeat timeout and not before": (
        Story, [lives(10, *ALL), lives(HEARTBEAT - 0.5, 0, 2), tells(1, Stopped()), lives(2, 0, 2)],
        (1, rf"worker 1 {QUIET} 3\d s: it is stopped\.$"),
    ),
    "one that goes on in time is forgiven": (
        Story, [tells(1, Stopped()), lives(HEARTBEAT - 1, 0, 2), lives(100, *ALL)], None,
    ),
    "processes that neither step nor compute are stuck": (
        Story, [commanded, lives(20, *ALL), lives(PROGRESS, *ALL, still=STILL), lives(2, *ALL, still=STILL)],
        (0, "chief 0 and worker 1 and worker 2 made no progress for 50 s; where each stands is in its log. "
            "If a step takes that long, try launch.progress_timeout=200.$"),
    ),
    **{
        f"one that computes is stuck after {patience} times as long": (
            TWO,
            [commanded, *stepped, lives(patience * PROGRESS - 5, 0, 1, still=STILL, computing=STILL),
             lives(7, 0, 1, still=STILL, computing=STILL)],
            (0, f"chief 0 and worker 1 computed for {patience * PROGRESS:.0f} s without a step; where each stands"),
        )
        # Until steps are told it is tracing.
        for patience, stepped in ((TRACING_PATIENCE, []), (BUSY_PATIENCE, [tells(0, Steps(1, [0.5]))]))
    },
    "another command may trace anew": (
        TWO, [tells(0, Steps(1, [0.5])), commanded, lives(3 * PROGRESS, 0, 1, still=STILL, computing=STILL)], None,
    ),
    "one that computes excuses those that wait for it": (
        TWO, [commanded, lives(4 * PROGRESS, 0, 1, still=STILL, computing=(1,))], None,
    ),
    "one that has answered owes nothing and who has not is named": (
        Story, [commanded, answers(0, 2), lives(PROGRESS + 2, *ALL, still=STILL)],
        (1, "worker 1 made no progress for 50 s;"),
    ),
    "who stood still first is blamed": (
        Story, [commanded, lives(10, 0, 2), lives(4, *ALL, still=(1,)), lives(PROGRESS + 5, *ALL, still=STILL)],
        (1, ""),
    ),
    "those that wait for a command are not stuck and a command starts the clock anew": (
        Story,
        [answers(*ALL), lives(10 * PROGRESS, *ALL, still=STILL), commanded, lives(PROGRESS - 1, *ALL, still=STILL)],
        None,
    ),
    "a racing worker that died is replaced and nobody blamed": (
        racing,
        [tells(1, KILLED), passes(0), replaces(rank1="worker 1 was killed by SIGKILL"), replaces(), tells(1, Joined()),
         lives(PROGRESS, 0, 1, 2, 3)],
        None,
    ),
    "a racing worker that is stopped is replaced after the heartbeat timeout": (
        racing,
        [lives(HEARTBEAT, 0, 1, 3), replaces(), tells(2, Stopped()), lives(1, 0, 1, 3),
         replaces(rank2=f"worker 2 {QUIET} 31 s: it is stopped")],
        None,
    ),
    "a racing worker is replaced so often and no more": (
        partial(racing, restarts=2),
        [*[tells(1, DIED), replaces(rank1="worker 1 ended with exit code 1")] * 2, tells(1, DIED), replaces(),
         passes(0)],
        (1, r"worker 1 ended with exit code 1, after it was started again 2 times \(launch.max_restarts\).$"),
    ),
    "before training begins a racing worker is a loss": (
        partial(racing, begun=False), [tells(1, KILLED), replaces(), passes(0)], (1, ""),
    ),
    **{
        f"a {name} is never replaced": (
            racing, [tells(rank, KILLED), replaces(), passes(0)], (rank, f"{name} {rank} was killed by SIGKILL.$"),
        )
        for rank, name in ((0, "coordinator"), (3, "parameter server"))
    },
    "a replaced worker that never joins again is named": (
        racing, [tells(1, DIED), replaces(rank1=""), lives(STARTUP + 1, 0, 2, 3)],
        (1, "worker 1 did not join within 60 s"),
    ),
    "where all racing workers stand still the run is stuck though servers have nothing to do": (
        racing, [lives(PROGRESS - 1, *STILL, still=STILL), lives(3, *STILL, still=STILL)],
        (0, "coordinator 0 and worker 1 and worker 2 made no progress"),
    ),
    "a coordinator that waits for a stopped worker, which beat once more, is not blamed and has its time anew": (
        racing,
        [beats(2), lives(HEARTBEAT, 1, 3), passes(0.5), tells(2, Stopped()), lives(0.5, 1, 3), replaces(rank2=""),
         tells(2, Joined()), lives(HEARTBEAT, 1, 2, 3), lives(1, 1, 2, 3)],
        (0, f"coordinator 0 {QUIET}"),
    ),
    **{
        f"a coordinator that waits for a stopped server is not blamed, whichever beat last ({last})": (
            racing, [passes(0.2), beats(last), lives(HEARTBEAT + 1, 1, 2)], (3, f"parameter server 3 {QUIET}"),
        )
        for last in (0, 3)
    },
    "a worker that may not be replaced any more is blamed before a coordinator that waits for it": (
        partial(racing, restarts=0), [lives(HEARTBEAT + 1, 1, 3)], (2, ""),
    ),
    "workers that serve owe nothing once their coordinator has answered": (
        racing,
        [lives(PROGRESS - 1, *STILL, still=STILL), tells(0, Finished()), answers(0), lives(5, *STILL, still=STILL)],
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("told", STORIES)
def test_who_is_to_blame(told):
    make_story, happens, expected = STORIES[told]
    story = make_story()
    *before, last = happens
    for each in before:
        assert each(story) is None
    failure = last(story)
    assert (failure is None) == (expected is None)
    if failure is not None:
        rank, words = expected
        assert (failure.rank, failure.lost) == (rank, OWN not in words)
        assert re.match(words, failure.error), failure.error
        # Who may still write where it stands.
        assert failure.stuck is any(how in failure.error for how in ("did not join", "no progress", "without a step"))
