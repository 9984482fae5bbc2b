"""Predicts the throughput of a plan from runs that were logged: a model of step time, fitted, with its interval.

    step = compute + contention + input + communication

Each part is a sum of terms, which are known from the plan, times coefficients, which are fitted and never below 0.
Where one worker's step of the model was timed, computing takes as long as that says, and the fit says what more workers
add. `step_model.terms` has the terms and their sources.
"""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from pipeline.analyze import comparable, measure, step_model
from pipeline.analyze.history import TimedRun
from pipeline.analyze.step_model import Case, Floats, Observed, Shape, case_of, on_wire, terms, with_wire
from pipeline.errors import UserError, refuse
from pipeline.plan.plan import Plan
from pipeline.record.events import Measured
from pipeline.record.files import FittedOn, Predicted

# Of the median polish, which soon changes nothing more.
POLISHED = 20
# The model is off by about so much at twice, or half, of the workers, batch or parameters of the nearest run, and more
# further away as a random walk is.
DRIFT_OF_DOUBLING = 0.03
# What a link carries differs by about so much from one time to the next, as others use it too.
LINK_SPREAD = 0.1


@dataclass(frozen=True, kw_only=True)
class Prediction(Predicted):
    """A prediction with the `parts` of its step as shares of `step_seconds`.

    Once it is calibrated, `spread` is how far `equal` runs lie apart, as a standard deviation of the logarithm.
    """

    confidence: float
    fitted_on: FittedOn
    step_seconds: float
    parts: Mapping[str, float]
    notes: tuple[str, ...] = ()
    spread: float = 0.0
    equal: int = 0


def predict(
    case: Case, runs: Sequence[Observed], timed: Observed | None = None, shared: float | None = None
) -> tuple[float, float, float, dict[str, float], list[str]]:
    """(step time, low, high, parts as shares, notes) of a case. Raises `UserError` where the runs say nothing.

    `timed` is a step of one worker, of the same model and replica batch, where none of the runs has that size; `shared`
    are the parameters that have room in the caches of a host.
    """
    linked = all(one.link_gbps for one in (case, *(run.case for run in runs)) if one.hosts > 1 and one.workers > 1)
    # Where all had several workers, nothing tells what one of the other sizes does alone, which a factor would be of.
    anchor = None if all(run.case.workers > 1 for run in runs) else timed
    runs = [*runs, timed] if timed is not None and anchor is None else runs
    models, allowed = step_model.fit(runs, linked, shared)
    notes: list[str] = []
    if anchor is not None:
        anchored_models = [(share, step_model.anchored(model, anchor)) for share, model in (*models, (1.0, allowed))]
        at_timed = [(share, model) for share, model in anchored_models if model is not None]
        if len(at_timed) < len(anchored_models):
            timed = None
            notes.append("What was timed is shorter than what runs say of its input and exchange, and left out.")
        else:
            *models, (_, allowed) = at_timed
    case_terms = terms(case, allowed.shape)
    only = {run.case.hosts > 1 for run in runs if run.case.workers > 1}
    # Of two kinds of links only one was measured, which says nothing of the other unless the time on the wire is known.
    strange = case.workers > 1 and len(only) == 1 and (case.hosts > 1) not in only
    _take_out(case_terms, allowed.names, case, runs, strange and not linked)
    wire = on_wire(case, Shape(by_wire=True)) if strange else on_wire(case, allowed.shape)
    if wire and strange:
        takes = f"what a step's bits take at {case.link_gbps:.3g} Gbit/s"
        notes.append(f"No run had several hosts: {takes} is added to what an exchange costs within a host.")
    _, likeliest = max(models, key=lambda weighted: weighted[0])
    if abs(likeliest.factor - 1) > step_model.SURPRISE:
        takes = f"takes {likeliest.factor:.2g} times what runs of other sizes let expect"
        why = "this model is another kind of work, or the machine has changed"
        notes.append(f"What one worker computes in a step {takes}: {why}.")
    parts = defaultdict[str, float](float)
    for share, model in models:
        for name, value in zip(model.names, model.query(case_terms) * model.coefficients, strict=True):
            parts[name.partition(" ")[0]] += share * float(value)
    fitted = sum(parts.values())
    off = DRIFT_OF_DOUBLING * math.sqrt(_doublings(case, runs))
    if timed is not None and fitted > 0:
        # What one worker computes at that size was measured, and what more of them add was not.
        sure = parts["compute"] / fitted
        off = sure * DRIFT_OF_DOUBLING * math.sqrt(_doublings(case, [*runs, timed])) + (1 - sure) * off
    low, high = step_model.interval(allowed, allowed.query(case_terms), fitted, off) if fitted > 0 else (0.0, 0.0)
    if high >= fitted * step_model.UNKNOWN or low <= fitted / step_model.UNKNOWN:
        expected = f"runs that tell how long a step of {case.workers} workers takes"
        raise UserError(expected, "ones that leave it open", "more of them, with other workers and train.replica_batch")
    total = with_wire(fitted, wire, case.buckets)
    parts["communication"] += total - fitted
    unsure = LINK_SPREAD * (total - fitted)
    low, high = total - math.hypot(fitted - low, unsure), total + math.hypot(high - fitted, unsure)
    return total, low, high, {name: value / total for name, value in parts.items() if value}, notes


