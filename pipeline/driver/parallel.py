"""Trains runs of a sweep at once, each in a thread: as jobs of a cluster, or on devices that others leave free."""

import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import InitVar, dataclass, replace
from pathlib import Path

from pipeline.driver import RunResult, Screen, start
from pipeline.driver.requests import Requests
from pipeline.driver.session import Key, Preemption, RunRequest, Session, cluster_key
from pipeline.launch import AT_ONCE, JOBS, Cluster, Job, LaunchError
from pipeline.launch.signals import Interrupted
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan, Process

# The output of a run, in its folder.
LOG = "driver.log"
POLL_SECONDS = 0.2
# For runs to end once the command does.
END_SECONDS = 60.0

Clusters = dict[str, Cluster]
# A part of this machine: the numbers of cores, and of GPUs as the machine's devices are numbered, each with its kind.
Part = frozenset[tuple[str, int]]
CORE, GPU = "core", "GPU"


def whole(machine: Machine) -> Part:
    """All of a machine."""
    gpus = range(len(machine.gpus))
    return frozenset([*((CORE, core) for core in machine.cores), *((GPU, gpu) for gpu in gpus)])


def numbers(part: Part, kind: str) -> list[int]:
    """The numbers of a part's cores or GPUs."""
    return sorted(number for name, number in part if name == kind)


def part_for(plan: Plan, free: Part, everything: Part) -> Part | None:
    """A part of what is free that a plan can have for itself, all where it takes any core; None where it needs more."""
    gpus = sum(device.startswith("GPU:") for process in plan.processes for device in process.devices)
    if not gpus and (plan.hardware.kind != "cpu" or not all(process.cores for process in plan.processes)):
        return everything if free == everything else None
    kind, count = (GPU, gpus) if gpus else (CORE, sum(len(process.cores) for process in plan.processes))
    part = frozenset((kind, number) for number in numbers(free, kind)[:count])
    return part if len(part) == count else None


@dataclass(eq=False)
class _Share(Cluster):
    """This machine as a cluster, of which a plan gets `part`, whichever cores and GPUs it names."""

    _cluster: Cluster
    _part: Part

    def inventory(self) -> Machine:
        # A plan does not change with what others leave free.
        return self._cluster.inventory()

    def warm_up(self) -> None:
        self._cluster.warm_up()

    def addresses(self, plan: Plan) -> Sequence[str]:
        return self._cluster.addresses(plan)

    def start(self, plan: Plan, group: str, folder: Path) -> Job:
        return self._cluster.start(moved(plan, whole(self.inventory()), self._part), group, folder)

    def close(self, code: int) -> None:
        """Nothing: the others go on with the machine."""


def moved(plan: Plan, everything: Part, part: Part) -> Plan:
    """The plan on the first, second and so on of a part's cores and GPUs in place of those of the whole machine."""
    both = [zip(numbers(everything, kind), numbers(part, kind), strict=False) for kind in (CORE, GPU)]
    cores, gpus = dict(both[0]), {f"GPU:{at}": f"GPU:{gpu}" for at, gpu in both[1]}

    def there(process: Process) -> Process:
        on = tuple(cores.get(core, core) for core in process.cores)
        return replace(process, cores=on, devices=tuple(gpus.get(device, device) for device in process.devices))

    return replace(plan, processes=tuple(map(there, plan.processes)))


