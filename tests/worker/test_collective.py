"""How replicas add up in a step, in TensorFlow, shared memory or Horovod, and what is told of errors and lost peers."""

import functools
import http.client
import inspect
import mmap
import os
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import Mock

import mistaken
import psutil
import pytest
import tensorflow as tf
import two_devices  # noqa: F401 # which are this process's
from conftest import answers, begun, came
from mistaken import CALLS, linear, trained, with_layer
from plans import config, machine, with_ports
from ports import reserved_ports
from tensorflow.python.ops import op_selector

from pipeline.config.schema import Kind
from pipeline.plan.planning import make
from pipeline.worker.loop import WeightComparison
from pipeline.worker.model_error import TrainingError, reason, told
from pipeline.worker.shared_memory import PeerLostError
from pipeline.worker.tensorflow import horovod
from pipeline.worker.tensorflow.collective import in_buckets, lost_a_peer, over
from pipeline.worker.tensorflow.hierarchical import Memory, SharedMemoryCollective, host_ring


def test_sums_over_replicas_have_sums_as_gradients_and_are_traced_without_a_walk_through_the_graph(monkeypatch):
    walk = Mock(wraps=op_selector.get_backward_walk_ops)
    monkeypatch.setattr(op_selector, "get_backward_walk_ops", walk)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    collective = over(strategy)

    @tf.function
    def step(value):
        def replica():
            number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            here = value + number
            with tf.GradientTape() as tape:
                tape.watch(here)
                (total,) = collective.sum([tf.square(here)])
            return total, tape.gradient(total, here)

        return strategy.run(replica)

    made = [[float(of_replica) for of_replica in strategy.experimental_local_results(each)]
            for each in step(tf.constant(3.0))]  # fmt: skip
    # 3^2 + 4^2; each replica's total has the gradient 1, whose sum is 2.
    assert made == [[25.0, 25.0], [12.0, 16.0]]
    walk.assert_not_called()


@pytest.mark.parametrize(("sizes", "bucket_bytes", "buckets"), [
    ([4, 100, 8, 8], 0, [[0, 1, 2, 3]]),
    ([4, 100, 8, 8], 40, [[2, 3], [1], [0]]),
    ([4, 100, 8, 8], 10, [[3], [2], [1], [0]]),
    ([4, None, 100], 400, [[0, 1, 2]]),
    # As large as another message costs, they are one.
    ([100_000], None, [[0]]),
    ([30_000, 30_000], None, [[0, 1]]),
    ([1000, 2_000_000, 1000], None, [[1, 2], [0]]),
    ([], None, []),
])  # fmt: skip
def test_the_last_leave_first_in_buckets_that_are_larger_than_they_need_be(sizes, bucket_bytes, buckets):
    arrays = {place: tf.TensorSpec([size]) for place, size in enumerate(sizes)}
    assert in_buckets(arrays, bucket_bytes) == buckets


def test_what_leaves_first_does_not_wait_for_what_backpropagation_makes_later():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    memory = Memory(mmap.mmap(-1, 4096), 0, {}, 0.0)

    def first_of(bucket_bytes):
        """The first message to another host in a step's graph, and the gradients that it waits for."""
        collective = SharedMemoryCollective(2, 1, memory, 0, 2, host_ring(strategy, 2), bucket_bytes)

        @tf.function(autograph=False)
        def step(inputs, first, last):
            with tf.GradientTape() as tape:
                tape.watch([first, last])
                loss = tf.reduce_sum(tf.tanh(inputs @ first) @ last)
            gradients = [tf.identity(one, name="made") for one in tape.gradient(loss, [first, last])]
            return collective.sum(gradients)

        graph = step.get_concrete_function(*map(tf.zeros, [(2, 3), (3, 4), (4, 5)])).graph
        sent = [operation for operation in graph.get_operations() if operation.type.startswith("CollectiveReduce")]
        before = op_selector.get_backward_walk_ops(sent[0], control_inputs=True)
        return len(sent), {operation.name for operation in before if operation.name.startswith("made")}

    assert first_of(0) == (1, {"made", "made_1"})
    assert first_of(1) == (2, {"made_1"})


@pytest.mark.slow
def test_strategies_of_one_process_train_one_after_another_also_after_an_error():
    first, second, spoilt = came("cells", timeout=240)
    assert first == second
    assert first.startswith("Expected labels from 0 to 2")
    assert spoilt.endswith("something failed. Try starting the process anew; in a notebook, restarting the kernel.")


