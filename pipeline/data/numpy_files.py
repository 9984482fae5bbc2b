"""Turns arrays that NumPy saved, an .npz file or a folder of .npy files, into training and validation arrays."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from pipeline.data import arrays
from pipeline.data.arrays import Array, Part, features, floats, whole
from pipeline.data.errors import DataError, expect_path
from pipeline.data.examples import Examples, Leaf, look_at_rows


def numpy(
    path: str | None = None, *, validation_fraction: float = 0.2, split_seed: int = 0, keep_dtype: bool = False
) -> tuple[Part | Examples, Part | Examples]:
    """The arrays of an .npz file, or of a folder of .npy files: x float32 [examples, ...], y int32 or float32.

    They are `x_train` and `y_train`, or `x` and `y`; with `x_validation` and `y_validation` (or `_val`, `_test`), or a
    part of them is held out, the same fraction of each class where y is classes. An x of bytes (uint8) is taken for
    images, divided by 255, and where it is [examples, height, width] it gets a channel; with `keep_dtype`, x is as it
    was saved. Whole numbers that int32, or for x float32, does not hold are int64. A y of text is classes, numbered in
    their order. Raises `DataError`.
    """
    where = Path(expect_path("numpy", path))
    x, y = arrays.saved_part(where, arrays.TRAIN)
    if arrays.saved_ending(where, arrays.VALIDATION) is not None:
        held_out = arrays.saved_part(where, arrays.VALIDATION)
    else:
        train, validation = arrays.split_saved(y, validation_fraction, split_seed)
        (x, y), held_out = (x[train], y[train]), (x[validation], y[validation])
    for name, ours, theirs in zip(("x", "y"), (x, y), held_out, strict=True):
        one, other = (f"{list(array.shape[1:])} {array.dtype}" for array in (ours, theirs))
        if ours.shape[1:] != theirs.shape[1:] or ours.dtype.kind != theirs.dtype.kind:
            received = f"{name} of {one} to train and of {other} to validate"
            raise DataError(f"examples of one shape and type in {where}", received, "saving both anew")
    inputs = _inputs(where, [x, held_out[0]], keep_dtype)
    labels, names = _labels(where, [y, held_out[1]])
    parts = list(zip(inputs, labels, strict=True))
    if names is None:
        return parts[0], parts[1]
    missing = sorted(set(range(len(names))) - set(parts[0][1].tolist()))
    flaws = tuple(f"no training examples of class {names[number]}" for number in missing)
    spec = tuple(Leaf(array.shape[1:], array.dtype.name) for array in parts[0])
    examples = Examples(parts[0], spec, num_classes=len(names), class_names=names, look=look_at_rows, flaws=flaws)
    return examples, dataclasses.replace(examples, raw=parts[1], flaws=())


def _inputs(where: Path, parts: list[Array], keep_dtype: bool) -> list[Array]:
    x = parts[0]
    if x.dtype.kind not in "fiub":
        received, instead = f"x of type {x.dtype}", "x.astype('float32')"
        if x.dtype.kind in "US":
            received, instead = "x of text", "the places of words in a vocabulary, or counts of them"
        raise DataError(f"numbers in {where}", received, instead)
    if keep_dtype:
        return parts
    if x.dtype != np.uint8:
        return features(parts, f"x of {where}")
    return [np.divide(array[..., None] if x.ndim == 3 else array, 255, dtype=np.float32) for array in parts]


def _labels(where: Path, parts: list[Array]) -> tuple[list[Array], tuple[str, ...] | None]:
    kind = parts[0].dtype.kind
    if kind in "US" and parts[0].ndim == 1:
        try:
            texts = [array.astype(str) if kind == "U" else np.char.decode(array, "utf-8") for array in parts]
        except UnicodeDecodeError as error:
            raise DataError(f"y of {where} in UTF-8", error, "y.astype(str)") from error
        names = np.unique(np.concatenate(texts))
        return [np.searchsorted(names, text).astype(np.int32) for text in texts], tuple(names.tolist())
    if kind not in "fiub":
        received = f"y of type {parts[0].dtype} and shape {list(parts[0].shape[1:])} for each"
        instead = "numpy.unique(y, return_inverse=True)[1].reshape(y.shape), which numbers text"
        raise DataError(f"one class or number for each example in {where}", received, instead)
    if kind == "f":
        return [floats(array, np.float32, f"y of {where}") for array in parts], None
    return whole(parts, f"y of {where}"), None