def _take_out(
    case_terms: dict[str, float], names: Sequence[str], case: Case, runs: Sequence[Observed], strange: bool
) -> None:
    workers = ", ".join(map(str, sorted({run.case.workers for run in runs})))
    where, elsewhere = ("between hosts", "within one host")[:: 1 if case.hosts > 1 else -1]
    for name, value in list(case_terms.items()):
        if value and "beyond" in name and name not in names:
            # No run tells of it, so that the terms of which it is the rest stand for all.
            case_terms[name] = 0.0
            continue
        refuse(
            (value and strange and name.startswith("communication"),
             f"runs whose devices exchange {where}, as those of the {case.workers} workers would",
             f"runs that do so {elsewhere} alone (workers={workers})", "runs on such hardware first, or "
             "python -m pipeline doctor or hardware.link_gbps=... for how fast their link is"),
            (value and name not in names, f"runs of two workers or more to predict workers={case.workers} from",
             f"workers={workers} alone, which says nothing of what workers cost each other ({name})",
             "workers=2 first"),
        )  # fmt: skip


def _doublings(case: Case, runs: Sequence[Observed]) -> float:
    """The doublings of workers, batch and parameters between a case and the nearest run."""
    numbers = attrgetter("workers", "replica_batch", "parameters")
    pairs = (zip(numbers(case), numbers(run.case), strict=True) for run in runs)
    return min(sum(abs(math.log2(max(1, one) / max(1, other))) for one, other in of_run) for of_run in pairs)


@dataclass(frozen=True)
class Basis:
    """The runs that a plan is predicted from, which differ in workers, batches and the size of the model alone."""

    runs: Sequence[TimedRun]
    fitted_on: FittedOn


def basis(planned: Plan, history: Sequence[TimedRun], where: str) -> Basis:
    """The runs in `history`, which is that of `where`, to predict `planned` from. Raises `UserError` without any."""
    named = f"strategy={planned.strategy.name}"
    first = f"`python -m pipeline -m {named} model={planned.model.name} data={planned.data.name} workers=1,2`"
    layouts = [(timed_run, timed_run.run.result.layout) for timed_run in history]
    timed = [timed_run for timed_run, layout in layouts if not (layout.rehearsal or layout.oversubscribed)]
    unlike = f"{len(history)} that are rehearsals or oversubscribed, whose speed is not that of the devices"
    refuse(
        (planned.hardware.rehearsal, "hardware whose speed can be measured", "a rehearsal", "hardware.rehearse=false"),
        (planned.strategy.exchange is None, "strategy.exchange to say what devices exchange", f"none of {named}",
         "strategy.exchange=all_reduce, if that is what they do"),
        (not timed, f"runs to predict from in {where}", unlike if history else "none", f"{first} first"),
    )  # fmt: skip
    differ = [comparable.apart(timed_run.plan, planned) for timed_run in timed]
    alike = [timed_run for timed_run, why in zip(timed, differ, strict=True) if not why and _whole(timed_run)]
    if not alike:
        nearest = min(differ, key=len)
        why = ", ".join(nearest) or "workers that it lost, or events that it lacks"
        received = f"{len(timed)} that differ: the nearest in {why}"
        raise UserError(f"runs in {where} that say something of this one", received, f"{first} on such hardware first")
    results = [(timed_run.plan.hardware.machine, timed_run.run.result) for timed_run in alike]
    keys = [json.dumps((machine, result.machine, result.versions), sort_keys=True) for machine, result in results]
    groups = [*comparable.grouped(zip(keys, alike, strict=True)).values()]
    on_this_machine = [runs for runs in groups if runs[0].plan.hardware.machine == planned.hardware.machine]
    runs = max(on_this_machine or groups, key=len)
    paths = "plan.strategy.name plan.model.name plan.workers plan.hardware.hosts plan.training.replica_batch parameters"
    columns = zip(*map(attrgetter(*paths.split()), runs), strict=True)
    strategies, models, workers, hosts, batches, sizes = (tuple(sorted(set(column))) for column in columns)
    distinct, machine = (strategies, models, workers, hosts, batches, sizes), runs[0].plan.hardware.machine
    versions = dict(runs[0].run.result.versions)
    return Basis(runs, FittedOn(len(runs), len(history) - len(runs), *distinct, machine, versions))


def observed(runs: Sequence[TimedRun]) -> list[Observed]:
    """The measured cases of runs that timed their steps."""
    times = [next((one.time for one in each.run.events if isinstance(one, Measured)), 0.0) for each in runs]
    in_order = [runs[place] for place in sorted(range(len(runs)), key=times.__getitem__)]
    cases = [case_of(timed_run.plan, timed_run.parameters) for timed_run in in_order]
    pairs = zip(cases, in_order, strict=True)
    return of_repeats(cases, [[case.examples / rate for rate in each.run.repeats] for case, each in pairs])


