"""Holds what the replicas of a training have learnt against each other while it lasts: all must have the same."""

from collections.abc import Callable, Sequence

from pipeline.worker.loop import TrainingError

# Digests of each replica here -> those of each process, on all of them.
Gather = Callable[[Sequence[str]], list[list[str]]]


class SameWeights:
    """Compares weights at the start, every so many steps, and at the end, where all replicas are between two calls."""

    def __init__(self, every: int | None, digests: Callable[[], list[str]], gather: Gather, collective: str) -> None:
        """`digests` are of the replicas here; `gather` tells all processes those of all, not by the `collective`.

        With `every` None nothing is compared.
        """
        self._every, self._digests, self._gather, self._collective = every, digests, gather, collective
        self._last = 0

    def compare(self, step: int) -> None:
        """Raises `TrainingError`, on all processes, where a replica has other weights than the first."""
        if self._every is None:
            return
        self._last = step
        told = self._gather(self._digests())
        for rank, digests in enumerate(told):
            if any(digest != told[0][0] for digest in digests):
                raise TrainingError(
                    f"the same weights on all replicas after step {step}",
                    f"others on rank {rank} than on rank 0, with strategy.collective={self._collective}",
                    "strategy.collective=tensorflow, or train.check=strict",
                )

    def after(self, step: int) -> None:
        """Compares where so many steps have been made since the last time."""
        if self._every is not None and step // self._every > self._last // self._every:
            self.compare(step)


NEVER = SameWeights(None, list, lambda digests: [list(digests)], "")
