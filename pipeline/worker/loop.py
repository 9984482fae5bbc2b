"""The loop of an engine, which trains a model on its data, and what all engines report of it."""

import abc
import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeAlias

import keras
import numpy as np

from pipeline.errors import refuse
from pipeline.record import events
from pipeline.worker.checkpoint import OnAll, State, grouped
from pipeline.worker.engine import Emit
from pipeline.worker.layout import BatchLayout, Position
from pipeline.worker.model_error import TrainingError
from pipeline.worker.variables import HELD, Variable

# What a step may wait for a batch that is there: TensorFlow's iterator takes 0.1 to 0.4 ms to hand one over on CPU.
HAND_OVER_SECONDS = 0.0005

# What there is to tell of a training beside its losses.
Facts: TypeAlias = dict[str, float | list[int]]
# (layout of the training data, their digest, what gives all processes the first one's state) -> where training begins.
Resume: TypeAlias = Callable[[BatchLayout, str, OnAll], Position]


@dataclass(frozen=True)
class Call:
    """One call of the compiled loop: losses [steps, 1 + outputs], examples [steps] of the global batches, seconds.

    `waits` [steps] are the seconds that each step waited for its batch, on the `worker` of asynchronous ones.
    """

    losses: np.ndarray
    sizes: np.ndarray
    seconds: float
    waits: np.ndarray
    worker: int = 0

    @property
    def steps(self) -> int:
        """Optimizer steps that the call made."""
        return len(self.sizes)


def waited(waits: np.ndarray) -> float:
    """Seconds in which steps waited for batches that were not there, from what each waited in all.

    >>> waited(np.array([0.0003, 0.0205, 0.0105]))
    0.03
    """
    return float(np.maximum(waits - HAND_OVER_SECONDS, 0.0).sum())


class Totals:
    """Adds up losses weighted by examples, for an exact mean over batches of different sizes.

    With `by_steps` that is the total loss alone; each output's is a mean over steps, as in Keras.
    """

    def __init__(self, names: tuple[str, ...], by_steps: bool = False) -> None:
        self._names, self._by_steps = names, by_steps
        self._sums, self._weights = np.zeros(len(names)), np.zeros(len(names))

    def add(self, values: np.ndarray, sizes: np.ndarray) -> None:
        """Adds losses [steps, losses] of steps with so many examples [steps]."""
        weights = np.ones(values.shape)
        weights[:, : 1 if self._by_steps else None] = sizes[:, None]
        self._sums += (values * weights).sum(axis=0)
        self._weights += weights.sum(axis=0)

    def state(self) -> list[np.ndarray]:
        """Returns what was added up so far, for `set_state`."""
        # A copy: it is written while training goes on.
        return [self._sums.copy(), self._weights.copy()]

    def set_state(self, state: Sequence[np.ndarray]) -> None:
        """Goes on from what `state` gave, in earlier versions one weight for all losses."""
        self._sums[:], self._weights[:] = state

    def means(self) -> dict[str, float]:
        """The mean of each loss so far."""
        return dict(zip(self._names, (self._sums / np.maximum(self._weights, 1.0)).tolist(), strict=True))


# Digests of each replica here -> those of each process, on all of them.
Gather = Callable[[Sequence[str]], list[list[str]]]


class WeightComparison:
    """Compares weights at the start, every so many steps, and at the end, where all replicas are between two calls."""

    def __init__(self, every: int | None, digests: Callable[[], list[str]], gather: Gather, collective: str) -> None:
        """`digests` are of the replicas here; `gather` gives all processes those of all. `every` None: never."""
        self._every, self._digests, self._gather, self._collective = every, digests, gather, collective
        self._last = 0

    def compare(self, step: int) -> None:
        """Raises `TrainingError`, on all processes, where a replica has other weights than the first."""
        if self._every is None:
            return
        of_all, self._last = self._gather(self._digests()), step
        for rank, digests in enumerate(of_all):
            differ = any(digest != of_all[0][0] for digest in digests)
            expected = f"the same weights on all replicas after step {step}"
            received = f"others on rank {rank} than on rank 0, with strategy.collective={self._collective}"
            instead = "strategy.collective=tensorflow, or train.check=strict"
            refuse((differ, expected, received, instead), error=TrainingError)

    def after(self, step: int) -> None:
        """Compares where so many steps have been made since the last time."""
        if self._every is not None and step // self._every > self._last // self._every:
            self.compare(step)


