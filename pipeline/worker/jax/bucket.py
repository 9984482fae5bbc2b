"""Gradients that travel in one bucket, as one array, where XLA would add up one array after the other.

On CPUs each array takes some 0.1 ms, however small, and processes of one host add one through memory that they share.
So one array holds the mean loss of a device's examples, its gradients and what metrics add up. That sums up to what one
device computes for models of known layers, losses and metrics, in which no example meets another before the loss.

Compiled steps reach shared memory by XLA's foreign function interface, whose structures are those of
`xla/ffi/api/c_api.h` beside jaxlib, which still calls functions of earlier ones.
"""

import ctypes
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh, PartitionSpec
from keras import layers, losses

from pipeline.plan.plan import Plan, Process
from pipeline.private_jax import distributed
from pipeline.worker.jax import step
from pipeline.worker.jax.devices import BATCH, MODEL, on_cpu
from pipeline.worker.shared_memory import LOOKS_SECONDS, Memory, PeerLostError, join

# Returns the sums of all devices' arrays, inside a function of one of them.
Add = Callable[[list[Any]], list[Any]]
# Layers that make of an example what they would make of it alone, as long as they have no state, such as a seed.
LAYERS = frozenset({
    layers.Activation, layers.Add, layers.Average, layers.AveragePooling1D, layers.AveragePooling2D, layers.Concatenate,
    layers.Conv1D, layers.Conv2D, layers.Dense, layers.DepthwiseConv2D, layers.Dropout, layers.Embedding,
    layers.Flatten, layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D, layers.GlobalMaxPooling1D,
    layers.GlobalMaxPooling2D, layers.InputLayer, layers.LayerNormalization, layers.LeakyReLU, layers.Maximum,
    layers.MaxPooling1D, layers.MaxPooling2D, layers.Multiply, layers.ReLU, layers.Rescaling, layers.Reshape,
    layers.RMSNormalization, layers.SeparableConv2D, layers.Subtract, layers.ZeroPadding2D,
})  # fmt: skip
# An axis, or axes, within an example.
ALONG_LAST = (-1, [-1], (-1,))
# Those whose mean over a batch is that over its examples.
LOSSES = frozenset({
    losses.binary_crossentropy, losses.categorical_crossentropy, losses.mean_absolute_error, losses.mean_squared_error,
    losses.sparse_categorical_crossentropy,
})  # fmt: skip


def by_xla(arrays: list[Any]) -> list[Any]:
    """The sums over all devices of the mesh, which XLA makes of one array."""
    return unpacked(jax.lax.psum(packed(arrays), BATCH), [array.shape for array in arrays])


def made_of(
    mesh: Mesh, model: keras.Model, variables: step.Variables, state: step.State, batch: Any, add: Add = by_xla
) -> step.Made:
    """As `step.made_of`, of a model that `fits`."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    parts, (trainable, other, _, metrics) = mesh.shape[BATCH], state
    if weights is not None or any(leaf.shape[0] % parts for leaf in jax.tree.leaves(batch)):
        return step.made_of(model, variables, state, batch)

    def of_part(state: step.State, batch: Any) -> Any:
        none = [jnp.zeros(one.shape, one.dtype) for one in metrics]
        loss, gradients, _, added = step.made_of(model, variables, (*state[:3], none), batch)
        return add([loss, *gradients, *added])

    whole = PartitionSpec()
    # Unchecked: Keras's layers do not say what of theirs is the same on all devices.
    by_part = jax.shard_map(
        of_part, mesh=mesh, in_specs=(whole, PartitionSpec(BATCH)), out_specs=whole, check_vma=False
    )
    sums = by_part(state, (x, y))
    loss, *gradients = (one / parts for one in sums[: 1 + len(trainable)])
    added = sums[1 + len(trainable) :]
    return loss, gradients, other, [old + new for old, new in zip(metrics, added, strict=True)]


def fits(model: keras.Model, variables: step.Variables, mesh: Mesh) -> bool:
    """True if a model's gradients can travel so, and it is then trained as it would be otherwise."""
    (trainable, other, _, counted), metrics = variables, model._compile_metrics
    losses_of_model = model._compile_loss and model._compile_loss._flat_losses
    loss = losses_of_model[0].loss if losses_of_model else None
    return (
        on_cpu(mesh)
        and mesh.shape[BATCH] > 1
        and mesh.shape[MODEL] == 1
        and all(variable.dtype == "float32" for variable in (*trainable, *counted))
        and not other
        and not model.losses
        and _is_of_examples(model)
        # The loss is the mean over the examples, none of which has a weight.
        and loss is not None
        and len(losses_of_model) == len(model.outputs) == 1
        and len(model.outputs[0].shape) > 1
        and type(loss).__module__.startswith("keras.")
        and loss.reduction == "sum_over_batch_size"
        and getattr(loss, "fn", None) in LOSSES
        and _is_usual(loss._fn_kwargs)
        # Each is a sum over examples, and their number.
        and all(
            type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state
            and _is_function_of_keras(metric._fn)
            and _is_usual(metric._fn_kwargs)
            for metric in ([] if metrics is None else metrics.metrics)
        )
    )


