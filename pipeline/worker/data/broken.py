"""Looks at arrays before they are trained on, and refuses or leaves out what is broken, whichever engine trains."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec
import numpy as np

from pipeline.data.examples import Broken, Examples, are_labels, leaves, look_at_rows, rows, whole_rows
from pipeline.errors import first_of
from pipeline.record.events import Loaded, Lost
from pipeline.worker.model_error import TrainingError


def look_through(
    parts: Mapping[str, Any], classes: int | None, number: int, of: int, skip: bool, whole: bool = True
) -> tuple[dict[str, list[Broken]], list[str]]:
    """Returns what is broken in share `number` of `of` of each part, and what to warn of; refuses it unless `skip`.

    Parts that are not `whole` do not tell what the data lack.
    """
    train = parts["train"]
    broken_parts = {name: broken(part, classes, number, of, skip) for name, part in parts.items()}
    complaints = _flaws(train, classes) if whole else ()
    if not skip:
        refuse([one for of_part in broken_parts.values() for one in of_part], complaints)
    read = train.notes if isinstance(train, Examples) else ()
    return broken_parts, [*read, *(f"There are {complaint}." for complaint in complaints)]


def loaded(sharded: Mapping[str, bool], counts: Mapping[str, int], broken_of: Mapping[str, Sequence[Broken]]) -> Loaded:
    """Returns the event of data that have so many examples, and of what was found broken in them."""
    lost = {name: [Lost(**vars(one)) for one in of_part] for name, of_part in broken_of.items()}
    return Loaded(dict(sharded), dict(counts), lost)


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


def without(part: Any, name: str, broken_of: Iterable[Mapping[str, Sequence[Lost]]]) -> Any:
    """The part of that name without what these processes have found broken in it."""
    lost = [Broken(**msgspec.structs.asdict(one)) for of_process in broken_of for one in of_process.get(name, ())]
    if not lost:
        return part
    if isinstance(part, Examples):
        return part.without(lost)
    return rows(part, whole_rows(len(leaves(part)[0]), lost))


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
