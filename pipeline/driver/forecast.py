"""Says what a plan needs, and how fast it would be, without training; refuses what lacks the memory for its model."""

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import Config, Exchange, Object, StrategyConfig
from pipeline.driver import Foreseen, RunResult
from pipeline.driver.session import RunRequest, Session, own_code
from pipeline.driver.start import planned_on, with_addresses
from pipeline.driver.watch import RunFailed
from pipeline.errors import UserError, amount
from pipeline.launch import reach
from pipeline.plan import planning
from pipeline.plan import size as sizes
from pipeline.plan.backends import COMPUTING, MODEL_PARALLEL
from pipeline.plan.estimate import Estimate, estimate
from pipeline.plan.plan import TENSORFLOW, Plan
from pipeline.record.files import append_prediction
from pipeline.record.log import read_json, write_json
from pipeline.record.results import Choices, Cost, Ending, Layout, Result, Speed

if TYPE_CHECKING:
    from pipeline.analyze import predict, step_model

# Devices that a copy of the model is tried over.
PARTS = (2, 4, 8)
MOST_NAMED = 3


def estimated(plan: Plan, request: RunRequest, session: Session) -> RunResult:
    """Shows what a plan needs. Builds its model once if its size is not known."""
    layout = Layout(workers=plan.workers, global_batch=plan.training.global_batch)
    point = request.ended(Result(Ending("PLANNED"), Choices.of(request.config), layout))
    size = learned_size(plan, request, session)
    if isinstance(size, str):
        session.screen.say(f"\nestimate   none, since the model could not be built: {size}")
        return point
    estimation = estimate(plan, size)
    session.screen.estimated(plan, estimation)
    if refusal := _refusal(plan, size, request, session):
        session.screen.say(f"\n{refusal}")
    return replace(point, estimate=estimation)


def predicted(plan: Plan, request: RunRequest, session: Session) -> RunResult:
    """Says how fast a plan would be, by earlier runs, and notes that to be scored later. Raises `UserError`."""
    # They bring along NumPy, which a plan does without.
    from pipeline.analyze import calibration, history, measure, predict

    config, output = request.config, request.output
    for name in (sweep := config.predict.sweep, None):
        if name not in session.histories:
            session.histories[name] = history.finished(output, name)
    basis = predict.basis(plan, session.histories[sweep], sweep or str(output))
    same = [timed_run for timed_run in basis.runs if timed_run.plan.model.build == plan.model.build]
    is_sized = plan.training.replica_batch in [timed_run.plan.training.replica_batch for timed_run in same]
    timed = None if is_sized else _timed_alone(plan, basis, request, session)
    if same:
        parameters = same[-1].parameters
    elif timed:
        parameters = timed.case.parameters
    elif isinstance(size := learned_size(plan, request, session), str):
        raise UserError("a model that can be built, to know its size", size.removesuffix("."), "another model")
    else:
        parameters = size.parameters
    errors = calibration.of_log(plan, basis, session.histories[None])
    prediction = calibration.calibrated(predict.of_plan(plan, parameters, basis, timed, errors.spread), errors)
    rate, examples = prediction.examples_per_second, plan.data.train_examples or basis.runs[-1].run.train_examples
    seconds = measure.seconds_to_finish(plan, rate, examples)
    watts = measure.watts_of_worker([timed_run.run.result for timed_run in basis.runs])
    joules = None if watts is None or seconds is None else watts * plan.workers * seconds
    price = config.hardware.price_per_hour
    result = Result(
        Ending("PREDICTED"),
        Choices.of(config),
        Layout.of(plan),
        Speed(rate, prediction.low, prediction.high, interval_confidence=prediction.confidence),
        cost=Cost(seconds, price, measure.cost(price, plan.hardware.hosts, seconds), joules),
        notes=(*plan.notes, *prediction.notes),
    )
    score = calibration.score([timed_run.run.result for timed_run in session.histories[None]])
    foreseen = Foreseen(prediction, score, config.predict.knee_share)
    append_prediction(output, calibration.line_of(plan, prediction, time.time()))
    return replace(request.ended(result), foreseen=foreseen)


def _timed_alone(
    plan: Plan, basis: "predict.Basis", request: RunRequest, session: Session
) -> "step_model.Observed | None":
    """A step of one worker of a plan, timed here and now; None if predict.time_one is false, or it cannot be timed."""
    from importlib import metadata

    from pipeline.analyze import predict, step_model
    from pipeline.driver.timing import time_steps

    versions = {name: metadata.version(name) for name in (*COMPUTING.get(plan.backend, ()), "keras")}
    fitted_on = basis.fitted_on
    comparable = fitted_on.machine == plan.hardware.machine and versions.items() <= fitted_on.versions.items()
    if not request.config.predict.time_one or not comparable or plan.hardware.kind not in ("cpu", "gpu"):
        return None
    cluster = session.here(request.config)
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
            case = step_model.case_of(one, starts[0].built.parameters or 0)
            lives = [[case.examples / repeat.examples_per_second for repeat in start.point] for start in starts]
            session.timed[key] = predict.one_run(case, lives)
    return session.timed[key]


def expect_room(plan: Plan, request: RunRequest, session: Session) -> Estimate | None:
    """The estimate, if the model's size is known before it is built. Raises `UserError` if memory is too little."""
    size = known_size(plan, size_file(plan, request.output, session.search))
    if size and (refusal := _refusal(plan, size, request, session)):
        raise UserError(refusal)
    return estimate(plan, size) if size else None


def known_size(plan: Plan, path: Path) -> sizes.Size | None:
    """The size that comes with the package, or that is in the file `path`; None if neither."""
    return sizes.shipped(plan) or read_json(sizes.Size, path)


