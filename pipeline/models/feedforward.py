"""Turns images into class probabilities by dense, convolutional and residual nets, and categories into clicks."""

from collections.abc import Mapping, Sequence

import keras
from keras import layers, ops

from pipeline.errors import UserError, refuse


def mlp(
    *, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (128,), dropout: float = 0.0
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
    return _classifier(inputs, x, num_classes, "mlp")


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
    _expect_images(input_shape, "cnn")
    # A convolution takes two pixels, and the pooling needs two.
    (height, width, _), smallest = input_shape, 2 * len(filters) + 2
    expected = f"images of at least {smallest}x{smallest} pixels for {len(filters)} convolutions of model=cnn"
    instead = "fewer filters, as in 'model.build.filters=[32]', or model=mlp"
    refuse((min(height, width) < smallest, expected, f"{height}x{width}", instead))
    x = inputs = keras.Input(tuple(input_shape))
    for count in filters:
        x = layers.Conv2D(count, kernel_size=3, activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D(pool_size=2)(x))
    x = layers.Dense(dense_units, activation="relu")(x)
    x = layers.Dropout(dropout)(x)
    return _classifier(inputs, x, num_classes, "cnn")


def resnet20(
    *, input_shape: Sequence[int], num_classes: int, blocks_per_stage: int = 3, base_filters: int = 16
) -> keras.Model:
    """As `cnn`, but three stages of `blocks_per_stage` residual blocks (He et al., 2015, section 4.2)."""
    _expect_images(input_shape, "resnet20")
    refuse((blocks_per_stage < 1, "at least one block per stage for model=resnet20", blocks_per_stage,
            "model.build.blocks_per_stage=3"))  # fmt: skip
    inputs = keras.Input(tuple(input_shape))
    x = layers.ReLU()(_convolve(inputs, base_filters, 1))
    for stage in range(3):
        for block in range(blocks_per_stage):
            stride = 2 if stage > 0 and block == 0 else 1
            filters = base_filters * 2**stage
            y = _convolve(layers.ReLU()(_convolve(x, filters, stride)), filters, 1)
            x = layers.ReLU()(layers.Add()([y, _shortcut(x, filters, stride)]))
    x = layers.GlobalAveragePooling2D()(x)
    return _classifier(inputs, x, num_classes, f"resnet{6 * blocks_per_stage + 2}")


def _classifier(inputs: keras.KerasTensor, x: keras.KerasTensor, num_classes: int, name: str) -> keras.Model:
    # float32 whatever the precision policy: in 16 bits, probabilities near 1 are all the same.
    return keras.Model(inputs, layers.Dense(num_classes, activation="softmax", dtype="float32")(x), name=name)


def _convolve(x: keras.KerasTensor, filters: int, stride: int) -> keras.KerasTensor:
    """A 3x3 convolution and batch normalization, before any activation."""
    x = layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
    # The usual values for CIFAR; with Keras's momentum of 0.99 the first epochs do not validate.
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def _shortcut(x: keras.KerasTensor, filters: int, stride: int) -> keras.KerasTensor:
    """The paper's option A: every `stride`-th pixel, and zeros for new channels; it has no parameters."""
    if stride > 1:
        x = layers.MaxPooling2D(pool_size=1, strides=stride)(x)
    added = filters - x.shape[-1]
    return ops.pad(x, [[0, 0], [0, 0], [0, 0], [added // 2, added - added // 2]]) if added else x


def _expect_images(input_shape: Sequence[int], model: str) -> None:
    expected, received = f"images [height, width, channel] for model={model}", f"examples of shape {list(input_shape)}"
    refuse((len(input_shape) != 3, expected, received, "model=mlp, which flattens any input"))


def recommender(
    *,
    input_shape: Mapping[str, Sequence[int]],
    categories: Sequence[int],
    embedding_dim: int = 16,
    hidden: Sequence[int] = (64, 32),
    learning_rate: float = 0.005,
) -> keras.Model:
    """A compiled model of {"ids": int32 [batch, columns], "dense": float32 [batch, features]}.

    Column i has its own embedding of `categories[i]` rows. It gives probabilities, float32 [batch, 1], and learns them
    by binary cross-entropy with Adam; its metric is the area under the ROC curve, `auc`.

    >>> recommender(input_shape={"ids": (2,), "dense": (8,)}, categories=[1_000, 10], hidden=[4]).count_params()
    16329
    """
    if not isinstance(input_shape, Mapping) or set(input_shape) != {"ids", "dense"}:
        received = sorted(input_shape) if isinstance(input_shape, Mapping) else f"examples of shape {input_shape}"
        raise UserError('examples with "ids" and "dense" for model=recommender', received, "data=clicks")
    columns = int(input_shape["ids"][0])
    if columns != len(categories):
        expected = f"categories for each of {columns} columns of ids for model=recommender"
        raise UserError(expected, len(categories), "'model.build.categories=${data.build.categories}'")
    inputs = {
        "ids": keras.Input((columns,), dtype="int32", name="ids"),
        "dense": keras.Input(tuple(input_shape["dense"]), name="dense"),
    }
    embedded = [
        layers.Embedding(size, embedding_dim, name=f"embedding_{column}")(inputs["ids"][:, column])
        for column, size in enumerate(categories)
    ]
    x = layers.Concatenate()([*embedded, inputs["dense"]])
    for place, units in enumerate(hidden):
        x = layers.Dense(units, activation="relu", name=f"hidden_{place}")(x)
    # float32 whatever the precision policy: in 16 bits, probabilities near 1 are all the same.
    outputs = layers.Dense(1, activation="sigmoid", dtype="float32", name="clicked")(x)
    model = keras.Model(inputs, outputs, name="recommender")
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc")],
    )
    return model
