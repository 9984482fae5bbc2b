"""Predicts the throughput of a plan from runs that were logged: a model of step time, fitted, with its interval.

    step = compute + contention + input + communication

Each part is a sum of terms, which are known from the plan, times coefficients, which are fitted and never below 0.
Where one worker's step of the model was timed, computing takes as long as that says, and the fit says what more workers
add. `docs/predicting.md` has the terms and their sources. Arithmetic only; SciPy is imported when something is fitted.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.analyze import comparable, measure
from pipeline.analyze.history import Run
from pipeline.config.parts import Part, fields_of
from pipeline.plan.plan import Plan

Floats = NDArray[np.float64]

CONFIDENCE = 0.9
# A run is not taken to repeat more closely than this, whatever its repeats say: they share one life of its processes.
LEAST_SPREAD = 0.02
# What the spread of repeats weighs beside the residuals, in degrees of freedom: the residuals of a few runs say little
# of themselves (the moderated t of Smyth, 2004).
PRIOR_FREEDOM = 4
# The model is off by about so much at twice, or half, of the workers, batch or parameters of the nearest run, and more
# further away as a random walk is.
DRIFT_OF_DOUBLING = 0.03
# A step that was timed is worth a note where it is further than this from what the runs let expect.
SURPRISE = 0.1
# Shares what the runs cannot tell apart evenly among its terms; too little to bend what they can.
RIDGE = 1e-5
# Of the median polish, which soon changes nothing more.
POLISHED = 20
BEYOND_SHARED = "contention parameters beyond a shared cache"
# How much more an equation weighs that has to hold than those that are fitted.
HOLD = 1e3
# A step that may take so many times as long as predicted is not known at all.
UNKNOWN = 1e3
HALVINGS = 17
SECONDS_OF_GBIT = 8e-9


class PredictError(ValueError):
    """What cannot be predicted: the message says what was expected, received, and what to type instead."""


@dataclass(frozen=True)
class Case:
    """What decides the time of a step: `fullest` is the most devices of one host, `together` of one process."""

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

    @property
    def examples(self) -> int:
        """Of a step of all workers, also where they race and each makes its own."""
        return self.workers * self.replica_batch


@dataclass(frozen=True)
class Observed:
    """What so many runs of a case measured: the median step time in seconds, and the relative spread of repeats."""

    case: Case
    seconds: float
    spread: float
    runs: int = 1


@dataclass(frozen=True)
class Shape:
    """Which terms a model of step time has.

    With `apart`, links within a host and between hosts have coefficients of their own. With `by_link`, bytes are
    divided by the speed of the link, which is known of all. From `cached` parameters on, each costs more the more there
    are; None: each costs the same. So many parameters as `shared` have room in the caches that a host's devices share,
    with all that a step goes through of each; None: that is not known. With `each_contends`, devices take something
    from each other for each parameter, whether there is room for it or not.
    """

    apart: bool = False
    by_link: bool = False
    cached: int | None = None
    shared: float | None = None
    each_contends: bool = True


@dataclass(frozen=True)
class Prediction:
    """Examples per second with an interval, `parts` of the step time as shares, and what it was fitted on."""

    examples_per_second: float
    low: float
    high: float
    confidence: float
    step_seconds: float
    parts: Mapping[str, float]
    fitted_on: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def identity(values: Mapping[str, Any]) -> str:
    """Names what decides a plan's throughput, from `Plan.to_json`'s values: a run of the same scores a prediction."""
    facts = comparable.of_step(values) | {name: values.get(name) for name in fields_of(Plan, Part.PREDICTION)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def case_of(plan: Mapping[str, Any], parameters: int) -> Case:
    """What decides the step time, from `Plan.to_json`'s values and the number of the model's parameters."""
    training = [process for process in plan["processes"] if process["replicas"]]
    on_host: Counter[int] = Counter()
    for process in training:
        on_host[process["host"]] += len(process["replicas"])
    return Case(
        workers=plan["workers"],
        replica_batch=plan["replica_batch"],
        parameters=parameters,
        gradient_bytes=parameters * plan["gradient_bits"] // 8,
        hosts=plan["hosts"],
        fullest=max(on_host.values()),
        together=max(len(process["replicas"]) for process in training),
        servers=max(1, sum(process["role"] == "parameter server" for process in plan["processes"])),
        exchange=plan["exchange"] or "",
        kind=plan["kind"],
        link_gbps=plan.get("link_gbps"),
    )


def observed(runs: Sequence[Run]) -> list[Observed]:
    """What runs that timed their steps say of each case that they are of."""
    in_order = sorted(runs, key=lambda run: run.measured_at or 0.0)
    cases = [case_of(run.plan, run.result["parameters"]) for run in in_order]
    seconds = [[case.examples / each for each in run.repeats] for case, run in zip(cases, in_order, strict=True)]
    slower = drift(cases, [float(np.median(each)) for each in seconds])
    timed: dict[Case, list[tuple[Sequence[float], float]]] = {}
    for case, each, factor in zip(cases, seconds, slower, strict=True):
        timed.setdefault(case, []).append((each, factor))
    return [_joined(case, many) for case, many in timed.items()]


def drift(cases: Sequence[Hashable], seconds: Sequence[float]) -> list[float]:
    """How many times as long as usual each run took, since the machine was slower or faster then.

    `cases` are what runs are of, in order of time, and `seconds` what a step took in each. A round is of runs that
    follow each other until a case comes again; what all cases of a round share is drift (the median polish of Tukey,
    1977, *Exploratory data analysis*, of logarithms).

    >>> [round(each, 3) for each in drift("abab", [1.0, 2.0, 1.21, 2.42])]
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
    return [float(each) for each in np.exp(shared - np.median(shared))]


