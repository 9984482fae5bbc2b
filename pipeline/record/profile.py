"""What the input and the model can do alone, and what the lost efficiency is made of, as result.json has them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Profile:
    """Which of input and model sets the pace, from the rate of each alone, and how fast training could be without it.

    `ceiling_examples_per_second` is None where neither clearly does.
    """

    input_examples_per_second: float
    model_examples_per_second: float
    bound: Literal["input", "model", "neither"]
    ceiling_examples_per_second: float | None


@dataclass(frozen=True)
class Part:
    """One part of the lost efficiency: its share of the step time, and the ends of it."""

    name: str
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Explanation:
    """How much of the efficiency is lost, to what, and what to change.

    `bound` is the part whose loss is worth a change, `straggler` the worker that others wait for, where there is one.
    """

    lost: float
    lost_low: float
    lost_high: float
    parts: list[Part]
    bound: str | None = None
    straggler: str | None = None
    advice: str = ""
