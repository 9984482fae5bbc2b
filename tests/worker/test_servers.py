"""What an asynchronous worker and its servers send each other arrives as it was."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.worker.tensorflow import messages, servers


@pytest.mark.parametrize("large", [1, 48, 1 << 20])
def test_arrays_of_all_kinds_arrive_as_they_were_sent(large, monkeypatch):
    monkeypatch.setattr(messages, "LARGE", large)
    arrays = [
        tf.constant([[1.5, -2.0, np.nan]]), tf.constant(7, tf.int64), tf.zeros([0, 4], tf.float16), tf.range(5),
        tf.cast(tf.range(3), tf.bfloat16), tf.constant([255], tf.uint8), tf.random.normal([40, 30]), tf.zeros([2, 0]),
    ]  # fmt: skip
    # Of rows that a batch names there are as many as it has; of an array by itself nothing need be known.
    specs = [tf.TensorSpec([None, *array.shape[1:]] if array.shape else [], array.dtype) for array in arrays]
    for signature in (specs, [tf.TensorSpec(array.shape, array.dtype) for array in arrays], [None] * len(arrays)):

        @tf.function(autograph=False)
        def sent(*arrays: tf.Tensor, signature: list[tf.TensorSpec] = signature) -> list[tf.Tensor]:
            known = [
                array if spec is None else tf.ensure_shape(array, spec.shape)
                for array, spec in zip(arrays, signature, strict=True)
            ]
            message = messages.joined(known)
            if large == 1 << 20 and signature[0] is not None:
                assert len(message) == 1
            return messages.split(message, known)

        unknown = [tf.TensorSpec(None, array.dtype) for array in arrays]
        for array, arrived in zip(arrays, sent.get_concrete_function(*unknown)(*arrays), strict=True):
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
        return first, second, tape.gradient(first + second, [fetched[id(kernel)], held])

    first, second, gradients = tf.nest.map_structure(lambda value: value.numpy(), step())
    assert first == pytest.approx(5 * before.sum(), rel=1e-5)
    assert second == 18
    assert [gradient.max() for gradient in gradients] == [5, 3]
    np.testing.assert_array_equal(kernel.numpy(), np.ones([3, 2]))
    assert kernel.value is held
