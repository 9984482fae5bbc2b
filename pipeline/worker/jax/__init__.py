"""JAX's engine: the same models, data and steps through Keras on JAX, on a mesh of devices, without TensorFlow."""
