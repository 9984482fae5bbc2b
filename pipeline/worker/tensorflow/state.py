"""State of a training at a moment: taken from its variables, put back, hashed, and sent from one process to all."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from pipeline.worker.checkpoint import State, grouped
from pipeline.worker.collective import Collective
from pipeline.worker.model_error import TrainingError
from pipeline.worker.state import digest
from pipeline.worker.state import on_all as state_on_all
from pipeline.worker.tensorflow.agreement import from_one
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.step import optimizers
from pipeline.worker.tensorflow.tables import grouped as shards_together
from pipeline.worker.tensorflow.tables import joined
from pipeline.worker.variables import HELD, Variable, held, kept_by_metrics


def held_beside(model: keras.Model, metrics: Sequence[keras.Variable]) -> tuple[list[Variable], list[keras.Variable]]:
    """(the variables that training goes on with beside those that a model and its optimizers list, and its `metrics`;
    those that each replica counts in apart, as of a metric that a loss has).
    """
    applied = optimizers(model)
    of_optimizers = [variable for optimizer in applied for variable in optimizer.variables]
    others = held([model, *applied], [*model.variables, *of_optimizers, *metrics])
    others = [*kept_by_metrics(model.metrics), *others]
    apart = [one for one in others if _is_counted_apart(one)]
    together = [one for one in others if not _is_counted_apart(one)]
    return together, [one for one in apart if isinstance(one, keras.Variable)]


def value_of(variable: Variable) -> np.ndarray:
    """The value that this process has in its first copy; no copy of it where that can be."""
    return np.asarray(tf.convert_to_tensor(copies(variable)[0]))


def variables_of(model: keras.Model, beside: Sequence[Variable]) -> list[Variable]:
    """All variables that training goes on with: a model's, its optimizers', and those held `beside` them."""
    # In an order that freezing a layer leaves as it is.
    counted = {id(variable) for variable in model.metrics_variables}
    own = [variable for variable in model.variables if id(variable) not in counted]
    return [*own, *(variable for optimizer in optimizers(model) for variable in optimizer.variables), *beside]


def of_model(model: keras.Model, beside: Sequence[Variable] = ()) -> dict[str, np.ndarray]:
    """Returns the arrays of `trained`, `other`, `optimizer` and `held` variables; a table in shards is one array."""
    arrays = {
        key: array
        for name, variables in _parts(model).items()
        for key, array in grouped(name, [joined(shards) for shards in shards_together(variables)]).items()
    }
    return arrays | grouped(HELD, [np.array(value_of(variable)) for variable in beside])


def put_back(model: keras.Model, state: State, beside: Sequence[Variable] = ()) -> None:
    """Gives a model and its optimizer what `of_model` took. Raises `TrainingError` where it does not fit."""
    values = state.group(HELD)
    # Those of earlier versions have none.
    if values and [value.shape for value in values] != [tuple(variable.shape) for variable in beside]:
        raise _unfit(f"{len(beside)} variables beside it, as of its loss,", f"{len(values)} others")
    for variable, value in zip(beside, values, strict=False):
        variable.assign(value)
    for name, variables in _parts(model).items():
        together, arrays = shards_together(variables), state.group(name)
        if len(together) != len(arrays):
            raise _unfit(f"{len(together)} {name} variables", f"{len(arrays)}")
        for shards, array in zip(together, arrays, strict=True):
            rows = sum(shard.shape[0] for shard in shards) if len(shards) > 1 else None
            shape = (rows, *shards[0].shape[1:]) if rows else tuple(shards[0].shape)
            if shape != array.shape:
                raise _unfit(f"{shards[0].path} of shape {shape}", f"one of shape {array.shape}")
            edges = np.cumsum([shard.shape[0] for shard in shards[:-1]] if rows else [])
            for shard, part in zip(shards, np.split(array, edges) if rows else [array], strict=True):
                shard.assign(part)


def on_all(
    state: State | None, strategy: tf.distribute.Strategy, collective: Collective[Addend], replica: int = 0
) -> State | None:
    """The state of the process with that replica on every process, all of which call this together."""

    def send(words: np.ndarray) -> np.ndarray:
        (received,) = from_one(strategy, collective)([tf.constant(replica), tf.constant(words)])
        array: np.ndarray = received.numpy()
        return array

    return state_on_all(state, send)


def _parts(model: keras.Model) -> dict[str, Sequence[keras.Variable]]:
    own = {id(variable) for variable in [*model.trainable_variables, *model.metrics_variables]}
    return {
        "trained": model.trainable_variables,
        "other": [variable for variable in model.variables if id(variable) not in own],
        "optimizer": [variable for optimizer in optimizers(model) for variable in optimizer.variables],
    }


def copies(variable: Variable) -> Sequence[tf.Variable]:
    """The variable's copy of each replica here."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return getattr(value, "values", (value,))


def _is_counted_apart(variable: Variable) -> bool:
    """True if each replica adds to a copy of its own, and their sum is the variable's value."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return hasattr(value, "values") and value.synchronization is tf.VariableSynchronization.ON_READ


def _unfit(expected: str, received: str) -> TrainingError:
    return TrainingError(
        f"a checkpoint of this model, with {expected}", f"{received}: the model has changed since", "resume=never"
    )


def replica_digests(variables: Sequence[keras.Variable]) -> list[str]:
    """A hash of weights for each replica that this process holds: all of them must agree."""
    replicas = len(copies(variables[0])) if variables else 0
    return [digest(copies(variable)[replica] for variable in variables) for replica in range(replicas)]