def _middles(values: Floats, groups: Sequence[Hashable]) -> Floats:
    """For each value the median of its group."""
    every: dict[Hashable, list[float]] = {}
    for group, value in zip(groups, values, strict=True):
        every.setdefault(group, []).append(float(value))
    middles = {group: np.median(of_group) for group, of_group in every.items()}
    return np.asarray([middles[group] for group in groups])


def _joined(case: Case, runs: Sequence[tuple[Sequence[float], float]]) -> Observed:
    """Runs of one case, each its repeats and its drift: the time of a step without drift, and its spread with it."""
    medians = [float(np.median(seconds)) for seconds, _ in runs]
    middle = float(np.median(medians))
    # The median's deviation, as the standard deviation of a normal distribution: one slow repeat does not decide.
    every = np.concatenate([seconds for seconds, _ in runs])
    spread = 1.4826 * float(np.median(np.abs(every - middle))) / middle
    usual = float(np.median([each / slower for each, (_, slower) in zip(medians, runs, strict=True)]))
    return Observed(case, usual, spread, len(runs))


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
    made = {f"compute {name}": value for name, value in compute.items()}
    if case.kind == "cpu":
        # Devices that are slices of one processor take cache and memory bandwidth from each other.
        for name, value in compute.items():
            if shape.each_contends or "parameters" not in name:
                made[f"contention {name}"] = (case.fullest - 1) * value
        if shape.shared:
            # One replica would have had the room to itself.
            room = shape.shared / case.fullest
            made[BEYOND_SHARED] = max(0.0, case.parameters - room) - max(0.0, case.parameters - shape.shared)
    # A process makes the batches of all its devices.
    made["input"] = float(case.replica_batch * case.together)
    latencies, travel = _exchanged(case)
    if latencies:
        link = "" if not shape.apart else " within a host" if case.hosts == 1 else " between hosts"
        speed = (case.link_gbps or 1.0) if shape.by_link else 1.0
        made |= {f"communication latency{link}": latencies, f"communication bytes{link}": travel / speed}
    return made


def _exchanged(case: Case) -> tuple[float, float]:
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
    """A model of step time that was fitted: names of its terms, coefficients, and the equations they were fitted to."""

    names: tuple[str, ...]
    coefficients: Floats
    rows: Floats
    target: Floats
    chi_square: float
    shape: Shape
    spread: float
    # Of what a model of another size computes, over what was fitted, and how sure that is, as a relative standard
    # deviation; one equation is that which it was found by.
    factor: float | None = None
    factor_spread: float = 0.0

    @property
    def told_apart(self) -> int:
        """How many coefficients are more than 0, of those that the equations tell apart."""
        return int(np.linalg.matrix_rank(self.rows[:, self.coefficients > 0]))

    @property
    def freedom(self) -> int:
        """Degrees of freedom that the residuals have."""
        return max(0, len(self.target) - (self.factor is not None) - self.told_apart)

    def query(self, wanted: Mapping[str, float]) -> Floats:
        """What each coefficient is multiplied by in a step that has these terms."""
        return np.asarray(
            [
                wanted.get(name, 0.0) * (self.factor if self.factor is not None and _computed(name) else 1.0)
                for name in self.names
            ]
        )

    @property
    def scale(self) -> float:
        """The variance of a residual over that which the repeats let expect."""
        return (PRIOR_FREEDOM + self.chi_square) / (PRIOR_FREEDOM + self.freedom)


