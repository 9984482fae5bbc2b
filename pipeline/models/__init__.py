"""The built-in models: one function per choice, from a shape and a class count to an uncompiled Keras model.

How a model is compiled, placed and trained is left to its caller.

    model = pipeline.models.cnn(input_shape=(28, 28, 1), num_classes=10)
"""

from pipeline.models.cnn import cnn
from pipeline.models.mlp import mlp
from pipeline.models.resnet20 import resnet20

__all__ = ["cnn", "mlp", "resnet20"]
