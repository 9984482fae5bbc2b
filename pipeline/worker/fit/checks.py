"""Refusals of `fit`, each a `UserError`, and what lets several strategies run in one process, one after the other."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from weakref import WeakSet

import keras
import tensorflow as tf

from pipeline.data.nested import Nested
from pipeline.errors import UserError, refuse
from pipeline.worker import labels
from pipeline.worker.collective import Pausable
from pipeline.worker.fit.passes import Passes
from pipeline.worker.layout import ReplicaPlace
from pipeline.worker.tensorflow import agreement
from pipeline.worker.tensorflow.collective import Addend, over
from pipeline.worker.tensorflow.equality_check.comparison import check
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling import reduction


def check_labels(model: keras.Model, train: Passes, held_out: Passes | None) -> None:
    """Refuses labels at hand that the model has no output for."""
    outputs = labels.outputs(model, train.spec)
    for name, data in (("training", train), ("validation", held_out)):
        if data is not None and data.labels is not None:
            labels.check_values(outputs, data.labels, name)


def warn_of_differences(
    loop: Loop, collective: Pausable[Addend], where: ReplicaPlace, train: Passes, note: Callable[[str], object]
) -> None:
    """Notes what all replicas make of a few examples otherwise than one device; all processes call it together."""
    comparison = check(loop, collective, where, train.sample)
    if comparison.outcome == "different" and not comparison.noted:
        advice = comparison.advice.replace("train.gather=true", "gather=True").replace("train.check=off", "check=False")
        note(f"{comparison.said(where.replicas)} {advice}".replace("on a small", "On a small", 1))


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Inside, what TensorFlow refuses labels for in the middle of a step is a `UserError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if (reason := labels.wrong_in_step(error.message)) is None:
            raise
        raise UserError(reason) from error


# How far apart the numbers of two strategies' groups of devices are; each has a few.
STRIDE = 1_000
_strategies = WeakSet[tf.distribute.Strategy]()
_bases = itertools.count(STRIDE, STRIDE)


@contextlib.contextmanager
def adding(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Inside, a strategy adds up apart from others of this process; CPU devices of one process through its memory."""
    if strategy not in _strategies:
        _strategies.add(strategy)
        base = next(_bases)
        for kind in (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy):
            kind._collective_key_base = base
    usual = vars(strategy.extended).get("_cross_device_ops")
    # What a MirroredStrategy has where it was not told how to add.
    by_default = isinstance(strategy, tf.distribute.MirroredStrategy) and usual is strategy.extended._collective_ops
    in_memory = by_default and all("CPU" in device for device in strategy.extended.worker_devices)
    if in_memory:
        strategy.extended._cross_device_ops = tf.distribute.ReductionToOneDevice()
    try:
        yield
    except tf.errors.OpError as error:
        if "Restart your program to reset" not in error.message:
            raise
        reason = error.message.split("Collective ops is aborted by: ")[-1].splitlines()[0].rstrip(". ")
        raise UserError(
            "sums over replicas to work",
            f"TensorFlow's word that they are stopped in this process, by: {reason}",
            "starting the process anew; in a notebook, restarting the kernel",
        ) from error
    finally:
        if in_memory:
            strategy.extended._cross_device_ops = usual


def check_model(model: object) -> None:
    """Refuses what is no compiled `keras.Model`, and one with steps of its own."""
    if not isinstance(model, keras.Model):
        raise UserError("a keras.Model", type(model).__name__, "keras.Sequential([...])")
    for name in filter(partial(reduction.is_own, model), ("train_step", "test_step")):
        instead = "python -m pipeline, which makes such steps; or compute_loss and add_loss, which are honoured"
        raise UserError(f"a model without a {name} of its own", f"{type(model).__name__}, which has one", instead)
    if not model.compiled or model.optimizer is None:
        raise UserError("a compiled model", "one that is not", "model.compile(optimizer, loss) first")


def check_compiled(model: keras.Model, where: ReplicaPlace) -> None:
    """Refuses a model that runs eagerly, or by XLA with several replicas."""
    # On a GPU without a strategy, Keras resolves "auto" to True: nobody asked for it.
    asked_for = where.replicas > 1 or not tf.config.list_physical_devices("GPU")
    refuse(
        (model.run_eagerly, "a model whose steps may be compiled", "run_eagerly=True",
         "model.run_eagerly = False; to debug, model.fit without a strategy"),
        (model.jit_compile and asked_for, "a model that is not compiled with XLA, which fails with several replicas",
         "jit_compile=True", 'jit_compile="auto"'),
    )  # fmt: skip


def check_made_under(strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]) -> None:
    """Refuses variables that were made outside of the strategy."""
    foreign = [variable for variable in variables if not strategy.extended.variable_created_in_scope(variable.value)]
    if foreign:
        under = f"a model, an optimizer and metrics made under the strategy they train with, {type(strategy).__name__}"
        instead = "to make and compile the model inside `with strategy.scope():`"
        raise UserError(under, f"{foreign[0].path}, made outside it", instead)


def callbacks(
    structure: Nested[keras.callbacks.Callback] | None, where: ReplicaPlace
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks as a list; refuses what is none, and a call that would make each process save."""
    own = structure.callbacks if isinstance(structure, keras.callbacks.CallbackList) else structure
    flat = [callback for callback in keras.tree.flatten(own) if callback is not None]
    wrong = [type(callback).__name__ for callback in flat if not isinstance(callback, keras.callbacks.Callback)]
    # To save a model makes variables, which there all processes must make together; callbacks run in the first.
    inside = bool(flat) and where.processes > 1 and tf.distribute.has_strategy()
    refuse(
        (wrong, "Keras callbacks", next(iter(wrong), None), "a subclass of keras.callbacks.Callback"),
        (inside, "fit with callbacks to be called outside strategy.scope()", "a call inside it",
         "to end the `with` block before fit"),
    )  # fmt: skip
    return flat


def check_same(strategy: tf.distribute.Strategy, where: ReplicaPlace, arguments: dict[str, float | None]) -> None:
    """Refuses, on all processes, a call that differs between them: they would wait for each other for ever."""
    if where.processes == 1:
        return
    numbers = tf.constant([-1.0 if value is None else float(value) for value in arguments.values()], tf.float64)
    (first,) = agreement.from_first(strategy, over(strategy))([numbers])
    (differing,) = agreement.over_replicas(strategy, over(strategy))([tf.cast(numbers != first, tf.float64)])
    for name, own, of_first, differs in zip(arguments, numbers.numpy(), first.numpy(), differing.numpy(), strict=True):
        if differs:
            other = "another elsewhere" if own == of_first else f"{own:g} here"
            raise UserError(
                f"every process to call fit with the same {name}",
                f"{of_first:g} in the first process and {other} (-1: none)",
                f"the same {name} in all",
            )


def due(model: keras.Model, validation_freq: int | Sequence[int]) -> Callable[[int], bool]:
    """Returns whether an epoch, by its number, is validated."""
    wrong = not isinstance(validation_freq, int | list | tuple | set | range) or validation_freq == 0
    expected = "validation_freq to be a number of epochs or a list of them"
    refuse((wrong, expected, f"{validation_freq!r}", "validation_freq=1"))
    frequency = validation_freq if isinstance(validation_freq, int) else list(validation_freq)
    return lambda epoch: bool(model._should_eval(epoch, frequency))
