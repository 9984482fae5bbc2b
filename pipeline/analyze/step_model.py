"""The seconds of a step as terms of a linear model, and their fit to measured runs, with intervals."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from pipeline.analyze import comparable
from pipeline.config.parts import Part, flat
from pipeline.plan.division import bucket_of
from pipeline.plan.plan import Plan

Floats = NDArray[np.float64]
BEYOND_SHARED = "contention parameters beyond a shared cache"
SECONDS_OF_GBIT = 8e-9
# The terms that are work of a device, and not of the network.
COMPUTED = ("compute", "contention")
# Of a prediction's interval. A person sees those of an hour together: even where these are independent, fewer than 17
# of 20 hold in one hour of eight with intervals of 90%, in one of sixty with those of 95%.
CONFIDENCE = 0.95
# A run is not taken to repeat more closely than this, whatever its repeats say: they share one life of its processes.
LEAST_SPREAD = 0.02
# What the spread of repeats weighs beside the residuals, in degrees of freedom: the residuals of a few runs say little
# of themselves (the moderated t of Smyth, 2004).
PRIOR_FREEDOM = 4
# Shares what the runs cannot tell apart evenly among its terms; too little to bend what they can.
RIDGE = 1e-5
# That a link takes the time of its bits is left for another rule only where that fits so much better (positive evidence
# by Kass & Raftery, 1995, Bayes factors).
EVIDENCE = 2.0
# How much more an equation weighs that has to hold than those that are fitted.
HOLD = 1e3
# What a model of another size computes differs by about so much from what its number of parameters lets expect; a step
# that was timed is worth a note where it is further off.
SURPRISE = 0.1
# A step that may take so many times as long as predicted is not known at all.
UNKNOWN = 1e3
# How closely the ends of an interval are found, as a logarithm.
EDGE = 5e-5


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

    With `apart`, links within a host and between hosts have coefficients of their own. The link between hosts takes the
    time that its bits need, beside what the bytes cost at both ends (`by_wire`), or a multiple of that (`by_link`).
    From `cached` parameters on, each costs more the more there are. As many as `shared` have room in the caches that a
    host's devices share; with `each_contends`, devices take something from each other for each parameter all the same.
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
    on_host = Counter(process.host for process in training for _ in process.replicas)
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


def terms(case: Case, shape: Shape) -> dict[str, float]:
    """The terms of a step's time, by a name that begins with the part that they are of."""
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
    """
    return max(rest + wire / buckets, rest * (1 + 2 / buckets) / 3 + wire)


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


@dataclass(frozen=True)
class Fit:
    """A model of step time that was fitted: names of its terms, coefficients, and the equations they were fitted to.

    `factor` is what a model of another size computes over what was fitted, `factor_spread` its relative standard
    deviation, above 0 where one equation is that which it was found by.
    """

    names: tuple[str, ...]
    coefficients: Floats
    rows: Floats
    target: Floats
    chi_square: float
    shape: Shape
    spread: float
    factor: float = 1.0
    factor_spread: float = 0.0

    @property
    def told_apart(self) -> int:
        """The number of coefficients above 0 that the equations tell apart."""
        return int(np.linalg.matrix_rank(self.rows[:, self.coefficients > 0]))

    def query(self, step_terms: Mapping[str, float]) -> Floats:
        """The factor of each coefficient in a step that has these terms."""
        factors = [self.factor if name.startswith(COMPUTED) else 1.0 for name in self.names]
        return np.asarray([step_terms.get(name, 0.0) for name in self.names]) * factors

    @property
    def scale(self) -> float:
        """The variance of a residual over that which the repeats let expect."""
        freedom = max(0, len(self.target) - (self.factor_spread > 0) - self.told_apart)
        return (PRIOR_FREEDOM + self.chi_square) / (PRIOR_FREEDOM + freedom)


def fit(runs: Sequence[Observed], linked: bool, shared: float | None = None) -> tuple[list[tuple[float, Fit]], Fit]:
    """Fits step times by weighted non-negative least squares on relative residuals.

    Returns fits with how likely each is, which adds up to 1, and one that allows for what the runs do not rule out:
    that of a larger model, each parameter costs more. Each has the simplest shape that the runs allow (by the criterion
    of Schwarz, 1978). There are two where runs went beyond the `shared` parameters that have room in a host's caches:
    devices contend for that, or for each parameter. With `linked`, the speed of all links between hosts is known.
    """
    sizes = sorted({run.case.parameters for run in runs})
    larger = max(1, sizes[0]) if len(sizes) > 1 else None
    allowed, shapes = Shape(cached=larger, shared=shared), [Shape(), Shape(cached=larger)]
    if any(terms(run.case, allowed).get(BEYOND_SHARED) for run in runs):
        shapes.insert(0, Shape(shared=shared, each_contends=False))
    links = [{"by_wire": True}, {"by_link": True}] if linked else [{}]
    fits = [
        _fit(runs, replace(shape, apart=apart, **link)) for shape in shapes for link in links for apart in (False, True)
    ]
    alike = comparable.grouped((bool(model.shape.shared), model) for model in fits)
    likely = [min(similar, key=_criterion) for similar in alike.values()]
    # Of two that fit the runs as well, each is half (Raftery, 1995, Bayesian model selection in social research).
    best = min(likely, key=_criterion)
    weights = [math.exp((_criterion(best) - _criterion(model)) / 2) for model in likely]
    shares = [weight / sum(weights) for weight in weights]
    widest = replace(best.shape, cached=larger, shared=shared, each_contends=True)
    return list(zip(shares, likely, strict=True)), _fit(runs, widest)


def anchored(model: Fit, timed: Observed) -> Fit | None:
    """The fit for models of the size of `timed`, one worker's step of which was timed; None where it says nothing.

    What such a model computes takes a factor of what was fitted to others, however many workers there are. Of how far
    it is from 1, as much is kept as the timed step's own luck does not explain, and nearly all of what surprises
    (empirical Bayes; Efron & Morris, 1973).
    """
    of_timed = terms(timed.case, model.shape)
    seconds = model.query(of_timed) * model.coefficients
    computed = np.asarray([name.startswith(COMPUTED) for name in model.names])
    own, rest = float(seconds[computed].sum()), float(seconds[~computed].sum())
    if own <= 0 or timed.seconds <= rest:
        return None
    luck = _moderated(max(LEAST_SPREAD, timed.spread), model.spread) ** 2 / timed.runs
    of_fit = model.told_apart / float(model.target @ model.target)
    off = math.log((timed.seconds - rest) / own)
    share = 1 - luck / max(SURPRISE**2 + of_fit + luck, off**2)
    scaled = replace(model, factor=math.exp(share * off), factor_spread=math.sqrt(share * luck))
    weight, query = 1 / scaled.factor_spread, scaled.query(of_timed)
    row = query * weight / float(query @ model.coefficients)
    return replace(scaled, rows=np.vstack([model.rows, row]), target=np.append(model.target, weight))


def _criterion(model: Fit) -> float:
    count = len(model.target)
    fits = count * math.log(1 + model.chi_square / count) + math.log(count) * model.told_apart
    return fits + EVIDENCE * model.shape.by_link


def _fit(runs: Sequence[Observed], shape: Shape) -> Fit:
    of_runs = [terms(run.case, shape) for run in runs]
    names = tuple(dict.fromkeys(name for of_run in of_runs for name, value in of_run.items() if value))
    pooled = max(LEAST_SPREAD, float(np.median([run.spread for run in runs])))
    weights = np.asarray([math.sqrt(run.runs) / _moderated(max(LEAST_SPREAD, run.spread), pooled) for run in runs])
    seconds = np.asarray([run.seconds for run in runs])
    rows = np.asarray([[of_run.get(name, 0.0) for name in names] for of_run in of_runs]) * (weights / seconds)[:, None]
    # Without the wire's seconds, as `with_wire` adds them.
    parts = [(run.seconds, on_wire(run.case, shape), run.case.buckets) for run in runs]
    rest = [min(step - wire / count, (step - wire) * 3 / (1 + 2 / count)) for step, wire, count in parts]
    target = weights * np.asarray(rest) / seconds
    coefficients, chi_square = _non_negative(rows, target)
    return Fit(names, coefficients, rows, target, chi_square, shape, pooled)


def _moderated(spread: float, pooled: float) -> float:
    """A run's spread, drawn to that of all: five repeats say little of their own."""
    return math.sqrt((spread**2 + pooled**2) / 2)


