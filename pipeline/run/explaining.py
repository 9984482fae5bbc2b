"""Makes processes time their steps with parts switched off, in turn with one device, in rounds."""

from collections.abc import Callable, Mapping
from functools import partial

from pipeline.analyze import explain, measure
from pipeline.plan.plan import Plan
from pipeline.record.commands import Explain
from pipeline.record.events import Explaining, SwitchedOff
from pipeline.record.findings import Explanation
from pipeline.run.group import Group
from pipeline.run.session import RunPreempted
from pipeline.run.timing import Measurements, build
from pipeline.run.watch import RunFailed

# Rounds of an explanation go on until there are so many and so long; after so much longer there need be fewer.
EXPLAIN_SECONDS, ENOUGH_ROUNDS = 10.0, 5
PATIENCE_SECONDS, LEAST_ROUNDS = 60.0, 3
# Short ones, since a machine that others use changes within seconds.
EXPLAIN_PIECE_SECONDS = 0.25
# At most so many replicas of a host are timed alone.
MOST_ALONE = 4


def explain_loss(point: Group, one: Group, per_call: int, measured: Measurements) -> Explanation | None:
    """Explains the lost efficiency; notes why if that failed, which fails no run since training is over."""
    plan = point.plan
    try:
        one.joined()
        build(one)
        rounds = _rounds(point, one, per_call, measured.built.normalizations)
    except RunFailed as failed:
        measured.notes.append(f"What was lost could not be explained: {failed.error}")
        return None
    except RunPreempted:
        measured.notes.append("What was lost is not explained, since the machine was asked for.")
        return None
    # Devices of a process that share a pool of threads are not told apart.
    apart = plan.hardware.kind != "cpu"
    names = {
        number: f"{process.role} {process.rank}{f' on {device}' * (apart and len(process.devices) > 1)}"
        for process in plan.processes
        for number, device in zip(process.replicas, process.devices, strict=True)
    }
    measured.explained = explain.explain(rounds, [names[number] for number in sorted(names)], plan)
    return measured.explained


def _rounds(point: Group, one: Group, per_call: int, normalizations: int) -> list[explain.Round]:
    """Rounds of all turns, each in the opposite order of the one before, so that a machine's drift favours none."""
    of_step = _of_step(point, one, per_call, normalizations)
    of_replicas = _of_replicas(point, per_call)
    rounds: list[explain.Round] = []
    began, names = point.clock(), [*of_step, *of_replicas]
    while not _enough(len(rounds), point.clock() - began):
        seconds: dict[str, float] = {}
        replicas: dict[str, dict[int, float]] = {}
        for name in names if len(rounds) % 2 == 0 else names[::-1]:
            if name in of_step:
                seconds[name] = of_step[name]()
            else:
                replicas[name] = of_replicas[name]()
        rounds.append(_round(seconds, replicas, point.plan, one.plan))
    return rounds


def _explaining(group: Group, command: Explain) -> list[Explaining]:
    return list(group.request(command).values())


