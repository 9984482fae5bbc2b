"""All that is taken from TensorFlow and Keras beyond what they promise to keep, and what for.

An upgrade may move any of it: `tests/test_private.py` names what is gone. What is added here has no public way.
"""

# The mask that layers pass on beside a tensor, which a loss is to honour.
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

# Whether state is kept elsewhere for now, in which nothing is to be assigned.
from keras.src.backend.common.stateless_scope import in_stateless_scope

# Reduction and weights of a loss, as Keras's own losses apply them.
from keras.src.losses import loss as keras_loss

# Random numbers of layers, whose state each replica is to have of its own.
from keras.src.random.seed_generator import SeedGenerator

# What `fit` makes of its data, so that batches are those of Keras.
from keras.src.trainers.data_adapters import array_slicing, get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

# Logs as callbacks get them.
from keras.src.utils.python_utils import pythonify_logs

# How long processes of a collective group go on without a word from each other, before the strategy sets it.
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2

# Whether AutoGraph converts what is called, which a compiled function says for its own Python.
from tensorflow.python.autograph.core import ag_ctx

# Which data set a stage of an input is, to know what it costs and what it keeps.
from tensorflow.python.data.experimental.ops import cardinality
from tensorflow.python.data.ops import cache_op, dataset_ops, map_op, prefetch_op, shuffle_op

# Elements of data sets as lists of tensors, and back.
from tensorflow.python.data.util import structure

# Strategies whose devices, or whose place of variables, their public constructors do not let one choose.
from tensorflow.python.distribute import collective_all_reduce_strategy as collective

# One process of each host adds to the others': a group of devices that no strategy has.
from tensorflow.python.distribute import (
    cross_device_utils,
    parameter_server_strategy,
    parameter_server_strategy_v2,
    ps_values,
)

# What launches the collectives of a replica, whose keys a loop asks the host for.
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher

# What changes variables of all replicas together, where a strategy has that done outside of them.
from tensorflow.python.distribute.merge_call_interim import maybe_merge_call, strategy_supports_no_merge_call

# How processes of several hosts watch over each other, which has no public setting; and what graphs are optimized by,
# of which the public options name only a part.
from tensorflow.python.eager import context

# A compiled function's Python as it is converted before it is compiled, for one that becomes a part of another.
from tensorflow.python.eager.polymorphic_function import autograph_util

# Whether an operation of an input is stateful.
from tensorflow.python.framework import op_def_registry

# Whether determinism was asked for, which has no public getter.
from tensorflow.python.framework.config import is_op_determinism_enabled

# The search for variables behind a custom gradient, which `worker/tensorflow/collective.py` does without, and which
# finds none that a step holds as plain values.
from tensorflow.python.ops import custom_gradient as custom_gradients

# Operations that draw, which all of TensorFlow's and Keras's random functions come down to.
from tensorflow.python.ops import (
    gen_random_ops,
    gen_stateful_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)

# The operations that XLA has a compiler for.
from tensorflow.python.util import pywrap_xla_ops

# What is used of these, and of public classes, under names that are not promised either.
ATTRIBUTES = {
    owner: tuple(names.split())
    for owner, names in {
        "CollectiveReplicaLauncher": "_next_instance_key",
        "ag_ctx": "ControlStatusCtx Status",
        "array_slicing": "TensorflowSparseWrapper can_slice_array convert_to_sliceable train_validation_split",
        "autograph_util": "py_func_from_autograph",
        "cache_op": "CacheDataset",
        "cardinality": "_AssertCardinalityDataset",
        "collective": "CollectiveAllReduceExtended",
        "collective.CollectiveAllReduceExtended": "_initialize_local_devices",
        "context": "context",
        "context.Context": "configure_coordination_service",
        "coordination_config_pb2": "CoordinatedJob",
        "cross_device_utils": "CollectiveKeys CollectiveReplicaLauncher",
        "custom_gradients": "_get_dependent_variables _graph_mode_decorator",
        "dataset_ops": "_OptionsDataset",
        "gen_random_ops": """
            multinomial parameterized_truncated_normal random_gamma random_poisson_v2 random_shuffle
            random_standard_normal random_uniform random_uniform_int truncated_normal
        """,
        "gen_stateful_random_ops": "rng_read_and_skip",
        "gen_stateless_random_ops": """
            stateless_multinomial stateless_parameterized_truncated_normal stateless_random_binomial
            stateless_random_poisson
        """,
        "gen_stateless_random_ops_v2": """
            stateless_random_gamma_v3 stateless_random_normal_v2 stateless_random_uniform_int_v2
            stateless_random_uniform_v2 stateless_shuffle stateless_truncated_normal_v2
        """,
        "map_op": "_MapDataset _ParallelMapDataset",
        "op_def_registry": "get",
        "parameter_server_strategy": "ParameterServerStrategyExtended",
        "parameter_server_strategy.ParameterServerStrategyExtended": "_create_var_creator _container_strategy",
        "parameter_server_strategy_v2": "ParameterServerStrategyV2 ParameterServerStrategyV2Extended",
        "parameter_server_strategy_v2.ParameterServerStrategyV2Extended": "_create_variable_round_robin",
        "prefetch_op": "_PrefetchDataset",
        "ps_values": "AggregatingVariable",
        "shuffle_op": "_ShuffleDataset",
        "structure": "from_tensor_list to_tensor_list",
        "keras.optimizers.Optimizer": """
            _apply_weight_decay _backend_apply_gradients _backend_increment_gradient_accumulators
            _backend_reset_gradient_accumulators _backend_update_step _clip_gradients _track_variable
            _update_model_variables_moving_average
        """,
        "keras.Model": "_flatten_layers _symbolic_build _compute_loss _should_eval",
        "keras.callbacks.EarlyStopping": "_set_monitor_op",
        "tf.data.Dataset": "_as_serialized_graph _inputs",
        "pywrap_xla_ops": "get_cpu_kernel_names get_gpu_kernel_names",
        "tf.Graph": "_get_function",
        "tf.Operation": "_set_attr",
        "tf.distribute.MirroredStrategy": "_collective_key_base",
        "tf.distribute.MultiWorkerMirroredStrategy": "_collective_key_base",
    }.items()
}
