"""How replicas add up in a step."""

import mmap

import pytest
import tensorflow as tf
import two_devices  # noqa: F401 # which are this process's
from scripts import came
from tensorflow.python.ops import op_selector

from pipeline.worker.loop import WeightComparison
from pipeline.worker.model_error import TrainingError
from pipeline.worker.tensorflow.collective import in_buckets, over
from pipeline.worker.tensorflow.hierarchical import HostRing, Memory, SharedMemoryCollective


def test_sums_over_replicas_have_sums_as_gradients_and_are_traced_without_a_walk_through_the_graph(monkeypatch):
    walk, walks = op_selector.get_backward_walk_ops, []
    monkeypatch.setattr(
        op_selector, "get_backward_walk_ops", lambda *given, **named: walks.append(given) or walk(*given, **named)
    )
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
    assert walks == []


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
        collective = SharedMemoryCollective(2, 1, memory, 2, HostRing(strategy, 0, 2), bucket_bytes)

        @tf.function(autograph=False)
        def step(inputs, first, last):
            with tf.GradientTape() as tape:
                tape.watch([first, last])
                loss = tf.reduce_sum(tf.tanh(inputs @ first) @ last)
            gradients = [tf.identity(one, name="made") for one in tape.gradient(loss, [first, last])]
            return collective.sum(gradients)

        graph = step.get_concrete_function(*map(tf.zeros, [(2, 3), (3, 4), (4, 5)])).graph
        sent = [operation for operation in graph.get_operations() if operation.type.startswith("CollectiveReduce")]
        before, waiting = set(), [sent[0]]
        while waiting:
            operation = waiting.pop()
            if operation not in before:
                before.add(operation)
                waiting += [one.op for one in operation.inputs] + operation.control_inputs
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
    for told, rank in (([["a"], ["b"]], 1), ([["a", "a"], ["a", "a"], ["a", "b"]], 2)):
        same = WeightComparison(10, list, lambda _, told=told: told, "sums")
        with pytest.raises(TrainingError, match=f"after step 7, received others on rank {rank} than on rank 0, with s"):
            same.compare(7)
