"""A model on a mesh of devices and its data, joined by compiled functions."""

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from pipeline.worker.jax import bucket, step
from pipeline.worker.jax.data import DeviceData, Reader, of_batch
from pipeline.worker.jax.devices import Axes, shardings
from pipeline.worker.layout import BEGINNING, Position
from pipeline.worker.loop import Call, TrainingLoop
from pipeline.worker.model_error import TrainingError
from pipeline.worker.state import digest
from pipeline.worker.variables import HELD, Variable, held, kept_by_metrics, updating

# Bytes of a variable from which on what its copies have left is given back at once.
LARGE = 2**20


class JaxLoop(TrainingLoop):
    """A training on this process, over a mesh of devices; each call is over when it returns."""

    def __init__(
        self,
        model: keras.Model,
        mesh: Mesh,
        train: DeviceData,
        validation: DeviceData | None,
        chief: bool = True,
        alone: bool = True,
        position: Position = BEGINNING,
        cut: Mapping[str, Axes] | None = None,
        alike: bool = False,
        add: bucket.Add = bucket.by_xla,
    ) -> None:
        """`cut` has the axes of variables that are cut, by their paths; `alike`: the same program makes every step."""
        self.model, self.chief, self.alone, self.optimizers = model, chief, alone, updating(model.optimizer)
        self.train_data, self.validation_data, self.layout = train, validation, train.layout
        self.mesh, self.cut, self._alike = mesh, cut or {}, alike
        self._shardings = shardings(model, self.cut, mesh)
        beside = held([model, model.optimizer], [*itertools.chain(*step.variables_of(model)), *model.variables])
        self._beside = [*kept_by_metrics(model.metrics), *beside]
        self.groups = step.variables_of(model, beside)
        # The shardings of all of them; and the arrays that are this loop's own, and that a step may take over.
        first, second, third, fourth = ([self._place(variable) for variable in group] for group in self.groups)
        self.places, self._own = (first, second, third, fourth), dict[int, Any]()
        for variable in self.variables():
            # Without a copy where it is there already; what copies have left glibc keeps for others, if that is there.
            self._assign(variable, step.over(variable.value, self._place(variable)))
            if variable.value.nbytes >= LARGE:
                with contextlib.suppress(AttributeError, OSError):
                    ctypes.CDLL(None).malloc_trim(0)
        made_of = partial(bucket.made_of, mesh, add=add) if bucket.fits(model, self.groups, mesh) else step.made_of
        self._train = self._steps(partial(step.train, made_of=made_of), train)
        self._validate: step.CompiledSteps | None = None
        self._results = step.results(model)
        self._reader = Reader(train, mesh, self._train.room, position)
        self.validates = validation is not None and bool(validation.layout.examples)

    def call(self, count: int, wanted: int = 0) -> Call:
        """Trains `count` steps on the batches that follow those of the call before."""
        built = len(self.groups[0])
        # Before the first step alone: Keras goes through all layers for it.
        if not self._train.compiling and (now := len(self.model.trainable_variables)) != built:
            expected = "callbacks to leave what is trained as it was built under backend=jax"
            received = f"a model of {now} trainable variables that was built with {built}"
            raise TrainingError(expected, received, "layer.trainable=False in model.build")
        return self._through(self._train, self._reader, count)

    def _validation_calls(self, steps_per_call: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        data = self.validation_data
        assert data is not None, "it validates"
        self._validate = self._validate or self._steps(step.validate, data)
        with contextlib.closing(Reader(data, self.mesh, self._validate.room, once=True)) as reader:
            for done in range(0, data.layout.steps, steps_per_call):
                call = self._through(self._validate, reader, min(steps_per_call, data.layout.steps - done))
                yield call.losses, call.sizes

    def _metric_results(self) -> dict[str, Any]:
        return self._results([variable.value for variable in self.groups[3]])

    def metrics_state(self) -> list[np.ndarray]:
        """The values of the metrics' variables."""
        return [whole(variable.value) for variable in self.groups[3]]

    def set_metrics_state(self, state: Sequence[np.ndarray]) -> None:
        """Goes on from what `metrics_state` gave."""
        for variable, value in zip(self.groups[3], state, strict=True):
            self.put(variable, value)

    def variables(self) -> list[Variable]:
        """All that training goes on with; all processes have what metrics count, too."""
        return list(itertools.chain(*self.groups))

    def value(self, variable: Variable) -> np.ndarray:
        """A variable's value, whole wherever its parts are; no copy of it where that can be."""
        value = variable.value
        return np.asarray(value) if value.is_fully_addressable else whole(value)

    def kept(self) -> dict[str, list[list[Variable]]]:
        """Returns the variables that a checkpoint holds, by the names of its groups."""
        listed = {"trained": self.groups[0], "other": self.model.non_trainable_variables, "optimizer": self.groups[2]}
        return {name: [[one] for one in variables] for name, variables in (listed | {HELD: self._beside}).items()}

    def put(self, variable: Variable, value: np.ndarray) -> None:
        """Gives a variable a value, where it is to be."""
        # Copied: what is NumPy's is not handed on by a step, whose first one would hold the whole state twice;
        # `may_alias=False` would share NumPy's memory all the same.
        self._assign(variable, step.over(jnp.array(value, variable.value.dtype), self._place(variable)))

    def added(self, values: Sequence[float]) -> list[float]:
        """The sums of small numbers over all processes, which call it together."""
        if self.alone:
            return list(values)
        gathered = multihost_utils.process_allgather(np.array(values, np.float32))
        return np.asarray(gathered).reshape(-1, len(values)).sum(axis=0).tolist()  # type: ignore[no-any-return]

    def from_first(self, values: Sequence[Any]) -> list[Any]:
        """The first process's arrays on all, which call it together with arrays of equal types and shapes."""
        if self.alone:
            return [np.asarray(value) for value in values]
        return [told_by_first(np.asarray(value)) for value in values]

    def held_bytes(self) -> int:
        """Bytes of weights and of the optimizer's state that a device holds."""
        variables = itertools.chain(*self.groups[:3])
        return sum(variable.value.addressable_shards[0].data.nbytes for variable in variables)

    def whole_model(self) -> keras.Model:
        """The model with its variables whole on one device of this process, to be saved; training is over."""
        device = jax.local_devices()[0]
        for variable in self.variables():
            variable.assign(jax.device_put(whole(variable.value), device))
        return self.model

    def replica_digests(self) -> list[str]:
        """A hash of the trained weights for each replica that this process holds: all of them must agree."""
        rows = [row for row in self.mesh.devices if row[0].process_index == jax.process_index()]
        return [digest(whole(variable.value, set(row)) for variable in self.groups[0]) for row in rows]

    def _steps(self, step_function: Callable[..., tuple[step.State, Any]], data: DeviceData) -> step.CompiledSteps:
        step_of, batch = partial(step_function, self.model, self.groups), of_batch(data, data.layout.global_batch)
        return step.CompiledSteps(step_of, self.mesh, self.values(), batch, data.layout.steps, self._alike)

    def _through(self, function: step.CompiledSteps, reader: Reader, count: int) -> Call:
        began, waited, compiling = time.perf_counter(), reader.waited, function.compiling
        state, losses, sizes = self.values(), list[list[Any]](), list[np.ndarray]()
        for block, first, steps in reader.take(count):
            state, of_block = function(state, block, first, steps)
            losses.append(of_block)
            sizes.append(np.full(steps, block.examples, np.float32))
        for variable, value in zip(self.variables(), itertools.chain(*state), strict=True):
            self._assign(variable, value)
        values = [
            np.hstack(of_block).astype(np.float32)[: len(of_steps)]
            for of_block, of_steps in zip(jax.device_get(losses), sizes, strict=True)
        ]
        seconds = time.perf_counter() - began - (function.compiling - compiling)
        waits = np.full(count, (reader.waited - waited) / count)
        return Call(np.concatenate(values)[:, None], np.concatenate(sizes), seconds, waits)

    def values(self) -> step.State:
        """The values of all variables, where the compiled functions take them."""
        trained, other, optimizer, metrics = ([self._there(variable) for variable in group] for group in self.groups)
        return trained, other, optimizer, metrics

    def _assign(self, variable: Variable, value: Any) -> None:
        variable.assign(value)
        self._own[id(variable)] = variable.value

    def _place(self, variable: keras.Variable) -> NamedSharding:
        return self._shardings.get(id(variable)) or step.everywhere(self.mesh)

    def _there(self, variable: Variable) -> Any:
        """Returns the value where it is to be: callbacks put it on one device, or assign what another has."""
        value, sharding = variable.value, self._place(variable)
        if isinstance(value, jax.Array) and value.sharding.is_equivalent_to(sharding, value.ndim):
            return value if value is self._own.get(id(variable)) else jnp.copy(value)
        return step.over(value, sharding)


def whole(value: Any, devices: Collection[jax.Device] | None = None) -> np.ndarray:
    """An array as one, put together of the parts that this process has, or that these devices of it have."""
    if not isinstance(value, jax.Array) or (devices is None and value.is_fully_addressable):
        return np.array(value)
    array = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        if devices is None or shard.device in devices:
            array[shard.index] = np.asarray(shard.data)
    return array


def told_by_first(value: np.ndarray) -> np.ndarray:
    """The first process's array on all, which call this together with arrays of one type and shape, as its bytes."""
    # Not as they are: JAX would make 32 bits of 64.
    sent = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(sent))
    return received.view(value.dtype).reshape(value.shape)
