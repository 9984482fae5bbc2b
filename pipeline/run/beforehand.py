"""What a result says of a point before it is run, and the results of points that are not run."""

from contextlib import suppress
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.plan.backends import other
from pipeline.plan.plan import AUTO, Plan
from pipeline.record import results
from pipeline.record.results import Choices, Ending, Layout, Result


def chosen(config: Config) -> Choices:
    """The choices of a config, by name."""
    return Choices(
        config.strategy.name,
        config.hardware.name,
        config.model.name,
        config.data.name,
        other(config.backend),
        None if config.strategy.collective == AUTO else other(config.strategy.collective),
    )


def choices_of(planned: Plan) -> Choices:
    """The choices of a plan, by name."""
    return Choices(
        planned.strategy.name,
        planned.hardware.name,
        planned.model.name,
        planned.data.name,
        other(planned.backend),
        other(planned.collective),
    )


def layout_of(planned: Plan, timed_workers: int | None) -> Layout:
    """How a plan is laid out, and how many of its workers were timed."""
    each = planned.strategy.devices_per_replica
    return Layout(
        workers=planned.workers,
        timed_workers=timed_workers,
        hosts=planned.hardware.hosts,
        processes=len(planned.processes),
        replicas=planned.workers,
        replica_batch=planned.training.replica_batch,
        global_batch=planned.training.global_batch,
        scaling=planned.training.scaling,
        precision=planned.training.precision,
        rehearsal=planned.hardware.rehearsal,
        oversubscribed=planned.hardware.oversubscribed,
        asynchronous=planned.strategy.asynchronous,
        devices=planned.workers * each if each > 1 else None,
    )


def refused(error: str, config: Config, folder: Path) -> Result:
    """The result of a point that cannot be laid out, written into its folder where there is one."""
    return _kept(Result(Ending("REFUSED", error), chosen(config), Layout(workers=config.workers)), folder)


def killed(error: str, config: Config, folder: Path) -> Result:
    """The same of one whose hosts were taken away before it began."""
    return _kept(Result(Ending("KILLED", error), chosen(config), Layout(workers=config.workers)), folder)


def unread(error: str, folder: Path) -> Result:
    """The same of a config that cannot be read."""
    return _kept(Result(Ending("REFUSED", error)), folder)


def _kept(result: Result, folder: Path) -> Result:
    with suppress(OSError):
        # A folder that was named may hold a run, whose result stays.
        if not (folder / "events.jsonl").exists():
            results.write(folder, result)
    return result