def fit(runs: Sequence[Observed], by_link: bool, shared: float | None = None) -> tuple[list[tuple[float, Fit]], Fit]:
    """Fits step times by weighted non-negative least squares on relative residuals.

    Returns fits with how likely each is, which adds up to 1, and one that allows for what the runs do not rule out:
    that of a larger model, each parameter costs more. Of the shapes that a model can have, each has the simplest,
    unless the runs tell that another one is right (by the criterion of Schwarz, 1978). There are two where runs went
    beyond the `shared` parameters that have room in the caches of a host: that is why devices contend, or they contend
    for each parameter.
    """
    sizes = sorted({run.case.parameters for run in runs})
    larger = max(1, sizes[0]) if len(sizes) > 1 else None
    allowed = Shape(False, by_link, larger, shared)
    told = any(terms(run.case, allowed).get(BEYOND_SHARED) for run in runs)
    known = [replace(allowed, cached=None, each_contends=False)] if told else []
    shapes = [*known, *(Shape(False, by_link, cached) for cached in (None, larger))]
    fits = [_fit(runs, replace(shape, apart=apart)) for shape in shapes for apart in (False, True)]
    alike = [[made for made in fits if bool(made.shape.shared) is there] for there in (True, False)]
    likely = [min(each, key=_criterion) for each in alike if each]
    # Of two that fit the runs as well, each is half (Raftery, 1995, Bayesian model selection in social research).
    best = min(likely, key=_criterion)
    weights = [math.exp((_criterion(best) - _criterion(made)) / 2) for made in likely]
    shares = [weight / sum(weights) for weight in weights]
    return list(zip(shares, likely, strict=True)), _fit(runs, replace(allowed, apart=best.shape.apart))


def anchored(made: Fit, timed: Observed) -> Fit | None:
    """The fit for models of the size of `timed`, one worker's step of which was timed; None where it says nothing.

    What such a model computes takes a factor of what was fitted to others, the same for all numbers of workers; input
    and exchange are as fitted.
    """
    wanted = terms(timed.case, made.shape)
    each = made.query(wanted) * made.coefficients
    computed = np.asarray([_computed(name) for name in made.names])
    own, rest = float(each[computed].sum()), float(each[~computed].sum())
    if own <= 0 or timed.seconds <= rest:
        return None
    weight = math.sqrt(timed.runs) / _moderated(max(LEAST_SPREAD, timed.spread), made.spread)
    found = replace(made, factor=(timed.seconds - rest) / own, factor_spread=1 / weight)
    row = found.query(wanted) * weight / timed.seconds
    return replace(found, rows=np.vstack([made.rows, row]), target=np.append(made.target, weight))


def _computed(term: str) -> bool:
    return term.startswith(("compute", "contention"))


def _criterion(made: Fit) -> float:
    count = len(made.target)
    return count * math.log(1 + made.chi_square / count) + math.log(count) * made.told_apart


def _fit(runs: Sequence[Observed], shape: Shape) -> Fit:
    known = [terms(run.case, shape) for run in runs]
    names = tuple(dict.fromkeys(name for each in known for name, value in each.items() if value))
    pooled = max(LEAST_SPREAD, float(np.median([run.spread for run in runs])))
    weights = np.asarray([math.sqrt(run.runs) / _moderated(max(LEAST_SPREAD, run.spread), pooled) for run in runs])
    seconds = np.asarray([run.seconds for run in runs])
    rows = np.asarray([[each.get(name, 0.0) for name in names] for each in known]) * (weights / seconds)[:, None]
    coefficients, rest = _non_negative(rows, weights)
    return Fit(names, coefficients, rows, weights, rest, shape, pooled)


