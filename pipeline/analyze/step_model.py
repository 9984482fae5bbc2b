"""The seconds of a step as terms of a linear model: work, contention, exchange, calls."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.analyze import comparable
from pipeline.analyze.history import TimedRun
from pipeline.config.parts import Part, flat
from pipeline.plan.division import bucket_of
from pipeline.plan.plan import Plan

# Of the median polish, which soon changes nothing more.
POLISHED = 20
Floats = NDArray[np.float64]
# The model is off by about so much at twice, or half, of the workers, batch or parameters of the nearest run, and more
# further away as a random walk is.
DRIFT_OF_DOUBLING = 0.03
BEYOND_SHARED = "contention parameters beyond a shared cache"
SECONDS_OF_GBIT = 8e-9


@dataclass(frozen=True)
class Case:
    """The facts that decide the time of a step: `fullest` is the most devices of a host, `together` of a process."""

    workers: int
    replica_batch: int
    parameters: int
    gradient_bytes: int
    hosts: int
    fullest: int
    together: int
    servers: int
    exchange: str
    kind: str
    link_gbps: float | None
    # In which gradients leave for other hosts while backpropagation makes others.
    buckets: int = 1

    @property
    def examples(self) -> int:
        """The examples of a step of all workers, also where each makes steps of its own."""
        return self.workers * self.replica_batch


@dataclass(frozen=True)
class Observed:
    """A case as so many runs measured it: median step time in seconds, and relative spread of repeats."""

    case: Case
    seconds: float
    spread: float
    runs: int = 1


@dataclass(frozen=True)
class Shape:
    """The terms that a model of step time has.

    With `apart`, links within a host and between hosts have coefficients of their own. The link between hosts, where
    its speed is known of all, takes the time that its bits need, beside what the bytes cost at both ends (`by_wire`),
    or bytes take a time that is a multiple of that (`by_link`). From `cached` parameters on, each costs more the more
    there are; None: each costs the same. So many parameters as `shared` have room in the caches that a host's devices
    share, with all that a step goes through of each; None: that is not known. With `each_contends`, devices take
    something from each other for each parameter, whether there is room for it or not.
    """

    apart: bool = False
    by_link: bool = False
    by_wire: bool = False
    cached: int | None = None
    shared: float | None = None
    each_contends: bool = True


def identity(plan: Plan) -> str:
    """Names what decides a plan's throughput: a run of the same scores a prediction."""
    facts = comparable.of_step(plan) | flat(plan, Part.PREDICTION)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def case_of(plan: Plan, parameters: int) -> Case:
    """The case of a plan whose model has so many parameters."""
    training = [process for process in plan.processes if process.replicas]
    on_host: Counter[int] = Counter()
    for process in training:
        on_host[process.host] += len(process.replicas)
    gradient_bytes = parameters * plan.training.gradient_bits // 8
    return Case(
        workers=plan.workers,
        replica_batch=plan.training.replica_batch,
        parameters=parameters,
        gradient_bytes=gradient_bytes,
        hosts=plan.hardware.hosts,
        fullest=max(on_host.values()),
        together=max(len(process.replicas) for process in training),
        servers=max(1, len(plan.ranks("parameter server"))),
        exchange=plan.strategy.exchange or "",
        kind=plan.hardware.kind,
        link_gbps=plan.hardware.link_gbps,
        buckets=max(1, gradient_bytes // max(1, bucket_of(gradient_bytes, plan.bucket_bytes))),
    )


def observed(runs: Sequence[TimedRun]) -> list[Observed]:
    """The measured cases of runs that timed their steps."""
    in_order = sorted(runs, key=lambda timed_run: timed_run.run.measured_at or 0.0)
    cases = [case_of(timed_run.plan, timed_run.parameters) for timed_run in in_order]
    repeats = [timed_run.run.repeats for timed_run in in_order]
    return of_repeats(
        cases, [[case.examples / rate for rate in rates] for case, rates in zip(cases, repeats, strict=True)]
    )


def of_repeats(cases: Sequence[Case], seconds: Sequence[Sequence[float]]) -> list[Observed]:
    """The same from the cases of runs in order of time, and the step times of each one's repeats."""
    slower = drift(cases, [float(np.median(of_run)) for of_run in seconds])
    timed = comparable.grouped(zip(cases, zip(seconds, slower, strict=True), strict=True))
    return [joined_runs(case, many) for case, many in timed.items()]


def drift(cases: Sequence[Hashable], seconds: Sequence[float]) -> list[float]:
    """The time of each run as a multiple of the usual one, since machines are slower or faster at times.

    `cases` are what runs are of, in order of time, and `seconds` what a step took in each. A round is of runs that
    follow each other until a case comes again; what all cases of a round share is drift (the median polish of Tukey,
    1977, *Exploratory data analysis*, of logarithms).

    >>> [round(factor, 3) for factor in drift("abab", [1.0, 2.0, 1.21, 2.42])]
    [0.909, 0.909, 1.1, 1.1]
    """
    rounds: list[int] = []
    this, number = set[Hashable](), 0
    for case in cases:
        if case in this:
            this, number = set(), number + 1
        this.add(case)
        rounds.append(number)
    left = np.log(seconds)
    shared = np.zeros(len(cases))
    for _ in range(POLISHED):
        left -= _middles(left, cases)
        of_round = _middles(left, rounds)
        left -= of_round
        shared += of_round
    return [float(factor) for factor in np.exp(shared - np.median(shared))]


def _middles(values: Floats, groups: Sequence[Hashable]) -> Floats:
    every = comparable.grouped(zip(groups, values, strict=True))
    middles = {group: np.median(of_group) for group, of_group in every.items()}
    return np.asarray([middles[group] for group in groups])


def joined_runs(case: Case, runs: Sequence[tuple[Sequence[float], float]]) -> Observed:
    """Runs of one case, each its repeats and its drift: the time of a step without drift, and its spread with it."""
    medians = [float(np.median(seconds)) for seconds, _ in runs]
    middle = float(np.median(medians))
    spread = spread_of(np.concatenate([seconds for seconds, _ in runs]), middle)
    usual = float(np.median([median / slower for median, (_, slower) in zip(medians, runs, strict=True)]))
    return Observed(case, usual, spread, len(runs))


def spread_of(seconds: Sequence[float] | Floats, middle: float) -> float:
    """The median deviation from the middle, as the relative standard deviation of a normal distribution.

    One slow repeat does not decide.

    >>> round(spread_of([0.9, 1.0, 1.1, 5.0, 1.0], 1.0), 3)
    0.148
    """
    return 1.4826 * float(np.median(np.abs(np.asarray(seconds) - middle))) / middle


def one_run(case: Case, lives: Sequence[Sequence[float]]) -> Observed:
    """A step that was timed in several lives of its process, which follow each other and so share a run's luck."""
    return replace(joined_runs(case, [(seconds, 1.0) for seconds in lives]), runs=1)


def terms(case: Case, shape: Shape) -> dict[str, float]:
    """The terms of a step's time, by a name that begins with the part that they are of.

    >>> ring = Case(4, 64, 1000, 4000, 4, 1, 1, 1, "all_reduce", "gpu", None)
    >>> [(name, value) for name, value in terms(ring, Shape()).items() if "communication" in name]
    [('communication latency', 6), ('communication bytes', 6000.0)]
    """
    # A replica's computing is affine in its batch; that of a model in its parameters, which each example passes
    # through, and each step updates.
    compute = {
        "a step": 1.0,
        "parameters": float(case.parameters),
        "examples": float(case.replica_batch),
        "parameters x examples": float(case.replica_batch) * case.parameters,
    }
    if shape.cached:
        # What no cache holds is read from memory again and again.
        beyond = max(0.0, math.log2(max(1, case.parameters) / shape.cached))
        compute["parameters beyond a cache x examples"] = compute["parameters x examples"] * beyond
    values = {f"compute {name}": value for name, value in compute.items()}
    if case.kind == "cpu":
        # Devices that are slices of one processor take cache and memory bandwidth from each other.
        for name, value in compute.items():
            if shape.each_contends or "parameters" not in name:
                values[f"contention {name}"] = (case.fullest - 1) * value
        if shape.shared:
            # One replica would have had the room to itself.
            room = shape.shared / case.fullest
            values[BEYOND_SHARED] = max(0.0, case.parameters - room) - max(0.0, case.parameters - shape.shared)
    # A process makes the batches of all its devices.
    values["input"] = float(case.replica_batch * case.together)
    latencies, travel = exchanged(case)
    if latencies:
        link = "" if not shape.apart else " within a host" if case.hosts == 1 else " between hosts"
        speed = (case.link_gbps or 1.0) if shape.by_link else 1.0
        values |= {f"communication latency{link}": latencies, f"communication bytes{link}": travel / speed}
    return values


def on_wire(case: Case, shape: Shape) -> float:
    """Seconds that the bits of a step take over the busiest link between hosts, where those are told apart."""
    if not shape.by_wire or case.hosts == 1 or not case.link_gbps:
        return 0.0
    return exchanged(case)[1] * SECONDS_OF_GBIT / case.link_gbps


def with_wire(rest: float, wire: float, buckets: int) -> float:
    """Seconds of a step whose bits take so long on the wire between hosts, and that takes `rest` without that.

    Backpropagation is two thirds of `rest` and makes bucket after bucket. The first can leave once it is made, and the
    last only at the end, so that the step ends when both are done:

        max(rest + wire / buckets, rest (1 + 2 / buckets) / 3 + wire)

    >>> with_wire(3.0, 2.0, buckets=1), with_wire(3.0, 2.0, buckets=4), with_wire(0.3, 2.0, buckets=4)
    (5.0, 3.5, 2.15)
    """
    return max(rest + wire / buckets, rest * (1 + 2 / buckets) / 3 + wire)


def without_wire(seconds: float, wire: float, buckets: int) -> float:
    """Returns the seconds of a step that are left without the wire's.

    >>> without_wire(5.0, 2.0, buckets=1), without_wire(3.5, 2.0, buckets=4), round(without_wire(2.15, 2.0, 4), 9)
    (3.0, 3.0, 0.3)
    """
    return min(seconds - wire / buckets, (seconds - wire) * 3 / (1 + 2 / buckets))


def exchanged(case: Case) -> tuple[float, float]:
    """(messages that wait for each other, bytes over the busiest link) of a step of all workers."""
    count, size = case.workers, case.gradient_bytes
    if case.exchange == "parameter_server":
        # Every worker reads the parameters from the servers and sends them gradients.
        return 2, count * (4 * case.parameters + size) / case.servers
    if count == 1 or case.exchange == "none":
        return 0, 0
    if case.exchange == "central":
        return 2 * (count - 1), count * 4 * case.parameters + 2 * (count - 1) * size + size
    if case.together == count and case.kind == "cpu":
        # TensorFlow's ReductionToOneDevice, as in `estimate`.
        return 2 * (count - 1), 2 * (count - 1) * size
    # A ring's 2 (n - 1) messages, which move 2 (n - 1) / n of the bytes over each link (Patarasuk & Yuan, 2009;
    # Thakur, Rabenseifner & Gropp, 2005).
    return 2 * (count - 1), 2 * (count - 1) / count * size
