"""Turns categories and dense features into the probability of a click: embeddings under a small dense tower."""

from collections.abc import Mapping, Sequence

import keras
from keras import layers

from pipeline.errors import UserError


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
