"""The check, profile and explanation of a run, as result.json has them."""

from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import first_of

What = Literal["loss", "metric", "gradient", "state", "output"]
NAMED = 3


@dataclass(frozen=True)
class Difference:
    """A value, named by its variable or layer, that replicas have otherwise than one device: relative to its size."""

    what: What
    name: str
    relative: float | None
    replicas: float | None = None
    one_device: float | None = None

    @property
    def text(self) -> str:
        """Returns the difference in words.

        >>> Difference("loss", "loss", 0.5, 74.2, 145.6).text, Difference("gradient", "out/kernel", 0.035).text
        ('loss 74.2 in place of 145.6', 'gradient of out/kernel by 3.5% of its size')
        """
        kind = "" if self.what in ("loss", "metric") and self.name.endswith("loss") else f"{self.what} "
        if self.replicas is not None and self.one_device is not None:
            return f"{kind}{self.name} {self.replicas:.4g} in place of {self.one_device:.4g}"
        if self.relative is None:
            return f"{kind}of {self.name}, which is no number"
        percent = 100 * self.relative
        return f"{kind}of {self.name} by {percent:{'.0f' if percent >= 10 else '.2g'}}% of its size"


@dataclass(frozen=True)
class Check:
    """Replicas compared with one device: differences, their cause, advice, what was left out; `noted` by the model."""

    outcome: Literal["equal", "different", "not made"]
    differences: list[Difference] = field(default_factory=list)
    cause: str = ""
    advice: str = ""
    unsaid: str = ""
    seconds: float | None = None
    noted: bool = False

    @property
    def largest(self) -> float:
        """The largest relative difference; 0 where there is none."""
        return max((each.relative for each in self.differences if each.relative is not None), default=0.0)

    def said(self, replicas: int) -> str:
        """Returns the differences and their cause in a sentence or two."""
        named = first_of([difference.text for difference in self.differences], NAMED, ", ", ", and")
        return f"on a small batch {replicas} replicas differ from one device in {named}. {self.cause}"


@dataclass(frozen=True)
class Pace:
    """Rates of input and model alone, which is slower, and that of training without it, None if neither clearly is."""

    input_examples_per_second: float
    model_examples_per_second: float
    bound: Literal["input", "model", "neither"]
    ceiling_examples_per_second: float | None


@dataclass(frozen=True)
class LostShare:
    """One part of the lost efficiency: its share of the step time, and the ends of its interval."""

    name: str
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Explanation:
    """The lost share of the efficiency, its parts, the one that is worth a change, and the worker others wait for."""

    lost: float
    lost_low: float
    lost_high: float
    parts: list[LostShare]
    bound: str | None = None
    straggler: str | None = None
    advice: str = ""