def _moderated(spread: float, pooled: float) -> float:
    """A run's spread, drawn to that of all: five repeats say little of their own."""
    return math.sqrt((spread**2 + pooled**2) / 2)


def _non_negative(rows: Floats, target: Floats) -> tuple[Floats, float]:
    """(coefficients of 0 or more, sum of squared residuals), the smallest coefficients among those that fit equally."""
    from scipy.optimize import nnls

    scale = np.abs(rows).max(axis=0)
    scaled = rows / scale
    count = scaled.shape[1]
    solved, _ = nnls(
        np.vstack([scaled, RIDGE * np.eye(count)]), np.concatenate([target, np.zeros(count)]), maxiter=100 * count
    )
    rest = float(np.sum((scaled @ solved - target) ** 2))
    return solved / scale, rest


def interval(made: Fit, query: Floats, centre: float, off: float) -> tuple[float, float]:
    """(low, high) of the step time of a run with the terms `query`, where the model is `off` by so much itself.

    Those times that coefficients of 0 or more allow for which the weighted squares are not much larger than at their
    least (the profile likelihood; Venzon & Moolgavkar, 1988). It is wide where the runs do not say.
    """
    from scipy.special import stdtrit

    quantile = float(stdtrit(PRIOR_FREEDOM + made.freedom, (1 + CONFIDENCE) / 2))
    held = HOLD * made.target.max()

    def inside(seconds: float) -> bool:
        """Do the runs allow coefficients that come to so many seconds?"""
        rows = np.vstack([made.rows, held * query / seconds])
        return _non_negative(rows, np.append(made.target, held))[1] - made.chi_square <= quantile**2 * made.scale

    # What one more run differs by, as did a step that was timed, and what the model is off there, in the logarithm as
    # all of it.
    own = quantile * math.sqrt(made.scale * (made.spread**2 + made.factor_spread**2) + off**2)
    low, high = (math.log(_edge(inside, centre, most) / centre) for most in (1 / UNKNOWN, UNKNOWN))
    return centre * math.exp(-math.hypot(low, own)), centre * math.exp(math.hypot(high, own))


def _edge(inside: Any, centre: float, most: float) -> float:
    """The last value that is `inside` on the way from `centre` to so many times of it."""
    near, far = 0.0, math.log(most)
    if inside(centre * most):
        return centre * most
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        near, far = (middle, far) if inside(centre * math.exp(middle)) else (near, middle)
    return centre * math.exp(near)


