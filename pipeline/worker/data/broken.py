"""The data of one process, rid of what is broken, whichever engine trains on them."""

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np

from pipeline.data.examples import Broken, Examples, are_labels, leaves, look_at_rows, rows, whole_rows
from pipeline.data.manifest import SPLITS
from pipeline.errors import first_of
from pipeline.plan.plan import Plan, Process
from pipeline.record.events import Loaded, Lost, Warned
from pipeline.worker.engine import Emit
from pipeline.worker.layout import BatchLayout
from pipeline.worker.model_error import TrainingError


class WholeData(abc.ABC):
    """The parts that a plan's function makes in a process, of which this one looks through a share."""

    def __init__(self, plan: Plan, process: Process, emit: Emit) -> None:
        self._plan, self._process, self._emit = plan, process, emit
        # Of each of SPLITS, None for one that is not there: as they were made, and what this process reads.
        self.whole: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}
        # Among the processes that have data; and the run's folder.
        self._number, self.folder = 0, Path()

    @abc.abstractmethod
    def made(self) -> tuple[Any, Any]:
        """Makes (training, validation) data of a kind that the engine reads."""

    @abc.abstractmethod
    def counted(self, all_whole: bool) -> tuple[dict[str, bool], dict[str, int]]:
        """(whether others read something else, examples here) of each part; `all_whole`: nothing is to be left out."""

    def sift(self, broken_parts: Mapping[str, list[Broken]]) -> None:  # noqa: B027 # Arrays can be looked at.
        """Leaves out what reading alone tells is broken, and adds it to what is broken."""

    def has_shards(self) -> bool:
        """True if the data are made in shards, one for each process."""
        return False

    def load(self, folder: str) -> Loaded:
        """Makes the data and looks through its share for what is broken; returns how many examples there are."""
        plan, alone, self.folder = self._plan, self.has_shards(), Path(folder)
        self._number = number = plan.leaders.index(self._process.rank)
        self.whole = dict(zip(SPLITS, self.made(), strict=True))
        train, classes, skip = self.whole["train"], plan.data.num_classes, plan.data.on_error == "skip"
        # Of what was made for this process alone, no other sees anything.
        share = (0, 1) if alone else (number, len(plan.leaders))
        broken_parts = {name: broken(part, classes, *share, skip) for name, part in self.whole.items()}
        # Of which a shard does not tell.
        complaints = () if alone else _flaws(train, classes)
        if skip:
            self.sift(broken_parts)
        else:
            refuse([one for of_part in broken_parts.values() for one in of_part], complaints)
        read = train.notes if isinstance(train, Examples) else ()
        for text in (*read, *(f"There are {complaint}." for complaint in complaints)) if number == 0 else ():
            self._emit(Warned(text))
        return self._loaded(broken_parts)

    def drop(self, broken_of: Mapping[str, Mapping[str, Sequence[Lost]]]) -> Loaded:
        """Leaves out what any process has found broken, or this one alone in what was made for it."""
        own = [broken_of.get(str(self._process.rank), {})] if self.has_shards() else broken_of.values()
        for name, part in self.whole.items():
            lost = [Broken(**msgspec.structs.asdict(one)) for of_process in own for one in of_process.get(name, ())]
            if lost and isinstance(part, Examples):
                self.whole[name] = part.without(lost)
            elif lost and isinstance(part, tuple):
                self.whole[name] = rows(part, whole_rows(len(leaves(part)[0]), lost))
        return self._loaded({})

    def layout(self, counts: list[int]) -> BatchLayout:
        """Returns how steps take their examples from shards of which each has so many."""
        batch, replicas = self._plan.training.global_batch, self._process.replicas
        return BatchLayout(batch, self._plan.workers, replicas[0], len(replicas), tuple(counts), self._process.rank)

    def _loaded(self, broken_parts: Mapping[str, Sequence[Broken]]) -> Loaded:
        lost = {name: [Lost(**vars(one)) for one in of_part] for name, of_part in broken_parts.items()}
        return Loaded(*self.counted(not any(broken_parts.values())), lost)


def broken(part: object, classes: int | None, number: int, of: int, thorough: bool) -> list[Broken]:
    """Returns broken examples in share `number` of `of`; those of a `tf.data.Dataset` are seen when it is read."""
    if isinstance(part, Examples):
        return part.look(part, number, of, thorough) if part.look else []
    if not _is_arrays(part):
        return []
    return look_at_rows(Examples(part, (), num_classes=classes), number, of)


def _flaws(part: object, classes: int | None) -> tuple[str, ...]:
    """Returns what is wrong with a training part as a whole, in words that follow "There are"."""
    if isinstance(part, Examples):
        return part.flaws
    if classes is None or not _is_arrays(part) or not are_labels(part[1]):
        return ()
    present = set(np.unique(np.asarray(part[1])).tolist())
    empty = [label for label in range(classes) if label not in present]
    named = first_of([str(label) for label in empty], between=", ", last=" and")
    return (f"no training examples of class {named}",) if empty else ()


def refuse(broken_ones: Sequence[Broken], complaints: Sequence[str], also: str = "") -> None:
    """Raises what is broken, if anything is, naming the first; `also` is typed beside data.on_error=skip."""
    if broken_ones:
        lost = sum(flaw.examples for flaw in broken_ones)
        named = first_of([f"{flaw.name} {flaw.why}" for flaw in broken_ones])
        instead = f"{also}data.on_error=skip, which trains on the others, or putting the data right"
        raise TrainingError("examples that can be trained on", f"{lost} that cannot: {named}", instead)
    if complaints:
        instead = "data.on_error=skip, which trains nevertheless, or putting the data right"
        raise TrainingError("complete data", complaints[0], instead)


def num_classes(part: object) -> int | None:
    """Returns the number of classes that a part knows of or integer labels name; None where labels do not tell."""
    if isinstance(part, Examples):
        return part.num_classes
    if not _is_arrays(part) or not are_labels(part[1]) or not len(part[1]):
        return None
    highest = int(np.asarray(part[1]).max())
    # Quantities, which no output could be of.
    return highest + 1 if highest < np.iinfo(np.int32).max else None


def _is_arrays(part: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(part, tuple) and len(part) > 1
