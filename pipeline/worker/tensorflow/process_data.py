"""Data of one process: made, divided among the processes, and rid of what is broken."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.config import targets
from pipeline.data.errors import DataError
from pipeline.data.examples import Broken, Examples
from pipeline.errors import refuse
from pipeline.plan.division import dealt, shared
from pipeline.plan.plan import DATA_SERVER, Plan, Process
from pipeline.worker import labels
from pipeline.worker.collective import Collective
from pipeline.worker.data import batches, conversion, inspection, loading
from pipeline.worker.data.reading import Batch, Part
from pipeline.worker.engine import Emit
from pipeline.worker.layout import BatchLayout, ReplicaPlace
from pipeline.worker.model_error import TrainingError
from pipeline.worker.state import digest
from pipeline.worker.tensorflow import static
from pipeline.worker.tensorflow.collective import Addend, lost_a_peer, texts

# The splits, as a message names them.
PARTS = ("training", "validation")
# Image files of a part are kept as arrays if those of all processes take no more bytes together, decoded.
SMALL_BYTES = 256 * 2**20
# So much of what a process says of its examples is compared.
MOST = 700
# Gives a process's text to all, and it all of theirs.
Tell: TypeAlias = Callable[[str], list[str]]
EXPECTED = ("training examples of one shape", "validation examples of one shape", "as many examples")


class ProcessData(loading.WholeData):
    """Data of a process: all of them, or the share that it reads, without what was found broken."""

    def __init__(self, plan: Plan, process: Process, emit: Emit) -> None:
        super().__init__(plan, process, emit)
        # How many classes the labels of examples may name, once a model says so.
        self.classes = plan.data.num_classes

    def made(self) -> tuple[Part, Part | None]:
        """Makes (training, validation) data, or a shard of them where they can be had in shards."""
        return self.shard(self._process.rank, len(self._plan.leaders))

    def sift(self, broken_parts: Mapping[str, list[Broken]]) -> None:
        """Leaves out of data sets what cannot be made or trained on."""
        for name, part in self.whole.items():
            # Every process reads it whole; one of them reports it.
            if isinstance(part, tf.data.Dataset):
                self.whole[name], lost = inspection.sifted(part, self._plan.data.num_classes)
                if lost and (self.has_shards() or self._number == 0):
                    why = "that cannot be made, or have NaN, infinity or a wrong label"
                    broken_parts[name].append(Broken(None, 0, lost, f"of the {name} data set", why))

    def counted(self, all_whole: bool) -> tuple[dict[str, bool], dict[str, int]]:
        """(whether others read something else, examples here) of each part, once files are divided."""
        sharded = {}
        for name, part in self.whole.items():
            own, sharded[name] = self._divided(part)
            # What is broken is left out first.
            self.parts[name] = self._cached(name, own) if all_whole else own
        return sharded, {name: 0 if part is None else batches.count(part) for name, part in self.parts.items()}

    def _cached(self, name: str, part: Part | None) -> Part | None:
        plan = self._plan
        if not isinstance(part, Examples | tf.data.Dataset):
            return part
        if plan.data.cache == "none":
            return self._kept_if_small(part)
        if plan.data.cache == "memory":
            return inspection.in_memory(part)
        build = json.dumps(plan.data.build, sort_keys=True, default=str)
        if name == "train" and plan.training.class_weight is not None:
            build += json.dumps(plan.training.class_weight, sort_keys=True)
        if isinstance(part, Examples) and part.digest is not None:
            # Other runs on the same data can use it.
            files = list(map(dataclasses.astuple, part.raw)) if part.in_files else part.count
            return inspection.in_file(part, Path(plan.output_dir) / "cache", f"{build} {part.digest} {files}")
        shard = self._process.rank if self.has_shards() else 0
        return inspection.in_file(part, self.folder / "cache", f"{build} {name} {shard}")

    def _kept_if_small(self, part: Examples | tf.data.Dataset) -> Examples | tf.data.Dataset:
        """Returns image files that are read again and again as arrays, if all processes have room for theirs."""
        plan, training = self._plan, self._plan.training
        if not (plan.data.keep_small and isinstance(part, Examples) and part.image_files):
            return part
        size = sum(leaf.dtype.size * (leaf.shape.num_elements() or 0) for leaf in tf.nest.flatten(part.element_spec))
        seen = (training.steps or 0) * training.global_batch or (training.epochs or 0) * part.count
        served = plan.strategy.asynchronous or plan.data.service or any(p.role == DATA_SERVER for p in plan.processes)
        if served or seen <= part.count or part.count * size * len(plan.leaders) > SMALL_BYTES:
            return part
        # Reading them again, while they are trained, says which is broken.
        with contextlib.suppress(*inspection.UNREADABLE):
            kept = inspection.in_memory(part)
            return dataclasses.replace(kept, digest=digest_of(part)) if isinstance(kept, Examples) else part
        return part

    def _divided(self, part: Part | None) -> tuple[Part | None, bool]:
        """(what this process reads of a part, whether others read something else)."""
        leaders = self._plan.leaders
        if len(leaders) == 1 or self.has_shards() or not (isinstance(part, Examples) and part.in_files):
            return part, len(leaders) > 1 and self.has_shards()
        files = [segment.records for segment in part.raw]
        # Files that were lost may leave too few for what was asked.
        policy = self._plan.data.shard if len(files) >= len(leaders) else "auto"
        if shared(policy, files, len(leaders)) == "element":
            return part, False
        own_files = dealt(files, len(leaders))[leaders.index(self._process.rank)]
        return dataclasses.replace(part, raw=tuple(part.raw[place] for place in own_files)), True

    def anew(self) -> tuple[Part, list[Part]]:
        """Returns training data to read apart: a data set made again, as iterators change its shuffles' state."""
        train = self.made()[0] if isinstance(self.parts["train"], tf.data.Dataset) else self.parts["train"]
        return train, self.read_by_workers(train)

    def sample(self, first: int, count: int) -> Batch:
        """Some of the training examples of all processes, from number `first` on, or the first of this one's shard."""
        part = self.whole["train"]
        assert part is not None, "load comes first"
        return inspection.examples_of(part, 0 if self.has_shards() else first, count, self.classes)

    def read_by_workers(self, train: Part) -> list[Part]:
        """Returns what asynchronous workers read of the training data: each a part of its own, if there are parts."""
        shares = self._plan.workers if self._plan.strategy.asynchronous and self.has_shards() else 1
        return [self.shard(shard, shares)[0] for shard in range(shares)] if shares > 1 else [train]

    def name_broken(self, error: Exception) -> None:
        """Raises what is broken in the data, if that is what an operation has failed for."""
        # Without it, a label is found wrong by the model alone, which is made once examples are left out.
        is_unsaid = self._plan.data.num_classes is None and self.classes is not None
        for part in () if lost_a_peer(error) else self.parts.values():
            broken = loading.broken(part, self.classes, 0, 1, thorough=True)
            also = f"data.num_classes={self.classes} " * is_unsaid
            loading.refuse([*broken, *inspection.first_broken(part, self.classes)], [], also)

    def has_shards(self) -> bool:
        """True if the data are made in shards, one for each process."""
        return targets.asks_for(self._plan.data.build, "data.build", "shard")

    def known_classes(
        self,
        strategy: tf.distribute.Strategy,
        collective: Collective[Addend],
        sample: Batch,
        note: Callable[[str], object],
    ) -> int | None:
        """The number of classes, as it was said or counted over all processes, which call this together.

        Refuses examples that differ in shape, and data that do not tell a number that the model's function asks for.
        """
        plan, y = self._plan, keras.utils.unpack_x_y_sample_weight(sample)[1]
        classes = plan.data.num_classes or loading.num_classes(self.parts["train"])
        if len(plan.leaders) > 1:
            validation, replicas = self.parts["validation"], self._process.replicas
            held_out = None if validation is None else batches.spec(validation)
            whole = () if self.has_shards() else [part for part in self.parts.values() if isinstance(part, tuple)]
            counts = list(map(batches.count, whole))
            tell = partial(texts, strategy, collective, ReplicaPlace(replicas[0], len(replicas), plan.workers))
            classes = agreed(tell, sample, held_out, classes, counts)
        if not targets.asks_for(plan.model.build, "model.build", "num_classes"):
            return classes
        expected, train = "the number of classes, which model.build asks for", self.parts["train"]
        received = f"data {'without labels' if y is None else 'whose labels do not tell'}"
        instead = "data.num_classes=10, or whatever it is, or a model.build that predicts a quantity"
        refuse((classes is None, expected, received, instead), error=TrainingError)
        # From labels, all of which are at hand.
        are_counted = plan.data.num_classes is None and not self.has_shards()
        if are_counted and isinstance(train, tuple) and (gap := labels.far_from_dense(np.asarray(train[1]))):
            note(gap)
        return classes

    def check_labels(self, model: keras.Model, sample: Batch, classes: int | None) -> int | None:
        """Refuses labels that the model has no output for; returns how many classes those may name that are read."""
        outputs = labels.outputs(model, sample)
        for name, part in zip(PARTS, self.parts.values(), strict=True):
            if isinstance(part, tuple) and len(part) > 1:
                labels.check_values(outputs, part[1], name)
        of_outputs = labels.classes(outputs, keras.utils.unpack_x_y_sample_weight(sample)[1])
        self.classes = min((number for number in (classes, of_outputs) if number is not None), default=None)
        return self.classes

    def shard(self, shard: int, shards: int) -> tuple[Part, Part | None]:
        """(training, validation) data, or a shard of them where the data can be had in shards."""
        with tf.device("CPU:0"):
            parts = loading.both(targets.call(self._plan.data.build, "data.build", shard=shard, shards=shards))
        if self._plan.strategy.static_batches:
            for name, part in zip(PARTS, parts, strict=True):
                static.check_data(part, name)
        train, validation = (conversion.part(part, name) for name, part in zip(PARTS, parts, strict=True))
        if (class_weight := self._plan.training.class_weight) is not None:
            train = conversion.weighed(train, {int(label): weight for label, weight in class_weight.items()})
        return train, validation

    def layout(self, counts: list[int]) -> BatchLayout:
        """Returns how steps take their examples from shards of which each has so many."""
        plan = self._plan
        if plan.strategy.asynchronous:
            return BatchLayout(plan.training.global_batch, replicas=1, first=0, local=1, counts=tuple(counts))
        layout = super().layout(counts)
        return dataclasses.replace(layout, last="left out") if plan.strategy.static_batches else layout

    def validation_parts(self, counts: list[int]) -> list[tuple[Part, BatchLayout]]:
        """Returns the parts to validate, with their layouts: two under static shapes, in batches of one size each."""
        part, layout = self.parts["validation"], self.layout(counts)
        if part is None:
            return []
        return batches.static_parts(part, layout) if self._plan.strategy.static_batches else [(part, layout)]


