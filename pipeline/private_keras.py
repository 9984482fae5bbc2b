"""Everything that all engines take from Keras beyond its public API, also where there is no TensorFlow.

The rest is in `private.py`, which has TensorFlow imported.
"""

from keras.src.backend import compute_output_spec  # a model's outputs in shape and type, before it is built
from keras.src.backend.common import global_state  # a scope under way, and the learning phase's, for a compiled loop
from keras.src.backend.common import variables as keras_variables  # around a given one, for state that lives in a loop
