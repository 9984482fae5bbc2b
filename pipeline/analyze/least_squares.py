"""Fits a step's terms to measured runs, with intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from pipeline.analyze.step_model import BEYOND_SHARED, Floats, Observed, Shape, on_wire, terms, without_wire

# Of a prediction's interval. A person sees those of an hour together: even where these have nothing in common,
# fewer than 17 of 20 hold in one hour of eight with intervals of 90%, in one of sixty with those of 95%.
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
        """The number of coefficients above 0 that the equations tell apart."""
        return int(np.linalg.matrix_rank(self.rows[:, self.coefficients > 0]))

    @property
    def freedom(self) -> int:
        """Degrees of freedom that the residuals have."""
        return max(0, len(self.target) - (self.factor is not None) - self.told_apart)

    def query(self, step_terms: Mapping[str, float]) -> Floats:
        """The factor of each coefficient in a step that has these terms."""
        factor = 1.0 if self.factor is None else self.factor
        return np.asarray([step_terms.get(name, 0.0) * (factor if is_computed(name) else 1.0) for name in self.names])

    @property
    def scale(self) -> float:
        """The variance of a residual over that which the repeats let expect."""
        return (PRIOR_FREEDOM + self.chi_square) / (PRIOR_FREEDOM + self.freedom)


def fit(runs: Sequence[Observed], linked: bool, shared: float | None = None) -> tuple[list[tuple[float, Fit]], Fit]:
    """Fits step times by weighted non-negative least squares on relative residuals.

    Returns fits with how likely each is, which adds up to 1, and one that allows for what the runs do not rule out:
    that of a larger model, each parameter costs more. Of the shapes that a model can have, each has the simplest,
    unless the runs tell that another one is right (by the criterion of Schwarz, 1978). There are two where runs went
    beyond the `shared` parameters that have room in the caches of a host: that is why devices contend, or they contend
    for each parameter. With `linked`, the speed of all links between hosts is known.
    """
    sizes = sorted({run.case.parameters for run in runs})
    larger = max(1, sizes[0]) if len(sizes) > 1 else None
    allowed = Shape(cached=larger, shared=shared)
    beyond = any(terms(run.case, allowed).get(BEYOND_SHARED) for run in runs)
    cached_shapes = [replace(allowed, cached=None, each_contends=False)] if beyond else []
    shapes = [*cached_shapes, *(Shape(cached=cached) for cached in (None, larger))]
    links = [{"by_wire": True}, {"by_link": True}] if linked else [{}]
    fits = [
        _fit(runs, replace(shape, apart=apart, **link)) for shape in shapes for link in links for apart in (False, True)
    ]
    alike = [[model for model in fits if bool(model.shape.shared) is shared_cache] for shared_cache in (True, False)]
    likely = [min(similar, key=_criterion) for similar in alike if similar]
    # Of two that fit the runs as well, each is half (Raftery, 1995, Bayesian model selection in social research).
    best = min(likely, key=_criterion)
    weights = [math.exp((_criterion(best) - _criterion(model)) / 2) for model in likely]
    shares = [weight / sum(weights) for weight in weights]
    as_best = {name: getattr(best.shape, name) for name in ("apart", "by_link", "by_wire")}
    return list(zip(shares, likely, strict=True)), _fit(runs, replace(allowed, **as_best))


def anchored(model: Fit, timed: Observed) -> Fit | None:
    """The fit for models of the size of `timed`, one worker's step of which was timed; None where it says nothing.

    What such a model computes takes a factor of what was fitted to others, the same for all numbers of workers; input
    and exchange are as fitted. Of how far that factor is from 1, as much is kept as the timed step's own luck does not
    explain, and nearly all of what surprises (empirical Bayes; Efron & Morris, 1973).
    """
    of_timed = terms(timed.case, model.shape)
    seconds = model.query(of_timed) * model.coefficients
    computed = np.asarray([is_computed(name) for name in model.names])
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


def is_computed(term: str) -> bool:
    """True if a term is work of a device, and not of the network."""
    return term.startswith(("compute", "contention"))


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
    rest = [without_wire(run.seconds, on_wire(run.case, shape), run.case.buckets) for run in runs]
    target = weights * np.asarray(rest) / seconds
    coefficients, chi_square = _non_negative(rows, target)
    return Fit(names, coefficients, rows, target, chi_square, shape, pooled)


def _moderated(spread: float, pooled: float) -> float:
    """A run's spread, drawn to that of all: five repeats say little of their own."""
    return math.sqrt((spread**2 + pooled**2) / 2)


def _non_negative(rows: Floats, target: Floats) -> tuple[Floats, float]:
    """(coefficients of 0 or more, sum of squared residuals), the smallest coefficients among those that fit equally."""
    from scipy.optimize import nnls

    scale = np.abs(rows).max(axis=0)
    scaled = rows / scale
    count = scaled.shape[1]
    rows, target_and_zeros = np.vstack([scaled, RIDGE * np.eye(count)]), np.concatenate([target, np.zeros(count)])
    solved, _ = nnls(rows, target_and_zeros, maxiter=100 * count)
    return solved / scale, float(np.sum((scaled @ solved - target) ** 2))


def interval(model: Fit, query: Floats, centre: float, off: float) -> tuple[float, float]:
    """(low, high) of the step time with the terms `query`, where the model is `off` by so much itself.

    That is the time of the point: a run of it has its own luck besides, which is no part of this. It is those times
    that coefficients of 0 or more allow for which the weighted squares are not much larger than at their least (the
    profile likelihood; Venzon & Moolgavkar, 1988). It is wide where the runs do not say.
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
