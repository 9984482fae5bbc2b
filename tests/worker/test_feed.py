"""Batches that are laid on devices ahead of the steps train to the same, and leave the host out of the loop."""

import numpy as np
import pytest
import scripts
from conftest import QUICK

from pipeline.worker.tensorflow import feed

# Of replicas; 0: one, without a strategy.
NUMBERS = (0, 1, 2)


@pytest.mark.slow
def test_batches_that_are_fed_ahead_train_to_the_last_bit_as_those_that_are_asked_for_and_without_the_host():
    found = {int(number): came for number, came in scripts.came("fed", *NUMBERS).items()}
    for replicas, came in found.items():
        plain, ahead = came["plain"], came["ahead"]
        for name in ("losses", "sizes", "held_out"):
            assert ahead[name] == plain[name], (replicas, name)
        assert ahead["sizes"] == [32, 32, 32, 11] * 2 + [32]
        assert all(wait >= 0 for wait in ahead["waits"])
        # What was read ahead and not trained on is read again after a resume.
        assert came["resumed"] == ahead["losses"][3:], replicas
        # One batch is trained on again and again by the same compiled loop.
        whole, parts, *sizes, traced = came["again"]
        assert (parts, sizes, traced) == (max(1, replicas), [whole] * 2, 1)
        if replicas:
            # The host has no part in the steps of a call; what is asserted is seen where it is so.
            assert came["ahead on host"] == []
            assert any("IteratorGetNext" in name for name in came["plain on host"])
    # Two replicas equal one device.
    np.testing.assert_allclose(found[2]["ahead"]["losses"], found[1]["plain"]["losses"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("arrived", "ended", "waits"), [
    ([-3, -2, -1, -1], 4, [0, 0, 0, 0]),
    # Each step takes 1, and each batch comes 2 after the one before.
    ([1, 3, 5, 7], 8, [1, 1, 1, 1]),
    # One batch of four is late; the others were there.
    ([-1, -1, 5, 5], 7, [0, 0, 3, 0]),
    # The last came as the call ended: a step takes no time.
    ([0, 2], 2, [0, 2]),
    ([], 1, []),
])  # fmt: skip
def test_waits_are_what_batches_came_late_by(arrived, ended, waits):
    np.testing.assert_allclose(feed.waits(np.array(arrived, float), 0.0, ended), waits, atol=1e-9)


def test_only_devices_with_memory_of_their_own_are_fed_ahead():
    name = "/job:worker/replica:0/task:1/device:{}:0"
    assert feed.feeds_ahead([name.format("GPU")])
    assert not any(feed.feeds_ahead(devices) for devices in ([], [name.format("CPU")], [name.format("TPU")]))


@pytest.mark.slow
def test_processes_that_are_fed_ahead_train_to_the_same(pipeline):
    ran = pipeline(
        "-m", "strategy=multi_worker", "workers=2", "data=digits", "train.replica_batch=50", "train.epochs=2", *QUICK,
        "strategy.build._target_=pipeline.strategies.multi_worker,fed.multi_worker", "data.service=null,1",
    ).ok()  # fmt: skip
    plain, by_service, ahead, ahead_by_service = ran.results
    for name in ("loss", "metrics", "val_loss", "val_metrics"):
        assert ahead[name] == plain[name]
        assert ahead_by_service[name] == by_service[name]
