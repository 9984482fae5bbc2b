"""Turns any input into class probabilities with dense layers alone."""

from collections.abc import Sequence

import keras
from keras import layers


def mlp(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    hidden: Sequence[int] = (128,),
    dropout: float = 0.0,
) -> keras.Model:
    """An uncompiled perceptron: float32 [batch, *input_shape] to float32 probabilities [batch, num_classes].

    >>> mlp(input_shape=(28, 28, 1), num_classes=10, hidden=[256, 128]).count_params()
    235146
    """
    inputs = keras.Input(tuple(input_shape))
    x = layers.Flatten()(inputs)
    for units in hidden:
        x = layers.Dense(units, activation="relu")(x)
        x = layers.Dropout(dropout)(x)
    # float32 whatever the precision policy: in 16 bits, probabilities near 1 are all the same.
    outputs = layers.Dense(num_classes, activation="softmax", dtype="float32")(x)
    return keras.Model(inputs, outputs, name="mlp")
