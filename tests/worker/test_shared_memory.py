"""Processes of one host add through memory that they share."""

import os
import shutil

import pytest
from ports import reserved_ports
from scripts import answers, begun, came


@pytest.fixture(scope="module")
def found():
    sums, killed = "sums:2 sums:3 compiled:2 compiled:3", "killed:2 killed:5 killed:3:1"
    return came("sharing", *f"{sums} {killed} gathered mismatched stopped unable another_user".split(), timeout=120)


@pytest.mark.parametrize("count", [2, 3])
# In a loop that JAX compiled too.
@pytest.mark.parametrize("way", ["sums", "compiled"])
def test_all_types_are_added_in_the_order_of_ranks_to_the_last_bit_in_each_repetition(found, way, count):
    assert found[f"{way}:{count}"] == [[]] * count


def test_rows_of_all_come_in_the_order_of_ranks_however_many_each_has(found):
    assert found["gathered"] == [True] * 3


def test_processes_that_add_other_things_or_in_another_order_end_by_name(found):
    assert len(found["mismatched"]) == 4
    for said in found["mismatched"]:
        assert said.startswith("TrainingError: Expected processes that add the same in the same order, received number")
        assert said.endswith("Try strategy.collective=tensorflow.")
    assert "float32[3] on rank 0, and number 1, sums of float32[4] on rank 1" in found["mismatched"][0]


@pytest.mark.parametrize(("way", "words"), [
    ("killed:2", "has gone"), ("killed:5", "has gone"), ("killed:3:1", "UNAVAILABLE: PeerLostError: "),
], ids=["before a sum", "in the middle of one", "in a function that JAX compiled"])  # fmt: skip
def test_a_killed_process_ends_the_wait_of_all_others(found, way, words):
    first, gone, third = found[way]
    assert gone is None
    for said, is_known, seconds in (first, third):
        assert words in said
        assert is_known
        assert seconds < 5


def test_a_process_stopped_in_the_middle_of_a_sum_is_waited_for_without_taking_a_core_and_then_adds_on(found):
    (waited, busy, total), (_, _, its_total), _ = found["stopped"]
    assert waited > 0.9
    assert busy < 0.4
    assert total == its_total == 3e6


@pytest.mark.parametrize(
    ("case", "reason"), [("unable", "rank 0 says: "), ("another_user", "rank 0 is not reached: it is another user's")]
)
def test_processes_that_cannot_share_memory_all_say_why(found, case, reason):
    if case == "another_user" and os.getuid():
        pytest.skip("another user takes root")
    assert len(set(found[case])) == 1
    assert found[case][0].startswith("ConnectionRefusedError: ")
    assert reason in found[case][0]


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="a mount takes root and unshare")
def test_what_is_shared_has_no_name_and_needs_no_room_in_dev_shm_where_a_killed_process_leaves_nothing():
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && "$@" && test -z "$(ls -A /dev/shm)"'
    made = came("sharing", "sums:2", "killed:5", "left", before=("unshare", "-m", "sh", "-c", mount, "sh"), timeout=120)
    assert made["sums:2"] == [[], []]
    assert made["killed:5"][1] is None
    assert made["left"] == [[[], 0, ["/memfd:pipeline (deleted)"]]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("local", "hosts", "processes"), [(1, 1, 2), (2, 1, 2), (2, 2, 4), (1, 3, 6)])
def test_replicas_of_processes_add_in_a_compiled_loop_on_the_way_back_and_without_a_graph(local, hosts, processes):
    with reserved_ports(processes) as ports:
        running = [begun("adding", local, hosts, rank, *ports) for rank in range(processes)]
        first, *others = answers(*running, timeout=120)
    assert others == [first] * (processes - 1)
    loop, (outside, _) = first
    replicas = range(processes * local)
    assert outside == [1.5 * len(replicas), 2.5 * len(replicas)]
    for step, by_replica in enumerate(loop):
        values = [(number + 1) * step for number in replicas]
        # The loss is v S(v) + S(v v) on each; a sum's gradient is the sum of its gradients.
        gradient = 2 * len(replicas) * sum(values) + 2 * len(replicas) * sum(values)
        rows = [number for number in replicas for _ in range(number + step)]
        weighed = sum(place * number for place, number in enumerate(rows))
        of_type = 3 * (step + 1 if hosts == 1 else 2) * sum(number + 1 for number in replicas)
        assert by_replica == [[of_type] * 6 + [sum(replicas), gradient, weighed]] * local