def digest_of(part: Part) -> str:
    """Names the data: a hash of the arrays, or of a data set's structure and size."""
    if isinstance(part, Examples) and part.digest is not None:
        return part.digest
    part = part.raw if isinstance(part, Examples) else part
    if isinstance(part, tf.data.Dataset):
        return hashlib.sha256(repr((part.element_spec, int(part.cardinality()))).encode()).hexdigest()[:16]
    return digest(tf.nest.flatten(part))


def agreed(
    tell: Tell, batch: Batch, held_out: Batch | None, classes: int | None = None, examples: Sequence[int] = ()
) -> int | None:
    """The most classes that any process has counted of example batches, or `DataError` on all where these differ.

    Where every process is to have all data, `examples` are how many it has of each part.
    """
    facts = [shapes(batch)[:MOST], shapes(held_out)[:MOST], " and ".join(f"{count:,}" for count in examples), classes]
    *columns, of_all = zip(*map(json.loads, tell(json.dumps(facts))), strict=True)
    instead = "data that are the same in each, or shards that differ in nothing but which examples they hold"
    for expected, (first, *others) in zip(EXPECTED, columns, strict=True):
        for number, other in enumerate(others, 1):
            received = f"{first} in the first and {other} in process {number}"
            refuse((other != first, f"{expected} in all processes", received, instead), error=DataError)
    return max((count for count in of_all if count is not None), default=None)


def shapes(batch: Batch | None) -> str:
    """The shapes of an example, as a user reads them, or none.

    >>> shapes(({"a": tf.zeros((2, 6)), "b": tf.zeros((2, 3))}, tf.zeros(2)))
    "x {'a': [6], 'b': [3]}, y []"
    """
    if batch is None:
        return "none"
    parts = zip(("x", "y", "sample_weight"), keras.utils.unpack_x_y_sample_weight(batch), strict=True)
    present = ((name, part) for name, part in parts if part is not None)
    return ", ".join(
        f"{name} {tf.nest.map_structure(lambda leaf: list(leaf.shape)[1:], part)}" for name, part in present
    )
