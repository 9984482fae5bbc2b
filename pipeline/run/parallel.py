"""Trains runs of a sweep at once, each in a thread: as jobs of a cluster, or on devices that others leave free.

Their output goes into a file of their folders. The calling thread gets signals, and makes the others end. The job of a
run that has finished takes the next one with the same cluster, as in turn.
"""

import dataclasses
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pipeline.launch import AT_ONCE, DEVICES, JOBS, Cluster, LaunchError
from pipeline.launch.local import LocalCluster
from pipeline.launch.share import CoreShare, Share, part_for, whole
from pipeline.launch.signals import Interrupted
from pipeline.run import start
from pipeline.run.requests import Requests
from pipeline.run.session import Key, Preemption, RunRequest, Session, cluster_key
from pipeline.run.views import RunResult, Screen

# The output of a run, in its folder.
LOG = "driver.log"
POLL_SECONDS = 0.2
# For runs to end once the command does.
END_SECONDS = 60.0

Open = Callable[[Path], AbstractContextManager[Screen]]
Outcome = RunResult | BaseException
# By their key.
Clusters = dict[str, Cluster]


@dataclass(frozen=True)
class _Running:
    """A run under way, when it began, its part of this machine, and the clusters that it has made or got."""

    request: RunRequest
    thread: threading.Thread
    began: float
    part: CoreShare
    clusters: Clusters


