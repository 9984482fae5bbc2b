"""Makes arrays of encoded images, varies them, and says what is wrong with those of which none can be made.

What decodes and varies is TensorFlow's, for graphs that any process may run; what looks for faults needs Pillow alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from pipeline.data.needed import augmentation

if TYPE_CHECKING:
    import tensorflow as tf

    Decode: TypeAlias = Callable[[tf.Tensor], tf.Tensor]
    Vary: TypeAlias = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

Size: TypeAlias = tuple[int, int]
"""Height and width in pixels."""

FORMATS = ("PNG", "JPEG", "GIF", "BMP")
# How red, green and blue make grey (ITU-R BT.601); green has the rest.
_RED, _BLUE = 0.299, 0.114
# The last chunk of every PNG, and what ends the last image of a GIF and the file. Pillow does without.
_END = {"PNG": b"\0\0\0\0IEND\xaeB`\x82", "GIF": b"\0;"}
UNREAD_BMP = "is a BMP with a palette of colours, packed, or not of 8, 24 or 32 bits a pixel: TensorFlow reads none"
CUT_OFF = "is cut off at its end"
# Where a BMP says at which byte its pixels begin, and how many bits each has, and how they are packed (0 and 3: not).
_BMP_START, _BMP_BITS, _BMP_PACKED = slice(10, 14), slice(28, 30), slice(30, 34)


def decoder(channels: int, size: Size | None, resize: bool = False) -> Decode:
    """A function from an encoded image, a scalar string tensor, to float32 [height, width, channels] in [0, 1].

    PNG, JPEG, GIF and BMP are told apart by their bytes; of several images in a file it is the first. Without `resize`,
    an image of another `size` is an error; with it, it gets that size. Without a size, each image keeps its own.
    Transparency is left out, 16 bits become 8, and one channel is the luma of colours.

    >>> import tensorflow as tf
    >>> png = tf.io.encode_png(tf.constant([[[51], [102]]], tf.uint8))
    >>> (decoder(channels=1, size=(1, 2))(png) * 255).numpy().ravel().round().tolist()
    [51.0, 102.0]
    """

    def decode(data: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        # With three channels alone it reads every format.
        image = tf.io.decode_image(data, channels=3, expand_animations=False)
        image = tf.cast(tf.ensure_shape(image, [None, None, 3]), tf.float32) / 255
        if channels == 1:
            red, green, blue = tf.split(image, 3, axis=-1)
            # Written so that grey comes out as it went in.
            image = green + _RED * (red - green) + _BLUE * (blue - green)
        return sized(image, size, resize)

    return decode


def sized(image: tf.Tensor, size: Size | None, resize: bool = False) -> tf.Tensor:
    """An image, float32 [height, width, channels], of a size: brought to it with `resize`, an error without."""
    import tensorflow as tf

    if size is None:
        return image
    if resize:
        # Without antialiasing, most pixels of a photograph would go unseen when it is made small.
        image = tf.image.resize(image, size, antialias=True)
    return tf.ensure_shape(image, [*size, image.shape[-1]])


def augmenter(options: Mapping[str, float] | bool | None) -> Vary | None:
    """A function from an image, float32 [height, width, channels] in [0, 1], and a seed, int32 [2], to a varied image.

    `flip` mirrors every other image left to right; `shift` moves it by up to that share of its height and width, and
    what comes in is black; `brightness` is added, up to so much either way; `contrast` stretches around the mean, by up
    to so much either way. True takes all of them, None, False, or all at 0, gives None. Raises `DataError`.

    >>> augmenter({"flip": False, "shift": 0}) is None
    True
    >>> augmenter({"zoom": 2})
    Traceback (most recent call last):
    pipeline.data.errors.DataError: Expected data.build.augment to have flip, shift, brightness, contrast, received \
zoom. Try 'data.build.augment={flip: true, shift: 0.1, brightness: 0.1, contrast: 0.1}'.
    """
    chosen = augmentation(options)
    if not any(chosen.values()):
        return None

    shift, brightness, contrast = (float(chosen.get(name, 0)) for name in ("shift", "brightness", "contrast"))

    def vary(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        seeds = tf.unstack(tf.random.split(seed, 4))
        if chosen.get("flip"):
            image = tf.image.stateless_random_flip_left_right(image, seeds[0])
        if shift:
            shape = tf.shape(image)
            height, width, _ = tf.unstack(tf.cast(tf.round(shift * tf.cast(shape, tf.float32)), tf.int32))
            padded = tf.pad(image, [[height, height], [width, width], [0, 0]])
            moved = tf.image.stateless_random_crop(padded, shape, seeds[1])
            image = tf.ensure_shape(moved, image.shape)
        if contrast:
            image = tf.image.stateless_random_contrast(image, 1 - contrast, 1 + contrast, seeds[2])
        if brightness:
            image = tf.image.stateless_random_brightness(image, brightness, seeds[3])
        return tf.clip_by_value(image, 0, 1)

    return vary


def fault(data: bytes, size: Size | None = None) -> str | None:
    """Says what is wrong with an encoded image: no image, cut off, or of another size than it should be; else None.

    Flipped bits are found where the format has checksums (PNG); a JPEG tells only of those that leave it unreadable.

    >>> fault(b"")
    'is empty'
    >>> fault(b"GIF89a")
    'is no PNG, JPEG, GIF or BMP that can be read (cannot identify image file)'
    """
    from PIL import Image

    if not data:
        return "is empty"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.verify()
        # An image that was verified cannot be read any more.
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.load()
            kind, mode, (width, height) = str(image.format), image.mode, image.size
    except Exception as error:  # each format has errors of its own
        reason = str(error).partition(" <_io")[0]
        return f"is no PNG, JPEG, GIF or BMP that can be read ({reason})"
    if _END.get(kind, b"") not in data:
        return CUT_OFF
    if kind == "BMP" and (of_bmp := _fault_of_bmp(data, mode, width, height)):
        return of_bmp
    if size is not None and (height, width) != tuple(size):
        offer = f"data.build.image_size=[{size[0]},{size[1]}] brings all to one size"
        return f"is {height}x{width} pixels, not {size[0]}x{size[1]} ({offer})"
    return None


def _fault_of_bmp(data: bytes, mode: str, width: int, height: int) -> str | None:
    """Says why TensorFlow does not read a BMP that Pillow reads, or takes its palette of colours for grey."""
    start, bits, packed = (int.from_bytes(data[place], "little") for place in (_BMP_START, _BMP_BITS, _BMP_PACKED))
    if mode not in ("L", "RGB", "RGBA") or bits not in (8, 24, 32) or packed not in (0, 3):
        return UNREAD_BMP
    # Rows are filled up to four bytes.
    return CUT_OFF if len(data) < start + (width * bits + 31) // 32 * 4 * height else None
