"""Says what a run would need, and how fast it would be, without training."""

import json
import tempfile
import time
from importlib import metadata
from pathlib import Path

from pipeline.analyze import history, outlook, predict, scoring, step_model
from pipeline.analyze.step_model import PredictError
from pipeline.launch import Cluster, reach
from pipeline.plan import planning
from pipeline.plan.errors import PlanError
from pipeline.plan.estimate import estimate
from pipeline.plan.plan import Plan
from pipeline.plan.size import Size
from pipeline.run import model_size
from pipeline.run.group import RunFailed
from pipeline.run.laying_out import planned_on, with_addresses
from pipeline.run.results import chosen
from pipeline.run.session import PointRequest, Result, Session
from pipeline.run.timing import time_steps

# A line for each prediction that was made, in the output folder.
PREDICTIONS = "predictions.jsonl"


def predicted(planned: Plan, request: PointRequest, cluster: Cluster, session: Session) -> Result:
    """Shows how fast a plan would be, from what was logged, and notes it to be scored. Raises what is in `REFUSALS`."""
    config, output = request.config, Path(request.config.output_dir)
    sweep = config.predict.sweep
    if sweep not in session.histories:
        session.histories[sweep] = history.finished(output, sweep)
    basis = predict.basis(planned, session.histories[sweep], sweep or str(output))
    same = [run for run in basis.runs if run.plan["model_build"] == planned.model.build]
    timed = None if predict.sized(planned, basis) else _timed_alone(planned, basis, request, cluster, session)
    if same:
        parameters = int(same[-1].result["parameters"])
    elif timed:
        parameters = timed.case.parameters
    elif size := size_of(planned, request, cluster, session):
        parameters = size.parameters
    else:
        why = session.unbuilt[model_size.file(planned, output, session.search)]
        raise PredictError(f"Expected a model that can be built, to know its size, received: {why} Try another model.")
    made = predict.of_plan(planned, parameters, basis, timed)
    examples = planned.data.train_examples or next((run.train_examples for run in reversed(basis.runs)), None)
    seconds = outlook.seconds_to_finish(planned, made.examples_per_second, examples)
    watts = outlook.watts_of_worker([run.result for run in basis.runs])
    result = {
        "status": "PREDICTED",
        "error": None,
        **chosen(config),
        "workers": planned.workers,
        "hosts": planned.hardware.hosts,
        "oversubscribed": planned.hardware.oversubscribed,
        "replica_batch": planned.training.replica_batch,
        "global_batch": planned.training.global_batch,
        "scaling": planned.training.scaling,
        "precision": planned.training.precision,
        "examples_per_second": made.examples_per_second,
        "examples_per_second_low": made.low,
        "examples_per_second_high": made.high,
        "interval_confidence": made.confidence,
        "step_seconds": made.step_seconds,
        "parts": dict(made.parts),
        "fitted_on": dict(made.fitted_on),
        "notes": [*planned.notes, *made.notes],
        "seconds_to_finish": seconds,
        "price_per_hour": config.hardware.price_per_hour,
        "cost_to_finish": outlook.cost(config.hardware.price_per_hour, planned.hardware.hosts, seconds),
        "energy_joules": None if watts is None or seconds is None else watts * planned.workers * seconds,
        "knee_share": config.predict.knee_share,
        "score": scoring.score([run.result for run in session.histories[sweep]]),
    }
    line = scoring.record(planned, parameters, made, time.time())
    output.mkdir(parents=True, exist_ok=True)
    with (output / PREDICTIONS).open("a") as lines:
        lines.write(json.dumps(line) + "\n")
    session.screen.predicted(result | {"notes": made.notes})
    return result


def _timed_alone(
    planned: Plan, basis: predict.Basis, request: PointRequest, cluster: Cluster, session: Session
) -> step_model.Observed | None:
    """A step of one worker of a plan, timed here and now; None where that is not asked for, or cannot be done."""
    same = {name: metadata.version(name) for name in ("tensorflow", "keras")}.items() <= basis.versions.items()
    there = basis.machine == planned.hardware.machine and same and planned.hardware.kind in ("cpu", "gpu")
    if not request.config.predict.time_one or not there:
        return None
    try:
        one = with_addresses(planned_on(planning.on_one_worker(request.config, planned), cluster), cluster)
        for address in one.data.service:
            reach.expect_data_service(address)
    except (PlanError, reach.NoAnswerError):
        # Such devices, or the servers of the data, are elsewhere.
        return None
    if one.hardware.oversubscribed:
        return None
    key = step_model.identity(json.loads(one.to_json()))
    if key not in session.timed:
        session.screen.say(
            "\nTiming steps of one worker, for some seconds, since no run had this model and replica batch. "
            "predict.time_one=false predicts from the runs alone."
        )
        try:
            with tempfile.TemporaryDirectory(prefix="pipeline-timed-") as folder:
                lives = time_steps(cluster, one, Path(folder))
        except RunFailed as failure:
            session.screen.say(f"It could not be timed: {failure}")
            session.timed[key] = None
        else:
            speeds = [[repeat.examples_per_second for repeat in life.point] for life in lives]
            session.timed[key] = predict.alone(one, lives[0].built.parameters or 0, speeds)
    return session.timed[key]


def size_of(planned: Plan, request: PointRequest, cluster: Cluster, session: Session) -> Size | None:
    """The size of a plan's model, which is built once where it is not known; None where it cannot be built."""
    kept = model_size.file(planned, Path(request.config.output_dir), session.search)
    size = model_size.known(planned, kept)
    if size is None and kept not in session.unbuilt:
        session.screen.say(
            f"\nBuilding the model once to know its size, which takes some seconds. {kept} will keep it."
        )
        try:
            size = model_size.keep(model_size.learn(planned, cluster), kept)
        except RunFailed as failure:
            session.unbuilt[kept] = str(failure)
    return size


def estimated(planned: Plan, request: PointRequest, cluster: Cluster, session: Session) -> Result:
    """Shows what a plan needs, having its model built once where its size is not known; returns the sums of it."""
    size = size_of(planned, request, cluster, session)
    if size is None:
        why = session.unbuilt[model_size.file(planned, Path(request.config.output_dir), session.search)]
        session.screen.say(f"\nestimate   none, since the model could not be built: {why}")
        return {"workers": planned.workers, "estimate": None}
    made = estimate(planned, size)
    session.screen.estimated(planned, made)
    return {
        "workers": planned.workers,
        "estimate": {
            "device_bytes": made.device.total,
            "activations_known": made.device.activations is not None,
            "step_bytes": None if made.exchanged is None else made.exchanged.total,
            "step_examples": planned.training.global_batch,
        },
    }


def tell_shards(planned: Plan, request: PointRequest, session: Session) -> None:
    """Shows which tables are cut and what stays whole, as far as that is known before the model is built."""
    if planned.strategy.min_shard_bytes is None:
        return
    size = model_size.known(planned, model_size.file(planned, Path(request.config.output_dir), session.search))
    if size:
        session.screen.shared(estimate(planned, size))
