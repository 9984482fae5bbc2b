"""What processes that train cases are asked, and what they answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from differing.case import Case

# What a training came to, by name: losses, metrics, weights, the optimizer's and the metrics' state.
Found: TypeAlias = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Asked:
    """A case to train; `order` is a seed by which each batch is put in another order, and last digits are disturbed."""

    case: Case
    order: int | None = None


@dataclass(frozen=True)
class Answer:
    """What a training came to, or why it did not: in a sentence, and as Python says it."""

    found: Found | None = None
    error: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Place:
    """A process's strategy, `one_device`, `mirrored` or `multi_worker`, and which of its processes it is."""

    strategy: str
    rank: int = 0
