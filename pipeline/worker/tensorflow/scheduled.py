"""The loop of an asynchronous training: its coordinator hands out steps, and workers make them, each at its pace.

Each step trains the batch that its number stands for, whoever makes it, and what it counted comes back with its result:
examples and metrics are those of the steps that were handed out, also where workers were lost and steps made again. A
message to a server costs more than the bytes of small weights, so a server sends all of its weights in one, and gets
their gradients in another. What updates the weights is all computed where they are.
"""

import contextlib
import math
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.analyze.comparable import grouped
from pipeline.data.arrays import Nested
from pipeline.private import custom_gradients, in_stateless_scope
from pipeline.private_keras import keras_variables
from pipeline.worker.checkpoint import State
from pipeline.worker.data.reading import Batch
from pipeline.worker.data.source import Source
from pipeline.worker.loop import Call, Facts
from pipeline.worker.patched import all_patched, patched
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow import tables
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling import metrics
from pipeline.worker.tensorflow.loss_scaling.updates import updating
from pipeline.worker.tensorflow.step import Carried, all_reduce_once, awaited, caller, narrowed, widened
from pipeline.worker.variables import bytes_of

# Steps of a small model, of so few variables, that are unrolled: going round the loop takes messages to servers too.
UNROLLED, FEW = 4, 16
# An array of so many bytes goes by itself: to join it with others would take as long as a message.
LARGE = 1 << 20
# So many calls a worker are handed out ahead, so that it never waits for the next.
AHEAD = 2
LOOK_SECONDS = 0.2


