"""Loads one process's data, for any engine: arrays of one length, rid of what is broken. Others are refused."""

import abc
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import keras
import msgspec
import numpy as np

from pipeline.data.arrays import Nested, floats, is_one_array, refuse_masked
from pipeline.data.errors import DataError
from pipeline.data.examples import Broken, Examples, are_labels, leaves, look_at_rows, rows, whole_rows
from pipeline.data.records import SPLITS
from pipeline.errors import first_of
from pipeline.plan.plan import Plan, Process
from pipeline.record.events import Loaded, Lost, Warned
from pipeline.worker.engine import Emit
from pipeline.worker.layout import BatchLayout
from pipeline.worker.model_error import TrainingError

NAMES = ("x", "y", "sample_weight")
SEVERAL = "several inputs in a dictionary: ({'a': a, 'b': b}, y)"
PAD = "keras.utils.pad_sequences, which makes all of one length"
# What makes dense arrays of TensorFlow's others, by their class's name.
DENSE = {"SparseTensor": "tf.sparse.to_dense", "RaggedTensor": ".to_tensor()"}
# NumPy's types that no engine has: structures, objects, dates, and floats of more than 64 bits.
NO_NUMBERS = "VOmMgG"


class WholeData(abc.ABC):
    """The parts that a plan's function makes in a process, of which this one looks through a share."""

    def __init__(self, plan: Plan, process: Process, emit: Emit) -> None:
        self._plan, self._process, self._emit = plan, process, emit
        # Of each of SPLITS, None for one that is not there: as they were made, and what this process reads.
        self.whole, self.parts = dict[str, Any](), dict[str, Any]()
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
        # Of what was made for this process alone, no other sees anything, and a shard tells nothing of the whole.
        share = (0, 1) if alone else (number, len(plan.leaders))
        broken_parts = {name: broken(part, classes, *share, skip) for name, part in self.whole.items()}
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
    return look_at_rows(Examples(part, (), num_classes=classes), number, of) if _is_arrays(part) else []


def _flaws(part: object, classes: int | None) -> tuple[str, ...]:
    # In words that follow "There are".
    if isinstance(part, Examples):
        return part.flaws
    if classes is None or not _is_arrays(part) or not are_labels(part[1]):
        return ()
    empty = np.setdiff1d(np.arange(classes), np.asarray(part[1])).tolist()
    named = first_of(list(map(str, empty)), between=", ", last=" and")
    return (f"no training examples of class {named}",) if empty else ()


def refuse(broken_ones: Sequence[Broken], complaints: Sequence[str], also: str = "") -> None:
    """Raises what is broken, if anything is, naming the first; `also` is typed beside data.on_error=skip."""
    if broken_ones:
        lost = sum(flaw.examples for flaw in broken_ones)
        named = first_of([f"{flaw.name} {flaw.why}" for flaw in broken_ones])
        instead = f"{also}data.on_error=skip, which trains on the others, or putting the data right"
        raise TrainingError("examples that can be trained on", f"{lost} that cannot: {named}", instead)
    for complaint in complaints:
        instead = "data.on_error=skip, which trains nevertheless, or putting the data right"
        raise TrainingError("complete data", complaint, instead)


def num_classes(part: object) -> int | None:
    """Returns the number of classes that a part knows of or integer labels name; None where labels do not tell."""
    if isinstance(part, Examples):
        return part.num_classes
    if not _is_arrays(part) or not are_labels(part[1]) or not len(part[1]):
        return None
    highest = int(np.asarray(part[1]).max())
    # Quantities, which no output could be of, are higher.
    return highest + 1 if highest < np.iinfo(np.int32).max else None


