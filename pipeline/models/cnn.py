"""Turns images into class probabilities with a few convolutions and a dense layer."""

from collections.abc import Sequence

import keras
from keras import layers

from pipeline.models.images import expect_images


def cnn(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    filters: Sequence[int] = (32, 64),
    dense_units: int = 128,
    dropout: float = 0.5,
) -> keras.Model:
    """An uncompiled net: float32 [batch, height, width, channel] to probabilities [batch, num_classes].

    The layers of the classic `mnist_cnn.py` of Keras's examples: 1.2 million parameters on MNIST.

    >>> cnn(input_shape=(28, 28, 1), num_classes=10).count_params()
    1199882
    """
    _expect_room(expect_images(input_shape, model="cnn"), convolutions=len(filters))
    x = inputs = keras.Input(tuple(input_shape))
    for count in filters:
        x = layers.Conv2D(count, kernel_size=3, activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D(pool_size=2)(x))
    x = layers.Dense(dense_units, activation="relu")(x)
    x = layers.Dropout(dropout)(x)
    # float32 whatever the precision policy: in 16 bits, probabilities near 1 are all the same.
    outputs = layers.Dense(num_classes, activation="softmax", dtype="float32")(x)
    return keras.Model(inputs, outputs, name="cnn")


def _expect_room(image: tuple[int, int, int], convolutions: int) -> None:
    """Refuses images that shrink to nothing: a convolution takes two pixels, and the pooling needs two.

    >>> _expect_room((8, 8, 1), convolutions=2)
    """
    height, width, _ = image
    smallest = 2 * convolutions + 2
    if min(height, width) < smallest:
        raise ValueError(
            f"Expected images of at least {smallest}x{smallest} pixels for {convolutions} convolutions "
            f"of model=cnn, received {height}x{width}. "
            "Try fewer filters, as in 'model.build.filters=[32]', or model=mlp."
        )