# The worker; loss vectors [steps, 1 + outputs], and of each step [steps] examples, staleness and seconds that it waited
# for its batch; and the metrics' state.
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
        self._fresh = [np.array(variable) for variable in self._counted]
        self._call = self._compiled_steps(source.batch)
        self._compiled: tf.types.experimental.ConcreteFunction | None = None
        # Steps under way, and the calls that those are in.
        self.pending, self._under_way, self._since = 0, 0, 0.0
        self._done: queue.Queue[Done] = queue.Queue()
        # Steps of each worker, and those before a checkpoint that training goes on from.
        self._steps_of, self._before = Counter[int](), Counter[int]()
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
        super().set_state(state)
        counts, steps = state.values["counts"], state.values["counts"]["steps_of"]
        # Whose steps they were is forgotten where there are other workers now.
        self._before = Counter(dict(enumerate(steps if len(steps) == self.concurrent_steps else [sum(steps)])))
        self._tally = {name: counts[name] for name in self._tally}
        self._updates_before = self._updates() - counts["updates"]

    def _updates(self) -> int:
        return int(self.model.optimizer.iterations.numpy())

    def _hand_out(self, count: int) -> None:
        def packed(*arguments: Any) -> tf.Tensor:
            # All results in one tensor, since each is fetched on a way of its own.
            parts = tf.nest.flatten(self._call(*arguments))
            return tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts], 0)

        rows, edges = self._rows(count)
        if self._compiled is None:
            specs = [self._source._values[0]._type_spec, *[tf.TensorSpec([None], tf.int64)] * 2]
            # As in `schedule`: without it TensorFlow warns that the step might run here.
            with patched(self.strategy.extended, {"_being_scheduled": True}):
                self._compiled = tf.function(packed, autograph=False).get_concrete_function(*specs)
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

    def _compiled_steps(self, batch: Callable[..., Batch]) -> Callable[..., tuple[Nested[tf.Tensor], ...]]:
        """Returns steps of one worker, while others make theirs: (source, rows, edges [steps + 1]) -> `Done`.

        Staleness counts the updates between reading the variables and updating them. A step's batch is `batch(source,
        rows, edge, next edge)`; the variables that metrics have `counted` in begin as `fresh`.
        """
        model, strategy, counted, fresh = self.model, self.strategy, self._counted, self._fresh
        all_reduce_once(model.optimizer)
        call, updates = caller(model), model.optimizer.iterations.value

        def replica_step(batch: Batch, state: Sequence[tf.Tensor], before: tf.Tensor) -> tuple[Any, ...]:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
            state, variables = list(state), model.trainable_variables
            held, apart = [variable.value for variable in variables], metrics.counted_apart(model, counted, state)
            with fetched(model, before) as held_here, apart as counting, tf.GradientTape() as tape:
                tape.watch(list(held_here.values()))
                y_pred = call(x, training=True)
                values = losses.weighted(model, x, y, y_pred, weights, tf.constant(1.0), training=True)
                scaled = model.optimizer.scale_loss(values[0])
            of_fetched, of_held = tape.gradient(scaled, [held_here, held])
            parts = [(of_fetched.get(id(one)), gradient) for one, gradient in zip(variables, of_held, strict=True)]
            both = ([part for part in of_one if part is not None] for of_one in parts)
            gradients = [tf.add(*some) if len(some) == 2 else next(iter(some), None) for some in both]
            counting(model.compute_metrics, x, y, y_pred, sample_weight=weights)
            return values, state, gradients

        def one(
            source: Iterator[Batch], rows: tf.Tensor, edges: tf.Tensor, index: tf.Tensor, state: Sequence[tf.Tensor],
            values: tf.TensorArray, sizes: tf.TensorArray, waits: tf.TensorArray,
        ) -> tuple[Carried, ...]:  # fmt: skip
            own_batch, waited = awaited(lambda: batch(source, rows, edges[index], edges[index + 1]), after=values)
            with losses.without_keras_scaling(), _added_in_place(), updating(model.optimizer):
                with tf.device(updates.device):
                    before = updates.read_value()
                loss, state, gradients = strategy.run(replica_step, args=(own_batch, state, before))
                stale = self._applied(gradients, before)
            size = tf.shape(tf.nest.flatten(own_batch)[0], tf.int64)[0]
            written = [array.write(index, value) for array, value in ((values, loss), (sizes, size), (waits, waited))]
            return index + 1, stale, state, *written

        def steps(source: Iterator[Batch], rows: tf.Tensor, edges: tf.Tensor) -> tuple[Nested[tf.Tensor], ...]:
            def some(number: int, first: tf.Tensor, stale: tf.TensorArray, *others: Carried) -> tuple[Carried, ...]:
                index, rest, ages = first, list(others), []
                for _ in range(number):
                    index, age, *rest = one(source, rows, edges, index, *rest)
                    ages.append(age)
                with tf.device(updates.device):
                    together = tf.cast(tf.stack(ages), tf.int64)
                return index, stale.scatter(tf.range(first, index), together), *rest

            count, variables = tf.shape(edges)[0] - 1, model.trainable_variables
            is_small = len(variables) <= FEW and sum(map(bytes_of, variables)) < LARGE
            arrays = [tf.TensorArray(kind, size=count) for kind in (tf.int64, tf.float32, tf.int64, tf.float32)]
            carried = (0, arrays[0], [tf.constant(value) for value in fresh], *arrays[1:])
            for number in (UNROLLED, 1) if is_small else (1,):
                more = partial(lambda by, index, *_: index + by <= count, number)
                carried = tf.while_loop(more, partial(some, number), carried)
            _, stale, state, values, sizes, waits = carried
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            return worker, *(array.stack() for array in (values, sizes, stale, waits)), state

        return tf.function(steps, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]

    def _applied(self, gradients: Sequence[Addend | None], before: tf.Tensor) -> tf.Tensor:
        """Updates weights by gradients, which each server gets in one message; returns the updates since `before`."""
        # With 16 `bits`, dense gradients travel as bfloat16.
        bits, optimizer, variables = self.replicas.gradient_bits, self.model.optimizer, self.model.trainable_variables
        updates = optimizer.iterations.value
        pairs = zip(variables, gradients, strict=True)
        present = {id(variable): gradient for variable, gradient in pairs if gradient is not None}
        by_server = grouped((one._value.device, one) for one in variables if id(one) in present)
        sparse = {key for key, gradient in present.items() if isinstance(gradient, tf.IndexedSlices)}
        narrow = {key: narrowed(one) if bits == 16 else one for key, one in present.items()}
        parts_of = {key: [one.values, one.indices] if key in sparse else [one] for key, one in narrow.items()}
        leaves = {device: [leaf for one in held for leaf in parts_of[id(one)]] for device, held in by_server.items()}
        messages_to = {device: joined(arrays) for device, arrays in leaves.items()}

        def apply(before: tf.Tensor, received: dict[str, list[tf.Tensor]]) -> tf.Tensor:
            arrived: dict[int, Addend] = {}
            for device, held in by_server.items():
                with tf.device(device):
                    parts = iter(split(received[device], leaves[device]))
                    for variable in held:
                        key, values = id(variable), next(parts)
                        arrived[key] = widened(values, present[key].dtype)
                        if key in sparse:
                            shape = tf.constant(list(variable.shape), tf.int32)
                            arrived[key] = tf.IndexedSlices(values, next(parts), shape)
            all_here = tf.nest.flatten(list(arrived.values()), expand_composites=True)
            with tf.device(updates.device):
                with tf.control_dependencies(all_here):
                    stale = updates.read_value() - before
                with tf.control_dependencies([stale]):
                    self.strategy.run(update, args=([arrived.get(id(variable)) for variable in variables],))
                return stale

        def update(arrived: list[Addend | None]) -> None:
            # `strategy.run` leaves the device of the scope behind.
            with tf.device(updates.device):
                optimizer.apply(arrived, variables)

        with tf.device(updates.device):
            return tf.function(apply, autograph=False)(before, messages_to)  # type: ignore[no-any-return]


