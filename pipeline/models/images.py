"""Refuses, in words, the inputs that a model of images cannot take."""

from collections.abc import Sequence


def expect_images(input_shape: Sequence[int], model: str) -> tuple[int, int, int]:
    """The shape as (height, width, channel), or a ValueError where it has another rank.

    >>> expect_images([28, 28, 1], model="cnn")
    (28, 28, 1)
    """
    if len(input_shape) != 3:
        raise ValueError(
            f"Expected images [height, width, channel] for model={model}, "
            f"received examples of shape {list(input_shape)}. Try model=mlp, which flattens any input."
        )
    height, width, channel = input_shape
    return height, width, channel