def _non_negative(rows: Floats, target: Floats) -> tuple[Floats, float]:
    """(coefficients of 0 or more, sum of squared residuals), the smallest coefficients among those that fit equally."""
    from scipy.optimize import nnls

    scale, count = np.abs(rows).max(axis=0), rows.shape[1]
    scaled = rows / scale
    ridge = np.vstack([scaled, RIDGE * np.eye(count)]), np.concatenate([target, np.zeros(count)])
    solved, _ = nnls(*ridge, maxiter=100 * count)
    return solved / scale, float(np.sum((scaled @ solved - target) ** 2))


def interval(model: Fit, query: Floats, centre: float, off: float) -> tuple[float, float]:
    """(low, high) of the step time with the terms `query`, where the model is `off` by so much itself.

    A run has its own luck besides. These are the times that coefficients of 0 or more allow for which the weighted
    squares are not much larger than at their least (the profile likelihood; Venzon & Moolgavkar, 1988).
    """
    from scipy.optimize import brentq

    quantile, held = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), HOLD * model.target.max()

    def excess(ratio: float) -> float:
        """The squares beyond what the runs allow, for coefficients that add up to exp(ratio) * centre."""
        rows = np.vstack([model.rows, held * query / (centre * math.exp(ratio))])
        return _non_negative(rows, np.append(model.target, held))[1] - model.chi_square - quantile**2 * model.scale

    def edge(end: float) -> float:
        """The last ratio that the runs allow on the way from 0 to an end."""
        if excess(end) <= 0:
            return end
        return float(brentq(excess, 0.0, end, xtol=EDGE)) if excess(0.0) < 0 else 0.0

    # What a step that was timed differs by, and what the model is off there, in the logarithm as all of it.
    own = quantile * math.sqrt(model.scale * model.factor_spread**2 + off**2)
    low, high = edge(-math.log(UNKNOWN)), edge(math.log(UNKNOWN))
    return centre * math.exp(-math.hypot(low, own)), centre * math.exp(math.hypot(high, own))
