"""Adds over the processes of a host inside a compiled step, through the memory that they share.

A compiled program calls what is registered by XLA's foreign function interface, a function of Python as well, with the
numbers where they lie. Its structures, of which a function reads the first fields, are those of `xla/ffi/api/c_api.h`
beside jaxlib, which stays able to call functions of earlier versions.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pipeline.plan.plan import Plan, Process
from pipeline.private_jax import distributed
from pipeline.worker.jax import bucket
from pipeline.worker.jax.bucket import Add
from pipeline.worker.shared_memory import LOOKS_SECONDS, Memory, PeerLostError, join

TARGET = "pipeline_shared_memory_sum"
# The version that the structures below were read in; it is what a function says that it was made for.
MAJOR, MINOR = 0, 3
# Asked of a function as it is registered, in place of a call.
METADATA = 1
# Numbers of an array from which on it is not packed.
LARGE = 1 << 14
# Codes of errors.
INTERNAL, UNAVAILABLE = 13, 14


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
    """Returns what a plan's processes, all of one host, add by; all of them call it, once.

    Raises `ConnectionRefusedError` in all if one cannot share memory.
    """
    number, count = plan.leaders.index(process.rank), len(plan.leaders)
    tell_all = _telling(number, count, plan.launch.startup_timeout)
    return adding(join(number, range(count), tell_all, 0 if plan.hardware.oversubscribed else LOOKS_SECONDS))


def adding(memory: Memory) -> Add:
    """Returns what adds arrays, float32, over the processes that share memory; called once in a process.

    Of a compiled program they call it once a step, and in the same order. Small arrays are packed into one: to XLA one
    costs less than to Python, until it has much to copy.
    """

    @ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))  # type: ignore[untyped-decorator]
    def called(pointer: Any) -> Any:
        frame = pointer.contents
        extension = _Extension.from_address(frame.extension) if frame.extension else None
        if extension is not None and extension.type == METADATA:
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
        # There is always a loss, which is small.
        small, large = ([one for one in arrays if (one.size < LARGE) is is_small] for is_small in (True, False))
        vector, *vectors = sums.bind(bucket.packed(small), *(one.astype(np.float32).reshape(-1) for one in large))
        of_small, of_large = iter(bucket.unpacked(vector, [one.shape for one in small])), iter(vectors)
        return [next(of_small) if one.size < LARGE else next(of_large).reshape(one.shape) for one in arrays]

    return add


def _vectors(buffers: Any) -> list[np.ndarray]:
    """Returns them where they lie."""
    of_each = [buffer.contents for buffer in buffers.buffers[: buffers.size]]
    return [np.frombuffer((ctypes.c_float * one.dims[0]).from_address(one.data), np.float32) for one in of_each]


def _telling(number: int, count: int, seconds: float) -> Callable[[str], list[str]]:
    """Returns what tells all processes, through the one that coordinates them, what each says; all call it together."""
    client, calls = distributed.global_state.client, 0

    def tell_all(text: str) -> list[str]:
        nonlocal calls
        calls += 1
        # Of no length a value is none.
        client.key_value_set(f"{TARGET}/{calls}/{number}", f"{text}\n")
        keys = [f"{TARGET}/{calls}/{other}" for other in range(count)]
        return [client.blocking_key_value_get(key, int(1000 * seconds)).removesuffix("\n") for key in keys]

    return tell_all
