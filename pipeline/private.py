"""All that is taken from TensorFlow and Keras beyond what they promise to keep, and what for.

An upgrade may move any of it: `tests/test_imports.py` names what is gone. What is added here has no public way.
"""

from keras.src.backend.common.masking import get_keras_mask, set_keras_mask  # passed on with a tensor, for its loss
from keras.src.backend.common.stateless_scope import in_stateless_scope  # in which nothing is to be assigned
from keras.src.losses import loss as keras_loss  # reduction and weights, as Keras's own losses apply them
from keras.src.random.seed_generator import SeedGenerator  # of layers, whose state each replica is to have of its own
from keras.src.trainers.data_adapters import array_slicing, get_data_adapter  # so that batches are those of `fit`
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.utils.python_utils import pythonify_logs  # logs as callbacks get them

# How long processes of a collective group go on without a word from each other, before the strategy sets it.
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2

# Whether AutoGraph converts what is called, which a compiled function says for its own Python.
from tensorflow.python.autograph.core import ag_ctx

# Which data set a stage of an input is, to know what it costs and keeps; and elements as lists of tensors, and back.
from tensorflow.python.data.experimental.ops import cardinality
from tensorflow.python.data.ops import cache_op, dataset_ops, map_op, prefetch_op, shuffle_op
from tensorflow.python.data.util import structure

# Strategies whose devices, or whose place of variables, their public constructors do not let one choose.
# `cross_device_utils`: one process of each host adds to the others', a group of devices that no strategy has.
from tensorflow.python.distribute import collective_all_reduce_strategy as collective
from tensorflow.python.distribute import (
    cross_device_utils,
    parameter_server_strategy,
    parameter_server_strategy_v2,
    ps_values,
)

# What launches the collectives of a replica, whose keys a loop asks the host for; and what changes variables of all
# replicas together, where a strategy has that done outside of them.
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from tensorflow.python.distribute.merge_call_interim import maybe_merge_call, strategy_supports_no_merge_call

# How processes of several hosts watch over each other, which has no public setting; what graphs are optimized by, of
# which public options name a part; and a function's Python as it is before it is compiled, to be a part of another.
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.framework import op_def_registry  # whether an operation of an input is stateful
from tensorflow.python.framework.config import is_op_determinism_enabled  # it has no public getter

# Operations that draw, which all random functions come down to; and the search for variables behind a custom gradient,
# which `worker/tensorflow/collective.py` does without, and which finds none that a step holds as plain values.
from tensorflow.python.ops import custom_gradient as custom_gradients
from tensorflow.python.ops import (
    gen_random_ops,
    gen_stateful_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)
from tensorflow.python.util import pywrap_xla_ops  # the operations that XLA has a compiler for