class Parallel:
    """Runs at once, no more than `at_once`; `opened` opens the screen of one at a path."""

    def __init__(self, requests: Requests, session: Session, at_once: int, opened: Open) -> None:
        self._session, self._most, self._opened = session, at_once, opened
        self._waiting = dict(requests.to_run)
        self._running: dict[Key, _Running] = {}
        self._ended: queue.SimpleQueue[tuple[Key, Outcome]] = queue.SimpleQueue()
        # Jobs whose run has finished, and threads that end those that no other run needs.
        self._idle: list[tuple[str, Cluster]] = []
        self._ending: list[threading.Thread] = []
        # Once all have ended, no other run takes a job any more.
        self._over, self._lock = False, threading.Lock()
        self._free: CoreShare | None = None
        self._everything = CoreShare()

    def run(self, begun: Callable[[Key, RunRequest], None], ended: Callable[[Key, RunResult, float], None]) -> None:
        """Trains all of them; calls `begun` and `ended` for each, with its seconds. Raises what one raises."""
        # A scheduler's signal lets those under way end by themselves.
        self._session.busy = True
        try:
            while self._waiting or self._running:
                if not self._session.preemption.asked:
                    self._begin(begun)
                elif not self._running:
                    return
                self._end_idle({cluster_key(request.config) for request in self._waiting.values()})
                try:
                    key, outcome = self._ended.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    continue
                running = self._take_out(key)
                if isinstance(outcome, BaseException):
                    raise outcome
                ended(key, outcome, time.monotonic() - running.began)
        except Interrupted as interrupted:
            self._end(interrupted.number)
            raise
        except BaseException:
            self._end(signal.SIGTERM)
            raise
        finally:
            self._end_all()
            for ending in self._ending:
                ending.join()
            self._session.busy = False

    def _begin(self, begun: Callable[[Key, RunRequest], None]) -> None:
        """Begins runs, in order, as many as there is room for."""
        for key in list(self._waiting):
            if len(self._running) == self._most:
                return
            request = self._waiting[key] = self._validated(self._waiting[key])
            part = self._room(request)
            if part is None:
                continue
            del self._waiting[key]
            if self._free is not None:
                self._free = self._free.without(part)
            if _kind(request) == DEVICES:
                request, clusters = self._on_devices(request, part)
                preemption = self._session.preemption
            else:
                # A scheduler's signal to one job is none to another.
                request, clusters = dataclasses.replace(request, planned=None), self._job_for(request)
                preemption = Preemption(self._session.preemption)
            thread = threading.Thread(target=self._work, args=(key, request, clusters, preemption), daemon=True)
            self._running[key] = _Running(request, thread, time.monotonic(), part, clusters)
            begun(key, request)
            thread.start()

    def _validated(self, request: RunRequest) -> RunRequest:
        """A repeat with its plan; as it is if that is refused, which shows once it starts."""
        if request.planned is not None or _kind(request) == JOBS:
            return request
        validated = start.validate(request, self._session)
        return request if isinstance(validated, RunResult) else validated

    def _room(self, request: RunRequest) -> CoreShare | None:
        """A run's part of this machine, an empty one if it needs none; None if there is no room for it."""
        if _kind(request) == JOBS or request.planned is None:
            return CoreShare()
        if self._free is None:
            self._free = self._everything = whole(request.planned.cluster.inventory())
        return part_for(request.planned.plan, self._free, self._everything)

    def _take_out(self, key: Key) -> _Running:
        running = self._running.pop(key)
        running.thread.join()
        if self._free is not None:
            self._free = self._free.joined(running.part)
        return running

    def _end(self, number: int) -> None:
        """Makes all runs end, as by a signal, and waits until they have."""
        self._session.preemption.end(number)
        until = time.monotonic() + END_SECONDS
        for running in self._running.values():
            running.thread.join(max(0.0, until - time.monotonic()))

    def _job_for(self, request: RunRequest) -> Clusters:
        """An idle job of the run's cluster; none if the run makes its own."""
        idle = next((job for job in self._idle if job[0] == cluster_key(request.config)), None)
        if idle is None:
            return {}
        self._idle.remove(idle)
        return dict([idle])

    def _end_idle(self, needed: Iterable[str]) -> None:
        """Begins to end the jobs of other clusters than those that are still needed."""
        for job in [job for job in self._idle if job[0] not in needed]:
            self._idle.remove(job)
            self._begin_to_close(dict([job]), 0)

    def _end_all(self) -> None:
        """Begins to end all jobs, those of runs too that have not ended in time."""
        with self._lock:
            self._over = True
        self._end_idle(())
        for running in self._running.values():
            self._begin_to_close(running.clusters, 1)

    def _begin_to_close(self, clusters: Clusters, code: int) -> None:
        self._ending.append(threading.Thread(target=_close, args=(clusters, code, self._session.screen)))
        self._ending[-1].start()

    def _on_devices(self, request: RunRequest, part: CoreShare) -> tuple[RunRequest, Clusters]:
        """The run on a part of this machine."""
        local = self._session.cluster(request.config)
        assert isinstance(local, LocalCluster)
        share: Cluster = Share(local, part)
        planned = request.planned
        if planned is not None:
            note = f"Up to {self._most} points ran at once on this machine: they share its memory's bandwidth."
            plan = dataclasses.replace(planned.plan, notes=(*planned.plan.notes, note))
            request = dataclasses.replace(request, planned=dataclasses.replace(planned, plan=plan, cluster=share))
        return request, {cluster_key(request.config): share}

    def _work(self, key: Key, request: RunRequest, clusters: Clusters, preemption: Preemption) -> None:
        """Trains a run, in a thread of its own."""
        outcome: Outcome
        try:
            with self._opened(request.folder / LOG) as screen:
                outcome = _outcome(request, _own(self._session, screen, clusters, preemption))
                if isinstance(outcome, BaseException):
                    _close(clusters, 1, screen)
                elif not outcome.result.finished or _kind(request) != JOBS:
                    _close(clusters, 0, screen)
                for job in clusters.values():
                    # Until another run has it, it has no screen.
                    job.serve(lambda text: None, lambda: None)
        except BaseException as error:
            outcome = error
        with self._lock:
            if not self._over:
                self._idle.extend(clusters.items())
                clusters.clear()
        _close(clusters, 1, self._session.screen)
        self._ended.put((key, outcome))


def _outcome(request: RunRequest, session: Session) -> Outcome:
    """The result of a run, or what it raises."""
    try:
        session.serve(request.config)
        return start.run(request, session)
    except BaseException as error:
        return error


def _own(session: Session, screen: Screen, clusters: Clusters, preemption: Preemption) -> Session:
    """The session of one run: a screen, a preemption and clusters of its own."""
    return dataclasses.replace(session, screen=screen, preemption=preemption, busy=True, ahead=None, _clusters=clusters)


def _close(clusters: Clusters, code: int, screen: Screen) -> None:
    """Ends all of them."""
    while clusters:
        try:
            # By one thread alone, where two end the same.
            _, cluster = clusters.popitem()
            cluster.close(code)
        except KeyError:
            return
        except (OSError, LaunchError) as error:
            screen.say(str(error))


def _kind(request: RunRequest) -> str:
    return AT_ONCE[request.config.cluster.name]