def _is_of_examples(layer: Any) -> bool:
    if isinstance(layer, keras.Model):
        inner = layer.layers if isinstance(layer, keras.Sequential) else getattr(layer, "operations", [None])
        return type(layer).__module__.startswith("keras.") and all(map(_is_of_examples, inner))
    return (
        type(layer) in LAYERS
        and getattr(layer, "axis", -1) in ALONG_LAST
        and not getattr(layer, "mask_zero", False)
        and layer.activity_regularizer is None
        and _is_function_of_keras(getattr(layer, "activation", None) or keras.activations.linear)
    )


def _is_usual(arguments: Mapping[str, Any]) -> bool:
    """True if a function, with these arguments, looks at each example by itself and counts all alike."""
    return arguments.get("axis", -1) in ALONG_LAST and arguments.get("ignore_class") is None


def _is_function_of_keras(function: Any) -> bool:
    return inspect.isfunction(function) and function.__module__.startswith("keras.")


def packed(arrays: list[Any]) -> Any:
    """float32 [numbers of all]."""
    # Not concatenated: XLA would then compute the sums behind each number anew for each.
    vector, place = jnp.zeros(sum(array.size for array in arrays), jnp.float32), 0
    for array in arrays:
        vector = jax.lax.dynamic_update_slice(vector, array.astype(jnp.float32).reshape(-1), (place,))
        place += array.size
    return vector


def unpacked(vector: Any, shapes: list[tuple[int, ...]]) -> list[Any]:
    """Arrays of these shapes that `packed` made a vector of."""
    sizes = [math.prod(shape) for shape in shapes]
    starts = itertools.accumulate(sizes, initial=0)
    return [vector[at : at + size].reshape(shape) for at, size, shape in zip(starts, sizes, shapes, strict=False)]


TARGET = "pipeline_shared_memory_sum"
# The version that the structures below were read in; it is what a function says that it was made for.
MAJOR, MINOR = 0, 3
# Asked of a function as it is registered, in place of a call; and codes of errors.
METADATA, INTERNAL, UNAVAILABLE = 1, 13, 14
# Numbers of an array from which on it is not packed.
LARGE = 1 << 14


def _struct(name: str, *fields: tuple[str, Any], begins: tuple[tuple[str, Any], ...] = ()) -> Any:
    """A structure of these fields after the two that all begin with, or others."""
    begins = begins or (("struct_size", c_size_t), ("extension", c_void_p))
    return type(name, (Structure,), {"_fields_": [*begins, *fields]})


