"""Files of data as a person has them, and what is read of them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from pipeline.data.examples import Broken, Examples

Array = np.ndarray[Any, Any]
TABLE = "height,weight,old,kind\n" + "".join(f"{n},{n * n / 4},{n % 3 == 0},{'ab'[n % 2]}\n" for n in range(20))


def broken(part: Examples, shares: int = 1) -> list[Broken]:
    """What is broken in a part, found by so many processes together."""
    return [each for number in range(shares) for each in part.look(part, number, shares, True)]


def made(part: Examples) -> list[tuple[Array, int]]:
    """The examples of a part, made as training makes them: in a graph, without AutoGraph."""
    dataset = tf.data.Dataset.from_tensor_slices(part.raw)
    if part.decode is not None:
        dataset = dataset.map(tf.autograph.experimental.do_not_convert(part.decode))
    assert tf.nest.map_structure(lambda spec: (spec.shape, spec.dtype), dataset.element_spec) == tf.nest.map_structure(
        lambda spec: (spec.shape, spec.dtype), part.spec
    )
    return list(dataset.as_numpy_iterator())


def picture(seed: int, height: int = 6, width: int = 5) -> Array:
    """Pixels that are drawn from a seed: uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


def encoded(pixels: Array, kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def flipped(data: bytes, place: int, bit: int = 1) -> bytes:
    """The data with one bit of a byte flipped."""
    return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