def predict(
    case: Case, runs: Sequence[Observed], timed: Observed | None = None, shared: float | None = None
) -> tuple[float, float, float, dict[str, float], list[str]]:
    """(step time, low, high, parts as shares, notes) of a case. Raises `PredictError` where the runs say nothing.

    `timed` is a step of one worker, of the same model and replica batch, where none of the runs has that size. So many
    parameters as `shared` have room in the caches of a host.
    """
    by_link = case.link_gbps is not None and all(run.case.link_gbps for run in runs if run.case.workers > 1)
    made, allowed = fit(runs, by_link, shared)
    notes: list[str] = []
    if timed is not None and all(run.case.workers > 1 for run in runs):
        # Nothing tells what one worker of the other sizes does alone, which a factor would be of.
        runs = [*runs, timed]
        made, allowed = fit(runs, by_link, shared)
    elif timed is not None:
        ours, theirs = [(share, anchored(each, timed)) for share, each in made], anchored(allowed, timed)
        known = [(share, each) for share, each in ours if each is not None]
        if len(known) < len(made) or theirs is None:
            timed = None
            notes.append("What was timed is shorter than what runs say of its input and exchange, and left out.")
        else:
            made, allowed = known, theirs
    wanted = terms(case, allowed.shape)
    only = {run.case.hosts > 1 for run in runs if run.case.workers > 1}
    # One of the two kinds of links was never measured, so what was measured of the other says nothing of it.
    strange = case.workers > 1 and len(only) == 1 and (case.hosts > 1) not in only
    offset = 0.0
    for name, value in list(wanted.items()):
        if value and "beyond" in name and name not in allowed.names:
            # No run tells of it, so that the terms of which it is the rest stand for all.
            wanted[name] = 0.0
        elif value and (name not in allowed.names or (strange and name.startswith("communication"))):
            offset += _unmeasured(name, value, case, runs, strange)
            wanted[name] = 0.0
    if offset:
        notes.append(
            f"Links between hosts were not measured: their {case.link_gbps:g} Gbit/s are taken from "
            f"hardware.link_gbps, and their latency is left out."
        )
    _, likeliest = max(made, key=lambda each: each[0])
    if likeliest.factor is not None and abs(likeliest.factor - 1) > SURPRISE:
        notes.append(
            f"What one worker computes in a step takes {likeliest.factor:.2g} times what runs of other sizes let "
            f"expect: this model is another kind of work, or the machine has changed."
        )
    parts: dict[str, float] = {}
    for share, each in made:
        for name, value in zip(each.names, each.query(wanted) * each.coefficients, strict=True):
            part = name.partition(" ")[0]
            parts[part] = parts.get(part, 0.0) + share * float(value)
    fitted = sum(parts.values())
    off = DRIFT_OF_DOUBLING * math.sqrt(_doublings(case, runs))
    if timed is not None and fitted > 0:
        # What one worker computes at that size was measured, and what more of them add was not.
        sure = parts.get("compute", 0.0) / fitted
        off = sure * DRIFT_OF_DOUBLING * math.sqrt(_doublings(case, [*runs, timed])) + (1 - sure) * off
    low, high = interval(allowed, allowed.query(wanted), fitted, off) if fitted > 0 else (0.0, 0.0)
    if high >= fitted * UNKNOWN or low <= fitted / UNKNOWN:
        raise PredictError(
            f"Expected runs that tell how long a step of {case.workers} workers takes, received ones that leave it "
            f"open. Try more of them, with other workers and train.replica_batch."
        )
    if offset:
        parts["communication"] = parts.get("communication", 0.0) + offset
    total = fitted + offset
    return total, low + offset, high + offset, {name: value / total for name, value in parts.items() if value}, notes


def _unmeasured(name: str, value: float, case: Case, runs: Sequence[Observed], strange: bool) -> float:
    """Seconds of a term that no run has, where the config says how long it takes. Raises `PredictError` otherwise."""
    if strange and case.hosts > 1 and case.link_gbps is not None:
        return _exchanged(case)[1] * SECONDS_OF_GBIT / case.link_gbps if " bytes" in name else 0.0
    workers = _listed(sorted({run.case.workers for run in runs}))
    if strange:
        here = "between hosts" if case.hosts > 1 else "within one host"
        there = "within one host" if case.hosts > 1 else "between hosts"
        link = " or hardware.link_gbps=... to take their speed from" if case.hosts > 1 else ""
        raise PredictError(
            f"Expected runs whose devices exchange {here}, as those of the {case.workers} workers would, received runs "
            f"that do so {there} alone (workers={workers}). Try runs on such hardware first{link}."
        )
    raise PredictError(
        f"Expected runs of two workers or more to predict workers={case.workers} from, received workers={workers} "
        f"alone, which says nothing of what workers cost each other ({name}). Try workers=2 first."
    )


def _doublings(case: Case, runs: Sequence[Observed]) -> float:
    """How many doublings of workers, batch and parameters it is from the nearest run."""
    return min(
        abs(math.log2(case.workers / run.case.workers))
        + abs(math.log2(case.replica_batch / run.case.replica_batch))
        + abs(math.log2(max(1, case.parameters) / max(1, run.case.parameters)))
        for run in runs
    )


@dataclass(frozen=True)
class Basis:
    """The runs that a plan is predicted from, which differ in workers, batches and the size of the model alone."""

    runs: Sequence[Run]
    left_out: int = 0

    @property
    def machine(self) -> str:
        """That which all of them ran on."""
        return str(self.runs[0].plan["machine"])

    @property
    def versions(self) -> dict[str, str]:
        """Those that all of them ran with, by package."""
        return dict(self.runs[0].result.get("versions") or {})

    def about(self) -> dict[str, Any]:
        """What is said of a prediction that was fitted on them."""
        plans = [run.plan for run in self.runs]
        return {
            "runs": len(self.runs),
            "left_out": self.left_out,
            "strategies": sorted({each["strategy"] for each in plans}),
            "models": sorted({each["model"] for each in plans}),
            "workers": sorted({each["workers"] for each in plans}),
            "hosts": sorted({each["hosts"] for each in plans}),
            "replica_batches": sorted({each["replica_batch"] for each in plans}),
            "parameters": sorted({run.result["parameters"] for run in self.runs}),
            "machine": self.machine,
            "versions": self.versions,
            "folders": [str(run.folder) for run in self.runs],
        }


