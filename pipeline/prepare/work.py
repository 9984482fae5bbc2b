"""What a Dask worker does: describe the source, gather what comes one after another, and make a shard.

Each process calls the data set's function once and keeps what it returned; an answer is plain values, an error one too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.config import targets
from pipeline.data.errors import DataError
from pipeline.data.examples import Segment
from pipeline.data.manifest import SPLITS, TRAIN, VALIDATION, Feature
from pipeline.errors import UserError
from pipeline.prepare import folder as folders
from pipeline.prepare import layout, sources, values
from pipeline.prepare.folder import Piece
from pipeline.prepare.sources import Rows

# A function that can be called for a shard of its data is called for so many, whatever the number of processes, so that
# the same examples come in the same order.
PIECES = 16
# Broken examples that an error names.
NAMED = 5
Answer = TypeVar("Answer")
# What has to be gathered: "stream" and (shard, shards), or "files" and (split, place of the file).
Waiting: TypeAlias = tuple[str, tuple[int, int] | tuple[str, int]]


@dataclass(frozen=True)
class Job:
    """What every task is told: the folder to fill, the function to call, and what decides the examples of a shard.

    `gathered` has the paths where the pieces of a stream, or of files, are told of, once these are gathered, and
    `class_names` what the source called its classes.
    """

    folder: str
    build: Mapping[str, Any]
    num_classes: int | None
    seed: int
    validation_fraction: float
    skip: bool
    gathered: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Part:
    """What is known of a split: its examples, about how many bytes they are, and how many of each class.

    `classes` is None where labels are no whole numbers.
    """

    examples: int
    nbytes: int
    classes: Mapping[int, int] | None


@dataclass(frozen=True)
class Description:
    """What a source holds, once its rows are known; or the pieces that have to be gathered before they are.

    `broken` says why examples are left out, `skipped` how many of each part of the source, `flaws` what is wrong with
    the source as a whole, `notes` how it was read. `digest` names its content.
    """

    pieces: tuple[Waiting, ...] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)
    features: tuple[Feature, ...] = ()
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    flaws: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    digest: str = ""
    has_validation: bool = False


@dataclass(frozen=True)
class Failed:
    """An answer: what went wrong, in words for a person; `broken` says why examples are, where it was these."""

    words: str
    broken: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Source:
    """What a process keeps of the source: its rows, those of each split in the order of their shards."""

    description: Description
    rows: Mapping[str, tuple[Rows, NDArray[np.int64]]]


def describe(job: Job) -> Description | Failed:
    """What the source holds."""
    return _told(lambda: _source(job).description, job)


def gather(job: Job, number: int, kind: str, which: tuple[int, int] | tuple[str, int]) -> Failed | None:
    """Puts piece `number` where every worker finds it: a stream's examples as records, with an index of them.

    `kind` is "stream", and `which` (shard, shards); or "files", and `which` the file's place in each part.
    """

    def made() -> None:
        pieces = _streamed(job, number, *which) if kind == "stream" else _indexed(job, number, *which)
        lost = [why for piece in pieces.values() for why in (*piece.broken.values(), *piece.lost)]
        if lost and not job.skip:
            raise _Broken(lost)
        folders.write_piece(job.folder, number, pieces)

    return _told(made, job)


def shard(job: Job, split: str, number: int, shards: int, digest: str) -> folders.Facts | Failed:
    """Makes one shard, whole or not at all; `digest` is what the source's content has to be."""

    def made() -> folders.Facts:
        source = _source(job)
        if source.description.digest != digest:
            raise DataError(not_the_same(job))
        rows, order = source.rows[split]
        return _write(job, layout.file_name(split, number, shards), rows, layout.share(order, number, shards))

    return _told(made, job)


def not_the_same(job: Job) -> str:
    """What to say where processes disagree about a source."""
    return (
        f"Expected {job.build[targets.KEY]} to return the same on every call, received other data in another process. "
        f"Try a seed of its own for each random generator in it."
    )


class _Broken(Exception):
    """Examples that are broken, where that ends the work."""

    def __init__(self, whys: list[str]) -> None:
        super().__init__(f"{len(whys)} broken examples")
        self.whys = tuple(whys)


