"""Turns the digits that scikit-learn carries into training and validation arrays."""

from pipeline.data.packaged import Part, hold_out, packaged_file, read_table


def digits(*, validation_fraction: float = 0.2, split_seed: int = 0) -> tuple[Part, Part]:
    """1,797 handwritten digits: float32 [examples, 8, 8, 1] in [0, 1], and int32 [examples] of 0 to 9.

    The table of `sklearn.datasets.load_digits`: the test part of UCI's handwritten digits.

    >>> (x_train, y_train), (x_validation, y_validation) = digits()
    >>> x_train.shape, x_validation.shape
    ((1438, 8, 8, 1), (359, 8, 8, 1))
    """
    path = packaged_file("sklearn", "datasets/data/digits.csv.gz", install="scikit-learn", name="digits")
    images, labels = read_table(path, height=8, width=8)
    return hold_out(images, labels, 16, validation_fraction, split_seed)