def basis(planned: Plan, history: Sequence[Run], where: str) -> Basis:
    """The runs in `history`, which is that of `where`, to predict `planned` from. Raises `PredictError` without any."""
    if planned.rehearsal:
        raise PredictError(
            "Expected hardware whose speed can be measured, received a rehearsal. Try hardware.rehearse=false."
        )
    if planned.exchange is None:
        raise PredictError(
            f"Expected strategy.exchange to say what devices exchange, received none of strategy={planned.strategy}. "
            f"Try strategy.exchange=all_reduce, if that is what they do."
        )
    asked = json.loads(planned.to_json())
    typed = f"strategy={planned.strategy} model={planned.model} data={planned.data}"
    first = f"`python -m pipeline -m {typed} workers=1,2`"
    if not history:
        raise PredictError(f"Expected runs to predict from in {where}, received none. Try {first} first.")
    timed = [run for run in history if not (run.result.get("rehearsal") or run.result.get("oversubscribed"))]
    if not timed:
        raise PredictError(
            f"Expected runs to predict from in {where}, received {len(history)} that are rehearsals or oversubscribed, "
            f"whose speed is not that of the devices. Try {first} first."
        )
    alike = [run for run in timed if not comparable.apart(run.plan, asked) and _whole(run)]
    if not alike:
        why = min((comparable.apart(run.plan, asked) for run in timed), key=len)
        raise PredictError(
            f"Expected runs in {where} that say something of this one, received {len(timed)} that differ: the nearest "
            f"in {_listed(why) or 'workers that it lost, or events that it lacks'}. Try {first} on such hardware first."
        )
    groups: dict[str, list[Run]] = {}
    for run in alike:
        key = json.dumps([run.plan["machine"], run.result.get("versions")], sort_keys=True)
        groups.setdefault(key, []).append(run)
    here = [runs for runs in groups.values() if runs[0].plan["machine"] == planned.machine]
    runs = max(here or list(groups.values()), key=len)
    return Basis(runs, len(history) - len(runs))


def sized(planned: Plan, found: Basis) -> bool:
    """Has any of the runs trained this model with this replica batch, on however many workers?"""
    return any(
        run.plan["model_build"] == planned.model_build and run.plan["replica_batch"] == planned.replica_batch
        for run in found.runs
    )


def alone(one: Plan, parameters: int, examples_per_second: Sequence[Sequence[float]]) -> Observed:
    """What repeats of `one`, the plan on one worker, in several lives of its processes say of its step."""
    case = case_of(json.loads(one.to_json()), parameters)
    return _joined(case, [([case.examples / each for each in repeats], 1.0) for repeats in examples_per_second])


def _whole(run: Run) -> bool:
    """Has it timed all of its workers, and is that still there to be read?"""
    timed = run.result.get("timed_workers", run.result.get("workers_at_end"))
    return timed in (None, run.plan["workers"]) and bool(run.repeats)


def of_plan(planned: Plan, parameters: int, found: Basis, timed: Observed | None = None) -> Prediction:
    """What `planned` would do with a model of so many parameters. Raises `PredictError`.

    `timed` is a step of one worker of it, where no run says how long that takes.
    """
    case = case_of(json.loads(planned.to_json()), parameters)
    runs = observed(found.runs)
    seconds, low, high, parts, notes = predict(case, runs, timed, _shared(found.runs))
    # What more workers add was measured at the sizes of the runs alone.
    sizes = runs if timed is None or case.workers > 1 else [*runs, timed]
    bound = sum(bool(run.result.get("input_bound")) for run in found.runs)
    if bound:
        notes.append(f"{bound} of the runs waited for their input: a faster input would make them, and this, faster.")
    if planned.oversubscribed:
        notes.append("Predicted as if each device had cores of its own, as those that were measured.")
    return Prediction(
        examples_per_second=measure.throughput(case.examples, seconds),
        low=measure.throughput(case.examples, high),
        high=measure.throughput(case.examples, low),
        confidence=CONFIDENCE,
        step_seconds=seconds,
        parts=parts,
        fitted_on=found.about() | {"timed_step_seconds": None if timed is None else timed.seconds},
        notes=(*_extrapolated(case, sizes), *_confounded(case, runs, sizes), *notes),
    )