@dataclass(eq=False)
class Parallel:
    """Runs at once, no more than `_at_once`, each in a thread; `_opened` opens the screen of one at a path.

    `_begun` and `_ended` are called by the thread that calls `run`, which alone uses all but the clusters under way.
    """

    requests: InitVar[Requests]
    _session: Session
    _at_once: int
    _opened: Callable[[Path], AbstractContextManager[Screen]]
    _begun: Callable[[Key, RunRequest], None]
    _ended: Callable[[Key, RunResult, float], None]
    _over: bool = False

    def __post_init__(self, requests: Requests) -> None:
        self._waiting = dict(requests.to_run)
        # The part and the clusters of each run under way, jobs whose run has finished, and those that are being ended.
        self._in_use: dict[Key, tuple[Part, Clusters]] = {}
        self._idle: list[tuple[str, Cluster]] = []
        self._ending: list[threading.Thread] = []
        self._free = self._everything = Part()
        # Of runs that have ended: results, or what they raised, and seconds.
        self._results: queue.SimpleQueue[tuple[Key, RunResult | BaseException, float]] = queue.SimpleQueue()

    def run(self) -> None:
        """Trains all of them. Raises what one raises."""
        session = self._session
        # A scheduler's signal lets those under way end by themselves.
        session.busy = True
        try:
            while self._in_use or (self._waiting and not session.preemption.asked):
                self._begin()
                with suppress(queue.Empty):
                    key, result, seconds = self._results.get(timeout=POLL_SECONDS)
                    self._give_back(key)
                    if isinstance(result, BaseException):
                        raise result
                    self._ended(key, result, seconds)
        except BaseException as error:
            # Those under way end as well.
            self._waiting.clear()
            session.preemption.ending = error.number if isinstance(error, Interrupted) else signal.SIGTERM
            until = time.monotonic() + END_SECONDS
            while self._in_use and (left := until - time.monotonic()) > 0:
                with suppress(queue.Empty):
                    self._give_back(self._results.get(timeout=left)[0])
            raise
        finally:
            self._over = True
            for job in self._idle:
                self._close(dict([job]), 0)
            for _, clusters in self._in_use.values():
                self._close(clusters, 1)
            for thread in self._ending:
                thread.join()
            session.busy = False

    def _begin(self) -> None:
        """Begins the runs that there is room for, in order."""
        for key in list(self._waiting):
            if len(self._in_use) >= self._at_once or self._session.preemption.asked:
                return
            if (part := self._room(key)) is None:
                continue
            request = self._waiting.pop(key)
            self._begun(key, request)
            self._free -= part
            _, clusters = self._in_use[key] = part, Clusters()
            if job := next((job for job in self._idle if job[0] == cluster_key(request.config)), None):
                self._idle.remove(job)
                clusters.update([job])
            threading.Thread(target=self._work, args=(key, request, part, clusters), daemon=True).start()

    def _room(self, key: Key) -> Part | None:
        """The part of this machine for a run, an empty one if it needs none; None if there is no room for it."""
        request = self._waiting[key]
        of_job = AT_ONCE[request.config.cluster.name] == JOBS
        if request.plan is None and not of_job:
            validated = start.validate(request, self._session)
            request = self._waiting[key] = request if isinstance(validated, RunResult) else validated
        if request.plan is None or of_job:
            return Part()
        if not self._everything:
            self._free = self._everything = whole(self._session.cluster(request.config).inventory())
        return part_for(request.plan, self._free, self._everything)

    def _give_back(self, key: Key) -> None:
        """Lets others have the room and the jobs of a run that has ended; jobs that none of them needs end."""
        part, clusters = self._in_use.pop(key)
        self._free |= part
        needed = {cluster_key(request.config) for request in self._waiting.values()}
        jobs = [*self._idle, *clusters.items()]
        self._idle = [job for job in jobs if job[0] in needed]
        for job in jobs:
            if job[0] not in needed:
                self._close(dict([job]), 0)

    def _work(self, key: Key, request: RunRequest, part: Part, clusters: Clusters) -> None:
        began = time.monotonic()
        try:
            result: RunResult | BaseException = self._train(request, part, clusters)
        except BaseException as error:
            result = error
        if self._over:
            # Nobody is left who would end it.
            _close(clusters, 1, self._session.screen)
        self._results.put((key, result, time.monotonic() - began))

    def _train(self, request: RunRequest, part: Part, clusters: Clusters) -> RunResult:
        session, plan, result = self._session, request.plan, None
        preemption, of_job = session.preemption, AT_ONCE[request.config.cluster.name] == JOBS
        if of_job:
            # A scheduler's signal to one job is none to another.
            request, preemption = replace(request, plan=None), Preemption(session.preemption)
        else:
            clusters[cluster_key(request.config)] = _Share(session.cluster(request.config), part)
            if plan is not None:
                note = f"Up to {self._at_once} points ran at once on this machine: they share its memory's bandwidth."
                request = replace(request, plan=replace(plan, notes=(*plan.notes, note)))
        with self._opened(request.folder / LOG) as screen:
            try:
                own = own_session(session, screen, clusters, preemption)
                own.serve(request.config)
                result = start.run(request, own)
            finally:
                if result is None or not result.result.finished or not of_job:
                    _close(clusters, int(result is None), screen)
            for job in clusters.values():
                # Until another run has it, it has no screen.
                job.serve(lambda text: None, lambda: None)
        return result

    def _close(self, clusters: Clusters, code: int) -> None:
        """Ends jobs with an exit code, while others go on."""
        self._ending.append(threading.Thread(target=_close, args=(clusters, code, self._session.screen)))
        self._ending[-1].start()


def own_session(session: Session, screen: Screen, clusters: Clusters, preemption: Preemption) -> Session:
    """The session of one run: a screen, a preemption and clusters of its own."""
    own = replace(session, open_screen=lambda: screen, preemption=preemption, _clusters=clusters)
    return replace(own, busy=True, ahead=None)


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
