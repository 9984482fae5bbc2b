"""Finds the checkpoint that a training goes on from, and what it is to keep of itself on the way."""

import dataclasses
from collections.abc import Callable

from pipeline.plan.plan import Plan
from pipeline.record import events
from pipeline.worker.checkpoint import Checkpointer, State, Survival
from pipeline.worker.engine import Tell
from pipeline.worker.input.layout import Layout, Position
from pipeline.worker.saving import check_same_data, is_good


def survival(
    plan: Plan,
    resume: str | None,
    layout: Layout,
    digest: str,
    chief: bool,
    on_all: Callable[[State | None], State | None],
    leave: Callable[[], bool],
    tell: Tell,
) -> tuple[Survival | None, Position]:
    """(How a training is kept and goes on, its position in the data), on all processes; None where none is kept.

    The first process, `chief`, reads the checkpoint, and `on_all` gives it to the others. Raises `TrainingError` for
    one of other data.
    """
    if plan.checkpoint.folder is None:
        return None, Position()
    checkpointer = Checkpointer(plan.checkpoint, tell)
    state = None
    if resume is not None and chief:
        state = checkpointer.last(is_good(plan))
        if state is None and plan.checkpoint.before is not None:
            there = dataclasses.replace(plan.checkpoint, folder=plan.checkpoint.before)
            state = Checkpointer(there, tell).last(is_good(plan))
    if resume is not None and len(plan.leaders) > 1:
        state = on_all(state)
    data = {"examples": layout.examples, "shards": len(layout.counts), "digest": digest, "build": plan.data.build}
    about = {"data": data, "learning_rate": plan.training.learning_rate}
    train = plan.training
    made = Survival(
        checkpointer, state, leave, train.divergence_factor, train.rate_scale, about, train.checkpoint_share
    )
    if resume is not None and chief:
        if resume == "back":
            checkpointer.drop_after(-1 if state is None else state.values["step"])
        values = {} if state is None else state.values
        tell(events.Restored(values.get("step", 0), state is not None, tuple(values.get("told", ()))))
    if state is None:
        return made, Position()
    check_same_data(state.values["data"], data)
    return made, Position(state.values["epoch"], state.values["examples"])
