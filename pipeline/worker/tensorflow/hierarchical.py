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
    is_first = number == first and len(of_hosts) > 1
    ring = HostRing(strategy, of_hosts.index(process.host), len(of_hosts)) if is_first else None
    return SharedMemoryCollective(plan.workers, local, memory, len(of_hosts), ring, plan.bucket_bytes)


class HostRing:
    """TensorFlow's ring over one process of each of so many hosts, of which this process's is number `host`."""

    def __init__(self, strategy: tf.distribute.Strategy, host: int, hosts: int) -> None:
        device = strategy.extended.worker_devices[0]
        kinds = tf.distribute.experimental.CommunicationImplementation
        options = tf.distribute.experimental.CommunicationOptions(implementation=kinds.RING)
        keys = cross_device_utils.CollectiveKeys(FIRST_KEY)
        group = keys.get_group_key([device])
        # It draws another key for each call of a graph, which TensorFlow can tell from an earlier one.
        self._launcher = cross_device_utils.CollectiveReplicaLauncher(group, hosts, keys, device, options)
        self._host, self._hosts = host, hosts

    def sum(self, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over hosts of arrays of equal shapes."""
        return [self._launcher.all_reduce(array) for array in arrays]

    def gather(self, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """For each array those of all hosts, one after another, along the first axis."""
        return sums.gathered(self._launcher.all_reduce, self._host, self._hosts, arrays)


class SharedMemoryCollective:
    """Adds over processes of some hosts, `local` replicas in each; the first of each host has the ring of hosts."""

    def __init__(
        self, replicas: int, local: int, memory: Memory, hosts: int, ring: HostRing | None, bucket_bytes: int | None
    ) -> None:
        self.replicas, self._local, self._memory, self._hosts, self._ring = replicas, local, memory, hosts, ring
        self._bucket_bytes = bucket_bytes

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

    def _joined(
        self, join: Callable[[Sequence[Sequence[tf.Tensor]]], list[tf.Tensor]], local: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        return join([[one] for one in local]) if self._local == 1 else sums.joined(join, local)

    def _added(self, by_replica: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        # Those of one type are packed by TensorFlow, to which an array costs less than to Python.
        with tf.device("CPU:0"):
            local = [one[0] if len(one) == 1 else tf.add_n(one) for one in by_replica]
            buckets = sums.in_buckets(dict(enumerate(local)), self._bucket_bytes)
            messages = [sums.by_type(local, bucket) for bucket in buckets]
            added = self._call(self._memory.sum, HostRing.sum, [list(message.values()) for message in messages])
            summed = sums.parted(local, zip(itertools.chain(*messages), added, strict=True))
            return [summed[place] for place in range(len(local))]

    def _gathered(self, by_replica: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            rows = [tf.concat(one, 0) for one in by_replica]
            return self._call(self._memory.gather, HostRing.gather, [rows])

    def _call(
        self, join: Callable[..., Any], over_hosts: Callable[..., Any], messages: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Joins arrays of this host's processes, message by message, then those of all hosts, handed on at the end."""
        joined = [_called(join, arrays) for arrays in messages]
        if self._hosts > 1:
            # To hand on is to gather what the others add nothing to.
            ring = self._ring
            own = [[one[:0] for one in arrays] if ring is None else over_hosts(ring, arrays) for arrays in joined]
            joined = [_called(self._memory.gather, list(itertools.chain(*own)))]
        return list(itertools.chain(*joined))


def _called(join: Callable[..., Any], arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls `join` in the order of the program, which all processes share, as it has an effect."""
    results = tf.numpy_function(join, arrays, [array.dtype for array in arrays])
    # Outside a graph it has no list around a single one.
    results = results if isinstance(results, list) else [results]
    return [tf.ensure_shape(one, [None, *like.shape[1:]]) for one, like in zip(results, arrays, strict=True)]
