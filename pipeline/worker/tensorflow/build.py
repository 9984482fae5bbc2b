"""Makes what a plan names: the model, compiled and built under the strategy, from a function and its arguments.

For `train.remat`, `tf.recompute_grad` forgets what a block computes, and computes it again on the way back.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.private import SeedGenerator
from pipeline.private_keras import compute_output_spec
from pipeline.worker import compiling, labels
from pipeline.worker.collective import Collective
from pipeline.worker.compiling import check_batches, check_made, check_optimizer, compile_chosen
from pipeline.worker.data.reading import Batch
from pipeline.worker.model_error import ModelError
from pipeline.worker.patched import all_patched, patched
from pipeline.worker.tensorflow import custom_steps, step
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow.collective import ALONE, Addend, of_process, over
from pipeline.worker.tensorflow.custom_steps import build as custom_build
from pipeline.worker.tensorflow.loss_scaling import global_batch, metrics, normalization, reduction
from pipeline.worker.variables import updating, within


def model(
    make: Callable[[], keras.Model],
    strategy: tf.distribute.Strategy,
    batch: Batch,
    optimizer: keras.optimizers.Optimizer | str | None = None,
    learning_rate: float | None = None,
    loss: Nested[keras.losses.Loss | str] | None = None,
    metrics: Nested[keras.metrics.Metric | str] | None = None,
    rate_scale: float = 1.0,
    collective: Collective[Addend] | None = None,
    note: Callable[[str], object] = str,
    gather: bool = False,
    batch_statistics: str = "global",
    arrays: bool = True,
) -> keras.Model:
    """Returns the model that `make` returns, ready to train under `strategy`.

    Shapes are taken from `batch`. What is None is the model's own, or for a model that is not compiled Adam, sparse
    categorical cross-entropy and accuracy. Any learning rate is multiplied by `rate_scale`. `arrays`: the data are no
    data set. What means nothing here goes to `note`. Raises `ModelError`, or `DataError` for labels unlike its loss.
    """
    with strategy.scope(), global_batch.asking_nobody():
        built = make()
        check_made(built)
        _check(built)
        _check_unheeded(built, strategy, note)
        _compile(built, optimizer, learning_rate, loss, metrics)
        with compiling.in_words(built, batch):
            labels.check(built, batch)
        if built.optimizer is not None:
            _check_optimizer(built.optimizer, strategy)
        ready(built, strategy, batch, collective or over(strategy), note, gather, batch_statistics, arrays)
        if (optimizer is not None or learning_rate is not None) and built.optimizer not in step.optimizers(built):
            whom = "for a model that applies the optimizer it is compiled with"
            received = f"{type(built).__name__}, which applies others"
            raise ModelError(f"train.optimizer and train.learning_rate {whom}", received, "arguments of model.build")
        for applied in step.optimizers(built):
            if rate_scale != 1.0:
                compiling.scale(applied, rate_scale)
            _check_optimizer(applied, strategy)
        return built


def _check(model: keras.Model) -> None:
    # Under that distribution TensorFlow has every variable whole on one device, in silence.
    if (chosen := keras.distribution.distribution()) is not None:
        why = "which would leave every variable whole on one device"
        instead = "strategy=model_parallel or strategy=mirrored without set_distribution, or backend=jax"
        raise ModelError(f"no keras.distribution under backend=tensorflow, {why}", type(chosen).__name__, instead)
    check_batches(model)
    for layer in model._flatten_layers():
        scope = layer._remat_mode
        listed = scope and (scope.mode != "list_of_layers" or layer.name in scope.layer_names)
        if listed and scope.mode not in (None, "activations") and layer._call_has_training_arg:
            expected = "layers without keras.RematScope, under which Keras fails in TensorFlow's graphs"
            instead = 'RematScope(mode="activations"), or none and train.remat=true'
            raise ModelError(expected, f"{layer.name} with mode={scope.mode!r}", instead)


def _check_unheeded(model: keras.Model, strategy: tf.distribute.Strategy, note: Callable[[str], object]) -> None:
    """Refuses steps of a model's own where they cannot be made; notes what it was compiled with and is left out."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy) and custom_steps.has_own(model):
        name = "train_step" if reduction.is_own(model, "train_step") else "test_step"
        expected = f"a model without a {name} of its own, since asynchronous workers make Keras's step between the "
        received = f"{type(model).__name__}, which has one"
        raise ModelError(expected + "updates of others", received, "strategy=mirrored or strategy=multi_worker")
    # On a GPU without a strategy, Keras resolves "auto" to True: nobody asked for it.
    was_asked = tf.distribute.has_strategy() or not tf.config.list_physical_devices("GPU")
    if model.compiled and model.jit_compile and was_asked:
        text = "The model was compiled with jit_compile=True, which is left out: train.xla=true has XLA compile the "
        note(text + "steps, under every strategy.")


