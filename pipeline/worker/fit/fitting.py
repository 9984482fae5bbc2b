"""Turns a call of Keras's `fit` into a training by our loop, in the user's own processes and under their strategy.

Keras's own `fit` fails under several of TensorFlow's strategies. This takes the same arguments, gives back the same
history, and refuses what it cannot honour. With several processes each calls `fit` with the same arguments; callbacks
run in the first, and all obey.

>>> import numpy as np
>>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
>>> model.compile("sgd", loss="mse")
>>> history = fit(model, np.ones((8, 2)), np.ones((8, 1)), epochs=3, verbose=0)
>>> len(history.history["loss"])
3
"""

import contextlib
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakSet

import keras
import tensorflow as tf

from pipeline.analyze import measure
from pipeline.data.arrays import Nested
from pipeline.errors import UserError, refuse
from pipeline.private import array_slicing
from pipeline.worker import labels
from pipeline.worker.callbacks import TEST_BATCH_HOOKS, TRAIN_BATCH_HOOKS, is_own, overrides
from pipeline.worker.collective import Pausable
from pipeline.worker.data import conversion
from pipeline.worker.data.reading import FitData
from pipeline.worker.fit import passes
from pipeline.worker.fit.keras_loop import AsyncKerasLoop, KerasHooks, KerasLoop
from pipeline.worker.fit.passes import Passes
from pipeline.worker.layout import ReplicaPlace
from pipeline.worker.patched import patched
from pipeline.worker.tensorflow import build, equality_check
from pipeline.worker.tensorflow.collective import from_first, over, over_replicas, texts
from pipeline.worker.tensorflow.loss_scaling import reduction
from pipeline.worker.tensorflow.process_data import agreed
from pipeline.worker.training import Training

# Enough to choose a call's length by, after one step for tracing.
TIMED_STEPS = 3
# The attribute under which a model keeps its loop between two calls, as Keras keeps its compiled functions.
KEPT_AS = "_loop_of_pipeline_fit"
# How far apart the numbers of two strategies' groups of devices are; each has a few.
STRIDE = 1_000
_strategies = WeakSet[tf.distribute.Strategy]()
_bases = itertools.count(STRIDE, STRIDE)


def fit(
    model: keras.Model,
    x: FitData = None,
    y: FitData = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str = "auto",
    callbacks: Nested[keras.callbacks.Callback] | None = None,
    validation_split: float = 0.0,
    validation_data: FitData = None,
    shuffle: bool | str = True,
    class_weight: dict[int, float] | None = None,
    sample_weight: FitData = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    *,
    strategy: tf.distribute.Strategy | None = None,
    gather: bool = False,
    check: bool = True,
) -> keras.callbacks.History:
    """Trains a compiled model as `model.fit` would on one device, on all replicas of a strategy, by default its own.

    Other arguments are those of `keras.Model.fit`. With `gather` replicas compute losses on the whole global batch, as
    losses over pairs of examples need. With `check` a few examples are compared with one device before the first fit.
    Raises `UserError` for what cannot be honoured.
    """
    strategy, loop_class, where = _checked(model, strategy, gather)
    hooks, due = _callbacks(callbacks, where), _due(model, validation_freq)
    # Keras's settings for debugging runs hold here too.
    epochs = min(epochs, keras.config.max_epochs() or epochs)
    if cap := keras.config.max_steps_per_epoch():
        steps_per_epoch, validation_steps = (min(steps or cap, cap) for steps in (steps_per_epoch, validation_steps))
    x, y, sample_weight = parts = conversion.for_keras(x, y, sample_weight, "training")
    if validation_split and validation_data is None:
        # The last examples.
        split = array_slicing.train_validation_split(parts, validation_split=validation_split)
        (x, y, sample_weight), validation_data = split
    # Another for each call, the same after the same global seed, from where Keras draws the order of a PyDataset.
    seed = 0 if isinstance(x, keras.utils.PyDataset) else random.randrange(2**31)
    with _adding(strategy):
        if where.processes > 1:
            seed = int(from_first(strategy, over(strategy))([tf.constant([seed], tf.float64)])[0][0])
        train = passes.passes(
            where, x, y, sample_weight, batch_size=batch_size, steps=steps_per_epoch, shuffle=shuffle, seed=seed,
            class_weight=class_weight,
        )  # fmt: skip
        held_out = _held_out(where, validation_data, validation_batch_size, batch_size, validation_steps)
        per_call = None
        if train.one_by_one or model.steps_per_execution > 1 or any(map(_sees_every_batch, hooks)):
            per_call = 1 if train.one_by_one else int(model.steps_per_execution)
        _check_same(strategy, where, {
            "epochs": epochs, "initial_epoch": initial_epoch, "steps_per_epoch": steps_per_epoch,
            "batch_size": batch_size, "validation_steps": validation_steps, "number of callbacks": len(hooks),
            "shuffle": shuffle is True, "number of validations": sum(map(due, range(initial_epoch, epochs))),
            "steps per call": per_call, "number of batches": train.steps, "number of examples": train.examples,
            "number of validation batches": getattr(held_out, "steps", None),
            "number of validation examples": getattr(held_out, "examples", None),
        })  # fmt: skip
        if where.processes > 1:
            tell = functools.partial(texts, strategy, over(strategy), where)
            agreed(tell, train.spec, None if held_out is None else held_out.spec)
        note = functools.partial(warnings.warn, stacklevel=2) if where.chief else str
        loop, adding = vars(model).get(KEPT_AS), Pausable(over(strategy))
        with build.lent(model, strategy, train.spec, adding, note, gather):
            outputs = labels.outputs(model, train.spec)
            for name, data in (("training", train), ("validation", held_out)):
                if data is not None and data.labels is not None:
                    labels.check_values(outputs, data.labels, name)
            _check_made_under(strategy, model.metrics_variables)
            # That of an earlier `fit`, as long as the model is compiled as it was then.
            is_new = not isinstance(loop, loop_class) or not loop.serves(model, strategy, train, gather)
            if is_new:
                alone = where.processes == 1
                loop = loop_class(model, strategy, train, gather, chief=where.chief, alone=alone, collective=adding)
                # Past Keras's own setter, which looks for weights in everything.
                vars(model)[KEPT_AS] = loop
            with loop.over(train, held_out, steps_per_epoch, validation_steps, due):
                if check and is_new and where.replicas > 1:
                    compared = equality_check.check(loop, adding, where, train.sample)
                    if compared.outcome == "different" and not compared.noted:
                        advice = compared.advice.replace("train.gather=true", "gather=True")
                        advice = advice.replace("train.check=off", "check=False")
                        note(f"{compared.said(where.replicas)} {advice}".replace("on a small", "On a small", 1))
                make_hooks = functools.partial(KerasHooks, train.spec, initial_epoch, verbose)
                # The user reads the history, and no events.
                training = Training(loop, epochs, None, hooks, lambda _: None, hooks=make_hooks, must_be_finite=False)
                return _train(training, loop, 1 if loop.step_by_step else per_call)


