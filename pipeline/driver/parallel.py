"""Trains runs of a sweep at once, each in a thread: as jobs of a cluster, or on devices that others leave free.

Their output goes into a file of their folders. The calling thread gets signals, and makes the others end. The job of a
run that has finished takes the next one with the same cluster, as in turn.
"""

import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.driver import RunResult, Screen, start
from pipeline.driver.requests import Requests
from pipeline.driver.session import Key, Preemption, RunRequest, Session, cluster_key
from pipeline.launch import AT_ONCE, DEVICES, JOBS, Cluster, Job, LaunchError
from pipeline.launch.signals import Interrupted
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan, Process

LOG = "driver.log"
POLL_SECONDS = 0.2
# For runs to end once the command does.
END_SECONDS = 60.0

Open = Callable[[Path], AbstractContextManager[Screen]]
Begun = Callable[[Key, RunRequest], None]
Ended = Callable[[Key, RunResult, float], None]
Clusters = dict[str, Cluster]


@dataclass(frozen=True)
class CoreShare:
    """A part of this machine: numbers of cores, and of GPUs as the machine's devices are numbered."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()

    def without(self, other: "CoreShare") -> "CoreShare":
        """Returns what is left of it."""
        cores = tuple(core for core in self.cores if core not in other.cores)
        return CoreShare(cores, tuple(gpu for gpu in self.gpus if gpu not in other.gpus))

    def joined(self, other: "CoreShare") -> "CoreShare":
        """Both of them."""
        return CoreShare(tuple(sorted((*self.cores, *other.cores))), tuple(sorted((*self.gpus, *other.gpus))))


def whole(machine: Machine) -> CoreShare:
    """All of a machine."""
    return CoreShare(machine.cores, tuple(range(len(machine.gpus))))


def part_for(plan: Plan, free: CoreShare, everything: CoreShare) -> CoreShare | None:
    """A part of what is free that a plan can have for itself; None where it needs more.

    A plan whose processes take any core leaves nothing beside it, unless it computes on GPUs.
    """
    gpus = [device for process in plan.processes for device in process.devices if device.startswith("GPU:")]
    if gpus:
        return CoreShare((), free.gpus[: len(gpus)]) if len(gpus) <= len(free.gpus) else None
    cores = sum(len(process.cores) for process in plan.processes)
    if plan.hardware.kind != "cpu" or not all(process.cores for process in plan.processes):
        return everything if free == everything else None
    return CoreShare(free.cores[:cores]) if cores <= len(free.cores) else None


class Share(Cluster):
    """This machine as a cluster, of which a plan gets `part`, whichever cores and GPUs it names."""

    def __init__(self, cluster: Cluster, part: CoreShare) -> None:
        self._cluster, self._part = cluster, part

    def inventory(self) -> Machine:
        """All of this machine: a plan does not change with what others leave free."""
        return self._cluster.inventory()

    def warm_up(self) -> None:
        """Begins the imports of its processes."""
        self._cluster.warm_up()

    def addresses(self, plan: Plan) -> Sequence[str]:
        """Free ports."""
        return self._cluster.addresses(plan)

    def start(self, plan: Plan, group: str, folder: Path) -> Job:
        """Forks the plan's processes, on cores and GPUs of this part."""
        return self._cluster.start(moved(plan, whole(self.inventory()), self._part), group, folder)

    def close(self, code: int) -> None:
        """Nothing: the others go on with the machine."""


def moved(plan: Plan, everything: CoreShare, part: CoreShare) -> Plan:
    """The plan on the first, second and so on of a part's cores and GPUs in place of those of the whole machine.

    >>> CoreShare((4, 5, 6)).without(CoreShare((5,)))
    CoreShare(cores=(4, 6), gpus=())
    """
    cores = dict(zip(everything.cores, part.cores, strict=False)) or {core: core for core in everything.cores}
    gpus = {f"GPU:{at}": f"GPU:{gpu}" for at, gpu in zip(everything.gpus, part.gpus, strict=False)}

    def there(process: Process) -> Process:
        on = tuple(cores[core] for core in process.cores)
        return replace(process, cores=on, devices=tuple(gpus.get(device, device) for device in process.devices))

    return replace(plan, processes=tuple(map(there, plan.processes)))


