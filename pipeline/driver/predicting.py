"""Says how fast a run would be, without training."""

import dataclasses
import tempfile
import time
from importlib import metadata
from pathlib import Path

from pipeline.analyze import calibration, history, outlook, predict, step_model
from pipeline.driver import Foreseen, RunResult
from pipeline.driver.memory_check import learned_size
from pipeline.driver.planner import planned_on, with_addresses
from pipeline.driver.session import RunRequest, Session
from pipeline.driver.timing import time_steps
from pipeline.driver.watch import RunFailed
from pipeline.errors import UserError
from pipeline.launch import Cluster, reach
from pipeline.plan import planning
from pipeline.plan.backends import COMPUTING
from pipeline.plan.plan import Plan
from pipeline.record.files import append_prediction
from pipeline.record.results import Choices, Cost, Ending, Layout, Result, Speed


def predicted(plan: Plan, request: RunRequest, cluster: Cluster, session: Session) -> RunResult:
    """Says how fast a plan would be, by earlier runs, and notes that to be scored later. Raises `UserError`."""
    config, output = request.config, request.output
    for name in (sweep := config.predict.sweep, None):
        if name not in session.histories:
            session.histories[name] = history.finished(output, name)
    logged = [timed_run.run.result for timed_run in session.histories[None]]
    basis = predict.basis(plan, session.histories[sweep], sweep or str(output))
    same = [timed_run for timed_run in basis.runs if timed_run.plan.model.build == plan.model.build]
    timed = None if predict.sized(plan, basis) else _timed_alone(plan, basis, request, cluster, session)
    if same:
        parameters = same[-1].parameters
    elif timed:
        parameters = timed.case.parameters
    elif isinstance(size := learned_size(plan, request, session), str):
        raise UserError("a model that can be built, to know its size", size.removesuffix("."), "another model")
    else:
        parameters = size.parameters
    now = time.time()
    errors = calibration.of_log(plan, basis, session.histories[None])
    prediction = calibration.calibrated(predict.of_plan(plan, parameters, basis, timed, errors.spread), errors)
    rate, examples = prediction.examples_per_second, plan.data.train_examples or basis.runs[-1].run.train_examples
    seconds = outlook.seconds_to_finish(plan, rate, examples)
    watts = outlook.watts_of_worker([timed_run.run.result for timed_run in basis.runs])
    joules = None if watts is None or seconds is None else watts * plan.workers * seconds
    price = config.hardware.price_per_hour
    result = Result(
        Ending("PREDICTED"),
        Choices.of(config),
        Layout.of(plan),
        Speed(rate, prediction.low, prediction.high, interval_confidence=prediction.confidence),
        cost=Cost(seconds, price, outlook.cost(price, plan.hardware.hosts, seconds), joules),
        notes=(*plan.notes, *prediction.notes),
    )
    foreseen = Foreseen(prediction, calibration.score(logged), config.predict.knee_share)
    append_prediction(output, calibration.line_of(plan, prediction, now))
    return dataclasses.replace(request.ended(result), foreseen=foreseen)


def _timed_alone(
    plan: Plan, basis: predict.Basis, request: RunRequest, cluster: Cluster, session: Session
) -> step_model.Observed | None:
    """A step of one worker of a plan, timed here and now; None if predict.time_one is false, or it cannot be timed."""
    versions = {name: metadata.version(name) for name in (*COMPUTING.get(plan.backend, ()), "keras")}
    comparable = basis.machine == plan.hardware.machine and versions.items() <= basis.versions.items()
    if not request.config.predict.time_one or not comparable or plan.hardware.kind not in ("cpu", "gpu"):
        return None
    try:
        one = with_addresses(planned_on(planning.on_one_worker(request.config, plan), cluster), cluster)
        for address in one.data.service:
            reach.expect_data_service(address)
    except UserError:
        # Such devices, or the servers of the data, are elsewhere.
        return None
    if one.hardware.oversubscribed:
        return None
    key = step_model.identity(one)
    if key not in session.timed:
        session.screen.say(
            "\nTiming steps of one worker, for some seconds, since no run had this model and replica batch. "
            "predict.time_one=false predicts from the runs alone."
        )
        try:
            with tempfile.TemporaryDirectory(prefix="pipeline-timed-") as folder:
                starts = time_steps(cluster, one, Path(folder))
        except RunFailed as failure:
            session.screen.say(f"It could not be timed: {failure}")
            session.timed[key] = None
        else:
            speeds = [[repeat.examples_per_second for repeat in start.point] for start in starts]
            session.timed[key] = predict.alone(one, starts[0].built.parameters or 0, speeds)
    return session.timed[key]
