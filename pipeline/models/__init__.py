"""The built-in models: one function per choice, from the data's shape to a Keras model.

Those that tell images apart are not compiled: `pipeline.models.cnn(input_shape=(28, 28, 1), num_classes=10)`.
"""

from pipeline.models.feedforward import cnn, mlp, recommender, resnet20
from pipeline.models.transformer import transformer

__all__ = ["cnn", "mlp", "recommender", "resnet20", "transformer"]