def _of_step(point: Group, one: Group, per_call: int, normalizations: int) -> dict[str, Callable[[], float]]:
    """By name, what times a step, compiled by now."""
    plan, turns = point.plan, dict[str, Callable[[], float]]()

    def seconds(group: Group, what: SwitchedOff, warmup_steps: int, steps: int) -> float:
        """Seconds of the slowest process, for as many examples as a step of all workers trains."""
        timed = _explaining(group, Explain(what, per_call, warmup_steps, steps))
        rate = measure.throughput(timed[0].examples or 0.0, max(event.seconds or 0.0 for event in timed))
        return plan.training.global_batch / rate

    def prepare(group: Group, what: SwitchedOff) -> Callable[[], float]:
        """Compiles the step, and finds out how many fill a piece."""
        if group is one and what == "everything":
            seconds(group, what, 0, 1)
        pace = seconds(group, what, 0, per_call) * group.plan.training.global_batch / plan.training.global_batch
        steps = per_call * max(1, measure.steps_of_piece(pace, EXPLAIN_PIECE_SECONDS) // per_call)
        # Batches that were made ahead are taken first, and would come at once.
        warmup = max(plan.measurement.warmup_steps, steps) if what == "everything" else 1
        return lambda: seconds(group, what, warmup, steps)

    def calling(group: Group) -> float:
        """Seconds of the call of a step that does nothing."""
        return _middle(
            [(event.seconds or 0.0) / per_call for event in _explaining(group, Explain("no step", per_call))]
        )

    for group, prefix in ((one, "one_"), (point, "")):
        switched: list[SwitchedOff] = ["everything", "no input"]
        # Those of one replica are not exchanged.
        if normalizations and plan.workers > 1 and group is point:
            switched.append("no statistics")
        for what in switched:
            turns[prefix + what.replace(" ", "_")] = prepare(group, what)
        turns[f"{prefix}calling"] = partial(calling, group)
    return turns


def _of_replicas(point: Group, per_call: int) -> dict[str, Callable[[], dict[int, float]]]:
    """By name, what times a step of each of some replicas without communication, compiled by now."""
    plan = point.plan
    if plan.workers == 1:
        return {}

    def apart(replicas: list[int], least: float = EXPLAIN_PIECE_SECONDS) -> dict[int, float]:
        command = Explain("no communication", per_call, replicas=replicas, seconds=least)
        stretches = [dict(event.replicas or ()) for event in _explaining(point, command)]
        if plan.hardware.kind == "cpu":
            # Those of one process share a pool of threads: which of them it serves first says nothing of any.
            stretches = [dict.fromkeys(each, sum(each.values()) / len(each)) for each in stretches if each]
        return {number: seconds for stretch in stretches for number, seconds in stretch.items()}

    everyone = list(range(plan.workers))
    apart(everyone, least=0.0)
    turns: dict[str, Callable[[], dict[int, float]]] = {"together": partial(apart, everyone)}
    for place, replicas in enumerate(_one_of_each_host(plan)[:MOST_ALONE]):
        turns[f"alone {place}"] = partial(apart, replicas)
    return turns


def _round(
    seconds: Mapping[str, float], replicas: Mapping[str, Mapping[int, float]], plan: Plan, one: Plan
) -> explain.Round:
    """One round's seconds, the baseline's as if there were an ideal device for each worker."""
    alone = [stretch for name, stretch in replicas.items() if name.startswith("alone")]
    return explain.Round(
        everything=seconds["everything"],
        no_input=seconds["no_input"],
        calling=seconds["calling"],
        one_everything=seconds["one_everything"] / plan.workers,
        one_no_input=seconds["one_no_input"] / plan.workers,
        one_calling=seconds["one_calling"] * plan.training.global_batch / (plan.workers * one.training.global_batch),
        no_statistics=seconds.get("no_statistics"),
        together=replicas.get("together", {}),
        alone={number: value for stretch in alone for number, value in stretch.items()},
    )


def _enough(rounds: int, seconds: float) -> bool:
    enough = rounds >= ENOUGH_ROUNDS and seconds > EXPLAIN_SECONDS
    return enough or (rounds >= LEAST_ROUNDS and seconds > PATIENCE_SECONDS)


def _one_of_each_host(plan: Plan) -> list[list[int]]:
    """The first replicas of all hosts, the second ones, and so on: in each list, each is alone on its host."""
    hosts: dict[int, list[int]] = {}
    for process in plan.processes:
        hosts.setdefault(process.host, []).extend(process.replicas)
    longest = max(map(len, hosts.values()))
    return [[host[place] for host in hosts.values() if place < len(host)] for place in range(longest)]


def _middle(values: list[float]) -> float:
    """The median, or the lower of two: one process that is slow does not decide."""
    return sorted(values)[(len(values) - 1) // 2]