def _train(training: Training, loop: KerasLoop, steps_per_call: int | None) -> keras.callbacks.History:
    """Trains to the end, in calls of so many steps, or as many as the first steps' pace asks for."""
    if steps_per_call is None:
        list(training.advance(1, 1))
        if timed := list(training.advance(TIMED_STEPS, TIMED_STEPS)):
            pace = sum(call.seconds for call in timed) / max(1, sum(call.steps for call in timed))
            steps_per_call = int(loop.hooks.from_first(measure.steps_per_call(pace, loop.concurrent_steps)))
    for _ in training.advance(None, steps_per_call or 1):
        pass
    return loop.hooks.history()


def _sees_every_batch(callback: keras.callbacks.Callback) -> bool:
    # Something in it would be wrong if several batches went by in one call.
    if is_own(callback):
        return overrides(callback, TRAIN_BATCH_HOOKS + TEST_BATCH_HOOKS)
    return getattr(callback, "save_freq", getattr(callback, "update_freq", "epoch")) != "epoch"  # type: ignore[no-any-return]


def _checked(
    model: keras.Model, named: tf.distribute.Strategy | None, gather: bool
) -> tuple[tf.distribute.Strategy, type[KerasLoop], ReplicaPlace]:
    """Returns the strategy of a model, its loop and this process's place; refuses a model that cannot train so."""
    backend, kind = keras.backend.backend(), type(model).__name__
    own = "python -m pipeline, which makes such steps; or compute_loss and add_loss, which are honoured"
    refuse(
        (backend != "tensorflow", "Keras on TensorFlow for pipeline.fit", f"KERAS_BACKEND={backend}",
         "KERAS_BACKEND=tensorflow, or python -m pipeline with backend=jax"),
        (not isinstance(model, keras.Model), "a keras.Model", kind, "keras.Sequential([...])"),
    )  # fmt: skip
    for name in ("train_step", "test_step"):
        refuse((reduction.is_own(model, name), f"a model without a {name} of its own", f"{kind}, which has one", own))
    unready = not model.compiled or model.optimizer is None
    refuse((unready, "a compiled model", "one that is not", "model.compile(optimizer, loss) first"))
    strategy = named or model.distribute_strategy
    _check_made_under(strategy, [*model.variables, *model.optimizer.variables])
    # Here a strategy is told from another, and nowhere else.
    asynchronous, under = isinstance(strategy, tf.distribute.ParameterServerStrategy), type(strategy).__name__
    refuse(
        (gather and asynchronous, "gather=False under asynchronous workers, each of whose batches is a whole one",
         "gather=True", "gather=False"),
        (isinstance(strategy, tf.distribute.TPUStrategy), "a strategy on CPUs or GPUs", "TPUStrategy",
         "python -m pipeline strategy=tpu, whose batches are of one size"),
        (under == "CentralStorageStrategy", "a strategy that Keras 3 counts metrics right under",
         f"TensorFlow's {under}",
         'pipeline.strategies.central_storage(("CPU:0", "CPU:1")), which is the same with that put right'),
    )  # fmt: skip
    where = passes.place(strategy)
    # On a GPU without a strategy, Keras resolves "auto" to True: nobody asked for it.
    asked_for = where.replicas > 1 or not tf.config.list_physical_devices("GPU")
    refuse(
        (model.run_eagerly, "a model whose steps may be compiled", "run_eagerly=True",
         "model.run_eagerly = False; to debug, model.fit without a strategy"),
        (model.jit_compile and asked_for, "a model that is not compiled with XLA, which fails with several replicas",
         "jit_compile=True", 'jit_compile="auto"'),
    )  # fmt: skip
    return strategy, AsyncKerasLoop if asynchronous else KerasLoop, where