def test_weights_are_compared_at_the_start_after_so_many_steps_and_whenever_asked_and_who_differs_is_named():
    compared = []
    same = WeightComparison(10, lambda: ["a"], lambda digests: compared.append(digests) or [digests, ["a"]], "sums")
    same.compare(0)
    for step in (4, 8, 12, 16, 19, 31, 32):
        same.after(step)
    same.compare(32)
    # At 0, 12, 31 and 32: steps come in calls of several.
    assert len(compared) == 4
    for digests, rank in (([["a"], ["b"]], 1), ([["a", "a"], ["a", "a"], ["a", "b"]], 2)):
        same = WeightComparison(10, list, lambda _, digests=digests: digests, "sums")
        with pytest.raises(TrainingError, match=f"after step 7, received others on rank {rank} than on rank 0, with s"):
            same.compare(7)


@pytest.fixture(scope="module")
def found():
    sums, killed = "sums:2 sums:3 compiled:2 compiled:3", "killed:2 killed:5 killed:3:1"
    return came("sharing", *f"{sums} {killed} gathered mismatched stopped unable another_user".split(), timeout=120)


# In a loop that JAX compiled too; and rows, however many each has.
@pytest.mark.parametrize("way", ["sums:2", "sums:3", "compiled:2", "compiled:3", "gathered"])
def test_all_types_come_in_the_order_of_ranks_to_the_last_bit_in_each_repetition(found, way):
    assert found[way] == ([True] * 3 if way == "gathered" else [[]] * int(way[-1]))


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
@pytest.mark.slow
def test_what_is_shared_has_no_name_and_needs_no_room_in_dev_shm_where_a_killed_process_leaves_nothing():
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && "$@" && test -z "$(ls -A /dev/shm)"'
    made = came("sharing", "sums:2", "killed:5", "left", before=("unshare", "-m", "sh", "-c", mount, "sh"), timeout=120)
    assert made["sums:2"] == [[], []]
    assert made["killed:5"][1] is None
    assert made["left"] == [[[], 0, ["/memfd:pipeline (deleted)"]]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("local", "hosts", "processes"), [(2, 1, 2), (2, 2, 4), (1, 3, 6)])
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


def planned(**keys):
    keys = {"strategy__collective": "horovod", "hardware__kind": Kind.cpu} | keys
    return with_ports(make(config("multi_worker", "2x4gpu", 6, **keys), machine()))


def test_each_process_that_trains_has_a_rank_of_all_and_one_of_its_host():
    plan = planned()
    places = [horovod.place(plan, process) for process in plan.processes]
    assert [place["HOROVOD_RANK"] for place in places] == list("012345")
    assert [place["HOROVOD_LOCAL_RANK"] for place in places] == list("012012")
    assert [place["HOROVOD_CROSS_RANK"] for place in places] == list("000111")
    assert {place["HOROVOD_HOSTNAME"] for place in places} == {"host0", "host1"}
    sizes = ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE")
    assert {tuple(place[name] for name in sizes) for place in places} == {("6", "3", "2")}
    with_batches = planned(data__service="1")
    assert len(with_batches.processes) == 8
    assert horovod.place(with_batches, with_batches.processes[5])["HOROVOD_SIZE"] == "6"


