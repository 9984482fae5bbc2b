"""Turns the end of a run into what `result.json` says of it: its figures, and notes on them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from msgspec.structs import asdict

from pipeline.analyze import calibration, comparable, measure, step_model
from pipeline.config.parts import unflat
from pipeline.config.schema import Config
from pipeline.driver.resume import Handover
from pipeline.driver.run import Run
from pipeline.driver.session import Preemption
from pipeline.driver.timing import Measurements
from pipeline.errors import first_of
from pipeline.plan.plan import Plan
from pipeline.record import results
from pipeline.record.events import MODEL, SAMPLE, WEIGHTS
from pipeline.record.files import Scored, read_predictions
from pipeline.record.findings import Check

SKIPPED_NAMED = 3


def result_of(run: Run, plan: Plan, config: Config, at: Handover, ending: results.Ending) -> results.Result:
    """The result of a run, of which the last attempt stands `at` its end."""
    measured, reused, repeats, source = at.measured, at.known, list[float](), None
    if at.baseline is not None:
        repeats = list(reused.examples_per_second) if reused is not None else []
        source = results.IN_THIS_RUN if reused is None else f"reused from {reused.folder}"
    if measured.baseline:
        repeats = [repeat.examples_per_second for repeat in measured.counted(plan)[1]]
    speed, training = speed_of(plan, measured, repeats, source), _training(measured, run)
    skipped = {part: sum(broken.examples for broken in measured.lost.get(part, ())) for part in ("train", "validation")}
    longest, shares = measure.input_wait(measured.point)
    waiting = [plan.processes[rank] for rank in (plan.ranks("worker") if plan.strategy.asynchronous else plan.leaders)]
    waited = results.Input(
        wait=longest,
        wait_by_worker=dict(zip([f"{each.role} {each.rank}" for each in waiting], shares, strict=False)),
        bound=None if longest is None else longest >= measure.INPUT_BOUND,
        train_examples_skipped=skipped["train"],
        validation_examples_skipped=skipped["validation"],
    )
    goodput, price, middle = run.goodput, config.hardware.price_per_hour, speed.examples_per_second
    seconds = measure.seconds_to_finish(plan, middle, measured.built.train_examples) if middle else None
    predictions: tuple[Scored, ...] = ()
    # Predictions are of devices with cores of their own.
    if ending.status == "FINISHED" and middle and not plan.hardware.oversubscribed:
        lines = read_predictions(Path(config.output_dir))
        predictions = tuple(calibration.scored(lines, step_model.identity(plan), middle))
    names = [f"worker {rank}" for rank in plan.ranks("worker")]
    by_name = dict(zip(names, measured.finished.worker_steps or [], strict=False))
    return results.Result(
        ending,
        results.Choices.of(plan),
        results.Layout.of(plan, measured.timed_workers or plan.workers),
        speed,
        waited,
        training,
        unflat(results.Staleness, asdict(measured.finished) | {"worker_steps": by_name}),
        results.Survival(
            measured.workers or plan.workers, goodput.resumed, measured.restarts, measured.rollbacks, goodput.repeated,
            goodput.share, run.saved_step,
        ),
        results.Cost(seconds, price, measure.cost(price, plan.hardware.hosts, seconds), measured.energy_joules),
        machine=plan.hardware.machine,
        versions=measured.versions,
        check=run.check,
        profile=measured.profile,
        explained=measured.explained,
        predictions=predictions,
        notes=(
            *plan.notes,
            *measured.notes,
            *(measured.built.notes or ()),
            *_notes_on_training(training, run.check, plan.workers),
            *_notes_on_speed(plan, measured, speed, waited),
            *_notes_on_skipped(measured),
        ),
    )  # fmt: skip


def speed_of(plan: Plan, measured: Measurements, baseline: Sequence[float], source: str | None) -> results.Speed:
    """Throughput, step times and speedup, with intervals, as far as measured; `baseline` repeats come from `source`."""
    point, _ = measured.counted(plan)
    points = [repeat.examples_per_second for repeat in point]
    middle, low, high = measure.interval(points) if points else (None, None, None)
    in_turn = source == results.IN_THIS_RUN
    ratio, least, most = measure.speedup(points, baseline, in_turn) if points and baseline else (None, None, None)
    devices = (measured.timed_workers or plan.workers) * plan.strategy.devices_per_replica
    efficiency = None if ratio is None else ratio / devices
    others = [repeat.other_work for repeat in point if repeat.other_work is not None]
    return results.Speed(
        middle,
        low,
        high,
        **(measure.step_ms(point) if point else {}),
        baseline_examples_per_second=measure.interval(baseline)[0] if baseline else None,
        baseline_source=source if baseline else None,
        speedup=ratio,
        speedup_low=least,
        speedup_high=most,
        # More than the ideal means that something has slowed the baseline.
        efficiency=None if efficiency is None or efficiency > results.MOST_EFFICIENCY else efficiency,
        interval_confidence=measure.confidence(len(points)) if points else None,
        repeats=len(points),
        steps_per_call=measured.steps_per_call,
        other_work=median(others) if others else None,
    )


def _notes_on_speed(plan: Plan, measured: Measurements, speed: results.Speed, waited: results.Input) -> list[str]:
    """Notes on a throughput that is not that of all workers, or disturbed, bound by input, or explained otherwise."""
    timed, others, notes = measured.timed_workers or plan.workers, speed.other_work, list[str]()
    if timed != plan.workers:
        notes.append(f"The throughput is that of {timed} workers.")
    if others is not None and others >= comparable.BUSY:
        notes.append(
            f"{comparable.TOOK} {others:.0%} of the time of the cores while steps were timed: the throughput is that "
            f"of a busy machine. Try again when it is quiet."
        )
    if speed.speedup is not None and speed.efficiency is None:
        notes.append("The baseline was disturbed: the speedup over it is more than there are devices. Try again.")
    if waited.bound:
        slowest, share = max(waited.wait_by_worker.items(), key=lambda of_worker: of_worker[1])
        notes.append(
            f"{comparable.WAITED} {slowest} waited for its batches for {share:.0%} of the step time. data.profile=true "
            f"says which stage of the input costs most. Try data.cache=memory, data.service=2, or to prepare the data "
            f"once with python -m pipeline prepare."
        )
    speedup = [value for value in (speed.speedup, speed.speedup_low, speed.speedup_high) if value is not None]
    if (explained := measured.explained) is not None and len(speedup) == 3:
        middle, low, high = (value / timed for value in speedup)
        if low > 1 - explained.lost_low or high < 1 - explained.lost_high:
            both = f"{middle:.0%} while training was timed, {1 - explained.lost:.0%} when its loss was explained"
            notes.append(f"The efficiency was {both}: load changed in between.")
    return notes


def _training(measured: Measurements, run: Run) -> results.Training:
    """The figures of training, and the files that it left in the run's folder."""
    built, finished = measured.built, measured.finished
    files = [name for name in (MODEL, WEIGHTS, SAMPLE) if (run.folder / name).exists()]
    return replace(
        unflat(results.Training, asdict(built) | asdict(finished)),
        metrics=finished.metrics or {},
        val_metrics=finished.val_metrics or {},
        seconds_startup=measured.seconds_startup,
        seconds_training=measured.seconds_training,
        xla=run.xla,
        xla_speedup=run.xla_speedup,
        saved=next((name for name in files if name != SAMPLE), None),
        sample=SAMPLE if SAMPLE in files else None,
        planned_epochs=None if finished.stopped_by is None else built.epochs,
    )


