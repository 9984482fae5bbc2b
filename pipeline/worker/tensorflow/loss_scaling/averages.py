"""Moving averages of weights that overwrite the weights every so many steps, without a branch.

Keras overwrites inside a condition, in which TensorFlow's strategies let no replica change a variable.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import keras
import tensorflow as tf

from pipeline.private import maybe_merge_call
from pipeline.worker.tensorflow.collective import Addend


@contextlib.contextmanager
def overwritten_without_branch(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, steps that are traced overwrite the weights that `optimizer` updates as often as it says."""
    frequency = optimizer.ema_overwrite_frequency if optimizer.use_ema else None
    if not frequency:
        yield
        return
    own = vars(optimizer)
    kept = {name: own[name] for name in ("_backend_apply_gradients",) if name in own}
    # Past Keras's own setter, which would track them. All replicas are traced inside, so none sees another's change.
    own["_backend_apply_gradients"] = partial(_apply, optimizer, frequency, optimizer._backend_apply_gradients)
    own["ema_overwrite_frequency"] = None
    try:
        yield
    finally:
        own["ema_overwrite_frequency"] = frequency
        own.pop("_backend_apply_gradients")
        own.update(kept)


def _apply(
    optimizer: keras.optimizers.Optimizer,
    frequency: int,
    apply: Callable[[Sequence[Addend], Sequence[keras.Variable]], None],
    gradients: Sequence[Addend],
    variables: Sequence[keras.Variable],
) -> None:
    apply(gradients, variables)
    due = tf.equal((optimizer.iterations + 1) % frequency, 0)
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    values = [(variable.value, average.value) for variable, average in pairs if average is not None]
    maybe_merge_call(_overwrite, tf.distribute.get_strategy(), values, due)


def _overwrite(
    strategy: tf.distribute.Strategy, pairs: Sequence[tuple[tf.Variable, tf.Variable]], due: tf.Tensor
) -> None:
    def chosen(variable: tf.Variable, average: tf.Tensor, due: tf.Tensor) -> None:
        variable.assign(tf.where(due, tf.cast(average, variable.dtype), variable))

    for variable, average in pairs:
        strategy.extended.update(variable, chosen, args=(average, due), group=False)