def _told(work: Callable[[], Answer], job: Job) -> Answer | Failed:
    """What `work` returns, or its error in words; a person's own exceptions could not be sent."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return work()
    except _Broken as error:
        return Failed("", error.whys)
    except (DataError, UserError) as error:
        return Failed(str(error))
    except OSError as error:
        traceback.print_exc()
        if str(error.filename or "").startswith(job.folder):
            return Failed(
                f"Expected to be able to write {error.filename}, received: {error.strerror or error}. "
                f"Try out=ANOTHER, or making space."
            )
        return Failed(_fault(job, error))
    except Exception as error:
        traceback.print_exc()
        return Failed(_fault(job, error))


def _fault(job: Job, error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")
    return (
        f"Expected {job.build[targets.KEY]} to make data, received {type(error).__name__}: {first.rstrip('.')}. "
        f"Try calling it in a Python of your own, or see {folders.log(job.folder)}."
    )


_KEPT: dict[str, Any] = {}


def _kept(key: str, make: Callable[[], Answer]) -> Answer:
    """What was made for a key before. Of another folder's work, nothing is kept."""
    if key not in _KEPT:
        _KEPT[key] = make()
    made: Answer = _KEPT[key]
    return made


def _called(job: Job, shard: int = 0, shards: int = 1) -> tuple[object, object]:
    """What the function returns, for a shard of its data where it can be called for one."""
    build = dict(job.build)
    return sources.parts_of(targets.call(build, "data.build", shard=shard, shards=shards))


def _name(job: Job, *more: object) -> str:
    return json.dumps([dataclasses.asdict(dataclasses.replace(job, skip=False)), *more], default=str)


def _whole(job: Job) -> tuple[object, object]:
    made: tuple[object, object] = _kept(_name(dataclasses.replace(job, gathered=None), "call"), lambda: _called(job))
    return made


def _source(job: Job) -> _Source:
    made: _Source = _kept(_name(job, "source"), lambda: _opened(job))
    return made


def _opened(job: Job) -> _Source:
    if job.gathered is not None:
        pieces = [folders.read_piece(path) for path in job.gathered]
        of_split = {split: [piece[split] for piece in pieces if split in piece] for split in SPLITS}
        found = {split: sources.Records(of_this) if of_this else None for split, of_this in of_split.items()}
        lost = {split: [why for piece in of_this for why in piece.lost] for split, of_this in of_split.items()}
        return _laid_out(job, found, lost, job.class_names, job.num_classes, ())
    parts = _whole(job)
    train, names = parts[0], getattr(parts[0], "class_names", None)
    classes = job.num_classes or getattr(train, "num_classes", None)
    flaws = tuple(flaw for part in parts for flaw in getattr(part, "flaws", ()))
    if waiting := _pieces(job, parts):
        return _Source(Description(waiting, num_classes=classes, class_names=names, flaws=flaws), {})
    rows = {
        split: None if part is None else sources.rows_of(part, split, classes)
        for split, part in zip(SPLITS, parts, strict=True)
    }
    made = _laid_out(job, rows, {}, names, classes, flaws)
    notes = tuple(getattr(train, "notes", ()))
    return dataclasses.replace(made, description=dataclasses.replace(made.description, notes=notes))


def _pieces(job: Job, parts: tuple[object, object]) -> tuple[Waiting, ...]:
    """What has to be gathered before the rows of the parts are known; empty where they are known at once."""
    if any(sources.is_in_files(part) for part in parts):
        return tuple(
            ("files", (split, place))
            for split, part in zip(SPLITS, parts, strict=True)
            if part is not None
            for place in range(len(part.raw) if sources.is_in_files(part) else 0)
        )
    if any(part is not None and sources.is_stream(part) for part in parts):
        pieces = PIECES if targets.asks_for(dict(job.build), "data.build", "shard") else 1
        return tuple(("stream", (number, pieces)) for number in range(pieces))
    return ()


def _laid_out(
    job: Job,
    found: Mapping[str, Rows | None],
    lost: Mapping[str, Sequence[str]],
    names: tuple[str, ...] | None,
    classes: int | None,
    flaws: tuple[str, ...],
) -> _Source:
    """The rows of each split in the order of their shards, and what is to be told of them."""
    orders: dict[str, tuple[Rows, NDArray[np.int64]]] = {}
    train, validation = found[TRAIN], found[VALIDATION]
    if train is not None:
        groups = None if train.labels is None else train.labels[_usable(train)]
        fraction = job.validation_fraction if validation is None else 0.0
        trains, held = layout.orders(_usable(train), groups, fraction, job.seed)
        orders[TRAIN] = train, trains
        if len(held):
            orders[VALIDATION] = train, held
    if validation is not None and len(_usable(validation)):
        orders[VALIDATION] = validation, layout.shuffled(_usable(validation), job.seed, 1)
    features = train.features if train is not None else ()
    if train is not None and validation is not None and validation.count and validation.features != features:
        raise DataError(
            f"validation examples as those that train, {values.in_words(features)}",
            values.in_words(validation.features),
            "the same shapes and types in both",
        )
    parts = {split: _part(rows, order) for split, (rows, order) in orders.items()}
    classes = classes if classes is not None else _counted_classes(parts)
    known = [rows for rows in (train, validation) if rows is not None]
    description = Description(
        parts=parts,
        features=features,
        num_classes=classes,
        class_names=names,
        flaws=flaws,
        broken=tuple(why for rows in known for why in rows.broken.values())
        + tuple(why for whys in lost.values() for why in whys),
        skipped={
            split: len(rows.broken) + len(lost.get(split, ())) for split, rows in found.items() if rows is not None
        },
        digest=hashlib.sha256("".join(rows.digest for rows in known).encode()).hexdigest()[:16],
        has_validation=validation is not None,
    )
    return _Source(description, orders)


