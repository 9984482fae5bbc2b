"""Fills a folder with the shards of a source: describes the source, decides the number of shards, and has them made."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import targets
from pipeline.config.schema import OnError, PrepareConfig
from pipeline.data.errors import DataError
from pipeline.data.records import TRAIN, Manifest
from pipeline.errors import UserError, refuse
from pipeline.prepare import folder as folders
from pipeline.prepare import work
from pipeline.prepare.cluster import Workers
from pipeline.prepare.folder import Folder, FolderState, SourceFacts
from pipeline.prepare.work import NAMED, Description, ShardJob

MIB = 2**20


class Shows(Protocol):
    """A view of how far the work is."""

    def say(self, line: str) -> None:
        """Shows one line that stays."""

    def begin(self, label: str, total: int, before: int) -> None:
        """Begins a step of so many shards or pieces, of which so many were there before."""

    def done(self, examples: int) -> None:
        """Adds one that is done, with so many examples."""


@dataclass(frozen=True)
class Prepared:
    """The manifest, the number of shards that were there before, and the seconds that reading and making took."""

    manifest: Manifest
    reused: int
    seconds: float
    seconds_shards: float


def prepare(
    config: PrepareConfig, search: Sequence[str], start: Callable[[], AbstractContextManager[Workers]], shows: Shows
) -> Prepared:
    """Fills the folder, or goes on with what an earlier command has left there.

    Raises `DataError` or `LaunchError` once it has begun, and another `UserError` for what is refused.
    """
    began = time.monotonic()
    with closing(Folder(Path(config.out or ""))) as folder:
        finished, state, settings = folder.manifest, folder.state, _settings(config, search)
        if state is not None and state.digest is None and state.gathered is None:
            # Nothing has been made of it.
            state = None
        _expect_same(folder.path, settings, finished, state)
        whole, shards, digest = folder.whole(), dict[str, int](), None
        if finished is not None:
            shards = {split: len(of_split) for split, of_split in finished.splits.items()}
            if len(whole) == sum(shards.values()):
                folder.finish(finished)
                return Prepared(finished, len(whole), time.monotonic() - began, 0.0)
            digest = finished.source.get("digest")
        state = state or FolderState(settings, digest, shards)
        folder.begin(state)
        shows.say("Reading the source.")
        with start() as workers:
            job = ShardJob(
                str(folder.path.absolute()), config.data.build, config.data.num_classes, config.seed,
                config.validation_fraction, skip=config.data.on_error is OnError.skip,
            )  # fmt: skip
            filling = _Filling(config, folder, state, job, workers, shows)
            filling.describe()
            if finished is None:
                shards = filling.plan()
            shards_began = time.monotonic()
            facts = filling.make(shards, whole)
            manifest = finished or filling.manifest(shards, facts)
            if any(facts[one.file].shard.sha256 != one.sha256 for split in manifest.splits.values() for one in split):
                expected = f"the shards that {folder.path} lacks to come out as they were"
                raise DataError(expected, "others", f"removing {folder.path}, and the same command")
            folder.finish(manifest)
        now = time.monotonic()
        return Prepared(manifest, len(whole), now - began, now - shards_began)


@dataclass
class _Filling:
    """The steps of a command, in order."""

    config: PrepareConfig
    folder: Folder
    state: FolderState
    job: ShardJob
    workers: Workers
    shows: Shows
    source: Description = field(default_factory=Description)

    def describe(self) -> None:
        """Describes the source, once what comes one after another is gathered."""
        flaws: tuple[str, ...] = ()
        if self.state.gathered is None:
            self.source = self._description()
            if not self.source.pieces:
                return
            flaws = self.source.flaws
            self.job.refuse((), flaws)
            # Where all workers find them, but for those that an earlier command has gathered.
            pieces = [(self.job, number, *piece) for number, piece in enumerate(self.source.pieces)]
            missing = [piece for piece in pieces if not folders.piece_path(self.job.folder, piece[1]).is_file()]
            self.shows.begin("reading", len(pieces), len(pieces) - len(missing))
            for _ in self.workers.results(work.gather, missing):
                self.shows.done(0)
            count, named = self.source.num_classes, self.source.class_names
            self.state = replace(self.state, gathered=len(pieces), num_classes=count, class_names=named)
            self.folder.begin(self.state)
        count, named = self.state.num_classes, self.state.class_names
        self.job = replace(self.job, gathered=self.state.gathered, num_classes=count, class_names=named)
        self.source = replace(self._description(), flaws=flaws)

    def _description(self) -> Description:
        """The description that all workers give, which must be the one that an earlier command was given."""
        first, *others = self.workers.on_each(work.describe, self.job)
        if any(other != first for other in others):
            raise work.not_the_same(self.job)
        if self.state.digest not in (None, first.digest) and not first.pieces:
            path = self.folder.path
            instead = f"out=ANOTHER, or removing {path}"
            raise DataError(f"the source that {path} was begun with", "one that has changed since", instead)
        return first

    def plan(self) -> dict[str, int]:
        """Returns the number of shards of each split. Refuses a source that cannot be trained on."""
        source, config = self.source, self.config
        for note in source.notes:
            self.shows.say(note)
        self.job.refuse(source.broken, source.flaws)
        if TRAIN not in source.parts or not source.parts[TRAIN].examples:
            raise _no_examples(len(source.broken))
        if source.has_validation and config.validation_fraction:
            expected = "validation_fraction=0 for a source that has a validation part of its own"
            raise DataError(expected, f"{config.validation_fraction:g}", "validation_fraction=0")
        classes = source.parts[TRAIN].classes
        if classes is not None and not self.job.skip:
            named = source.class_names or [*map(str, range(source.num_classes or 0))]
            empty = [named[number] for number in range(source.num_classes or 0) if number not in classes]
            instead = "data.on_error=skip, which prepares the others, or another data.num_classes"
            refuse((empty, f"training examples of each of {source.num_classes} classes",
                    f"none of class {', '.join(empty[:NAMED])}", instead), error=DataError)  # fmt: skip
        shards = dict(self.state.shards)
        if not shards:
            parts, workers = source.parts, config.workers
            examples, nbytes = parts[TRAIN].examples, config.shard_mib * MIB
            refuse(
                (workers and examples < workers, f"at least one training example for each of {workers} workers",
                 examples, f"workers={examples}"),
                (config.shards and examples < config.shards,
                 f"at least one training example in each of {config.shards} shards", examples,
                 f"shards={examples // (workers or 1) * (workers or 1)}"),
            )  # fmt: skip
            shards = {name: shard_count(part.examples, part.nbytes, nbytes, workers) for name, part in parts.items()}
            by_size = shard_count(examples, parts[TRAIN].nbytes, nbytes, None)
            if config.shards:
                shards[TRAIN] = config.shards
            elif shards[TRAIN] != by_size:
                reason = f"so that {workers} workers have equally many"
                self.shows.say(f"{shards[TRAIN]} shards instead of {by_size}, {reason}.")
        self.state = replace(self.state, digest=source.digest, shards=shards)
        self.folder.begin(self.state)
        return shards

    def make(self, shards: Mapping[str, int], whole: Mapping[str, SourceFacts]) -> dict[str, SourceFacts]:
        """Makes the shards that are not `whole`; returns the facts of all, by file."""
        numbered = [(split, number, count) for split, count in shards.items() for number in range(count)]
        named = {folders.file_name(*one): one for one in numbered}
        facts = {name: whole[name] for name in named if name in whole}
        tasks = [(self.job, *one, self.source.digest) for name, one in named.items() if name not in whole]
        self.shows.begin("shards", len(named), len(facts))
        for of_shard in facts.values():
            self.job.refuse(of_shard.skipped)
        for of_shard in self.workers.results(work.shard, tasks):
            facts[of_shard.shard.file] = of_shard
            self.shows.done(of_shard.shard.examples)
        if missing := [name for name, of_shard in facts.items() if not self.folder.has(of_shard.shard)]:
            expected = f"Dask workers that write to {self.folder.path.absolute()} as this machine sees it"
            raise DataError(expected, f"no {missing[0]} there", "a folder that all machines share")
        return facts

    def manifest(self, shards: Mapping[str, int], facts: Mapping[str, SourceFacts]) -> Manifest:
        """Returns the manifest of a folder of such shards."""
        source = self.source
        splits = {
            split: tuple(facts[folders.file_name(split, number, count)].shard for number in range(count))
            for split, count in shards.items()
        }
        if source.num_classes is None:
            splits = {split: tuple(replace(shard, classes={}) for shard in shards) for split, shards in splits.items()}
        # Encoded images whose sizes are all the same have that one.
        sizes = {size for of_shard in facts.values() for size in of_shard.sizes}
        features = tuple(
            replace(one, shape=(*next(iter(sizes)), one.shape[2])) if one.stored == "image" and len(sizes) == 1 else one
            for one in source.features
        )
        skipped = len(source.broken) + sum(len(of_shard.skipped) for of_shard in facts.values())
        origin: dict[str, Any] = {"data": self.config.data.name, "build": dict(self.config.data.build)}
        origin |= {"skipped": skipped, "digest": source.digest, "asked": dict(self.state.asked)}
        manifest = Manifest(features, splits, source.num_classes, source.class_names, origin, self.config.seed)
        if not manifest.examples(TRAIN):
            raise _no_examples(skipped)
        return manifest


def _settings(config: PrepareConfig, search: Sequence[str]) -> dict[str, Any]:
    """The settings that decide the bytes of the shards, as plain values; the same command has the same."""
    code = hashlib.sha256()
    for path in sorted(targets.sources(config.data.build, search)):
        code.update(path.read_bytes())
    names = ("seed", "validation_fraction", "shard_mib", "shards", "workers")
    return {
        **{f"data.build.{name}": value for name, value in config.data.build.items()},
        "data.num_classes": config.data.num_classes,
        **{name: getattr(config, name) for name in names},
        "code": code.hexdigest()[:16],
    }


def _expect_same(path: Path, settings: Mapping[str, Any], manifest: Manifest | None, state: FolderState | None) -> None:
    before: Any = state.asked if state else manifest.source.get("asked") if manifest else settings
    if before is None:
        received = f"{path}, whose manifest does not say what it was made from"
        raise UserError("out to be a folder that is empty, or that this command began", received, "out=ANOTHER")
    for key in {**before, **settings}:
        if before.get(key) == settings.get(key):
            continue
        if key == "code":
            received = f"{settings.get('data.build._target_')} with changes since"
            raise UserError(f"the code that {path} was begun with", received, f"out=ANOTHER, or removing {path}")
        old, new = (f"{key}={'null' if value is None else value}" for value in (before.get(key), settings.get(key)))
        raise UserError(f"the settings that {path} was begun with, {old}", new, f"out=ANOTHER, or {old}")


def _no_examples(skipped: int) -> DataError:
    lost = f" once {skipped} broken ones are left out" if skipped else ""
    return DataError("training data with examples", f"none{lost}", "another source")


def shard_count(examples: int, total_bytes: int, shard_bytes: float, workers: int | None) -> int:
    """The number of shards of about `shard_bytes`; as many as workers, or a multiple, if there are enough examples.

    >>> [shard_count(examples, 250, 100, workers) for examples, workers in ((1_000, None), (1_000, 2), (5, 4), (1, 2))]
    [3, 4, 4, 1]
    """
    by_size = max(1, min(examples, int(-(-total_bytes // shard_bytes))))
    if not workers or examples < workers:
        return by_size if not workers else max(1, examples)
    return min(-(-by_size // workers), examples // workers) * workers