def of_repeats(cases: Sequence[Case], seconds: Sequence[Sequence[float]]) -> list[Observed]:
    """The same from the cases of runs in order of time, and the step times of each one's repeats."""
    slower = drift(cases, [float(np.median(of_run)) for of_run in seconds])
    timed = comparable.grouped(zip(cases, zip(seconds, slower, strict=True), strict=True))
    return [joined_runs(case, many) for case, many in timed.items()]


def drift(cases: Sequence[Hashable], seconds: Sequence[float]) -> list[float]:
    """The time of each run, in their order, as a multiple of the usual one: machines are slower or faster at times.

    A round is of runs that follow each other until a case comes again; what all cases of a round share is drift (the
    median polish of Tukey, 1977, *Exploratory data analysis*, of logarithms).
    """
    rounds, this = list[int](), set[Hashable]()
    for case in cases:
        rounds.append(rounds[-1] + (case in this) if rounds else 0)
        this = {case} if case in this else this | {case}
    left, shared = np.log(seconds), np.zeros(len(cases))
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

    >>> round(spread_of([0.9, 1.0, 1.1, 5.0, 1.0], 1.0), 3)
    0.148
    """
    return 1.4826 * float(np.median(np.abs(np.asarray(seconds) - middle))) / middle


def one_run(case: Case, lives: Sequence[Sequence[float]]) -> Observed:
    """A step that was timed in several lives of its process, which follow each other and so share a run's luck."""
    return dataclasses.replace(joined_runs(case, [(seconds, 1.0) for seconds in lives]), runs=1)


def _whole(timed_run: TimedRun) -> bool:
    """True if it timed all of its workers, and has the events of that."""
    result = timed_run.run.result
    timed = result.survival.workers_at_end if result.layout.timed_workers is None else result.layout.timed_workers
    return timed in (None, timed_run.plan.workers) and bool(timed_run.run.repeats)


def of_plan(
    planned: Plan, parameters: int, basis: Basis, timed: Observed | None = None, luck: float | None = None
) -> Prediction:
    """The prediction for a plan whose model has so many parameters, with a `timed` step as `predict` takes it.

    Equal runs lie `luck` apart, as a standard deviation; None: as their repeats let expect. Raises `UserError`.
    """
    case, runs = case_of(planned, parameters), observed(basis.runs)
    if luck is not None:
        runs = [dataclasses.replace(run, spread=luck) for run in runs]
        timed = timed and dataclasses.replace(timed, spread=max(luck, timed.spread))
    seconds, low, high, parts, notes = predict(case, runs, timed, _shared(basis.runs))
    # What more workers add was measured at the sizes of the runs alone.
    sizes = runs if timed is None or case.workers > 1 else [*runs, timed]
    bound = sum(bool(timed_run.run.result.input.bound) for timed_run in basis.runs)
    if bound:
        notes.append(f"{bound} of the runs waited for their input: a faster input would make them, and this, faster.")
    if planned.hardware.oversubscribed:
        notes.append("Predicted as if each device had cores of its own, as those that were measured.")
    return Prediction(
        examples_per_second=measure.throughput(case.examples, seconds),
        low=measure.throughput(case.examples, high),
        high=measure.throughput(case.examples, low),
        confidence=step_model.CONFIDENCE,
        strategy=planned.strategy.name,
        workers=planned.workers,
        parameters=parameters,
        step_seconds=seconds,
        parts=parts,
        fitted_on=dataclasses.replace(basis.fitted_on, timed_step_seconds=None if timed is None else timed.seconds),
        notes=(*_doubts(case, runs, sizes), *notes),
    )


def _shared(runs: Sequence[TimedRun]) -> float | None:
    """The number of parameters that fit the caches of the runs' host; None if they do not tell."""
    caches = [timed_run.plan.hardware.cache_bytes for timed_run in runs if timed_run.plan.hardware.cache_bytes]
    states = [(timed_run.run.result.training.state_bytes, timed_run.parameters) for timed_run in runs]
    of_one = [state_bytes / parameters for state_bytes, parameters in states if state_bytes]
    return float(np.median(caches) / np.median(of_one)) if caches and of_one else None


def _doubts(case: Case, runs: Sequence[Observed], sizes: Sequence[Observed]) -> list[str]:
    phrases, notes = [], []
    names = {"workers are": "most", "the replica batch is": "largest", "the parameters are": "most"}
    for (words, superlative), key in zip(names.items(), ("workers", "replica_batch", "parameters"), strict=True):
        value, measured = getattr(case, key), [getattr(run.case, key) for run in sizes]
        if value > max(measured):
            phrases.append(f"{words} {value / max(measured):.3g} times the {superlative}")
        elif value < min(measured):
            phrases.append(f"{words} {value / min(measured):.2g} of the least")
    if phrases:
        notes.append(f"Extrapolated: {', '.join(phrases)} that was measured.")
    if len(runs) <= step_model.PRIOR_FREEDOM:
        notes.append("Too few runs to estimate the fit's error: the interval reflects noise between repeats only.")
    if len({run.case.replica_batch for run in sizes}) == 1 and case.replica_batch != runs[0].case.replica_batch:
        notes.append("One replica batch was measured: how speed changes with the batch is a guess.")
    return notes
