"""The distribution strategies: one function each, from device names to a `tf.distribute.Strategy`."""

from pipeline.strategies.central_storage import central_storage
from pipeline.strategies.default import default
from pipeline.strategies.mirrored import mirrored
from pipeline.strategies.model_parallel import model_parallel
from pipeline.strategies.multi_worker import multi_worker
from pipeline.strategies.one_device import one_device
from pipeline.strategies.parameter_server import parameter_server
from pipeline.strategies.tpu import tpu

__all__ = [
    "central_storage",
    "default",
    "mirrored",
    "model_parallel",
    "multi_worker",
    "one_device",
    "parameter_server",
    "tpu",
]
