"""Runs points of a sweep at once, each in a thread: as jobs of a cluster, or on devices that others leave free.

What they show goes into a file of their folders: a screen has room for one. The thread that calls hears of signals, and
has the others end. The job of a point that has finished takes the next one that asks for the same, as in turn.
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
from pipeline.launch.local.share import Part, Share, part_for, whole
from pipeline.launch.signals import Interrupted
from pipeline.record.results import Ending, Layout, Result
from pipeline.run import run
from pipeline.run.beforehand import chosen, layout_of
from pipeline.run.points import Points
from pipeline.run.preemption import Preemption
from pipeline.run.session import Key, PointRequest, Session, cluster_key
from pipeline.run.views import PointResult, Screen

# What a point shows, in its folder.
LOG = "conductor.log"
POLL_SECONDS = 0.2
# For points to end once the command is to.
END_SECONDS = 60.0

Open = Callable[[Path], AbstractContextManager[Screen]]
Outcome = PointResult | BaseException
# By what tells them from others.
Clusters = dict[str, Cluster]


@dataclass(frozen=True)
class _Running:
    """A point under way, since when, what it has of this machine, and the clusters that it has made or was given."""

    request: PointRequest
    thread: threading.Thread
    began: float
    part: Part
    clusters: Clusters


class SideBySide:
    """Points that run at once, no more than `most`; `opened` is where one shows what it does, by its folder."""

    def __init__(self, points: Points, session: Session, most: int, opened: Open) -> None:
        self._session, self._most, self._opened = session, most, opened
        self._waiting = dict(points.to_run)
        self._running: dict[Key, _Running] = {}
        self._ended: queue.SimpleQueue[tuple[Key, Outcome]] = queue.SimpleQueue()
        # Jobs whose point has finished, and what ends those that no other asks for.
        self._idle: list[tuple[str, Cluster]] = []
        self._ending: list[threading.Thread] = []
        # Has all ended, so that no other point takes a job any more?
        self._over, self._lock = False, threading.Lock()
        self._free: Part | None = None
        self._everything = Part()

    def run(self, begun: Callable[[Key, PointRequest], None], ended: Callable[[Key, PointResult, float], None]) -> None:
        """Runs all of them; tells of each that has begun, or ended, and how long it took. Raises what one raises."""
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
                running = self._let_go(key)
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

    def _begin(self, begun: Callable[[Key, PointRequest], None]) -> None:
        """Begins points, in order, as many as there may be, of which there is room for each."""
        for key in list(self._waiting):
            if len(self._running) == self._most:
                return
            request = self._waiting[key] = self._laid_out(self._waiting[key])
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
                request, clusters = dataclasses.replace(request, laid_out=None), self._job_for(request)
                preemption = Preemption(self._session.preemption)
            thread = threading.Thread(target=self._work, args=(key, request, clusters, preemption), daemon=True)
            self._running[key] = _Running(request, thread, time.monotonic(), part, clusters)
            begun(key, request)
            thread.start()

    def _laid_out(self, request: PointRequest) -> PointRequest:
        """A repeat laid out as the point itself was; as it is where that is refused, which is told once it is run."""
        if request.laid_out is not None or _kind(request) == JOBS:
            return request
        looked_over = run.look_over(request, self._session)
        return request if isinstance(looked_over, PointResult) else looked_over

    def _room(self, request: PointRequest) -> Part | None:
        """What a point gets of this machine, nothing where it needs none; None where there is no room for it."""
        if _kind(request) == JOBS or request.laid_out is None:
            return Part()
        if self._free is None:
            self._free = self._everything = whole(request.laid_out.cluster.inventory())
        return part_for(request.laid_out.plan, self._free, self._everything)

    def _let_go(self, key: Key) -> _Running:
        running = self._running.pop(key)
        running.thread.join()
        if self._free is not None:
            self._free = self._free.joined(running.part)
        return running

    def _end(self, number: int) -> None:
        """Has all points end, as by a signal, and waits until they have."""
        self._session.preemption.end(number)
        until = time.monotonic() + END_SECONDS
        for running in self._running.values():
            running.thread.join(max(0.0, until - time.monotonic()))

    def _job_for(self, request: PointRequest) -> Clusters:
        """One that is idle and what the point asks for; none where the point makes its own."""
        wanted = cluster_key(request.config)
        found = next((job for job in self._idle if job[0] == wanted), None)
        if found is None:
            return {}
        self._idle.remove(found)
        return dict([found])

    def _end_idle(self, wanted: Iterable[str]) -> None:
        """Has the jobs end that are not wanted any more, and does not wait for that."""
        for job in [job for job in self._idle if job[0] not in wanted]:
            self._idle.remove(job)
            self._begin_to_close(dict([job]), 0)

    def _end_all(self) -> None:
        """Has all jobs end, those of points too that have not ended in time."""
        with self._lock:
            self._over = True
        self._end_idle(())
        for running in self._running.values():
            self._begin_to_close(running.clusters, 1)

    def _begin_to_close(self, clusters: Clusters, code: int) -> None:
        self._ending.append(threading.Thread(target=_close, args=(clusters, code, self._session.screen)))
        self._ending[-1].start()

    def _on_devices(self, request: PointRequest, part: Part) -> tuple[PointRequest, Clusters]:
        """The point on a part of this machine."""
        local = self._session.cluster(request.config)
        assert isinstance(local, LocalCluster)
        share: Cluster = Share(local, part)
        made = request.laid_out
        if made is not None:
            note = f"Up to {self._most} points ran at once on this machine: they share its memory's bandwidth."
            plan = dataclasses.replace(made.plan, notes=(*made.plan.notes, note))
            request = dataclasses.replace(request, laid_out=dataclasses.replace(made, plan=plan, cluster=share))
        return request, {cluster_key(request.config): share}

    def _work(self, key: Key, request: PointRequest, clusters: Clusters, preemption: Preemption) -> None:
        """Runs a point. In a thread of its own."""
        outcome: Outcome
        try:
            with self._opened(request.folder / LOG) as screen:
                outcome = _outcome(request, _own(self._session, screen, clusters, preemption))
                if isinstance(outcome, BaseException):
                    _close(clusters, 1, screen)
                elif not outcome.result.finished or _kind(request) != JOBS:
                    _close(clusters, 0, screen)
                for job in clusters.values():
                    # Until another point has it, there is nowhere to say anything.
                    job.serve(lambda text: None, lambda: None)
        except BaseException as error:
            outcome = error
        with self._lock:
            if not self._over:
                self._idle.extend(clusters.items())
                clusters.clear()
        _close(clusters, 1, self._session.screen)
        self._ended.put((key, outcome))


def _outcome(request: PointRequest, session: Session) -> Outcome:
    """What becomes of a point, or what it raises."""
    try:
        session.serve(request.config)
        return run.run(request, session)
    except BaseException as error:
        return error


def _own(session: Session, screen: Screen, clusters: Clusters, preemption: Preemption) -> Session:
    """What a point has for itself of what the points of a command share."""
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


def _kind(request: PointRequest) -> str:
    return AT_ONCE[request.config.cluster.name]


def under_way(request: PointRequest, status: str) -> PointResult:
    """What is known of a point that has not ended."""
    made = request.laid_out
    layout = Layout(workers=request.config.workers) if made is None else layout_of(made.plan, None)
    return request.ended(Result(Ending(status), chosen(request.config), layout))