def _held_out(
    where: ReplicaPlace, data: FitData, batch_size: int | None, train_batch_size: int | None, steps: int | None
) -> Passes | None:
    if data is None:
        return None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    x, y, sample_weight = conversion.for_keras(x, y, sample_weight, "validation")
    is_set = isinstance(x, tf.data.Dataset)
    batch_size = batch_size if is_set else batch_size or train_batch_size
    leaves = [leaf for leaf in keras.tree.flatten((x, y, sample_weight)) if leaf is not None]
    sliced = all(array_slicing.can_slice_array(leaf) and hasattr(leaf, "shape") for leaf in leaves)
    if steps is not None and batch_size is not None and sliced and not is_set:
        # What so many steps see.
        x, y, sample_weight = keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[: batch_size * steps], (x, y, sample_weight), none_is_leaf=True
        )
    return passes.passes(where, x, y, sample_weight, batch_size=batch_size, steps=steps)


@contextlib.contextmanager
def _adding(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Inside, a strategy adds up apart from others of this process; CPU devices of one process through its memory."""
    # What TensorFlow refuses labels for in the middle of a step, or sums in this process, is a `UserError`.
    if strategy not in _strategies:
        _strategies.add(strategy)
        base = next(_bases)
        for kind in (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy):
            kind._collective_key_base = base
    usual = vars(strategy.extended).get("_cross_device_ops")
    # What a MirroredStrategy has where it was not told how to add.
    by_default = isinstance(strategy, tf.distribute.MirroredStrategy) and usual is strategy.extended._collective_ops
    in_memory = by_default and all("CPU" in device for device in strategy.extended.worker_devices)
    changed = {"_cross_device_ops": tf.distribute.ReductionToOneDevice()} if in_memory else {}
    try:
        with patched(strategy.extended, changed):
            yield
    except tf.errors.OpError as error:
        if (wrong := labels.wrong_in_step(error.message)) is not None:
            raise UserError(wrong) from error
        if "Restart your program to reset" not in error.message:
            raise
        reason = error.message.split("Collective ops is aborted by: ")[-1].splitlines()[0].rstrip(". ")
        received = f"TensorFlow's word that they are stopped in this process, by: {reason}"
        instead = "starting the process anew; in a notebook, restarting the kernel"
        raise UserError("sums over replicas to work", received, instead) from error


def _check_made_under(strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]) -> None:
    under = f"a model, an optimizer and metrics made under the strategy they train with, {type(strategy).__name__}"
    instead = "to make and compile the model inside `with strategy.scope():`"
    for variable in variables:
        foreign = not strategy.extended.variable_created_in_scope(variable.value)
        refuse((foreign, under, f"{variable.path}, made outside it", instead))


def _callbacks(own: Nested[keras.callbacks.Callback] | None, where: ReplicaPlace) -> list[keras.callbacks.Callback]:
    own = own.callbacks if isinstance(own, keras.callbacks.CallbackList) else own
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


def _check_same(strategy: tf.distribute.Strategy, where: ReplicaPlace, arguments: dict[str, float | None]) -> None:
    """Refuses, on all processes, a call that differs between them: they would wait for each other for ever."""
    if where.processes == 1:
        return
    numbers = tf.constant([-1.0 if value is None else float(value) for value in arguments.values()], tf.float64)
    (first,) = from_first(strategy, over(strategy))([numbers])
    (differing,) = over_replicas(strategy, over(strategy))([tf.cast(numbers != first, tf.float64)])
    for name, own, of_first, differs in zip(arguments, numbers.numpy(), first.numpy(), differing.numpy(), strict=True):
        if differs:
            other = "another elsewhere" if own == of_first else f"{own:g} here"
            received = f"{of_first:g} in the first process and {other} (-1: none)"
            raise UserError(f"every process to call fit with the same {name}", received, f"the same {name} in all")


def _due(model: keras.Model, validation_freq: int | Sequence[int]) -> Callable[[int], bool]:
    wrong = not isinstance(validation_freq, int | list | tuple | set | range) or validation_freq == 0
    expected = "validation_freq to be a number of epochs or a list of them"
    refuse((wrong, expected, f"{validation_freq!r}", "validation_freq=1"))
    frequency = validation_freq if isinstance(validation_freq, int) else list(validation_freq)
    return lambda epoch: bool(model._should_eval(epoch, frequency))