NO_COMPARISON = WeightComparison(None, list, lambda digests: [list(digests)], "")


class TrainingLoop(abc.ABC):
    """A model and its data, joined by compiled functions: some steps of training, or one validation."""

    # Whose variables have the values of the moment between two calls.
    model: keras.Model
    # True in the first process, and in the only one.
    chief: bool
    alone: bool
    # How the training data are laid out over steps, as far as that is known beforehand.
    layout: BatchLayout
    # Steps under way whose results are still to come, workers that step beside each other, and whether all have begun.
    pending, concurrent_steps, warm = 0, 1, True
    outputs: tuple[str, ...] = ()
    # True if there is data to `evaluate`, around which others are to call the hooks.
    validates: bool
    # Those that update the weights, the first of which is reported on.
    optimizers: tuple[keras.optimizers.Optimizer, ...]

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch, as far as they are known beforehand."""
        return self.layout.steps

    def begin_epoch(self, examples: int) -> int:
        """Returns the steps left in an epoch that has trained so many examples; an empty call ends it before."""
        return self.layout.steps_after(examples)

    @abc.abstractmethod
    def call(self, count: int, wanted: int = 0) -> Call:
        """Trains `count` steps on the batches that follow those of the call before, of `wanted` in all."""

    def evaluate(self, steps_per_call: int, emit: Emit) -> dict[str, float]:
        """Returns loss and metrics over the whole validation part; nothing where there is none."""
        if not self.validates:
            return {}
        self.reset_metrics()
        totals, done = self.totals(), 0
        for losses, sizes in self._validation_calls(steps_per_call):
            totals.add(losses, sizes)
            done += len(sizes)
            emit(events.Beat(validated=done))
        return totals.means() | self.metrics()

    @abc.abstractmethod
    def _validation_calls(self, steps_per_call: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Validates call by call; yields the losses [steps, 1 + outputs] and examples [steps] of each."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics so far, without the losses that Keras tracks among them."""
        lost = ("loss", *self.outputs)
        return flat({name: result for name, result in self._metric_results().items() if name not in lost})

    @abc.abstractmethod
    def _metric_results(self) -> Mapping[str, Any]:
        """Returns the results of metrics over all replicas, as Keras names them."""

    def totals(self) -> Totals:
        """Returns what adds up the losses of this model."""
        return Totals(("loss", *self.outputs))

    def facts(self) -> Facts:
        """Returns what else there is to report of the training so far."""
        return {}

    @abc.abstractmethod
    def metrics_state(self) -> list[np.ndarray]:
        """Returns the values of the metrics' variables over all replicas; all processes take part."""

    @abc.abstractmethod
    def set_metrics_state(self, state: Sequence[np.ndarray]) -> None:
        """Goes on from what `metrics_state` gave."""

    def metrics_at_hand(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the first process may read and change what metrics count, over all replicas; all enter together."""
        return contextlib.nullcontext()

    def reset_metrics(self) -> None:
        """Begins the metrics anew, as for an epoch."""
        self.model.reset_metrics()

    @abc.abstractmethod
    def variables(self) -> Sequence[Variable]:
        """Returns all that training goes on with, of losses and metrics too, without what metrics count."""

    @abc.abstractmethod
    def value(self, variable: Variable) -> np.ndarray:
        """Returns a variable's value, whole; no copy of it where that can be."""

    @abc.abstractmethod
    def kept(self) -> Mapping[str, Sequence[Sequence[Variable]]]:
        """Returns what a checkpoint holds, by the names of its groups: of each array the variables with its rows."""

    @abc.abstractmethod
    def put(self, variable: Variable, value: np.ndarray) -> None:
        """Gives a variable a value, wherever its parts are."""

    def state(self) -> State:
        """Returns the arrays that training goes on with, without what metrics count, and `counts` of async steps."""
        arrays = dict[str, np.ndarray]()
        for name, together in self.kept().items():
            parts = ([np.array(self.value(one)) for one in shards] for shards in together)
            arrays |= grouped(name, [np.concatenate(one) if len(one) > 1 else one[0] for one in parts])
        return State({"counts": {}}, arrays)

    def set_state(self, state: State) -> None:
        """Goes on from what `state` gave, on other devices too. Raises `TrainingError` where it does not fit."""

        def expect(fits: bool, expected: str, received: str) -> None:
            expected, changed = f"a checkpoint of this model, with {expected}", "the model has changed since"
            refuse((not fits, expected, f"{received}: {changed}", "resume=never"), error=TrainingError)

        for name, together in self.kept().items():
            arrays = state.group(name)
            # Those of earlier versions have none.
            if name == HELD and not arrays:
                continue
            expect(len(together) == len(arrays), f"{len(together)} {name} variables", f"{len(arrays)}")
            for shards, array in zip(together, arrays, strict=True):
                first, rows = shards[0], [shard.shape[0] for shard in shards] if len(shards) > 1 else []
                shape = (sum(rows), *first.shape[1:]) if rows else tuple(first.shape)
                what = f"{getattr(first, 'path', first.name)} of shape {shape}"
                expect(shape == array.shape, what, f"one of shape {array.shape}")
                parts = np.split(array, np.cumsum(rows[:-1])) if rows else [array]
                for shard, part in zip(shards, parts, strict=True):
                    self.put(shard, part)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, steps are made for nothing but time; afterwards model and optimizer are what they were."""
        state = self.state()
        yield
        self.set_state(state)
        self.reset_metrics()

    @abc.abstractmethod
    def replica_digests(self) -> list[str]:
        """Returns a hash of the trained weights for each replica here: all of them must agree."""

    @abc.abstractmethod
    def added(self, values: Sequence[float]) -> list[float]:
        """Returns the sums of small numbers over all replicas; all processes call it together."""

    @abc.abstractmethod
    def from_first(self, values: Sequence[Any]) -> list[Any]:
        """Returns the first process's arrays on all, which call it together with equal types and shapes."""


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions that a measurement depends on: of these packages, and of what every engine computes with."""
    return {
        "python": platform.python_version(),
        **{one: metadata.version(one) for one in (*packages, "keras", "numpy")},
    }


def flat(results: Mapping[str, Any]) -> dict[str, float]:
    """Results of metrics as numbers; those of several have as many names, and a dict has its own, as in Keras.

    >>> flat({"accuracy": np.float32(0.5), "recall": np.array([0.0, 1.0]), "mine": {"least": 0.1, "most": 0.9}})
    {'accuracy': 0.5, 'recall_0': 0.0, 'recall_1': 1.0, 'least': 0.1, 'most': 0.9}
    """
    numbers: dict[str, float] = {}
    for name, result in results.items():
        if isinstance(result, Mapping):
            numbers |= flat(result)
        elif (values := np.asarray(result)).ndim:
            numbers |= {f"{name}_{index}": float(value) for index, value in enumerate(values.flat)}
        else:
            numbers[name] = float(values)
    return numbers


def figures(logs: Mapping[str, float]) -> dict[str, Any]:
    """Keras's flat logs as loss, metrics, val_loss and val_metrics.

    >>> figures({"loss": 1.0, "accuracy": 0.5, "val_loss": 2.0})
    {'loss': 1.0, 'val_loss': 2.0, 'metrics': {'accuracy': 0.5}, 'val_metrics': {}}
    """
    own = {name: value for name, value in logs.items() if not name.startswith("val_")}
    held_out = {name[4:]: value for name, value in logs.items() if name.startswith("val_")}
    losses = {"loss": own.pop("loss", None), "val_loss": held_out.pop("loss", None)}
    return {**losses, "metrics": own, "val_metrics": held_out}
