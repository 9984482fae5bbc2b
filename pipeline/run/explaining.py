"""Has processes time their steps with parts switched off, in turn with one device, in rounds."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipeline.analyze import explain, measure
from pipeline.plan.plan import Plan
from pipeline.record.commands import Explain
from pipeline.record.events import Event, Explained, Explaining, SwitchedOff
from pipeline.run.errors import RunFailed
from pipeline.run.group import Group
from pipeline.run.preemption import Preempted
from pipeline.run.timing import Measured, build

# Rounds of an explanation go on until there are so many and so long; after so much longer there need be fewer.
EXPLAIN_SECONDS, ENOUGH_ROUNDS = 10.0, 5


PATIENCE_SECONDS, LEAST_ROUNDS = 60.0, 3


# Short ones, since a machine that others use changes within seconds.
EXPLAIN_PIECE_SECONDS = 0.25


# So many replicas of a host are timed alone, at most.
MOST_ALONE = 4


def explain_loss(point: Group, one: Group, per_call: int, measured: Measured, tell: Callable[[Event], None]) -> None:
    """Has the processes time their steps with parts switched off, in turn with one device.

    Training is over: what fails here fails no run.
    """
    plan = point.plan
    try:
        one.joined()
        build(one)
        rounds = _rounds(point, one, per_call, measured.built.normalizations)
    except RunFailed as failed:
        measured.notes.append(f"What was lost could not be explained: {failed.failure.error}")
        return
    except Preempted:
        measured.notes.append("What was lost is not explained, since the machine was asked for.")
        return
    # Devices of a process that share a pool of threads are not told apart.
    apart = plan.hardware.kind != "cpu"
    names = {
        number: f"{process.role} {process.rank}{f' on {device}' * (apart and len(process.devices) > 1)}"
        for process in plan.processes
        for number, device in zip(process.replicas, process.devices, strict=True)
    }
    measured.explained = explain.explain(rounds, [names[number] for number in sorted(names)], plan)
    tell(Explained(measured.explained, time=time.time()))


@dataclass(frozen=True)
class _Turns:
    """What is timed in a round, by name, compiled by now: seconds of a step, and those of replicas by their numbers."""

    of_step: dict[str, Callable[[], float]] = field(default_factory=dict)
    of_replicas: dict[str, Callable[[], dict[int, float]]] = field(default_factory=dict)


def _rounds(point: Group, one: Group, per_call: int, normalizations: int) -> list[explain.Round]:
    """Rounds of all turns, each in the opposite order of the one before, so that a machine's drift favours none."""
    turns = _turns(point, one, per_call, normalizations)
    rounds: list[explain.Round] = []
    began, names = point.clock(), [*turns.of_step, *turns.of_replicas]
    while not _enough(len(rounds), point.clock() - began):
        seconds: dict[str, float] = {}
        replicas: dict[str, dict[int, float]] = {}
        for name in names if len(rounds) % 2 == 0 else names[::-1]:
            if name in turns.of_step:
                seconds[name] = turns.of_step[name]()
            else:
                replicas[name] = turns.of_replicas[name]()
        rounds.append(_round(seconds, replicas, point.plan, one.plan))
    return rounds