def _notes_on_training(training: results.Training, check: Check | None, replicas: int) -> list[str]:
    """Notes on what a callback has changed, and on replicas that were compared with one device."""
    notes = []
    if training.stopped_by is not None:
        end = f"epoch {training.epochs} of {training.planned_epochs}, step {training.stopped_at}"
        notes.append(f"Training ended early, at {end}: {training.stopped_by}.")
    if training.restored_epoch is not None:
        notes.append(
            f"The weights are those of epoch {training.restored_epoch}, which EarlyStopping restored; loss and metrics "
            f"are those of epoch {training.epochs}."
        )
    if check is not None and check.outcome == "not made" and not check.noted:
        notes.append(f"Replicas were not compared with one device (train.check): {check.unsaid}.")
    if check is not None and check.outcome == "different" and not check.noted:
        difference = check.said(replicas)
        notes.append(f"{difference[0].upper()}{difference[1:]} {check.advice}")
    return notes


def _notes_on_skipped(measured: Measurements) -> list[str]:
    notes = []
    for part, what in (("train", "training"), ("validation", "validation")):
        lost = measured.lost.get(part, ())
        if count := sum(broken.examples for broken in lost):
            names = first_of([f"{broken.name} {broken.why}" for broken in lost], SKIPPED_NAMED)
            more = ", all in events.jsonl" if len(lost) > SKIPPED_NAMED else ""
            notes.append(f"{count} {what} example{'s were' if count > 1 else ' was'} left out: {names}{more}.")
    return notes


def preempted(preemption: Preemption, saved_step: int | None) -> str:
    """Says how the run was preempted, and how to go on."""
    how = "ended by Ctrl-C" if preemption.by_person else f"preempted by {preemption.asked}"
    if saved_step is None:
        return f"The run was {how}. No checkpoint was written yet; the same command begins it anew."
    return f"The run was {how}. The last checkpoint is of step {saved_step}; the same command goes on from there."