SIZE = (("struct_size", c_size_t),)
_Version = _struct("Version", ("major", c_int), ("minor", c_int))
_Metadata = _struct("Metadata", ("version", _Version), begins=SIZE)
_Extension = _struct("Extension", ("type", c_int), ("next", c_void_p), ("metadata", POINTER(_Metadata)), begins=SIZE)
_Error = _struct("Error", ("message", c_char_p), ("code", c_int))
_Create = ctypes.CFUNCTYPE(c_void_p, POINTER(_Error))
_Api = _struct("Api", ("version", _Version), ("internal", c_void_p), ("create_error", _Create))
_Buffer = _struct("Buffer", ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64)))
_Buffers = _struct("Buffers", ("size", c_int64), ("types", c_void_p), ("buffers", POINTER(POINTER(_Buffer))))
_Frame = _struct(
    "Frame", ("api", POINTER(_Api)), ("context", c_void_p), ("stage", c_int), ("arguments", _Buffers),
    ("results", _Buffers),
)  # fmt: skip

# What XLA calls lives as long as the process.
_registered: list[object] = []


def of_plan(plan: Plan, process: Process) -> Add:
    """Returns what a plan's processes, all of one host, add by; `ConnectionRefusedError` where memory is not shared."""
    number, count = plan.leaders.index(process.rank), len(plan.leaders)
    client, calls = distributed.global_state.client, itertools.count()

    def tell_all(text: str) -> list[str]:
        call, patience_ms = next(calls), int(1000 * plan.launch.startup_timeout)
        # Of no length a value is none.
        client.key_value_set(f"{TARGET}/{call}/{number}", f"{text}\n")
        keys = [f"{TARGET}/{call}/{other}" for other in range(count)]
        return [client.blocking_key_value_get(key, patience_ms).removesuffix("\n") for key in keys]

    return adding(join(number, range(count), tell_all, 0 if plan.hardware.oversubscribed else LOOKS_SECONDS))


def adding(memory: Memory) -> Add:
    """Returns what adds arrays, float32, over the processes that share memory; called once in a process."""

    @ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))  # type: ignore[untyped-decorator]
    def called(pointer: Any) -> Any:
        frame = pointer.contents
        if frame.extension and (extension := _Extension.from_address(frame.extension)).type == METADATA:
            version = extension.metadata.contents.version
            version.major, version.minor = MAJOR, MINOR
            return None
        try:
            memory.sum_into(_vectors(frame.results), _vectors(frame.arguments))
        except BaseException as error:
            # What is raised here ends nowhere else: ctypes would go on with whatever sums there are.
            code = UNAVAILABLE if isinstance(error, PeerLostError) else INTERNAL
            message = f"{type(error).__name__}: {error}".encode()
            raised = _Error(ctypes.sizeof(_Error), None, message, code)
            return frame.api.contents.create_error(ctypes.byref(raised))
        return None

    _registered.append(called)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.cast(called, c_void_p).value), platform="cpu")

    # Its effect is that others go on: XLA is to leave it out, or join it with another, nowhere. JAX is not told: it
    # calls programs that have an effect by way of Python, which takes 0.1 ms.
    sums = Primitive(TARGET)
    sums.multiple_results = True
    sums.def_abstract_eval(lambda *vectors: vectors)
    mlir.register_lowering(sums, jax.ffi.ffi_lowering(TARGET, has_side_effect=True), platform="cpu")

    def add(arrays: list[Any]) -> list[Any]:
        # Small ones, of which there always is a loss, are packed: one costs XLA less than Python, until it copies much.
        small, large = ([one for one in arrays if (one.size < LARGE) is is_small] for is_small in (True, False))
        vector, *vectors = sums.bind(packed(small), *(one.astype(np.float32).reshape(-1) for one in large))
        of_small, of_large = iter(unpacked(vector, [one.shape for one in small])), iter(vectors)
        return [next(of_small) if one.size < LARGE else next(of_large).reshape(one.shape) for one in arrays]

    return add


def _vectors(buffers: Any) -> list[np.ndarray]:
    of_each = [buffer.contents for buffer in buffers.buffers[: buffers.size]]
    return [np.frombuffer((ctypes.c_float * one.dims[0]).from_address(one.data), np.float32) for one in of_each]