def ready(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    batch: Nested[tf.Tensor],
    collective: Collective[Addend],
    note: Callable[[str], object] = str,
    gather: bool = False,
    batch_statistics: str = "global",
    arrays: bool = True,
) -> None:
    """Builds a compiled model in the strategy's scope and makes it exact; notes what is not exact."""
    own = custom_steps.has_own(model)
    if own:
        custom_build.build(model, batch, arrays)
    else:
        with compiling.in_words(model, batch):
            _build_compiled(model, batch)
            model._symbolic_build(data_batch=batch)
    if not model.trainable_variables:
        raise ModelError("Expected a model with weights to train, received one without.")
    for text in compiling.overlooked(model, batch) if not own else ():
        note(text)
    several = strategy.num_replicas_in_sync > 1
    if several:
        statistics = {"global": collective, "host": of_process(strategy), "replica": ALONE}[batch_statistics]
        everywhere = statistics.replicas == strategy.num_replicas_in_sync
        normalization.synchronize(model, collective if everywhere else statistics, everywhere)
    if own:
        losses.apart(model)
        if gather:
            note("train.gather is left out: the steps of the model are its own, and compute their losses themselves.")
        texts = custom_build.sums_over_examples(model, batch) if several else []
    else:
        losses.make_exact(model, collective)
        texts = losses.find(model, batch, gather) if several else []
    vars(model)[step.NOTED_AS] = bool(texts)
    for text in texts:
        note(text)
    # A model with steps of its own may have no call.
    if several and (not own or reduction.is_own(model, "call")):
        metrics.count_on_global_batch(model, batch)
    elif not own and isinstance(strategy, tf.distribute.ParameterServerStrategy):
        for metric in metrics.not_added(model, batch):
            expected = "metrics that count and add up, since the states of asynchronous workers are added"
            received = f"{metric.name} ({type(metric).__name__}), whose state is no sum over batches"
            raise ModelError(expected, received, "leaving it out, or strategy=mirrored or multi_worker")


def _build_compiled(model: keras.Model, batch: Batch) -> None:
    # Keras would call the model for them once more, which takes a deep one as long as it took to make.
    is_of_keras = type(model).__module__.partition(".")[0] == "keras"
    if not is_of_keras or not all(layer.built for layer in model._flatten_layers()):
        return

    def symbol(leaf: tf.Tensor | None) -> keras.KerasTensor | None:
        return None if leaf is None else keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))

    x, y, weights = keras.tree.map_structure(symbol, keras.utils.unpack_x_y_sample_weight(batch))
    made_for, *others = model.inputs
    # A call of the model on such an input gives the outputs that it names.
    if others or not isinstance(x, keras.KerasTensor) or made_for.shape[1:] != x.shape[1:]:
        return
    y_pred = labels.predicted(model, x)
    if model._compile_metrics is not None and not model._compile_metrics.built:
        compute_output_spec(model.compute_metrics, x, y, y_pred, sample_weight=weights)
    if model._compile_loss is not None and not model._compile_loss.built:
        compute_output_spec(model._compute_loss, x, y, y_pred, sample_weight=weights, training=False)


