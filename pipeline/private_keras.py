"""Everything that all engines take from Keras beyond its public API, also where there is no TensorFlow.

The rest is in `private.py`, which has TensorFlow imported.
"""

# The outputs of a model in shape and type, before it is built.
from keras.src.backend import compute_output_spec

# A compiled loop asks and sets what Keras keeps for its own: a scope under way, and the learning phase's.
from keras.src.backend.common import global_state

# A variable of Keras around one that is given, for state that lives in a loop.
from keras.src.backend.common import variables as keras_variables