class Parallel:
    """Runs at once, no more than `at_once`; `opened` opens the screen of one at a path.

    `begun` and `ended` are called for each, with its seconds, by the thread that calls `run`.
    """

    def __init__(
        self, requests: Requests, session: Session, at_once: int, opened: Open, begun: Begun, ended: Ended
    ) -> None:
        self._session, self._opened, self._begun, self._ended = session, opened, begun, ended
        # Guards what follows. Once it is over, no run takes a job any more.
        self._changed, self._over = threading.Condition(), False
        self._waiting = dict(requests.to_run)
        self._free: CoreShare | None = None
        self._everything = CoreShare()
        # Jobs whose run has finished, and the clusters of the run of each thread.
        self._idle: list[tuple[str, Cluster]] = []
        self._in_use = [Clusters() for _ in range(at_once)]
        self._threads = [threading.Thread(target=self._work, args=(used,), daemon=True) for used in self._in_use]
        # What threads have the calling one do or raise; None once they end.
        self._events: queue.SimpleQueue[Callable[[], None] | BaseException | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Trains all of them. Raises what one raises."""
        # A scheduler's signal lets those under way end by themselves.
        self._session.busy = True
        try:
            for thread in self._threads:
                thread.start()
            for _ in self._threads:
                while event := self._events.get():
                    if isinstance(event, BaseException):
                        raise event
                    event()
        except BaseException as error:
            self._end(error.number if isinstance(error, Interrupted) else signal.SIGTERM)
            raise
        finally:
            self._end_jobs()
            self._session.busy = False

    def _work(self, clusters: Clusters) -> None:
        try:
            while following := self._next():
                self._train(*following, clusters)
        except BaseException as error:
            self._events.put(error)
        self._events.put(None)

    def _next(self) -> tuple[Key, RunRequest, CoreShare] | None:
        """The next run that there is room for, in order, with its part of this machine; None once no other begins."""
        with self._changed:
            while self._waiting and not self._session.preemption.asked:
                for key in list(self._waiting):
                    request = self._waiting[key] = self._validated(self._waiting[key])
                    if (part := self._room(request)) is not None:
                        del self._waiting[key]
                        self._free = self._free and self._free.without(part)
                        self._events.put(partial(self._begun, key, request))
                        return key, request, part
                self._changed.wait(POLL_SECONDS)
        return None

    def _validated(self, request: RunRequest) -> RunRequest:
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

    def _train(self, key: Key, request: RunRequest, part: CoreShare, clusters: Clusters) -> None:
        began, session, result = time.monotonic(), self._session, None
        try:
            if _kind(request) == DEVICES:
                request, preemption = self._on_devices(request, part, clusters), session.preemption
            else:
                # A scheduler's signal to one job is none to another.
                request, preemption = replace(request, planned=None), Preemption(session.preemption)
                self._take_job(request, clusters)
            with self._opened(request.folder / LOG) as screen:
                try:
                    own = own_session(session, screen, clusters, preemption)
                    own.serve(request.config)
                    result = start.run(request, own)
                finally:
                    if result is None or not result.result.finished or _kind(request) != JOBS:
                        _close(clusters, int(result is None), screen)
                for job in clusters.values():
                    # Until another run has it, it has no screen.
                    job.serve(lambda text: None, lambda: None)
            self._events.put(partial(self._ended, key, result, time.monotonic() - began))
        finally:
            self._give_back(part, clusters)

    def _on_devices(self, request: RunRequest, part: CoreShare, clusters: Clusters) -> RunRequest:
        share = clusters[cluster_key(request.config)] = Share(self._session.cluster(request.config), part)
        planned = request.planned
        if planned is None:
            return request
        note = f"Up to {len(self._threads)} points ran at once on this machine: they share its memory's bandwidth."
        plan = replace(planned.plan, notes=(*planned.plan.notes, note))
        return replace(request, planned=replace(planned, plan=plan, cluster=share))

    def _take_job(self, request: RunRequest, clusters: Clusters) -> None:
        with self._changed:
            job = next((job for job in self._idle if job[0] == cluster_key(request.config)), None)
            if job is not None:
                self._idle.remove(job)
                clusters.update([job])

    def _give_back(self, part: CoreShare, clusters: Clusters) -> None:
        with self._changed:
            self._free = self._free and self._free.joined(part)
            if not self._over:
                self._idle.extend(clusters.items())
                clusters.clear()
            needed = {cluster_key(request.config) for request in self._waiting.values()}
            unneeded = [job for job in self._idle if job[0] not in needed]
            self._idle = [job for job in self._idle if job[0] in needed]
            self._changed.notify_all()
        for job in unneeded:
            _close(dict([job]), 0, self._session.screen)
        _close(clusters, 1, self._session.screen)

    def _end(self, number: int) -> None:
        with self._changed:
            self._waiting.clear()
        self._session.preemption.end(number)
        until = time.monotonic() + END_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    def _end_jobs(self) -> None:
        with self._changed:
            self._over, idle, self._idle = True, self._idle, []
        ends = [(dict([job]), 0) for job in idle] + [(clusters, 1) for clusters in self._in_use]
        ending = [threading.Thread(target=_close, args=(*end, self._session.screen)) for end in ends]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()


def own_session(session: Session, screen: Screen, clusters: Clusters, preemption: Preemption) -> Session:
    """The session of one run: a screen, a preemption and clusters of its own."""
    return replace(
        session, open_screen=lambda: screen, preemption=preemption, busy=True, ahead=None, _clusters=clusters
    )


def _close(clusters: Clusters, code: int, screen: Screen) -> None:
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
