"""Replicas whose weights differ end a training."""

import pytest

from pipeline.worker.loop import TrainingError
from pipeline.worker.same import SameWeights


def test_weights_are_compared_at_the_start_after_so_many_steps_and_whenever_asked():
    compared = []
    same = SameWeights(10, lambda: ["a"], lambda digests: compared.append(digests) or [digests, ["a"]], "sums")
    same.compare(0)
    for step in (4, 8, 12, 16, 19, 31, 32):
        same.after(step)
    same.compare(32)
    # At 0, 12, 31 and 32: steps come in calls of several.
    assert len(compared) == 4


@pytest.mark.parametrize(("told", "rank"), [([["a"], ["b"]], 1), ([["a", "a"], ["a", "a"], ["a", "b"]], 2)])
def test_who_differs_is_named(told, rank):
    same = SameWeights(10, list, lambda _: told, "sums")
    with pytest.raises(TrainingError, match=f"after step 7, received others on rank {rank} than on rank 0, with strat"):
        same.compare(7)