def _added_in_place() -> contextlib.AbstractContextManager[None]:
    """Inside, Keras adds to a variable where it is held, so that nothing is lost that other workers add meanwhile."""
    usual = keras_variables.Variable.assign_add

    def assign_add(self: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        if in_stateless_scope() or "_direct_assign" in vars(self):
            return usual(self, value)
        return self._value.assign_add(tf.cast(value, self._value.dtype))

    return patched(keras_variables.Variable, {"assign_add": assign_add})


@contextlib.contextmanager
def fetched(model: keras.Model, before: tf.Tensor) -> Iterator[dict[int, tf.Tensor]]:
    """Inside, weights have the values, by id, that each server sends in one message; tables are read where they are."""
    values: dict[int, tf.Tensor] = {}
    variables: list[tuple[keras.Variable, tf.Variable]] = []
    looked_up = {id(shard) for shard in tables.shards(model)}
    usual = custom_gradients._graph_mode_decorator

    def sent(device: str, variables: Sequence[keras.Variable], before: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(device), tf.control_dependencies([before]):
            return joined([variable._value.read_value() for variable in variables])

    def assigned(variable: keras.Variable, held: tf.Variable, value: tf.Tensor) -> None:
        vars(variable)["_value"] = held
        held.assign(tf.cast(value, held.dtype))

    def decorated(*call: object, **named: object) -> object:
        # TensorFlow finds no variables there but where they are held.
        with all_patched((variable, {"_value": held}) for variable, held in variables):
            return usual(*call, **named)

    with contextlib.ExitStack() as stack:
        read_whole = (one for one in model.trainable_variables if id(one) not in looked_up)
        for device, held in grouped((one._value.device, one) for one in read_whole).items():
            read = [tf.TensorSpec(variable.shape, variable._value.dtype) for variable in held]
            with tf.device(device):
                # Functions, so that what begins them is one message, however many operations they have.
                message = tf.function(partial(sent, device, held), autograph=False)(before)
            for variable, value in zip(held, split(message, read), strict=True):
                values[id(variable)] = value
                variables.append((variable, variable._value))
                assign = partial(assigned, *variables[-1])
                stack.enter_context(patched(variable, {"_value": value, "_direct_assign": assign}))
        stack.enter_context(patched(custom_gradients, {"_graph_mode_decorator": decorated}))
        yield values


def joined(arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns all bytes of the arrays as one, uint8 [bytes], and behind it the large arrays as they are."""
    # A first dimension that is not known before a step goes with them.
    small = [array for array in arrays if not _is_large(array)]
    rows = [tf.shape(array)[0] for array in small if not array.shape.is_fully_defined()]
    parts = [tf.reshape(tf.bitcast(part, tf.uint8), [-1]) for part in ([tf.stack(rows)] if rows else []) + small]
    return [*([tf.concat(parts, 0)] if parts else []), *filter(_is_large, arrays)]


def split(message: Sequence[tf.Tensor], arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the arrays that were `joined`, on the device of the scope; of `arrays`, types and shapes are asked."""
    small = [array for array in arrays if not _is_large(array)]
    large, apart = iter(message[1:] if small else message), list[tf.Tensor]()
    if small:
        opened = sum(not array.shape.is_fully_defined() for array in small)
        counts = 4 * opened
        rows = iter(tf.unstack(tf.bitcast(tf.reshape(message[0][:counts], [opened, 4]), tf.int32)) if opened else ())
        shapes = [array.shape if array.shape.is_fully_defined() else [next(rows), *array.shape[1:]] for array in small]
        sizes = [math.prod(shape) * array.dtype.size for shape, array in zip(shapes, small, strict=True)]
        for part, shape, array in zip(tf.split(message[0][counts:], sizes, num=len(small)), shapes, small, strict=True):
            width = [array.dtype.size] if array.dtype.size > 1 else []
            apart.append(tf.bitcast(tf.reshape(part, [*shape, *width]), array.dtype))
    others = iter(apart)
    return [next(large if _is_large(array) else others) for array in arrays]


def _is_large(array: tf.Tensor) -> bool:
    if array.shape.is_fully_defined():
        return bool(array.shape.num_elements() * array.dtype.size >= LARGE)
    # Of one with more open dimensions than the first, no length is known.
    return not array.shape.rank or not array.shape[1:].is_fully_defined()
