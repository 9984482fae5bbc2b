"""`train.xla` under TensorFlow: has XLA compile the steps of a loop, where that is asked for or turns out to be faster.

The steps made for it are on one batch, and what they change is put back. Exchange and update are left to TensorFlow.
"""

import dataclasses
import math
import random
import statistics

import keras
import numpy as np
import tensorflow as tf

from pipeline.worker.data.reading import Part
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow.collective import lost_a_peer
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.profile import one_again, plain

# Both are timed in turn in at most so many rounds of so many seconds each, of one step or more. Fewer rounds where they
# would take longer than so many seconds.
ROUNDS, ROUND_SECONDS, MOST_STEPS, MOST_SECONDS = 5, 0.2, 50, 4.0
# TensorFlow joins operations into such that XLA has no compiler for, and lays them out anew, before XLA is asked.
JOINS = ("remapping", "layout_optimizer")


@dataclasses.dataclass(frozen=True)
class Settled:
    """The choice: whether XLA compiles steps, how long it took, how many times as fast as TensorFlow, where timed."""

    note: str = ""
    xla: bool | None = None
    seconds: float | None = None
    speedup: float | None = None


def settle(loop: Loop, part: Part, choice: str) -> Settled:
    """Compiles the loop's step by XLA, for `choice` "auto" where it is faster then; returns what came of it.

    `part` is the training data, which nothing else reads. All processes of a training call it together, and settle on
    the same. Raises `ModelError` where XLA fails and `choice` is "true".
    """
    batch = one_again(loop.strategy, dataclasses.replace(loop.train_data, part=plain(part), shuffle=False))
    by_tensorflow = loop.compiled_anew()
    left_out = set[str]()
    by_xla = loop.compile_by(left_out)

    def seconds(steps: int, xla: bool) -> float:
        _for_xla(xla)
        return loop.on(batch, steps, by_xla if xla else by_tensorflow).seconds

    def not_by_xla() -> None:
        _for_xla(False)
        # Anew, so that it is what it would be if nothing had been timed.
        loop.compile_by(None)

    with loop.put_back():
        try:
            # Traced first, so that the first call's time is that of compiling.
            by_xla.get_concrete_function(batch, tf.constant(1))  # type: ignore[attr-defined]
            compiling = seconds(1, xla=True)
        except (tf.errors.OpError, ValueError) as error:
            if lost_a_peer(error):
                raise
            message = str(error).strip().splitlines()[0]
            if choice != "auto":
                raise ModelError("a model that XLA compiles", message, "train.xla=false, or auto") from error
            not_by_xla()
            return Settled(f"XLA compiles no step, since it fails: {message} (train.xla=auto).", False)
        text = f"XLA compiled the step before training, in {compiling:.1f} s"
        if left_out:
            text += f", without {', '.join(sorted(left_out))}, which it has no compiler for"
        if choice != "auto":
            return Settled(f"{text}.", True, compiling)
        seconds(1, xla=False)
        # What all processes have the same of, as they are to make as many steps.
        paces = loop.added([seconds(2, xla) / 2 for xla in (False, True)])
        pace, both = paces[0] / loop.collective.replicas, sum(paces) / loop.collective.replicas
        steps = min(max(math.ceil(ROUND_SECONDS / pace), 1), MOST_STEPS)
        count = min(max(int(MOST_SECONDS / (steps * both)), 1), ROUNDS)
        rounds = [[seconds(steps, xla) for xla in (False, True)] for _ in range(count)]
    without, within = loop.added([statistics.median(of_one) for of_one in zip(*rounds, strict=True)])
    speedup = without / within
    if speedup > 1:
        return Settled(
            f"{text}, which makes it {speedup:.2f} times as fast (train.xla=auto).", True, compiling, speedup
        )
    not_by_xla()
    text = f"XLA compiles no step: it would be {speedup:.2f} times as fast, after compiling for {compiling:.1f} s"
    return Settled(f"{text} (train.xla=auto).", False, compiling, speedup)


def seed(loop: Loop, value: int) -> None:
    """Seeds all random generators before training, and keeps what XLA has compiled."""
    # TensorFlow forgets all compiled functions when its own seed is set. That of XLA's stands since the process began.
    if loop.xla is None:
        keras.utils.set_random_seed(value)
    else:
        random.seed(value)
        np.random.seed(value)


def _for_xla(xla: bool) -> None:
    """Makes TensorFlow leave operations as they are from now on, where XLA compiles them, or join them as usual."""
    tf.config.optimizer.set_experimental_options(dict.fromkeys(JOINS, not xla))
