"""Deep models that `deep.py` trains: those of `keras.applications`, and a transformer."""

import keras


def application(input_shape: tuple[int, ...], num_classes: int, name: str) -> keras.Model:
    """The model of that name in `keras.applications`, such as ResNet50, with weights drawn anew."""
    model: keras.Model = getattr(keras.applications, name)(weights=None, input_shape=input_shape, classes=num_classes)
    return model


def transformer(
    input_shape: tuple[int, ...], num_classes: int, blocks: int = 12, width: int = 128, heads: int = 4
) -> keras.Model:
    """An encoder over tokens, which are the inputs in [0, 1] in steps of a thousandth: [tokens] -> [num_classes]."""
    layers = keras.layers
    inputs = keras.Input(input_shape)
    x = layers.Embedding(1_001, width)(keras.ops.cast(1_000 * inputs, "int32"))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(y, y)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(y)
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(num_classes, activation="softmax")(pooled))
