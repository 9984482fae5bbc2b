"""Fills a folder with the shards of a source: describes the source, decides the number of shards, and has them made."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import targets
from pipeline.config.schema import OnError, PrepareConfig
from pipeline.data.errors import DataError
from pipeline.data.manifest import TRAIN, Feature, Manifest
from pipeline.errors import UserError
from pipeline.prepare import folder as folders
from pipeline.prepare import work
from pipeline.prepare.cluster import Workers
from pipeline.prepare.folder import Folder, FolderState, SourceFacts
from pipeline.prepare.work import NAMED, Description, ShardJob


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
    config: PrepareConfig,
    search: Sequence[str],
    start: Callable[[], AbstractContextManager[Workers]],
    shows: Shows,
) -> Prepared:
    """Fills the folder, or goes on with what an earlier command has left there. `start` starts workers.

    Raises `DataError` or `LaunchError` once it has begun, and another `UserError` for what is refused.
    """
    began = time.monotonic()
    folder = Folder(Path(config.out or ""))
    try:
        manifest, state = folder.manifest(), folder.state
        settings = _settings(config, search)
        if state is not None and state.digest is None and state.gathered is None:
            # Nothing has been made of it.
            state = None
        _expect_same(folder.path, settings, manifest, state)
        folder.clear_partial()
        whole = folder.whole(manifest)
        if manifest is not None:
            shards = {split: len(shards) for split, shards in manifest.splits.items()}
            if len(whole) == sum(shards.values()):
                folder.finish(manifest)
                return Prepared(manifest, len(whole), time.monotonic() - began, 0.0)
            state = state or FolderState(settings, manifest.source.get("digest"), shards)
        state = state or FolderState(settings)
        folder.begin(state)
        shows.say("Reading the source.")
        with start() as workers:
            filling = _Filling(config, folder, state, whole, workers, shows)
            shards = filling.plan(manifest)
            shards_began = time.monotonic()
            manifest = filling.make(shards, manifest)
        now = time.monotonic()
        return Prepared(manifest, len(whole), now - began, now - shards_began)
    finally:
        folder.close()


class _Filling:
    def __init__(
        self,
        config: PrepareConfig,
        folder: Folder,
        state: FolderState,
        whole: Mapping[str, SourceFacts],
        workers: Workers,
        shows: Shows,
    ) -> None:
        self._config, self._folder, self._state, self._whole = config, folder, state, whole
        self._workers, self._shows = workers, shows
        self._job = ShardJob(
            folder=str(folder.path.absolute()),
            build=config.data.build,
            num_classes=config.data.num_classes,
            seed=config.seed,
            validation_fraction=config.validation_fraction,
            skip=config.data.on_error is OnError.skip,
        )
        self._source = Description()

    def plan(self, manifest: Manifest | None) -> dict[str, int]:
        """Describes the source; the number of shards of each split, as in the manifest of a finished folder."""
        source = self._source = self._describe()
        if manifest is not None:
            return {split: len(shards) for split, shards in manifest.splits.items()}
        for note in source.notes:
            self._shows.say(note)
        self._job.refuse(source.broken, source.flaws)
        self._expect_examples()
        shards = self._shards()
        self._note(replace(self._state, digest=source.digest, shards=shards))
        return shards

    def make(self, shards: Mapping[str, int], finished: Manifest | None) -> Manifest:
        """Makes the shards that are not there, and the manifest unless a `finished` folder has one."""
        facts = self._make(shards)
        manifest = finished or self._manifest(shards, facts)
        if any(facts[shard.file].shard.sha256 != shard.sha256 for split in manifest.splits.values() for shard in split):
            path = self._folder.path
            expected = f"the shards that {path} lacks to come out as they were"
            raise DataError(expected, "others", f"removing {path}, and the same command")
        self._folder.finish(manifest)
        return manifest

    def _describe(self) -> Description:
        flaws: tuple[str, ...] = ()
        if self._state.gathered is None:
            source = self._description()
            if not source.pieces:
                return source
            flaws = source.flaws
            self._job.refuse((), flaws)
            # Where all workers find them, but for those that an earlier command has gathered.
            job = self._job
            pieces = [(job, number, kind, which) for number, (kind, which) in enumerate(source.pieces)]
            missing = [piece for piece in pieces if not folders.piece_path(job.folder, piece[1]).is_file()]
            self._shows.begin("reading", len(pieces), len(pieces) - len(missing))
            for _ in self._workers.results(work.gather, missing):
                self._shows.done(0)
            named, count = source.class_names, source.num_classes
            self._note(replace(self._state, gathered=len(source.pieces), num_classes=count, class_names=named))
        count, named = self._state.num_classes, self._state.class_names
        self._job = replace(self._job, gathered=self._state.gathered, num_classes=count, class_names=named)
        return replace(self._description(), flaws=flaws)

    def _description(self) -> Description:
        """The description that all workers give, which must be the one that an earlier command was given."""
        first, *others = self._workers.on_each(work.describe, self._job)
        if any(other != first for other in others):
            raise work.not_the_same(self._job)
        if self._state.digest not in (None, first.digest) and not first.pieces:
            path = self._folder.path
            instead = f"out=ANOTHER, or removing {path}"
            raise DataError(f"the source that {path} was begun with", "one that has changed since", instead)
        return first

    def _shards(self) -> dict[str, int]:
        config, parts = self._config, self._source.parts
        if self._state.shards:
            return dict(self._state.shards)
        folders.check_shards(parts[TRAIN].examples, config.shards, config.workers)

        def count(split: str, workers: int | None) -> int:
            part = parts[split]
            return folders.shard_count(part.examples, part.nbytes, config.shard_mib * folders.MIB, workers)

        counts = {split: count(split, config.workers) for split in parts}
        if config.shards:
            counts[TRAIN] = config.shards
        elif config.workers and counts[TRAIN] != (by_size := count(TRAIN, None)):
            reason = f"so that {config.workers} workers have equally many"
            self._shows.say(f"{counts[TRAIN]} shards instead of {by_size}, {reason}.")
        return counts

    def _make(self, shards: Mapping[str, int]) -> dict[str, SourceFacts]:
        facts, tasks = {}, []
        for split, count in shards.items():
            for number in range(count):
                name = folders.file_name(split, number, count)
                if name in self._whole:
                    facts[name] = self._whole[name]
                else:
                    tasks.append((self._job, split, number, count, self._source.digest))
        self._shows.begin("shards", sum(shards.values()), len(facts))
        for of_shard in facts.values():
            self._job.refuse(of_shard.skipped)
        for of_shard in self._workers.results(work.shard, tasks):
            facts[of_shard.shard.file] = of_shard
            self._shows.done(of_shard.shard.examples)
        if missing := [name for name, of_shard in facts.items() if not self._folder.has(of_shard.shard)]:
            expected = f"Dask workers that write to {self._folder.path.absolute()} as this machine sees it"
            raise DataError(expected, f"no {missing[0]} there", "a folder that all machines share")
        return facts

    def _manifest(self, shards: Mapping[str, int], facts: Mapping[str, SourceFacts]) -> Manifest:
        config, source = self._config, self._source
        splits = {
            split: tuple(facts[folders.file_name(split, number, count)].shard for number in range(count))
            for split, count in shards.items()
        }
        if source.num_classes is None:
            splits = {split: tuple(replace(shard, classes={}) for shard in shards) for split, shards in splits.items()}
        sizes = {size for of_shard in facts.values() for size in of_shard.sizes}
        skipped = sum(source.skipped.values()) + sum(len(of_shard.skipped) for of_shard in facts.values())
        manifest = Manifest(
            features=tuple(_of_size(feature, sizes) for feature in source.features),
            splits=splits,
            num_classes=source.num_classes,
            class_names=source.class_names,
            source={
                "data": config.data.name,
                "build": dict(config.data.build),
                "skipped": skipped,
                "digest": source.digest,
                "asked": dict(self._state.asked),
            },
            seed=config.seed,
        )
        if not manifest.examples(TRAIN):
            raise _no_examples(skipped)
        return manifest

    def _expect_examples(self) -> None:
        source = self._source
        if TRAIN not in source.parts or not source.parts[TRAIN].examples:
            raise _no_examples(sum(source.skipped.values()))
        if source.has_validation and (fraction := self._config.validation_fraction):
            expected = "validation_fraction=0 for a source that has a validation part of its own"
            raise DataError(expected, f"{fraction:g}", "validation_fraction=0")
        classes = source.parts[TRAIN].classes
        if source.num_classes is None or classes is None or self._job.skip:
            return
        named = source.class_names or [*map(str, range(source.num_classes))]
        if empty := [named[number] for number in range(source.num_classes) if number not in classes]:
            received = f"none of class {', '.join(empty[:NAMED])}"
            instead = "data.on_error=skip, which prepares the others, or another data.num_classes"
            raise DataError(f"training examples of each of {source.num_classes} classes", received, instead)

    def _note(self, state: FolderState) -> None:
        self._state = state
        self._folder.begin(state)


def _settings(config: PrepareConfig, search: Sequence[str]) -> dict[str, Any]:
    """The settings that decide the bytes of the shards, as plain values; the same command has the same."""
    code = hashlib.sha256()
    for path in sorted(targets.sources(config.data.build, search)):
        code.update(path.read_bytes())
    return {
        **{f"data.build.{name}": value for name, value in config.data.build.items()},
        "data.num_classes": config.data.num_classes,
        "seed": config.seed,
        "validation_fraction": config.validation_fraction,
        "shard_mib": config.shard_mib,
        "shards": config.shards,
        "workers": config.workers,
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


def _of_size(feature: Feature, sizes: set[tuple[int, int]]) -> Feature:
    """A feature of encoded images with their size, if all have the same."""
    if feature.stored != "image" or len(sizes) != 1:
        return feature
    return replace(feature, shape=(*next(iter(sizes)), feature.shape[2]))


def _no_examples(skipped: int) -> DataError:
    lost = f" once {skipped} broken ones are left out" if skipped else ""
    return DataError("training data with examples", f"none{lost}", "another source")