def learned_size(plan: Plan, request: RunRequest, session: Session) -> sizes.Size | str:
    """The size, of a model that is built once if it is not known; why it could not be built, if so."""
    path = size_file(plan, request.output, session.search)
    if (size := known_size(plan, path)) is not None or path in session.unbuilt:
        return session.unbuilt[path] if size is None else size
    # What drives processes takes a moment to import.
    from pipeline.driver.timing import learn_size

    session.screen.say(f"\nBuilding the model once to know its size, which takes some seconds. {path} will keep it.")
    try:
        return keep_size(learn_size(plan, session.here(request.config)), path)
    except RunFailed as failure:
        session.unbuilt[path] = str(failure)
        return session.unbuilt[path]


def keep_size(size: sizes.Size, path: Path) -> sizes.Size:
    """The size, written to a file for later commands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, size)
    return size


def size_file(plan: Plan, output: Path, search: Sequence[str]) -> Path:
    """The file for the size of a plan's model, named by all that it depends on."""
    from importlib import metadata

    versions = {name: metadata.version(name) for name in (*COMPUTING.get(plan.backend, ()), "keras")}
    code = own_code(plan, search) or hashlib.sha256().hexdigest()
    return output / "sizes" / f"{sizes.fingerprint(plan, code, versions)}.json"


def _refusal(plan: Plan, size: sizes.Size, request: RunRequest, session: Session) -> str | None:
    # On the same hosts, whatever devices they have.
    cluster = session.cluster(request.config)
    return too_large(plan, size, request.config, lambda config: planned_on(config, cluster, False, False))


def too_large(plan: Plan, size: sizes.Size, config: Config, replan: Callable[[Config], Plan]) -> str | None:
    """The refusal of a plan with too little memory, with what fits once `replan` has planned it; None if it fits."""
    estimation = estimate(plan, size)
    if estimation.fits:
        return None

    def fits(changed: Config) -> bool:
        with suppress(UserError):
            return estimate(replan(changed), size).fits
        return False

    fitting = (typed for typed, changed in _others(plan, size, config) if fits(changed))
    tried = ", or ".join(islice(fitting, MOST_NAMED))
    tried = tried or "a smaller model: no strategy, train.remat or batch tried holds it"
    host, device, whose = estimation.host, estimation.device, "in all"
    if host is None or estimation.too_small:
        place, whose = f"{plan.hardware.memory_gib:g} GiB of a device of {plan.hardware.name}", "on each"
        needed = max(each.total for each in estimation.memory)
    else:
        place, needed = f"{host.gib:g} GiB of a host, which its CPU devices share,", host.total
    parts = (
        (device.parameters, "of parameters"), (device.gradients, "of gradients"), (device.slots, "of the optimizer"),
        (device.activations or 0, "of activations"), (device.batches, "of batches"),
    )  # fmt: skip
    of_device = ", ".join(f"{amount(size)} {what}" for size, what in parts if size)
    return (
        f"Expected a model that fits the {place} under strategy={plan.strategy.name}, received one that takes "
        f"{needed / 2**30:.3g} GiB {whose} ({of_device} on a device). Try {tried}."
    )


def without_room(plan: Plan, state_bytes: int) -> str | None:
    """The refusal of a built model whose weights, gradients and slots alone exceed the memory; None if they fit."""
    hardware, devices = plan.hardware, [len(process.devices) for process in plan.processes if process.host == 0]
    gib = hardware.memory_gib or hardware.host_memory_gib
    copies = sum(devices) // plan.strategy.devices_per_replica if hardware.memory_gib is None else 1
    if gib is None or plan.strategy.asynchronous or (plan.strategy.devices_per_replica > 1 and copies == 1):
        return None
    if copies * state_bytes <= gib * 2**30:
        return None
    return (
        f"Expected a model that fits {gib:g} GiB under strategy={plan.strategy.name}, received one whose weights, "
        f"gradients and optimizer take {copies * state_bytes / 2**30:.3g} GiB. "
        f"Try mode=plan, which names what holds it."
    )


def _others(plan: Plan, size: sizes.Size, config: Config) -> Iterator[tuple[str, Config]]:
    """Yields (what is typed, the config) of what may hold the model: several devices a copy, one copy, less a batch."""
    bases = [("", config)]
    if size.forgetful_step is not None and not config.train.remat:
        bases.append((" train.remat=true", replace(config, train=replace(config.train, remat=True))))
        yield "train.remat=true", bases[1][1]
    # As the size says how the model is laid over devices.
    cuttable = size.layers if plan.backend == TENSORFLOW else any(variable.cut for variable in size.variables)
    tried = [parts for parts in PARTS if cuttable and parts > plan.strategy.devices_per_replica]
    build: Object = {"_target_": MODEL_PARALLEL, "layout": None}
    parallel = StrategyConfig("model_parallel", spans_devices=True, build=build)
    one = StrategyConfig("one_device", exchange=Exchange.none, build={"_target_": "pipeline.strategies.one_device"})
    several = [
        (f" strategy.devices_per_replica={parts}", replace(parallel, devices_per_replica=parts)) for parts in tried
    ]
    for strategies in () if plan.strategy.asynchronous else (several, [("", one)] * (plan.workers > 1)):
        for also, base in bases:
            for typed, strategy in strategies:
                changed = replace(base, workers=1, strategy=strategy)
                yield f"strategy={strategy.name} workers=1{typed}{also}", changed
    batch = plan.training.replica_batch // 2
    while batch and not estimate(replace(plan, training=replace(plan.training, replica_batch=batch)), size).fits:
        batch //= 2
    if batch:
        train = replace(config.train, replica_batch=batch, global_batch=None)
        yield f"train.replica_batch={batch}", replace(config, train=train)
