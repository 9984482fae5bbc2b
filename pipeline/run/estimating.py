"""Says what a run would need, without training."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.launch import Cluster
from pipeline.plan import size as sizes
from pipeline.plan.estimate import estimate
from pipeline.plan.plan import Plan
from pipeline.plan.size import Size
from pipeline.record.results import Ending, Layout, Result
from pipeline.run import model_size
from pipeline.run.beforehand import chosen
from pipeline.run.errors import RunFailed
from pipeline.run.holding import refuse_too_large, too_large
from pipeline.run.laying_out import planned_on
from pipeline.run.session import PointRequest, Session
from pipeline.run.views import Needs, PointResult


def estimated(planned: Plan, request: PointRequest, cluster: Cluster, session: Session) -> PointResult:
    """Shows what a plan needs, having its model built once where its size is not known."""
    point = request.ended(Result(Ending("PLANNED"), chosen(request.config), Layout(workers=planned.workers)))
    size = size_of(planned, request, session)
    if size is None:
        why = session.unbuilt[model_size.file(planned, Path(request.config.output_dir), session.search)]
        session.screen.say(f"\nestimate   none, since the model could not be built: {why}")
        return point
    made = estimate(planned, size)
    session.screen.estimated(planned, made)
    if said := too_large(planned, size, request.config, planner(cluster)):
        session.screen.say(f"\n{said}")
    needs = Needs(
        device_bytes=made.device.total,
        activations_known=made.device.activations is not None,
        step_bytes=None if made.exchanged is None else made.exchanged.total,
        step_examples=planned.training.global_batch,
    )
    return dataclasses.replace(point, needs=needs)


def expect_room(planned: Plan, request: PointRequest, cluster: Cluster, session: Session) -> None:
    """Refuses a plan that there is too little memory for, where the size of its model is known. Raises `UserError`."""
    kept = model_size.file(planned, Path(request.config.output_dir), session.search)
    if size := model_size.known(planned, kept):
        refuse_too_large(planned, size, request.config, planner(cluster))


def planner(cluster: Cluster) -> Callable[[Config], Plan]:
    """What makes the plan of a changed config on the same hosts, whatever devices they have."""
    return lambda config: planned_on(config, cluster, present=False, begin=False)


def tell_shards(planned: Plan, request: PointRequest, session: Session) -> None:
    """Shows which tables are cut and what stays whole, as far as that is known before the model is built."""
    if planned.strategy.min_shard_bytes is None:
        return
    size = model_size.known(planned, model_size.file(planned, Path(request.config.output_dir), session.search))
    if size:
        session.screen.shared(estimate(planned, size))


def size_of(planned: Plan, request: PointRequest, session: Session) -> Size | None:
    """The size of a plan's model, which is built once where it is not known; None where it cannot be built."""
    if size := sizes.shipped(planned):
        return size
    kept = model_size.file(planned, Path(request.config.output_dir), session.search)
    size = model_size.known(planned, kept)
    if size is None and kept not in session.unbuilt:
        session.screen.say(
            f"\nBuilding the model once to know its size, which takes some seconds. {kept} will keep it."
        )
        try:
            size = model_size.keep(model_size.learn(planned, session.here(request.config)), kept)
        except RunFailed as failure:
            session.unbuilt[kept] = str(failure)
    return size
