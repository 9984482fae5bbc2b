"""The tasks of a Dask worker: describe the source, gather what comes one after another, and make a shard.

Each process calls the data set's function once and keeps the data. Results are plain values, and errors are
`DataError`s: a user's own exceptions could not be sent.
"""

import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.config import targets
from pipeline.data.arrays import split as split_rows
from pipeline.data.errors import DataError
from pipeline.data.examples import Examples, share_of
from pipeline.data.records import SPLITS, TRAIN, VALIDATION, Feature
from pipeline.errors import UserError, first_line, first_of
from pipeline.prepare import folder as folders
from pipeline.prepare import sources
from pipeline.prepare.folder import ShardPiece
from pipeline.prepare.sources import Rows

# A function that can be called for a shard of its data is called for so many, whatever the number of processes, so that
# the same examples come in the same order.
PIECES = 16
# Broken examples that an error names.
NAMED = 5
# A piece to gather: "stream" and (shard, shards), or "files" and (split, place of the file).
PieceId: TypeAlias = tuple[str, tuple[int, int] | tuple[str, int]]


@dataclass(frozen=True)
class ShardJob:
    """The folder to fill, the function to call, the pieces once they are gathered, and what decides the shards."""

    folder: str
    build: Mapping[str, Any] = field(hash=False)
    num_classes: int | None
    seed: int
    validation_fraction: float
    skip: bool
    gathered: int | None = None
    class_names: tuple[str, ...] | None = None

    def refuse(self, broken: Sequence[str], flaws: Sequence[str] = ()) -> None:
        """Raises `DataError` for broken examples or flaws, each in words, unless these are skipped."""
        remedy = "data.on_error=skip, which prepares {}, or putting the data right"
        if broken and not self.skip:
            examples = f"some that cannot: {first_of(broken, NAMED)}"
            raise DataError("examples that can be trained on", examples, remedy.format("the others"))
        if flaws and not self.skip:
            raise DataError("complete data", flaws[0], remedy.format("them nevertheless"))


@dataclass(frozen=True)
class ShardPart:
    """A split: how many examples, about how many bytes, and examples by class, None if labels are no whole numbers."""

    examples: int
    nbytes: int
    classes: Mapping[int, int] | None


@dataclass(frozen=True)
class Description:
    """The content of a source, once its rows are known; or the pieces that must be gathered before they are.

    `broken` says why examples are left out, `flaws` are of the source as a whole, and `digest` names its content.
    """

    pieces: tuple[PieceId, ...] = ()
    parts: Mapping[str, ShardPart] = field(default_factory=dict)
    features: tuple[Feature, ...] = ()
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    flaws: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    digest: str = ""
    has_validation: bool = False


# The description of a source, and by split its rows in the order of their shards.
Source: TypeAlias = tuple[Description, Mapping[str, tuple[Rows, NDArray[np.int64]]]]


def describe(job: ShardJob) -> Description:
    """The description of the source."""
    with _named_errors(job):
        return _source(job)[0]


def gather(job: ShardJob, number: int, kind: str, which: tuple[Any, int]) -> None:
    """Puts piece `number` where every worker finds it, as records with an index of them; see `PieceId`."""
    with _named_errors(job):
        if kind == "files":
            split, place = which
            pieces = {split: _indexed(job, number, split, place)}
        elif which[1] == 1:
            parts = _parts(job)
            # An iterator can be gone through once.
            _parts.cache_clear()
            pieces = {split: _streamed(job, number, split, part, "") for split, part in parts.items()}
        else:
            named = f" of shard {which[0]} of {which[1]}"
            pieces = {split: _streamed(job, number, split, part, named) for split, part in _call(job, *which).items()}
        job.refuse([why for piece in pieces.values() for why in (*piece.broken.values(), *piece.lost)])
        with folders.partial(folders.piece_path(job.folder, number)) as writing:
            writing.write(msgspec.msgpack.encode(pieces))


