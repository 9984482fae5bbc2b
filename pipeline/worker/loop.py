"""What a training needs of an engine's loop, and what a call of the loop comes to, whichever engine makes it."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypedDict

import keras
import numpy as np

from pipeline.worker.engine import Tell
from pipeline.worker.held import Variable
from pipeline.worker.model_error import TrainingError as TrainingError

# What a step may wait for a batch that is there: TensorFlow's iterator takes 0.1 to 0.4 ms to hand one over on CPU.
HAND_OVER_SECONDS = 0.0005

# What there is to tell of a training beside its losses, and its metrics as a model gives them.
Facts: TypeAlias = dict[str, float | list[int]]


class Counts(TypedDict, total=False):
    """What was counted of an asynchronous training: steps of each worker, examples, staleness in all and at most, and
    updates of the variables.
    """

    steps_of: list[int]
    examples: float
    stale_sum: float
    stale_most: int
    updates: int


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
    """Adds up losses weighted by examples, so that their mean is exact over batches of different sizes."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._sums = np.zeros(len(names))
        self._examples = 0.0

    def add(self, values: np.ndarray, sizes: np.ndarray) -> None:
        """Adds losses [steps, losses] of steps with so many examples [steps]."""
        self._sums += (values.astype(np.float64) * sizes[:, None]).sum(axis=0)
        self._examples += float(sizes.sum())

    def state(self) -> list[np.ndarray]:
        """What was added up so far, for `set_state`."""
        # A copy: it is written while training goes on.
        return [self._sums.copy(), np.array(self._examples)]

    def set_state(self, state: Sequence[np.ndarray]) -> None:
        """Goes on from what `state` gave."""
        self._sums, self._examples = np.array(state[0]), float(state[1])

    def means(self) -> dict[str, float]:
        """The mean over examples of each loss so far."""
        return dict(zip(self._names, (self._sums / max(self._examples, 1.0)).tolist(), strict=True))


class Loop(Protocol):
    """A model and its data, joined by compiled functions: some steps of training, or one validation."""

    @property
    def model(self) -> keras.Model:
        """The model that it trains, whose variables have the values of the moment between two calls."""

    @property
    def chief(self) -> bool:
        """Is this the first process?"""

    @property
    def alone(self) -> bool:
        """Is it the only one?"""

    @property
    def pending(self) -> int:
        """Steps under way whose results are still to come."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch, as far as they are known beforehand."""

    @property
    def global_batch(self) -> int:
        """Examples that a step stands for."""

    def steps_ahead(self) -> int:
        """Steps in the epoch that begins now."""

    def steps_after(self, examples: int) -> int:
        """Steps that are left of an epoch whose steps have trained so many examples."""

    def call(self, count: int, wanted: int = 0) -> Call:
        """Trains `count` steps on the batches that follow those of the call before."""

    @property
    def validates(self) -> bool:
        """True if there is data to `evaluate`, around which others are to call the hooks."""

    def evaluate(self, steps_per_call: int, tell: Tell) -> dict[str, float]:
        """Loss and metrics over the whole validation part; empty where there is none."""

    def metrics(self) -> dict[str, float]:
        """The metrics so far, without the losses."""

    def totals(self) -> Totals:
        """What adds up the losses of this model."""

    def facts(self) -> Facts:
        """What else there is to tell of the training so far."""

    def counts(self) -> Counts:
        """What was counted of the training so far, as plain values."""

    def set_counts(self, counts: Counts) -> None:
        """Goes on from what `counts` gave."""

    def metrics_state(self) -> list[np.ndarray]:
        """The values of the metrics' variables; all processes take part."""

    def set_metrics_state(self, state: Sequence[np.ndarray]) -> None:
        """Goes on from what `metrics_state` gave."""

    def metrics_at_hand(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the first process may read and change what metrics count, over all replicas; all enter together."""

    def reset_metrics(self) -> None:
        """Begins the metrics anew, as for an epoch."""

    def optimizers(self) -> Sequence[keras.optimizers.Optimizer]:
        """Those that update the weights, the first of which is told of."""

    def variables(self) -> Sequence[Variable]:
        """All that training goes on with, of losses and metrics too, without what metrics count."""

    def value(self, variable: Variable) -> np.ndarray:
        """A variable's value in this process, which need not be a copy."""

    def state(self) -> dict[str, np.ndarray]:
        """The arrays of all that training goes on with, without what metrics count, by name."""

    def set_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Goes on from what `state` gave, also on other devices. Raises `TrainingError` where it does not fit."""

    def added(self, values: Sequence[float]) -> list[float]:
        """The sums of small numbers over all replicas; all processes call it together."""

    def from_first(self, values: Sequence[Any]) -> list[Any]:
        """The first process's arrays on all, which call it together with arrays of equal types and shapes."""


def flat(results: Mapping[str, Any]) -> dict[str, float]:
    """Results of metrics as numbers; those of several have as many names, and a dict has its own, as in Keras.

    >>> flat({"accuracy": np.float32(0.5), "recall": np.array([0.0, 1.0]), "mine": {"least": 0.1, "most": 0.9}})
    {'accuracy': 0.5, 'recall_0': 0.0, 'recall_1': 1.0, 'least': 0.1, 'most': 0.9}
    """
    found: dict[str, float] = {}
    for name, result in results.items():
        if isinstance(result, Mapping):
            found |= flat(result)
            continue
        values = np.asarray(result)
        many = {f"{name}_{index}": float(value) for index, value in enumerate(values.flat)}
        found |= many if values.ndim else {name: float(values)}
    return found


class Figures(TypedDict):
    """What an epoch came to, in training and on held-out data."""

    loss: float | None
    metrics: dict[str, float]
    val_loss: float | None
    val_metrics: dict[str, float]


def figures(logs: Mapping[str, float]) -> Figures:
    """Keras's flat logs as loss, metrics, val_loss and val_metrics.

    >>> figures({"loss": 1.0, "accuracy": 0.5, "val_loss": 2.0})
    {'loss': 1.0, 'metrics': {'accuracy': 0.5}, 'val_loss': 2.0, 'val_metrics': {}}
    """
    own = {name: value for name, value in logs.items() if not name.startswith("val_")}
    held_out = {name[4:]: value for name, value in logs.items() if name.startswith("val_")}
    return {
        "loss": own.pop("loss", None),
        "metrics": own,
        "val_loss": held_out.pop("loss", None),
        "val_metrics": held_out,
    }