def _turns(point: Group, one: Group, per_call: int, normalizations: int) -> _Turns:
    """What is timed in a round."""
    plan = point.plan

    def ask(group: Group, command: Explain) -> list[Explaining]:
        return list(group.ask(command).values())

    def seconds(group: Group, what: SwitchedOff, warmup_steps: int, steps: int) -> float:
        """Of a step, by the slowest process, and of so many examples as a step of all workers trains."""
        told = ask(group, Explain(what, per_call, warmup_steps, steps))
        rate = measure.throughput(told[0].examples or 0.0, max(event.seconds or 0.0 for event in told))
        return plan.training.global_batch / rate

    turns = _Turns()

    def prepare(group: Group, name: str, what: SwitchedOff) -> None:
        """Compiles what is timed, and finds out how many steps fill a piece."""
        if group is one and what == "everything":
            seconds(group, what, 0, 1)
        pace = seconds(group, what, 0, per_call) * group.plan.training.global_batch / plan.training.global_batch
        steps = per_call * max(1, measure.steps_of_piece(pace, EXPLAIN_PIECE_SECONDS) // per_call)
        # What was made ahead meanwhile is taken first, and would come at once.
        warmup = max(plan.measurement.warmup_steps, steps) if what == "everything" else 1
        turns.of_step[name] = lambda: seconds(group, what, warmup, steps)

    for group, prefix in ((one, "one_"), (point, "")):
        # Those of one replica are not exchanged.
        exchanged: tuple[SwitchedOff, ...] = (
            ("no statistics",) if normalizations and plan.workers > 1 and group is point else ()
        )
        timed: tuple[SwitchedOff, ...] = ("everything", "no input", *exchanged)
        for what in timed:
            prepare(group, prefix + what.replace(" ", "_"), what)
        turns.of_step[f"{prefix}calling"] = lambda group=group: _middle(  # type: ignore[misc]
            [(told.seconds or 0.0) / per_call for told in ask(group, Explain("no step", per_call))]
        )
    if plan.workers > 1:

        def apart(replicas: list[int], least: float = EXPLAIN_PIECE_SECONDS) -> dict[int, float]:
            told = ask(point, Explain("no communication", per_call, replicas=replicas, seconds=least))
            taken = [dict(event.replicas or ()) for event in told]
            if plan.hardware.kind == "cpu":
                # Those of one process share a pool of threads: which of them it serves first says nothing of any.
                taken = [dict.fromkeys(stretch, sum(stretch.values()) / len(stretch)) for stretch in taken if stretch]
            return {number: seconds for stretch in taken for number, seconds in stretch.items()}

        everyone = list(range(plan.workers))
        apart(everyone, least=0.0)
        turns.of_replicas["together"] = lambda: apart(everyone)
        for place, replicas in enumerate(_one_of_each_host(plan)[:MOST_ALONE]):
            turns.of_replicas[f"alone {place}"] = lambda replicas=replicas: apart(replicas)  # type: ignore[misc]
    return turns


def _round(
    seconds: Mapping[str, float], replicas: Mapping[str, Mapping[int, float]], plan: Plan, one: Plan
) -> explain.Round:
    """What the turns have found, the baseline's as if there were an ideal device for each worker."""
    alone = [taken for name, taken in replicas.items() if name.startswith("alone")]
    return explain.Round(
        everything=seconds["everything"],
        no_input=seconds["no_input"],
        calling=seconds["calling"],
        one_everything=seconds["one_everything"] / plan.workers,
        one_no_input=seconds["one_no_input"] / plan.workers,
        one_calling=seconds["one_calling"] * plan.training.global_batch / (plan.workers * one.training.global_batch),
        no_statistics=seconds.get("no_statistics"),
        together=replicas.get("together", {}),
        alone={number: taken for stretch in alone for number, taken in stretch.items()},
    )


def _enough(rounds: int, seconds: float) -> bool:
    enough = rounds >= ENOUGH_ROUNDS and seconds > EXPLAIN_SECONDS
    return enough or (rounds >= LEAST_ROUNDS and seconds > PATIENCE_SECONDS)


def _one_of_each_host(plan: Plan) -> list[list[int]]:
    """The first replicas of all hosts, the second ones, and so on: each is alone on its host."""
    hosts: dict[int, list[int]] = {}
    for process in plan.processes:
        hosts.setdefault(process.host, []).extend(process.replicas)
    most = max(map(len, hosts.values()))
    return [[host[place] for host in hosts.values() if place < len(host)] for place in range(most)]


def _middle(values: list[float]) -> float:
    """The median, or the lower of two: one process that is slow does not decide."""
    return sorted(values)[(len(values) - 1) // 2]