def _usable(rows: Rows) -> NDArray[np.int64]:
    whole = np.ones(rows.count, bool)
    whole[list(rows.broken)] = False
    return np.flatnonzero(whole)


def _part(rows: Rows, order: NDArray[np.int64]) -> Part:
    classes = None
    if rows.labels is not None:
        numbers, counts = np.unique(rows.labels[order], return_counts=True)
        classes = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    return Part(len(order), rows.nbytes * len(order) // max(rows.count, 1), classes)


def _counted_classes(parts: Mapping[str, Part]) -> int | None:
    """How many classes there are, where whole numbers from 0 on all have examples; others are no classes."""
    train = parts[TRAIN].classes if TRAIN in parts else None
    if not train or any(part.classes is None for part in parts.values()):
        return None
    last = max(label for part in parts.values() for label in part.classes or ())
    return last + 1 if len(train) == last + 1 else None


def _streamed(job: Job, number: int, shard: int, shards: int) -> dict[str, Piece]:
    """A shard of the streams of a source, as records in files of their own."""
    parts = _whole(job) if shards == 1 else _called(job, shard, shards)
    if shards == 1:
        # An iterator can be gone through once.
        _KEPT.clear()
    named = f" of shard {shard} of {shards}" if shards > 1 else ""
    return {
        split: _streamed_part(job, number, split, part, named)
        for split, part in zip(SPLITS, parts, strict=True)
        if part is not None
    }


def _streamed_part(job: Job, number: int, split: str, part: object, named: str) -> Piece:
    """One part as records in a file of its own; `named` says which part it is, where it is not all of a split."""
    encoder = sources.Encoder(split, job.num_classes)
    path = folders.piece_path(job.folder, number, split)
    rows = None if sources.is_stream(part) else sources.rows_of(part, split, job.num_classes)
    made: Iterator[sources.Made]
    if rows is None:
        examples = enumerate(sources.examples_of(part))
        made = (encoder.make(example, f"example {place} of {split}{named}") for place, example in examples)
    else:
        made = rows.make(_usable(rows))
    lost: list[str] = [] if rows is None else list(rows.broken.values())
    index: list[tuple[int, int, int]] = []
    with folders.partial(path) as (file, facts):
        for example in made:
            if example.record is None:
                lost.append(str(example.why))
                if not job.skip and len(lost) > NAMED:
                    break
                continue
            index.append((facts.bytes, len(example.record), example.label or 0))
            facts.write(file, example.record, None)
    labelled = encoder.labelled if rows is None else rows.labels is not None
    features = encoder.features if rows is None else rows.features
    table = np.array(index, np.int64).reshape(-1, 3)
    return Piece(str(path), table, features, labelled, facts.sha256, {}, tuple(lost))


def _indexed(job: Job, number: int, split: str, place: int) -> dict[str, Piece]:
    """One file of records of a source, with an index of them; those of another kind become records of ours."""
    part = _whole(job)[0 if split == TRAIN else 1]
    assert sources.is_in_files(part), "the piece is a file"
    segment: Segment = part.raw[place]
    if sources.is_prepared(segment.path):
        return {split: sources.piece_of_file(part, segment)}
    one = dataclasses.replace(part, raw=(segment,))
    broken = part.look(one, 0, 1, True) if part.look else []
    made = _streamed_part(job, number, split, one.without(broken), f" of {segment.path}")
    lost = (f"{flaw.name} {flaw.why}" for flaw in broken for _ in range(flaw.examples))
    return {split: dataclasses.replace(made, lost=(*lost, *made.lost))}


def _write(job: Job, name: str, rows: Rows, chosen: NDArray[np.int64]) -> folders.Facts:
    """Makes a shard of the chosen rows."""
    lost: list[str] = []
    sizes: set[tuple[int, int]] = set()
    with folders.partial(Path(job.folder, name), folders.facts_path(job.folder, name)) as (file, writing):
        for made in rows.make(chosen):
            if made.record is None:
                lost.append(str(made.why))
                continue
            writing.write(file, made.record, made.label)
            if made.size is not None and len(sizes) < 2:
                sizes.add(made.size)
        if lost and not job.skip:
            raise _Broken(lost)
        writing.skipped, writing.sizes = tuple(lost), tuple(sorted(sizes))
    return writing.facts(name)