def test_it_is_told_where_to_meet_by_the_environment_which_is_put_back_and_by_no_other_interface(monkeypatch):
    plan = planned()
    told = horovod.meeting(plan, plan.processes[1], "127.0.0.1:4000/secret", 4000)
    assert told["HOROVOD_GLOO_IFACE"] == "lo"
    where = (told["HOROVOD_GLOO_RENDEZVOUS_ADDR"], told["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    assert where == ("127.0.0.1:4000/secret", "4000")
    monkeypatch.setenv("HOROVOD_CONTROLLER", "mpi")
    before = dict(os.environ)
    with horovod.told(told):
        assert os.environ["HOROVOD_CONTROLLER"] == "gloo"
    assert dict(os.environ) == before
    plan = planned(cluster__host="192.0.2.1")
    with pytest.raises(TrainingError, match=r"Expected a network interface with the address 192\.0\.2\.1"):
        horovod.meeting(plan, plan.processes[0], "192.0.2.1", 4000)


def asked(port, method, path, body=None, **headers):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as line:
        line.request(method, path, body, headers)
        answer = line.getresponse()
        return answer.status, answer.read()


def test_what_one_leaves_others_find_who_know_the_token_until_it_is_taken_back_or_the_rendezvous_is_over():
    with horovod.served("127.0.0.1") as (port, token):
        first, second, elsewhere = (f"/{token}:{port}/{key}" for key in ("global_/0", "global_/1", "local_host0/0"))
        assert asked(port, "GET", first)[0] == 404
        assert asked(port, "PUT", first, b"\0\1 bytes")[0] == 200
        strange = f"/{'0' * len(token)}:{port}/global_/0"
        for other in ("/global_/0", strange, f"/{token[:-1]}", "/", first[1:], f"/a{first}"):
            assert [asked(port, method, other, b"b")[0] for method in ("GET", "PUT", "DELETE")] == [403] * 3
        # Many at once.
        with ThreadPoolExecutor(16) as threads:
            assert {*threads.map(lambda _: asked(port, "GET", first), range(16))} == {(200, b"\0\1 bytes")}
        # Of another scope.
        assert asked(port, "GET", elsewhere)[0] == 404
        # One that is too large.
        assert asked(port, "PUT", second, b"b", **{"Content-Length": str(1 << 40)})[0] == 413
        assert asked(port, "DELETE", first)[0] == asked(port, "DELETE", second)[0] == 200
        assert asked(port, "GET", first)[0] == 404
        mine = [at.laddr for at in psutil.Process().net_connections("tcp") if at.laddr.port == port]
        assert {at.ip for at in mine} == {"127.0.0.1"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


OF_HOROVOD = (
    'Graph execution error:\n\nDetected at node sum defined at (most recent call last):\n  File "a.py", line 1\n\n'
    "Horovod has been shut down. This was caused by an exception on one of the ranks.\n\t [[{{node sum}}]]"
)
UNKNOWN = functools.partial(tf.errors.UnknownError, None, None)


def test_who_has_lost_a_peer_is_told_from_who_has_failed():
    unavailable = tf.errors.UnavailableError(None, None, "Connection reset by peer")
    closed = UNKNOWN("[gloo/transport/tcp/pair.cc:589] Connection closed by peer")
    passed_on = UNKNOWN("PeerLostError: a process of this host has gone\nTraceback (most")
    assert all(map(lost_a_peer, (unavailable, UNKNOWN(OF_HOROVOD), closed, passed_on, PeerLostError("it has gone"))))
    failed = UNKNOWN("IndexError: list index out of range")
    assert not any(map(lost_a_peer, (failed, ValueError("Horovod has been shut down"))))


def test_an_error_of_jax_is_told_in_place_of_those_of_each_layer_that_keras_could_not_make_anew():
    inner, outer = (AttributeError("'str' object has no attribute '_error_repr'") for _ in range(2))
    inner.__context__, outer.__context__ = ValueError("a traced array"), inner
    assert reason(outer) == "ValueError: a traced array"


# What is told first of a mistake, by its name in `mistaken.py`.
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "Keras": (mistaken.wrong_reshape, "ValueError: The total size of the tensor must be unchanged"),
    "a cause": (mistaken.raised_from, "ValueError: no width was given ("),
    "shapes in call": (lambda: with_layer(CALLS["product"]), "ValueError: Dimensions must be equal, but are 4 and 3"),
    "an attribute": (lambda: with_layer(CALLS["missing"]), "AttributeError: 'Own' object has no attribute 'nowhere' ("),
    "an assertion": (lambda: with_layer(mistaken.checked), "AssertionError: assert x.shape[-1] == 3"),
    "several lines": (lambda: with_layer(mistaken.branched), "ValueError: the width must be odd the width was 4 ("),
    "a model of one's own": (
        lambda: trained(mistaken.Unfinished()), "AttributeError: 'Unfinished' object has no attribute 'head'",
    ),
    "a loss": (
        lambda: trained(linear(10), mistaken.loss_of_sevens),
        "InvalidArgumentError: Input to reshape is a tensor with 40 values, but the requested shape requires",
    ),
    "a metric": (
        lambda: trained(linear(), metrics=[mistaken.Counts()]),
        "AttributeError: 'Counts' object has no attribute 'total' (",
    ),
    "a callback": (lambda: trained(linear(), callbacks=[mistaken.Looks()]), "KeyError: 'val_auc' ("),
    "data": (lambda: trained(linear(), data=mistaken.from_shelf()), "OSError: no shelf 7 in the archive ("),
    "numbers without a row": (
        lambda: trained(linear(rows=1)), "InvalidArgumentError: indices[0,0] = 1 is not in [0, 1) (",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_reason_comes_first_and_then_the_line_of_a_person_s_own_file(mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
        make()
    said = reason(raised.value)
    assert said.startswith(words)
    assert "\n" not in said
    source = inspect.getsource(mistaken).splitlines()
    (number,) = (number for number, text in enumerate(source, 1) if text.endswith(f"  # {mistake}"))
    assert f"mistaken.py:{number})" in said


def test_the_reason_is_told_and_not_where_in_the_graph_it_came_up_and_our_own_as_it_stands():
    said = "UnknownError: Horovod has been shut down. This was caused by an exception on one of the ranks."
    assert told(UNKNOWN(OF_HOROVOD)) == said
    ours = "Expected one, received two. Try three."
    assert told(UNKNOWN(f"Graph execution error:\n\nTrainingError: {ours}\nTraceback (most recent call")) == ours
