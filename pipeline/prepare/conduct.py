"""One step after another: what is there, what the source holds, how many shards that makes, and the making of them."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import targets
from pipeline.config.schema import OnError, PrepareConfig
from pipeline.data.errors import first_of
from pipeline.data.manifest import TRAIN, Feature, Manifest
from pipeline.errors import UserError
from pipeline.prepare import folder as folders
from pipeline.prepare import layout, work
from pipeline.prepare.cluster import Answer, Workers
from pipeline.prepare.folder import Facts, Folder, State
from pipeline.prepare.work import NAMED, Description, Failed, Job


class PrepareError(UserError):
    """Data that cannot be prepared: the message says what was expected, received and what to type instead."""


class Shows(Protocol):
    """Where it is told how far the work is."""

    def say(self, line: str) -> None:
        """One line that stays."""

    def begin(self, label: str, total: int, examples: int | None) -> None:
        """A step begins, of so many shards or pieces."""

    def done(self, number: int, examples: int) -> None:
        """So many more are done, with so many examples."""


@dataclass(frozen=True)
class Prepared:
    """What came of it: the manifest, which shards were there before, and how long reading and making took, in s."""

    made: Manifest
    there: int
    seconds: float
    seconds_shards: float


def prepare(
    config: PrepareConfig,
    search: Sequence[str],
    start: Callable[[], AbstractContextManager[Workers]],
    shows: Shows,
    clock: Callable[[], float] = time.monotonic,
) -> Prepared:
    """Fills the folder, or goes on with what an earlier command has left there. `start` starts workers.

    Raises `PrepareError`, `UserError`, `UserError` or `ClusterError`.
    """
    began = clock()
    folder = Folder(Path(config.out or ""))
    try:
        made, state = folder.manifest(), folder.state
        asked = _asked(config, search)
        if state is not None and state.digest is None and state.gathered is None:
            # Nothing has been made of it.
            state = None
        _expect_same(folder.path, asked, made, state)
        folder.clear_partial()
        whole = folder.whole(made)
        if made is not None:
            shards = {split: len(shards) for split, shards in made.splits.items()}
            if len(whole) == sum(shards.values()):
                folder.finish(made)
                return Prepared(made, len(whole), clock() - began, 0.0)
            state = state or State(asked, made.source.get("digest"), shards)
        state = state or State(asked)
        folder.begin(state)
        shows.say("Reading the source.")
        with start() as workers:
            making = _Making(config, folder, state, whole, workers, shows, clock, began)
            return making.prepared() if made is None else making.mended(made)
    finally:
        folder.close()


class _Making:
    """The steps that need workers."""

    def __init__(
        self,
        config: PrepareConfig,
        folder: Folder,
        state: State,
        whole: Mapping[str, Facts],
        workers: Workers,
        shows: Shows,
        clock: Callable[[], float],
        began: float,
    ) -> None:
        self._config, self._folder, self._state, self._whole = config, folder, state, whole
        self._workers, self._shows, self._clock, self._began = workers, shows, clock, began
        self._skip = config.data.on_error is OnError.skip
        self._job = Job(
            folder=str(folder.path.absolute()),
            build=config.data.build,
            num_classes=config.data.num_classes,
            seed=config.seed,
            validation_fraction=config.validation_fraction,
            skip=self._skip,
        )

    def prepared(self) -> Prepared:
        """What came of it."""
        found = self._described()
        for note in found.notes:
            self._shows.say(note)
        self._refuse_broken(found.broken, found.flaws)
        self._expect_examples(found)
        shards = self._shards(found)
        self._note(replace(self._state, digest=found.digest, shards=shards))
        began = self._clock()
        facts = self._made(found, shards)
        made = self._manifest(found, shards, facts)
        self._folder.finish(made)
        now = self._clock()
        return Prepared(made, len(self._whole), now - self._began, now - began)

    def mended(self, made: Manifest) -> Prepared:
        """The same of a finished folder that lacks shards: those are made again."""
        found, began = self._described(), self._clock()
        facts = self._made(found, {split: len(shards) for split, shards in made.splits.items()})
        if any(facts[shard.file].shard.sha256 != shard.sha256 for split in made.splits.values() for shard in split):
            raise PrepareError(
                f"the shards that {self._folder.path} lacks to come out as they were",
                "others",
                f"removing {self._folder.path}, and the same command",
            )
        self._folder.finish(made)
        now = self._clock()
        return Prepared(made, len(self._whole), now - self._began, now - began)

    def _described(self) -> Description:
        """What the source holds, once all that comes one after another is gathered."""
        gathered = self._state.gathered
        job = self._job
        flaws: tuple[str, ...] = ()
        if gathered is None:
            first = self._same_on_all()
            if not first.pieces:
                return first
            self._refuse_broken((), first.flaws)
            self._gather(first)
            state = replace(
                self._state,
                gathered=len(first.pieces),
                num_classes=first.num_classes,
                class_names=first.class_names,
            )
            self._note(state)
            flaws = first.flaws
        paths = [folders.piece_facts(job.folder, number) for number in range(self._state.gathered or 0)]
        self._job = replace(
            job,
            num_classes=self._state.num_classes,
            class_names=self._state.class_names,
            gathered=tuple(map(str, paths)),
        )
        return replace(self._same_on_all(), flaws=flaws)

    def _same_on_all(self) -> Description:
        """What every worker says of the source, which must be the same, and what an earlier command was told."""
        answers = [self._expected(answer) for answer in self._workers.on_each(work.describe, self._job)]
        first = answers[0]
        if any(answer != first for answer in answers):
            raise PrepareError(work.not_the_same(self._job))
        if self._state.digest not in (None, first.digest) and not first.pieces:
            raise PrepareError(
                f"the source that {self._folder.path} was begun with",
                "one that has changed since",
                f"out=ANOTHER, or removing {self._folder.path}",
            )
        return first

    def _gather(self, found: Description) -> None:
        """Has every piece put where all workers find it; those that an earlier command has gathered are there."""
        job = self._job
        waiting = [
            (job, number, kind, which)
            for number, (kind, which) in enumerate(found.pieces)
            if not folders.piece_facts(job.folder, number).is_file()
        ]
        self._shows.begin("reading", len(found.pieces), None)
        self._shows.done(len(found.pieces) - len(waiting), 0)
        for answer in self._workers.answers(work.gather, waiting):
            self._expected(answer)
            self._shows.done(1, 0)

    def _shards(self, found: Description) -> dict[str, int]:
        """How many shards each split has; as many as before, where an earlier command has begun them."""
        config = self._config
        if self._state.shards:
            return dict(self._state.shards)
        train, most = found.parts[TRAIN], config.shard_mib * layout.MIB
        layout.check(train.examples, config.shards, config.workers)
        wanted = {
            split: layout.shard_count(part.examples, part.nbytes, most, None) for split, part in found.parts.items()
        }
        counts = {
            split: layout.shard_count(part.examples, part.nbytes, most, config.workers)
            for split, part in found.parts.items()
        }
        if config.shards:
            counts[TRAIN] = config.shards
        elif said := layout.told([counts[TRAIN]], wanted[TRAIN], config.workers):
            self._shows.say(f"{said}.")
        return counts

    def _made(self, found: Description, shards: Mapping[str, int]) -> dict[str, Facts]:
        """What is known of each shard, by its file, once all are made."""
        tasks, facts = [], {}
        for split, count in shards.items():
            for number in range(count):
                name = layout.file_name(split, number, count)
                if name in self._whole:
                    facts[name] = self._whole[name]
                else:
                    tasks.append((self._job, split, number, count, found.digest))
        self._shows.begin("shards", sum(shards.values()), sum(part.examples for part in found.parts.values()))
        self._shows.done(len(facts), sum(fact.shard.examples for fact in facts.values()))
        for known in facts.values():
            self._refuse_broken(known.skipped, ())
        for answer in self._workers.answers(work.shard, tasks):
            made = self._expected(answer)
            facts[made.shard.file] = made
            self._shows.done(1, made.shard.examples)
        if lost := folders.missing(str(self._folder.path), list(facts.values())):
            raise PrepareError(
                f"Dask workers that write to {self._folder.path.absolute()} as this machine sees it",
                f"no {lost[0]} there",
                "a folder that all machines share",
            )
        return facts

    def _manifest(self, found: Description, shards: Mapping[str, int], facts: Mapping[str, Facts]) -> Manifest:
        config = self._config
        splits = {
            split: tuple(facts[layout.file_name(split, number, count)].shard for number in range(count))
            for split, count in shards.items()
        }
        if found.num_classes is None:
            splits = {split: tuple(replace(shard, classes={}) for shard in shards) for split, shards in splits.items()}
        sizes = {size for fact in facts.values() for size in fact.sizes}
        skipped = sum(found.skipped.values()) + sum(len(fact.skipped) for fact in facts.values())
        made = Manifest(
            features=tuple(_of_size(feature, sizes) for feature in found.features),
            splits=splits,
            num_classes=found.num_classes,
            class_names=found.class_names,
            source={
                "data": config.data.name,
                "build": dict(config.data.build),
                "skipped": skipped,
                "digest": found.digest,
                "asked": dict(self._state.asked),
            },
            seed=config.seed,
        )
        if not made.examples(TRAIN):
            raise PrepareError(_nothing(skipped))
        return made

    def _expect_examples(self, found: Description) -> None:
        """Refuses a source without examples, or without any of a class."""
        if TRAIN not in found.parts or not found.parts[TRAIN].examples:
            raise PrepareError(_nothing(sum(found.skipped.values())))
        if found.has_validation and self._config.validation_fraction:
            raise PrepareError(
                "validation_fraction=0 for a source that has a validation part of its own",
                f"{self._config.validation_fraction:g}",
                "validation_fraction=0",
            )
        classes = found.parts[TRAIN].classes
        if found.num_classes is None or classes is None or self._skip:
            return
        empty = [
            found.class_names[number] if found.class_names else str(number)
            for number in range(found.num_classes)
            if number not in classes
        ]
        if empty:
            raise PrepareError(
                f"training examples of each of {found.num_classes} classes",
                f"none of class {', '.join(empty[:NAMED])}",
                "data.on_error=skip, which prepares the others, or another data.num_classes",
            )

    def _refuse_broken(self, broken: Sequence[str], flaws: Sequence[str]) -> None:
        if self._skip:
            return
        if broken:
            raise PrepareError(
                "examples that can be trained on",
                f"some that cannot: {first_of(broken, NAMED)}",
                "data.on_error=skip, which prepares the others, or putting the data right",
            )
        if flaws:
            raise PrepareError(
                "data that lack nothing",
                flaws[0],
                "data.on_error=skip, which prepares them nevertheless, or putting the data right",
            )

    def _expected(self, answer: Answer | Failed) -> Answer:
        if not isinstance(answer, Failed):
            return answer
        self._refuse_broken(answer.broken, ())
        raise PrepareError(answer.words)

    def _note(self, state: State) -> None:
        self._state = state
        self._folder.begin(state)


def _asked(config: PrepareConfig, search: Sequence[str]) -> dict[str, Any]:
    """What decides the bytes of the shards, as plain values; the same command asks for the same."""
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


def _expect_same(path: Path, asked: Mapping[str, Any], made: Manifest | None, state: State | None) -> None:
    """Refuses a folder that was begun with other settings."""
    then: Any = state.asked if state is not None else made.source.get("asked") if made is not None else asked
    if then is None:
        raise UserError(
            "out to be a folder that is empty, or that this command began",
            f"{path}, whose manifest does not say what it was made from",
            "out=ANOTHER",
        )
    differing = [key for key in {**then, **asked} if then.get(key) != asked.get(key)]
    if not differing:
        return
    key = differing[0]
    if key == "code":
        raise UserError(
            f"the code that {path} was begun with",
            f"{asked.get('data.build._target_')} with changes since",
            f"out=ANOTHER, or removing {path}",
        )
    raise UserError(
        f"the settings that {path} was begun with, {key}={_typed(then.get(key))}",
        f"{key}={_typed(asked.get(key))}",
        f"out=ANOTHER, or {key}={_typed(then.get(key))}",
    )


def _typed(value: object) -> str:
    return "null" if value is None else str(value)


def _of_size(feature: Feature, sizes: set[tuple[int, int]]) -> Feature:
    """A feature of encoded images with their size, where all have the same."""
    if feature.stored != "image" or len(sizes) != 1:
        return feature
    return dataclasses.replace(feature, shape=(*next(iter(sizes)), feature.shape[2]))


def _nothing(skipped: int) -> str:
    lost = f" once {skipped} broken ones are left out" if skipped else ""
    return f"Expected training data with examples, received none{lost}. Try another source."
