"""Adds over processes through memory that those of one host share: `pipeline.worker.shared_memory`.

Of several hosts, the first process of each adds its host's sums to those of others by TensorFlow's ring, and hands on
what that comes to. Gradients leave in buckets, while backpropagation makes others.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from pipeline.plan.plan import Plan, Process
from pipeline.private import cross_device_utils
from pipeline.worker.collective import Collective
from pipeline.worker.layout import ReplicaPlace
from pipeline.worker.shared_memory import LOOKS_SECONDS, Memory, join
from pipeline.worker.tensorflow import collective as sums
from pipeline.worker.tensorflow.collective import Addend, TensorFlowCollective, over

# The first key of the ring of hosts, whose keys are its own: other groups of devices, which all processes have, are
# counted alike in each of them. It is more than a strategy has groups.
FIRST_KEY = 1 << 20


def of_plan(plan: Plan, process: Process, strategy: tf.distribute.Strategy) -> Collective[Addend]:
    """Returns what a plan's processes add by, all of which call it: TensorFlow where they cannot share memory."""
    number, local = plan.leaders.index(process.rank), len(process.replicas)
    hosts = [plan.processes[rank].host for rank in plan.leaders]
    first = hosts.index(process.host)
    place = ReplicaPlace(process.replicas[0], local, plan.workers)
    tell_all = partial(sums.texts, strategy, over(strategy), place)
    try:
        looks_seconds = 0 if plan.hardware.oversubscribed else LOOKS_SECONDS
        memory = join(number, range(first, first + hosts.count(process.host)), tell_all, looks_seconds)
    except ConnectionRefusedError as error:
        note = f"TensorFlow adds, in place of shared memory: {error}."
        return TensorFlowCollective(plan.workers, note, plan.bucket_bytes)
    of_hosts = list(dict.fromkeys(hosts))
    ring = host_ring(strategy, len(of_hosts)) if number == first and len(of_hosts) > 1 else None
    host = of_hosts.index(process.host)
    return SharedMemoryCollective(plan.workers, local, memory, host, len(of_hosts), ring, plan.bucket_bytes)


def host_ring(strategy: tf.distribute.Strategy, hosts: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns what adds up by TensorFlow's ring over one process of each of so many hosts."""
    device = strategy.extended.worker_devices[0]
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(implementation=kinds.RING)
    keys = cross_device_utils.CollectiveKeys(FIRST_KEY)
    # It draws another key for each call of a graph, which TensorFlow can tell from an earlier one.
    launcher = cross_device_utils.CollectiveReplicaLauncher(keys.get_group_key([device]), hosts, keys, device, options)
    return launcher.all_reduce  # type: ignore[no-any-return]


class SharedMemoryCollective:
    """Adds over processes of some hosts, `local` replicas in each; the first of each host has the ring of hosts."""

    def __init__(
        self, replicas: int, local: int, memory: Memory, host: int, hosts: int, ring: Any, bucket_bytes: int | None
    ) -> None:
        self.replicas, self._local, self._memory, self._bucket_bytes = replicas, local, memory, bucket_bytes
        self._host, self._hosts, self._ring = host, hosts, ring

    def sum(self, arrays: Sequence[Addend]) -> list[Addend]:
        """The sums, those of dense arrays in one message or in buckets, and as their gradients those of gradients."""
        return sums.by_kind(arrays, self._total, partial(sums.with_rows, partial(self._joined, self._gathered)))

    def sent_bytes(self, size: int) -> int:
        """Returns the mean of what processes add first, read of each other (2 (p - 1) / p), send by ring, hand on."""
        on_host = self.replicas // self._hosts
        processes = on_host // self._local
        between = (2 * (self._hosts - 1) * size // self._hosts + (processes - 1) * size) if self._hosts > 1 else 0
        return 2 * (self._local - 1) * size // self._local + (2 * (processes - 1) * size + between) // on_host

    def _total(self, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return sums.with_sums_as_gradients(partial(self._joined, self._added), self._total, arrays)

    def _joined(self, join: Callable[..., list[tf.Tensor]], local: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return join([[one] for one in local]) if self._local == 1 else sums.joined(join, local)

    def _added(self, by_replica: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        # Those of one type are packed by TensorFlow, to which an array costs less than to Python.
        with tf.device("CPU:0"):
            local = [one[0] if len(one) == 1 else tf.add_n(one) for one in by_replica]
            buckets = sums.in_buckets(dict(enumerate(local)), self._bucket_bytes)
            messages = [sums.by_type(local, bucket) for bucket in buckets]
            arrays = [list(message.values()) for message in messages]
            added = self._call(self._memory.sum, lambda joined: list(map(self._ring, joined)), arrays)
            summed = sums.parted(local, zip(itertools.chain(*messages), added, strict=True))
            return [summed[place] for place in range(len(local))]

    def _gathered(self, by_replica: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            over_hosts = partial(sums.gathered, self._ring, self._host, self._hosts)
            return self._call(self._memory.gather, over_hosts, [[tf.concat(one, 0) for one in by_replica]])

    def _call(self, join: Any, over_hosts: Any, messages: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Joins arrays of this host's processes, message by message, then those of all hosts, handed on at the end."""
        joined = [_called(join, arrays) for arrays in messages]
        if self._hosts > 1:
            # To hand on is to gather what the others add nothing to.
            own = [[one[:0] for one in arrays] if self._ring is None else over_hosts(arrays) for arrays in joined]
            joined = [_called(self._memory.gather, list(itertools.chain(*own)))]
        return list(itertools.chain(*joined))


def _called(join: Callable[..., Any], arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls `join` in the order of the program, which all processes share, as it has an effect."""
    results = tf.numpy_function(join, arrays, [array.dtype for array in arrays])
    # Outside a graph it has no list around a single one.
    results = results if isinstance(results, list) else [results]
    return [tf.ensure_shape(one, [None, *like.shape[1:]]) for one, like in zip(results, arrays, strict=True)]