@contextlib.contextmanager
def lent(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    batch: Batch,
    collective: Collective[Addend],
    note: Callable[[str], object] = str,
    gather: bool = False,
) -> Iterator[None]:
    """Inside, a user's compiled model is `ready`; afterwards all but what it learnt is as it was."""
    with contextlib.ExitStack() as stack:
        stack.callback(metrics.given_back, model)
        with strategy.scope(), global_batch.asking_nobody(model):
            _check_optimizer(model.optimizer, strategy)
            _check(model)
            with compiling.in_words(model, batch):
                labels.check(model, batch)
                model._symbolic_build(data_batch=batch)
            # Set as they are, to be put back.
            for layer in model._flatten_layers():
                stack.enter_context(patched(layer, {"_losses": layer._losses}))
            for layer in normalization.layers(model):
                stack.enter_context(patched(layer, {"synchronized": layer.synchronized, "_moments": layer._moments}))
            if (compiled := model._compile_loss) is not None:
                stack.enter_context(patched(compiled, {"_flat_losses": compiled._flat_losses}))
            ready(model, strategy, batch, collective, note, gather)
        summing = {"_all_reduce_sum_gradients": list}
        stack.enter_context(all_patched((one, summing) for one in within(model.optimizer)))
        yield


def _compile(model: keras.Model, optimizer: Any, learning_rate: float | None, loss: Any, metrics: Any) -> None:
    own = custom_steps.has_own(model)
    if reduction.is_own(model, "compile"):
        chosen = {"optimizer": optimizer, "learning_rate": learning_rate, "loss": loss, "metrics": metrics}
        keys = [f"train.{key}" for key, value in chosen.items() if value is not None]
        if model.compiled and not keys:
            return
        takes_others = own
        try:
            inspect.signature(model.compile).bind(optimizer=None, loss=None, metrics=None)
        except TypeError:
            takes_others = True
        if takes_others:
            expected = f"{type(model).__name__}, whose compile is its own, to be compiled in model.build"
            instead = "arguments of model.build for what compile takes"
            raise ModelError(expected, " and ".join(keys) or "one that is not compiled", instead)
    compile_chosen(model, optimizer, learning_rate, loss, metrics, own)


def _check_optimizer(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    check_optimizer(optimizer)
    apart = isinstance(strategy, tf.distribute.ParameterServerStrategy | tf.distribute.TPUStrategy)
    for accumulated in {one.gradient_accumulation_steps for one in updating(optimizer)} - {None}:
        if apart:
            expected = "an optimizer that applies each step's gradients, since Keras cannot accumulate them over "
            instead = f"batches {accumulated} times as large, or strategy=mirrored"
            received = f"gradient_accumulation_steps={accumulated}"
            raise ModelError(expected + "asynchronous workers or TPUs", received, instead)


def forget(model: keras.Model) -> None:
    """Makes a built model's blocks compute again, with the same random numbers; `ModelError` if that saves nothing."""
    compiling.forget(model, _forgetful, stateful=False)


def _forgetful(block: keras.layers.Layer, call_inside: compiling.BlockCall) -> compiling.BlockCall:
    @functools.wraps(call_inside)
    def call(*args: Any, **named: Any) -> Any:
        leaves = tf.nest.flatten((args, named))
        are_tensors = [isinstance(leaf, tf.Tensor) for leaf in leaves]
        # The seeds that the first call has drawn.
        drawn: list[tf.Tensor] = []
        calls = itertools.count()

        def called(*tensors: tf.Tensor) -> Any:
            rest, draw, again = iter(tensors), SeedGenerator.next, iter(drawn) if next(calls) else None
            own_leaves = [next(rest) if is_one else leaf for is_one, leaf in zip(are_tensors, leaves, strict=True)]
            own_args, own_named = tf.nest.pack_sequence_as((args, named), own_leaves)

            def seed(generator: SeedGenerator, ordered: bool = True) -> tf.Tensor:
                if again is not None:
                    return next(again)
                drawn.append(draw(generator, ordered))
                return drawn[-1]

            with patched(SeedGenerator, {"next": seed}):
                return call_inside(*own_args, **own_named)

        return tf.recompute_grad(called)(*itertools.compress(leaves, are_tensors))

    return call
