"""What a part of the data may be, and what comes of it, in types."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from pipeline.data.examples import Examples
from pipeline.data.nested import Nested

# Arrays, or structures of them, with the examples along the first axis; examples that are made; single examples.
Part: TypeAlias = Nested[np.ndarray] | Examples | tf.data.Dataset
# Tensors with the examples along the first axis, as (x, y) or (x, y, weights); an example has no such axis.
Batch: TypeAlias = Nested[tf.Tensor]
# The size of a step's global batch, float32, and a batch for each of this process's replicas.
Step: TypeAlias = tuple[tf.Tensor, tuple[Batch, ...]]
Batches: TypeAlias = Iterator[Step]
# The structure of an example: what type and shape each tensor has.
Spec: TypeAlias = Nested[tf.TypeSpec]
# The sizes of an example's tensors, None for those that differ.
Shape: TypeAlias = Nested[tuple[int | None, ...]]
# What becomes of an element, of several elements side by side, or of a batch.
Function: TypeAlias = Callable[[Batch], Batch]
