"""The built-in models: their shapes, sizes, words of refusal, and that what is saved comes back the same."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from pipeline.models import cnn, mlp, recommender, resnet20, transformer
from pipeline.models.transformer import SIZES

Model = Callable[..., Any]
IMAGES = [(8, 8, 1), (28, 28, 1), (32, 32, 3)]
# The perceptron flattens any input.
ANY = [(16,), (6, 5), (2, 3, 4, 5)]
SMALL = partial(transformer, input_shape=(16,), num_classes=11, blocks=2, width=16, heads=2)
TABLES = partial(recommender, categories=[50])


@pytest.fixture(autouse=True)
def _fresh_keras() -> None:
    keras.utils.set_random_seed(0)


def examples(shape: tuple[int, ...], count: int = 4) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).random((count, *shape), dtype=np.float32)


@pytest.mark.parametrize(("build", "shapes"), [(mlp, IMAGES + ANY), (cnn, IMAGES), (resnet20, IMAGES)])
def test_a_model_turns_images_of_any_of_our_sizes_into_probabilities_and_loads_with_the_same(build, shapes, tmp_path):
    for shape in shapes:
        # A list, as a YAML file gives it.
        model, x = build(input_shape=[*shape], num_classes=7), examples(shape)
        probabilities = keras.ops.convert_to_numpy(model(x))
        assert (model.input_shape, probabilities.shape, model.compiled) == ((None, *shape), (4, 7), False)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(x), probabilities)


def test_arguments_reach_the_layers_and_resnet20_has_the_parameters_of_the_paper() -> None:
    model = resnet20(input_shape=(32, 32, 3), num_classes=10)
    # "0.27M" in table 6 of He et al. (2015).
    assert sum(int(np.prod(weight.shape)) for weight in model.trainable_weights) == 269_722
    weighted = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense)]
    assert len(weighted) == 20

    def each(model: keras.Model, name: str) -> list[Any]:
        return [getattr(layer, name) for layer in model.layers if hasattr(layer, name)]

    assert each(mlp(input_shape=(5,), num_classes=3, hidden=[4, 2]), "units") == [4, 2, 3]
    # Images that just fit so many convolutions.
    net = cnn(input_shape=(8, 8, 1), num_classes=3, filters=[4, 6, 8], dense_units=5, dropout=0.25)
    assert (each(net, "filters"), each(net, "units"), each(net, "rate")) == ([4, 6, 8], [5, 3], [0.25])
    deep = resnet20(input_shape=(8, 8, 1), num_classes=3, blocks_per_stage=5, base_filters=4)
    assert deep.name == "resnet32"
    norms = [layer for layer in deep.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert len(norms) == 31


def test_the_shortcut_keeps_every_second_pixel_and_adds_channels_of_zeros() -> None:
    from pipeline.models.feedforward import _shortcut

    image = examples((5, 4, 2))
    inputs = keras.Input((5, 4, 2))
    shortcut = keras.ops.convert_to_numpy(keras.Model(inputs, _shortcut(inputs, filters=4, stride=2))(image))
    np.testing.assert_array_equal(shortcut[..., 1:3], image[:, ::2, ::2, :])
    assert not shortcut[..., [0, 3]].any()


@pytest.mark.parametrize("build", [mlp, cnn, resnet20])
def test_probabilities_stay_float32_in_mixed_precision(build: Model) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = build(input_shape=(8, 8, 1), num_classes=10)
    finally:
        keras.config.set_dtype_policy(before)
    assert model(examples((8, 8, 1))).dtype == model.layers[-1].compute_dtype == "float32"
    assert "bfloat16" in {layer.compute_dtype for layer in model.layers}


@pytest.mark.parametrize("build", [mlp, cnn, partial(resnet20, blocks_per_stage=1)], ids=["mlp", "cnn", "resnet8"])
def test_a_model_learns_what_it_is_shown(build: Model) -> None:
    x, y = examples((8, 8, 1), count=32), np.arange(32, dtype=np.int32) % 2
    x[y == 1] *= 0.3
    model = build(input_shape=(8, 8, 1), num_classes=2)
    model.compile("adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    losses = model.fit(x, y, epochs=5, verbose=0, batch_size=32).history["loss"]
    assert losses[-1] < losses[0]


OF_IMAGES = r"Expected images \[height, width, channel\] .* received examples of shape \[64\]\. Try model=mlp"


@pytest.mark.parametrize(("build", "shape", "words"), [
    (partial(cnn, num_classes=10), (64,), OF_IMAGES),
    (partial(resnet20, num_classes=10), (64,), OF_IMAGES),
    (partial(cnn, num_classes=10, filters=[8, 8, 8]), (9, 7, 1),
     r"at least 8x8 pixels for 3 convolutions .* received 9x7\. Try fewer"),
    (partial(resnet20, num_classes=10, blocks_per_stage=0), (8, 8, 1),
     r"at least one block .* received 0\. Try model\.build\.blocks_per_stage=3"),
    (SMALL, (28, 28, 1), r"sequences of tokens .* received examples of shape \[28, 28, 1\]\. Try data=text"),
    (partial(SMALL, size="2b"), (16,), r"\(tiny, 10m, 100m, 1b\), received 2b\. Try model\.build\.size=tiny"),
    (partial(SMALL, blocks=0), (16,), r"at least one block .* received 0\. Try model\.build\.blocks=4"),
    (partial(SMALL, heads=3), (16,), r"an even number of 16 .* received 3\. Try model\.build\.width=192"),
    (TABLES, {"ids": (2,), "dense": (3,)}, r"for each of 2 columns .* received 1\. Try 'model\.build\.categories="),
    (TABLES, (28, 28, 1), r'with "ids" and "dense" .* received examples of shape .*Try data=clicks'),
])  # fmt: skip
def test_what_a_model_cannot_be_built_for_is_refused(build: Model, shape: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(input_shape=shape)


def test_the_recommender_has_a_table_for_each_column() -> None:
    shape = {"ids": (2,), "dense": (3,)}
    model = recommender(input_shape=shape, categories=[50, 4], embedding_dim=6, hidden=[5])
    tables = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    assert [(table.input_dim, table.output_dim) for table in tables] == [(50, 6), (4, 6)]
    batch = {"ids": np.array([[49, 3], [0, 0]], np.int32), "dense": np.zeros((2, 3), np.float32)}
    assert (model(batch).shape, model.compiled) == ((2, 1), True)


def test_a_token_of_the_transformer_sees_those_before_it_alone_and_where_they_are() -> None:
    model, tokens = SMALL(), np.arange(32, dtype=np.int32).reshape(2, 16) % 11
    logits = keras.ops.convert_to_numpy(model(tokens))
    assert logits.shape == (2, 16, 11)
    later, swapped = tokens.copy(), tokens.copy()
    later[:, 9:] = 0
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(later))[:, :9], logits[:, :9])
    swapped[:, [0, 1]] = tokens[:, [1, 0]]
    # The same tokens before it, in another order.
    assert np.abs(keras.ops.convert_to_numpy(model(swapped))[:, -1] - logits[:, -1]).max() > 1e-6


@pytest.mark.slow
def test_the_transformer_learns_text_and_its_perplexity_is_that_of_its_loss(tmp_path: Path) -> None:
    model, tokens = SMALL(learning_rate=0.01), np.tile(np.arange(17, dtype=np.int32) % 5, (16, 1))
    history = model.fit(tokens[:, :-1], tokens[:, 1:], epochs=30, verbose=0).history
    assert history["perplexity"][-1] < 5 < history["perplexity"][0]
    np.testing.assert_allclose(np.exp(history["loss"]), history["perplexity"], rtol=1e-4)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    there, here = (keras.ops.convert_to_numpy(one(tokens[:, :-1])) for one in (again, model))
    np.testing.assert_array_equal(there, here)


@pytest.mark.parametrize(("size", "millions"), [("tiny", 0.8), ("10m", 10.7), ("100m", 101), ("1b", 1007)])
def test_the_sizes_of_the_transformer_are_what_they_are_called(size: str, millions: float) -> None:
    blocks, width, heads = SIZES[size].values()
    block = 12 * width**2 + 2 * width
    assert size == "1b" or SMALL(blocks=1, width=width, heads=heads).count_params() == block + 12 * width
    assert (blocks * block + 257 * width) / 1e6 == pytest.approx(millions, rel=0.03)