def shard(job: ShardJob, split: str, number: int, shards: int, digest: str) -> folders.SourceFacts:
    """Makes one shard, whole or not at all; `digest` is that of the source's content."""
    with _named_errors(job):
        description, orders = _source(job)
        if description.digest != digest:
            raise not_the_same(job)
        rows, order = orders[split]
        name = folders.file_name(split, number, shards)
        facts, own = Path(job.folder, folders.HIDDEN, "shards", f"{name}.json"), share_of(len(order), number, shards)
        with folders.partial(Path(job.folder, name), facts) as writing:
            for example in rows.make(order[own.start : own.stop]):
                if example.record is None:
                    writing.skipped.append(example.why)
                    continue
                writing.write(example.record, example.label)
                if example.size is not None:
                    writing.sizes.add(example.size)
            job.refuse(writing.skipped)
        return writing.facts(name)


def not_the_same(job: ShardJob) -> DataError:
    """The error for a source that differs between processes."""
    expected = f"{job.build[targets.KEY]} to return the same on every call"
    return DataError(expected, "other data in another process", "a seed of its own for each random generator in it")


@contextmanager
def _named_errors(job: ShardJob) -> Iterator[None]:
    """Turns an error of the data set's function, or of writing, into a `DataError`; its traceback goes into the log."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        yield
    except UserError as error:
        # What was received may be something that cannot be sent.
        raise DataError(error.expected, str(error.received), error.try_this) from None
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, OSError) and str(error.filename or "").startswith(job.folder):
            reason = error.strerror or error
            raise DataError(f"to be able to write {error.filename}", reason, "out=ANOTHER, or making space") from None
        received = f"{type(error).__name__}: {first_line(error).rstrip('.') if str(error).strip() else 'no reason'}"
        instead = f"calling it in a Python of your own, or see {Path(job.folder, folders.PRINTED)}"
        raise DataError(f"{job.build[targets.KEY]} to make data", received, instead) from None


def _call(job: ShardJob, shard: int = 0, shards: int = 1) -> dict[str, object]:
    """The parts of the data by split, without one that is None."""
    parts = sources.parts_of(targets.call(dict(job.build), "data.build", shard=shard, shards=shards))
    return {split: part for split, part in zip(SPLITS, parts, strict=True) if part is not None}


# For the job that a process works on.
_parts = lru_cache(maxsize=1)(_call)


@lru_cache(maxsize=1)
def _source(job: ShardJob) -> Source:
    if job.gathered is not None:
        kind, paths = dict[str, ShardPiece], (folders.piece_path(job.folder, each) for each in range(job.gathered))
        pieces = [msgspec.msgpack.decode(path.read_bytes(), type=kind) for path in paths]
        of_split = {split: [piece[split] for piece in pieces if split in piece] for split in SPLITS}
        records = {split: sources.of_pieces(some) for split, some in of_split.items() if some}
        lost = [why for some in of_split.values() for piece in some for why in piece.lost]
        return _lay_out(job, records, lost, Description(num_classes=job.num_classes, class_names=job.class_names))
    parts = _parts(job)
    train = parts.get(TRAIN)
    named = getattr(train, "class_names", None)
    outline = Description(
        pieces=_pieces(job, parts),
        num_classes=job.num_classes or getattr(train, "num_classes", None),
        # A list in Keras's data sets of folders; a job with these names is hashed.
        class_names=None if named is None else tuple(named),
        flaws=tuple(flaw for part in parts.values() for flaw in getattr(part, "flaws", ())),
        notes=tuple(getattr(train, "notes", ())),
    )
    if outline.pieces:
        return outline, {}
    rows = {split: sources.rows_of(part, split, outline.num_classes) for split, part in parts.items()}
    return _lay_out(job, rows, (), outline)


def _pieces(job: ShardJob, parts: Mapping[str, object]) -> tuple[PieceId, ...]:
    """The pieces to gather before the rows of the parts are known; none if they are known at once."""
    in_files = {split: part.raw for split, part in parts.items() if isinstance(part, Examples) and part.in_files}
    if in_files:
        return tuple(("files", (split, place)) for split, raw in in_files.items() for place in range(len(raw)))
    if any(map(sources.is_stream, parts.values())):
        pieces = PIECES if targets.asks_for(dict(job.build), "data.build", "shard") else 1
        return tuple(("stream", (number, pieces)) for number in range(pieces))
    return ()


def _lay_out(job: ShardJob, rows: Mapping[str, Rows], lost: Sequence[str], outline: Description) -> Source:
    """Returns the rows of each split in the order of their shards, and the rest of the source by its `outline`."""
    orders: dict[str, tuple[Rows, NDArray[np.int64]]] = {}
    usable = {split: of_split.usable for split, of_split in rows.items()}
    if TRAIN in rows and VALIDATION not in rows and job.validation_fraction:
        train, whole = rows[TRAIN], usable[TRAIN]
        groups = np.zeros(len(whole), np.int64) if train.labels is None else train.labels[whole]
        chosen = split_rows(groups, job.validation_fraction, job.seed)
        orders = {split: (train, whole[part]) for split, part in zip(SPLITS, chosen, strict=True)}
    else:
        for split, whole in usable.items():
            orders[split] = rows[split], np.random.default_rng([job.seed, SPLITS.index(split)]).permutation(whole)
    if VALIDATION in orders and not len(orders[VALIDATION][1]):
        del orders[VALIDATION]
    features = rows[TRAIN].features if TRAIN in rows else ()
    if TRAIN in rows and VALIDATION in rows and rows[VALIDATION].count and rows[VALIDATION].features != features:
        expected = f"validation examples as those that train, {sources.in_words(features)}"
        raise DataError(expected, sources.in_words(rows[VALIDATION].features), "the same shapes and types in both")
    parts = {}
    for split, (of_split, order) in orders.items():
        numbers, counts = np.unique(
            order[:0] if of_split.labels is None else of_split.labels[order], return_counts=True
        )
        classes = None if of_split.labels is None else dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        parts[split] = ShardPart(len(order), of_split.nbytes * len(order) // max(of_split.count, 1), classes)
    description = dataclasses.replace(
        outline,
        parts=parts,
        features=features,
        num_classes=outline.num_classes if outline.num_classes is not None else _count_classes(parts),
        broken=(*(why for of_split in rows.values() for why in of_split.broken.values()), *lost),
        digest=sources.digest_of("".join(of_split.digest for of_split in rows.values())),
        has_validation=VALIDATION in rows,
    )
    return description, orders


def _count_classes(parts: Mapping[str, ShardPart]) -> int | None:
    train = parts[TRAIN].classes if TRAIN in parts else None
    if not train or any(part.classes is None for part in parts.values()):
        return None
    last = max(label for part in parts.values() for label in part.classes or ())
    return last + 1 if len(train) == last + 1 else None


def _streamed(job: ShardJob, number: int, split: str, part: object, named: str) -> ShardPiece:
    """One part as records in a file of its own; `named` says which part it is, where it is not all of a split."""
    path = Path(job.folder, folders.HIDDEN, "pieces", f"{number:05d}-{split}.tfrecord")
    encoder, lost, index = sources.Encoder(split, job.num_classes), list[str](), list[tuple[int, int, int]]()
    if not sources.is_stream(part):
        rows = sources.rows_of(part, split, job.num_classes)
        examples, encoder.features, lost = rows.make(rows.usable), rows.features, [*rows.broken.values()]
    else:
        stream = enumerate(sources.examples_of(part))
        examples = (encoder.make(example, f"example {place} of {split}{named}") for place, example in stream)
    with folders.partial(path) as writing:
        for example in examples:
            if example.record is not None:
                index.append((writing.bytes, len(example.record), example.label or 0))
                writing.write(example.record)
                continue
            lost.append(example.why)
            if not job.skip and len(lost) > NAMED:
                break
    digest, table = writing.facts(path.name).shard.sha256, np.array(index, np.int64).tobytes()
    return ShardPiece(str(path), encoder.features, digest, lost=tuple(lost), index=table)


def _indexed(job: ShardJob, number: int, split: str, place: int) -> ShardPiece:
    """An index of one file of records of a source; those of another kind become records of ours."""
    part = _parts(job)[split]
    assert isinstance(part, Examples), "the piece is a file"
    segment = part.raw[place]
    if (of_file := sources.piece_of_file(part, segment)) is not None:
        return of_file
    one = dataclasses.replace(part, raw=(segment,))
    broken = part.look(one, 0, 1, True) if part.look else []
    piece = _streamed(job, number, split, one.without(broken), f" of {segment.path}")
    lost = (f"{flaw.name} {flaw.why}" for flaw in broken for _ in range(flaw.examples))
    return dataclasses.replace(piece, lost=(*lost, *piece.lost))
