"""What came of comparing all replicas with one device before training, as result.json has it, and in words."""

from dataclasses import dataclass, field
from typing import Literal

What = Literal["loss", "metric", "gradient", "state", "output"]
# So many differences are named in a sentence; all are in result.json.
NAMED = 3


@dataclass(frozen=True)
class Difference:
    """What differs, by name, and by how much of its size on one device; of a single number also both values.

    A `gradient` and a `state` are named by their variable, an `output` by its layer.
    """

    what: What
    name: str
    relative: float | None
    replicas: float | None = None
    one_device: float | None = None

    @property
    def text(self) -> str:
        """In words.

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
    """What came of it: the differences, what most likely makes them, what to try, and how long it took in seconds.

    `unsaid` is why there was nothing to compare, or what was left out of it; `noted` that a note of the model names the
    cause already, with what to type.
    """

    outcome: Literal["equal", "different", "not made"]
    differences: list[Difference] = field(default_factory=list)
    cause: str = ""
    advice: str = ""
    unsaid: str = ""
    seconds: float | None = None
    noted: bool = False

    @property
    def largest(self) -> float:
        """The largest of the differences, in shares of what differs; 0 where there is none."""
        return max((found.relative for found in self.differences if found.relative is not None), default=0.0)

    def said(self, replicas: int) -> str:
        """The differences and their cause in a sentence or two."""
        named = ", ".join(found.text for found in self.differences[:NAMED])
        more = len(self.differences) - NAMED
        others = f", and {more} more" if more > 0 else ""
        return f"on a small batch {replicas} replicas differ from one device in {named}{others}. {self.cause}"
