"""Examples that are made while they are read: what is cheap to read, and what makes an example of it.

Whoever trains orders and divides what is cheap, and makes of it only the examples that are trained here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Segment:
    """Records of one TFRecord file: so many, from the `first` on, which starts at byte `offset`."""

    path: str
    records: int
    first: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Examples:
    """A part of the data whose examples are made while they are read.

    `raw` is one of two: arrays, or a nested structure of them, with the examples along the first axis; or segments
    of TFRecord files, whose elements are scalar strings. `parse` makes a batch of raw elements a batch of examples
    `(x, y)` or `(x, y, weight)`; then `decode` makes each of these what is trained, and `augment`, which is given an
    example and a seed, int32 [2], varies it anew in each epoch. The functions are TensorFlow's: they are traced once.
    `spec` is the structure of a finished example, `tf.TensorSpec`s without a batch axis.

    `names` has the files of the examples where each has its own, for messages.
    """

    raw: Any
    spec: Any
    parse: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None
    augment: Callable[[Any, Any], Any] | None = None
    num_classes: int | None = None
    names: Any = None

    @property
    def in_files(self) -> bool:
        """Are they records in files, read in order, rather than arrays, any of whose rows can be had?"""
        return isinstance(self.raw, tuple) and bool(self.raw) and all(isinstance(each, Segment) for each in self.raw)

    @property
    def count(self) -> int:
        """How many examples there are."""
        if self.in_files:
            return sum(segment.records for segment in self.raw)
        import tensorflow as tf

        return len(tf.nest.flatten(self.raw)[0])

    def of(self, segments: tuple[Segment, ...]) -> Examples:
        """The same from other segments."""
        return dataclasses.replace(self, raw=segments)