def _shared(runs: Sequence[Run]) -> float | None:
    """How many parameters have room in the caches of the host that runs were on; None where they do not tell."""
    caches = [run.plan["cache_bytes"] for run in runs if run.plan.get("cache_bytes")]
    of_one = [run.result["state_bytes"] / run.result["parameters"] for run in runs if run.result.get("state_bytes")]
    return float(np.median(caches) / np.median(of_one)) if caches and of_one else None


def _extrapolated(case: Case, runs: Sequence[Observed]) -> list[str]:
    """How far beyond what was measured the case is."""
    found = []
    for name, here, there in (
        ("workers", case.workers, [run.case.workers for run in runs]),
        ("the replica batch", case.replica_batch, [run.case.replica_batch for run in runs]),
        ("the parameters", case.parameters, [run.case.parameters for run in runs]),
    ):
        least, most = min(there), max(there)
        if here > most:
            found.append(f"{name} are {here / most:.3g} times the most" if name != "the replica batch" else
                         f"{name} is {here / most:.3g} times the largest")  # fmt: skip
        elif here < least:
            found.append(f"{name} {'is' if 'batch' in name else 'are'} {here / least:.2g} of the least")
    return [f"Extrapolated: {_listed(found)} that was measured."] if found else []


def _confounded(case: Case, runs: Sequence[Observed], sizes: Sequence[Observed]) -> list[str]:
    """What few runs cannot say, and what those of so few sizes cannot."""
    notes = []
    if len(runs) <= PRIOR_FREEDOM:
        notes.append("So few points leave hardly a residual: the interval is that which their repeats let expect.")
    if len({run.case.replica_batch for run in sizes}) == 1 and case.replica_batch != runs[0].case.replica_batch:
        notes.append("One replica batch was measured, so what grows with it is not told from what does not.")
    return notes


def record(planned: Plan, parameters: int, made: Prediction, now: float) -> dict[str, Any]:
    """A prediction as a line of predictions.jsonl."""
    return {
        "time": now,
        "identity": identity(json.loads(planned.to_json())),
        "examples_per_second": made.examples_per_second,
        "low": made.low,
        "high": made.high,
        "confidence": made.confidence,
        "strategy": planned.strategy,
        "workers": planned.workers,
        "parameters": parameters,
        "fitted_on": {name: value for name, value in made.fitted_on.items() if name != "folders"},
    }


def scored(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], measured: float) -> list[dict[str, Any]]:
    """The predictions that were made for a plan, each number once, with how far each was off and whether it held.

    >>> plan = {"workers": 2}
    >>> made = {"identity": identity(plan), "examples_per_second": 110.0, "low": 90.0, "high": 130.0}
    >>> [(each["error"], each["held"]) for each in scored([made, made], plan, measured=100.0)]
    [(0.1, True)]
    """
    wanted = identity(plan)
    found = {
        (each["examples_per_second"], each["low"], each["high"]): each
        for each in records
        if each.get("identity") == wanted
    }
    return [
        {name: value for name, value in each.items() if name != "identity"}
        | {
            "measured": measured,
            "error": round(each["examples_per_second"] / measured - 1, 6),
            "held": each["low"] <= measured <= each["high"],
        }
        for each in found.values()
    ]


def score(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How good the predictions of these runs were: how many, the median error, and the share of intervals that held.

    >>> score([{"predictions": [{"error": -0.1, "held": True}, {"error": 0.2, "held": False}]}, {}])
    {'count': 2, 'median_error': 0.15, 'held': 0.5}
    """
    every = [each for result in results for each in result.get("predictions") or ()]
    if not every:
        return {"count": 0, "median_error": None, "held": None}
    return {
        "count": len(every),
        "median_error": round(float(np.median([abs(each["error"]) for each in every])), 6),
        "held": sum(bool(each["held"]) for each in every) / len(every),
    }


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))
