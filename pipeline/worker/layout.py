"""The examples that a step, a replica and a process train, by arithmetic on their numbers."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Position:
    """A position in training: whole epochs, and the examples of the next one that its steps so far stand for.

    A step stands for a whole global batch, also where the last of an epoch had fewer examples.
    """

    epoch: int = 0
    examples: int = 0


BEGINNING = Position()


@dataclass(frozen=True)
class ReplicaPlace:
    """The place of this process: it feeds `local` replicas, from number `first` on, of `replicas`."""

    first: int
    local: int
    replicas: int

    @property
    def processes(self) -> int:
        """Processes that train together, each with as many replicas."""
        return self.replicas // self.local

    @property
    def number(self) -> int:
        """The number of this process among them."""
        return self.first // self.local

    @property
    def chief(self) -> bool:
        """True in the first process."""
        return self.first == 0


@dataclass(frozen=True)
class BatchLayout:
    """The examples of each step: this process feeds `local` replicas, from number `first` on, of `replicas`.

    `counts` holds the examples of each process's shard, or the one total where every process reads everything. The last
    batch of an epoch, if too small, is "short", "left out", or "padded" with examples that do not count.
    """

    global_batch: int
    replicas: int
    first: int
    local: int
    counts: tuple[int, ...]
    process: int = 0
    last: Literal["short", "left out", "padded"] = "short"

    @property
    def sharded(self) -> bool:
        """True if each process reads a shard of its own."""
        return len(self.counts) > 1

    @property
    def examples(self) -> int:
        """Examples in an epoch, over all processes."""
        return sum(self.counts)

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return self.steps_after(0)

    def steps_after(self, examples: int) -> int:
        """Steps left in an epoch of which so many examples are trained."""
        if self.last == "left out":
            return min(count // self.share for count in self._left(examples))
        return max(-(-count // self.share) for count in self._left(examples))

    @property
    def always_fed(self) -> bool:
        """True if every replica has examples at every step, also at the last and smallest of an epoch."""
        return self.always_fed_after(0)

    def always_fed_after(self, examples: int) -> bool:
        """True if it has also in the rest of an epoch that has trained so many examples, and in whole ones after."""
        return self.last != "short" or (self._fed(0) and self._fed(examples))

    def settled(self, position: Position) -> Position:
        """The same position, as the beginning of the next epoch where this one has no step left.

        >>> BatchLayout(global_batch=64, replicas=1, first=0, local=1, counts=(100,)).settled(Position(1, examples=128))
        Position(epoch=2, examples=0)
        """
        return position if self.steps_after(position.examples) else Position(position.epoch + 1)

    @property
    def share(self) -> int:
        """Examples that each shard gives to a global batch, or the one part that all read."""
        return self.global_batch // len(self.counts)

    def _left(self, examples: int) -> list[int]:
        return [max(0, count - examples // len(self.counts)) for count in self.counts]

    def _fed(self, examples: int) -> bool:
        replicas, before = self.replicas // len(self.counts), (self.steps_after(examples) - 1) * self.share
        return before < 0 or all(min(self.share, left - before) >= replicas for left in self._left(examples))
