"""What an asynchronous worker and its servers send each other arrives as it was."""

from collections.abc import Callable, Sequence
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.worker.tensorflow import scheduled as servers


def sent(known: Sequence[tf.TensorShape], *arrays: tf.Tensor) -> list[tf.Tensor]:
    """The arrays, as they arrive where no more of their shapes is known than this."""
    arrays = [tf.ensure_shape(array, shape) for array, shape in zip(arrays, known, strict=True)]
    message = servers.joined(arrays)
    if servers.LARGE > 1000 and known[0].rank is not None:
        assert len(message) == 1
    return servers.split(message, arrays)


@pytest.mark.parametrize("large", [1, 64, 1 << 20])
@pytest.mark.parametrize("known", ["all", "without rows", "nothing"])
def test_arrays_of_all_kinds_arrive_as_they_were_sent(large, known, monkeypatch):
    monkeypatch.setattr(servers, "LARGE", large)
    arrays = [
        tf.constant([[1.5, -2.0, np.nan]]), tf.constant(7, tf.int64), tf.zeros([0, 4], tf.float16), tf.range(5),
        tf.cast(tf.range(3), tf.bfloat16), tf.constant([255], tf.uint8), tf.random.normal([40, 30]), tf.zeros([2, 0]),
    ]  # fmt: skip
    shapes = {
        "all": [array.shape for array in arrays],
        # Of rows that a batch names there are as many as it has.
        "without rows": [tf.TensorShape([None, *array.shape[1:]] if array.shape.rank else []) for array in arrays],
        "nothing": [tf.TensorShape(None)] * len(arrays),
    }
    specs = [tf.TensorSpec(None, array.dtype) for array in arrays]
    function = tf.function(partial(sent, shapes[known]), autograph=False).get_concrete_function(*specs)
    for array, arrived in zip(arrays, function(*arrays), strict=True):
        assert array.dtype == arrived.dtype
        np.testing.assert_array_equal(array, arrived)


def test_a_weight_that_a_layer_assigns_to_is_read_where_it_is_from_then_on():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    kernel, before = model.layers[0].kernel, model.layers[0].kernel.numpy()
    held = kernel.value

    @tf.function(autograph=False)
    def step() -> tuple[tf.Tensor, ...]:
        with servers.fetched(model, tf.constant(0)) as fetched, tf.GradientTape() as tape:
            tape.watch(list(fetched.values()))
            first = tf.reduce_sum(5.0 * kernel.value)
            kernel.assign(tf.ones([3, 2]))
            second = tf.reduce_sum(3.0 * kernel.value)
            both = first + second
        return first, second, tape.gradient(both, [fetched[id(kernel)], held])

    first, second, gradients = tf.nest.map_structure(lambda value: value.numpy(), step())
    assert first == pytest.approx(5 * before.sum(), rel=1e-5)
    assert second == 18
    assert [gradient.max() for gradient in gradients] == [5, 3]
    np.testing.assert_array_equal(kernel.numpy(), np.ones([3, 2]))
    assert kernel.value is held


def multiplied(x: tf.Tensor, kernel: keras.Variable) -> tf.Tensor:
    @tf.custom_gradient
    def product(x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., object]]:
        def gradient(upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> tuple[tf.Tensor, list[tf.Tensor]]:
            of_x = tf.matmul(upstream, tf.convert_to_tensor(kernel), transpose_b=True)
            return of_x, [tf.matmul(x, upstream, transpose_a=True) for _ in variables]

        return tf.matmul(x, tf.convert_to_tensor(kernel)), gradient

    return product(x)


def computed_again(x: tf.Tensor, kernel: keras.Variable) -> tf.Tensor:
    return tf.recompute_grad(lambda x: tf.matmul(x, tf.convert_to_tensor(kernel)))(x)


@pytest.mark.parametrize("product", [multiplied, computed_again])
def test_a_weight_behind_a_custom_gradient_has_its_gradient(product):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    kernel = model.layers[0].kernel
    held, x = kernel.value, tf.constant([[1.0, 2.0, 3.0]])

    @tf.function(autograph=False)
    def step() -> list[tf.Tensor]:
        with servers.fetched(model, tf.constant(0)) as fetched, tf.GradientTape() as tape:
            tape.watch(list(fetched.values()))
            both = tf.reduce_sum(product(x, kernel) + tf.matmul(x, tf.convert_to_tensor(kernel)))
        return tape.gradient(both, [fetched[id(kernel)], held])

    assert [gradient[:, 0].numpy().tolist() for gradient in step()] == [[1, 2, 3], [1, 2, 3]]
    assert kernel.value is held
