"""Structures of something: what examples and batches are made of, as `tf.nest` has them."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
# One of something, or tuples, lists and dictionaries of such.
Nested: TypeAlias = T | Sequence["Nested[T]"] | Mapping[str, "Nested[T]"]
