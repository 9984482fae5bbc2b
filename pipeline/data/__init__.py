"""The built-in data sets: one function per choice, from its arguments to `(train, validation)`, always the same.

A part is `(x, y)`, two NumPy arrays: float32 [examples, height, width, channel] in [0, 1], and int32 [examples]. That
of `clicks` is a `tf.data.Dataset`, and those of text and files of one's own are `Examples`, made while they are read.

    (x_train, y_train), (x_validation, y_validation) = pipeline.data.mnist5k()
"""

from pipeline.data.built_in import cifar10, clicks, digits, fashion_mnist, mnist, mnist5k, synthetic, text
from pipeline.data.errors import DataError
from pipeline.data.pictures import images
from pipeline.data.tables import csv, numpy
from pipeline.data.tfrecord import tfds, tfrecord

__all__ = [
    "DataError", "cifar10", "clicks", "csv", "digits", "fashion_mnist", "images", "mnist", "mnist5k", "numpy",
    "synthetic", "text", "tfds", "tfrecord",
]  # fmt: skip