def _is_arrays(part: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(part, tuple) and len(part) > 1


def both(parts: Iterable[object]) -> tuple[object, object]:
    """(training, validation) of what a data set's function has returned. Raises `DataError`."""
    if isinstance(parts, Mapping):
        received = f"a {type(parts).__name__} of {', '.join(map(str, parts))}"
        instead = "return parts['train'], parts['validation']"
        raise DataError("data.build to return (train, validation)", received, instead)
    try:
        train, validation = parts
    except (TypeError, ValueError) as error:
        received = f"Expected data.build to return (train, validation), received {type(parts).__name__}."
        raise DataError(received) from error
    if hasattr(train, "__array__") and hasattr(validation, "__array__"):
        received = f"two arrays, of shapes {list(np.shape(train))} and {list(np.shape(validation))}"
        expected = "data.build to return (train, validation), each of them (x, y)"
        raise DataError(expected, received, "return (x, y), None")
    return train, validation


def part(value: object, name: str) -> tuple[Nested[np.ndarray], ...]:
    """A part, "training" or "validation", as arrays, nested as it came, lists too. Raises `DataError`."""
    components = tuple(value) if isinstance(value, list | tuple) else (value,)
    # (x, y, None) is (x, y).
    while components and components[-1] is None:
        components = components[:-1]
    absent = [path for path, values in zip(NAMES, components, strict=False) if values is None]
    if not 1 <= len(components) <= len(NAMES) or absent:
        received = f"{absent[0]} of None" if absent else f"{len(components) or 'none'}{' of them' * bool(components)}"
        instead = "zeros as y" if absent == ["y"] else SEVERAL
        raise DataError(f"{name} data as (x, y) or (x, y, sample_weight)", received, instead)
    named = zip(NAMES, components, strict=False)
    of_part = tuple(arrays(without_lists(values, path, name), path, name) for path, values in named)
    check_lengths(of_part, name)
    return of_part


def without_lists(values: object, path: str, name: str) -> object:
    """The same structure, with an array in place of each list of numbers, and a tuple in place of any other list.

    A message calls it by its `path`, x, y["size"] or the like, and the `name` of its part.
    """
    if isinstance(values, Mapping):
        return {key: without_lists(inner, f"{path}[{key!r}]", name) for key, inner in values.items()}
    if not isinstance(values, list | tuple):
        return values
    if not is_one_array(values):
        return tuple(without_lists(inner, f"{path}[{place}]", name) for place, inner in enumerate(values))
    where = f"{path} of the {name} data"
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"rows of one length in {where}", "a list of others", f"{PAD}") from error
    # As Keras does with Python's floats.
    return floats(array, keras.config.floatx(), where) if array.dtype == np.float64 else array


def arrays(values: object, path: str, name: str) -> Nested[np.ndarray]:
    """The same structure, with arrays in place of what is like one: numbers, or text for x. Raises `DataError`."""
    if isinstance(values, Mapping):
        return {key: arrays(inner, f"{path}[{key!r}]", name) for key, inner in values.items()}
    if isinstance(values, tuple):
        return tuple(arrays(inner, f"{path}[{place}]", name) for place, inner in enumerate(values))
    kind, where = type(values).__name__, f"{path} of the {name} data"
    if kind in DENSE or hasattr(values, "tocsr"):
        raise DataError("dense arrays", f"{kind} as {where}", DENSE.get(kind, ".toarray()"))
    if values is None:
        raise DataError(f"an array as {where}", "None", "leaving it out, or zeros in its place")
    refuse_masked(values, where)
    array = np.asarray(values)
    if array.dtype.kind == "O":
        array = _of_objects(array, values, where)
    if not array.ndim:
        raise DataError(f"an array as {where}", _short(values), "numpy.array, with one row an example")
    if array.dtype.char in NO_NUMBERS:
        raise DataError(f"numbers as {where}", array.dtype, ".astype('float32'), or whatever stands for it")
    if array.dtype.kind in "US" and path.split("[")[0] != "x":
        instead = "numpy.unique(y, return_inverse=True)[1], which numbers classes from 0"
        raise DataError(f"numbers as {where}", f"text, such as {_texts(array.flat[:1])[0]!r}", instead)
    return array


def _of_objects(array: np.ndarray, values: object, where: str) -> np.ndarray:
    """Text as text, that of TensorFlow's too; anything else that NumPy keeps as Python objects is refused."""
    if array.ndim and array.size and all(isinstance(value, str | bytes) for value in array.flat):
        return np.array(_texts(array.flat)).reshape(array.shape)
    if not array.ndim:
        instead = "numpy.array, or tf.data.Dataset.from_generator"
        raise DataError(f"arrays or a tf.data.Dataset as {where}", _short(values), instead)
    shapes = {np.shape(value) for value in array.flat}
    how = ".astype('float32')" if shapes == {()} else "numpy.stack, which makes one array of all"
    kinds = ", ".join(sorted({type(value).__name__ for value in array.flat}))
    raise DataError(f"numbers as {where}", f"an array of objects ({kinds})", how if len(shapes) == 1 else PAD)


def _texts(values: Iterable[str | bytes]) -> list[str]:
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values]


def check_lengths(of_part: Sequence[Nested[np.ndarray] | None], name: str) -> None:
    """Refuses arrays of several lengths. Raises `DataError`."""
    named = {path: values for path, values in zip(NAMES, of_part, strict=False) if values is not None}
    lengths = {path: sorted({len(leaf) for leaf in leaves(values)}) for path, values in named.items()}
    if len(every := set(itertools.chain(*lengths.values()))) <= 1:
        return
    x = named["x"]
    if isinstance(x, tuple) and lengths.get("y") == [len(x)]:
        received = f"a list of {len(x)} arrays, which stands for as many inputs"
        raise DataError(f"x of the {name} data to be one array of {len(x)} examples", received, "numpy.stack(x)")
    counts = ", ".join(f"{' and '.join(f'{size:,}' for size in sizes)} in {path}" for path, sizes in lengths.items())
    instead = f"looking for those that are missing, or cutting all to {min(every):,}"
    raise DataError(f"as many examples in each array of the {name} data", counts, instead)


def _short(values: object) -> str:
    return repr(values) if isinstance(values, int | float | str) else f"a {type(values).__name__}"
