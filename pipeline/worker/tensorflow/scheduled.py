"""The loop of an asynchronous training: its coordinator hands out steps, and workers make them, each at its pace.

Each step trains the batch that its number stands for, whoever makes it, and what it counted comes back with its result:
examples and metrics are those of the steps that were handed out, also where workers were lost and steps made again.
"""

import contextlib
import queue
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from pipeline.worker.checkpoint import State
from pipeline.worker.data.reading import Batch
from pipeline.worker.data.source import Source
from pipeline.worker.loop import Call, Facts
from pipeline.worker.patched import all_patched, patched
from pipeline.worker.tensorflow import scheduled_step
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling import metrics

# So many calls a worker are handed out ahead, so that it never waits for the next.
AHEAD = 2
LOOK_SECONDS = 0.2


# A call's results as they came back: from which worker, then of each step losses, examples, staleness and seconds that
# it waited for its batch, and the metrics' state.
Done: TypeAlias = tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]


class AsyncLoop(Loop):
    """A loop on the coordinator, whose workers step apart. What metrics count is kept here."""

    # What the metrics' variables hold, in place of what servers do, which a message would change at each step.
    _own_counts: Sequence[tf.Variable] = ()

    def feed(self, source: Source, workers: int) -> None:
        """Makes so many workers train on the batches of a source from now on; nothing of it is counted yet."""
        self._counted = metrics.counted(self.model)
        if not self._own_counts:
            with tf.device("CPU:0"):
                self._own_counts = [tf.Variable(np.array(one), trainable=False) for one in self._counted]
        held = zip(self._counted, self._own_counts, strict=True)
        self._counting_here = contextlib.ExitStack()
        self._counting_here.enter_context(all_patched((variable, {"_value": own}) for variable, own in held))
        self.model.reset_metrics()
        self.concurrent_steps, self._rows = workers, source.rows
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self._source = iter(self._coordinator.create_per_worker_dataset(source.made))
        # The metrics' state before any batch.
        self._fresh = [np.array(variable) for variable in self._counted]
        self._call = scheduled_step.scheduled_steps(
            self.model, self.strategy, source.batch, self._counted, self._fresh, self.replicas.gradient_bits
        )
        self._compiled: tf.types.experimental.ConcreteFunction | None = None
        # Steps under way, and the calls that those are in.
        self.pending, self._under_way = 0, 0
        self._done: queue.Queue[Done] = queue.Queue()
        self._since = 0.0
        # Steps of each worker, and those before a checkpoint that training goes on from.
        self._steps_of: Counter[int] = Counter()
        self._before: Counter[int] = Counter()
        self._tally = {"examples": 0.0, "stale_sum": 0.0, "stale_most": 0}
        self._updates_before = self._updates()

    def let_go(self) -> None:
        """Lets go of the source, and of all that was made of it."""
        self._counting_here.close()
        del self._source, self._rows, self._call, self._compiled, self._coordinator

    @property
    def warm(self) -> bool:  # type: ignore[override]
        """True once every worker has made a step, and so has all that it needs for the next."""
        return len(self._steps_of) == self.concurrent_steps

    def call(self, count: int, wanted: int = 0) -> Call:
        """Returns the results of a worker's next call; hands out calls of `count` steps until `wanted` are out."""
        if not self.pending:
            self._since = time.perf_counter()
        wanted = max(count, wanted)
        while self.pending < wanted and self._under_way < AHEAD * self.concurrent_steps:
            self._hand_out(min(count, wanted - self.pending))
        while True:
            try:
                worker, losses, sizes, stale, waits, state = self._done.get(timeout=LOOK_SECONDS)
                break
            except queue.Empty:
                # Raises what a call has failed with.
                self._coordinator.done()
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.pending -= len(sizes)
        self._under_way -= 1
        self._steps_of[worker] += len(sizes)
        tally = self._tally
        tally["examples"] += float(sizes.sum())
        tally["stale_sum"] += float(stale.sum())
        tally["stale_most"] = max(tally["stale_most"], int(stale.max()))
        for own, after, before in zip(self._own_counts, state, self._fresh, strict=True):
            own.assign_add((after - before).astype(before.dtype))
        return Call(losses, sizes, seconds, waits, worker)

    def facts(self) -> Facts:
        """Staleness, what was counted, updates and whose steps they were; steps under way are in none of it."""
        steps_of = self._before + self._steps_of
        total = steps_of.total()
        return {
            "staleness_mean": self._tally["stale_sum"] / max(total, 1),
            "staleness_max": self._tally["stale_most"],
            "steps": total,
            "examples": int(self._tally["examples"]),
            "updates": self._updates() - self._updates_before,
            "worker_steps": [steps_of[worker] for worker in range(self.concurrent_steps)],
        }

    def state(self) -> State:
        """Returns what training goes on with, without its metrics, and what was counted of it."""
        facts = self.facts()
        counts = {"steps_of": facts["worker_steps"], "updates": facts["updates"], **self._tally}
        return State({"counts": counts}, super().state().arrays)

    def set_state(self, state: State) -> None:
        """Goes on from what `state` gave, on other devices too."""
        # Whose steps they were is forgotten where there are other workers now.
        super().set_state(state)
        counts = state.values["counts"]
        steps = counts["steps_of"]
        self._before = Counter(dict(enumerate(steps if len(steps) == self.concurrent_steps else [sum(steps)])))
        self._tally = {name: counts[name] for name in self._tally}
        self._updates_before = self._updates() - counts["updates"]

    def _updates(self) -> int:
        return int(self.model.optimizer.iterations.numpy())

    def _hand_out(self, count: int) -> None:
        rows, edges = self._rows(count)
        if self._compiled is None:
            index = tf.TensorSpec([None], tf.int64)
            # As in `schedule`: without it TensorFlow warns that the step might run here.
            with patched(self.strategy.extended, {"_being_scheduled": True}):
                packed = tf.function(self._packed, autograph=False)
                self._compiled = packed.get_concrete_function(self._source._values[0]._type_spec, index, index)
        # Past the public `schedule`, which takes a compiled function alone and cannot say which call is done first.
        self._coordinator._cluster.schedule(self._make, args=(self._source, rows, edges), kwargs=None)
        self.pending += count
        self._under_way += 1

    def _make(self, source: Iterator[Batch], rows: tf.Tensor, edges: tf.Tensor) -> None:
        """Makes a call on a worker and waits for it, in the thread that TensorFlow keeps for that worker."""
        assert self._compiled is not None, "what is handed out is compiled before"
        packed, count, width = self._compiled(source, rows, edges).numpy(), len(edges) - 1, 1 + len(self.outputs)
        ends = np.cumsum([1, count * width, count, count, count, *(value.size for value in self._fresh)])
        worker, flat, sizes, stale, waits, *state = np.split(packed, ends[:-1])
        losses = flat.reshape(count, width).astype(np.float32)
        metrics = [part.reshape(value.shape) for part, value in zip(state, self._fresh, strict=True)]
        self._done.put((int(worker[0]), losses, sizes.astype(np.float32), stale, waits, metrics))

    def _packed(self, source: Iterator[Batch], rows: tf.Tensor, edges: tf.Tensor) -> tf.Tensor:
        """All results in one tensor, since each is fetched on a way of its own."""
        *results, state = self._call(source, rows, edges)
        parts = [*results, *state]
        return tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts], 0)
