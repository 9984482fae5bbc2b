"""Shows the preparing of data while it goes on, and what came of it: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pipeline.data.manifest import Manifest
from pipeline.views.terminal.words import amount, clean, duration, listed, plural, rate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

    from pipeline.prepare.filling import Prepared

LINE_SECONDS = 10.0
# Classes whose examples are told one by one.
CLASSES = 12


class PrepareProgress:
    """Shards that are done, examples a second, and the time that is left; shown inside its `with` block."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._bars: Bars | None = None
        self._label, self._total, self._before, self._done, self._examples = "", 0, 0, 0, 0
        self._began = self._told = clock()

    def __enter__(self) -> PrepareProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def say(self, line: str) -> None:
        """One line that stays."""
        with suppress(OSError):
            self._console.print(clean(line), soft_wrap=True)

    def begin(self, label: str, total: int, before: int) -> None:
        """A step begins, of so many shards or pieces; those that were there before take no time."""
        self._stop()
        self._label, self._total, self._before, self._done, self._examples = label, total, before, before, 0
        self._began = self._told = self._clock()
        if not self._console.is_interactive:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = TextColumn("{task.description:<10}"), BarColumn(None), MofNCompleteColumn()
        figures = TextColumn("{task.fields[told]}")
        self._bars = Progress(*columns, figures, console=self._console, transient=True, expand=True)
        self._bars.start()
        self._bars.add_task(label, total=total, completed=before, told="")

    def done(self, examples: int) -> None:
        """One more is done, with so many examples."""
        self._done += 1
        self._examples += examples
        now = self._clock()
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=self._done, told=self._figures(now))
        elif now - self._told >= LINE_SECONDS:
            self._told = now
            self.say(f"{self._label}: {listed(f'{self._done} of {self._total}', self._figures(now))}")

    def _figures(self, now: float) -> str:
        shards, seconds = self._done - self._before, now - self._began
        if seconds <= 0:
            return ""
        speed = f"{rate(self._examples / seconds)} examples/s" if self._examples else ""
        left = f"{duration((self._total - self._done) * seconds / shards)} left" if self._done < self._total else ""
        return listed(speed, left)

    def _stop(self) -> None:
        if self._bars is not None:
            with suppress(OSError):
                self._bars.stop()
            self._bars = None


def summary_lines(prepared: Prepared, folder: str) -> list[str]:
    """Returns the contents of a folder of prepared data, what this command did for it, and how to train on it."""
    manifest, before = prepared.manifest, prepared.reused
    shards = sum(len(split) for split in manifest.splits.values())
    lines = []
    for split, of_split in manifest.splits.items():
        size = amount(sum(shard.bytes for shard in of_split))
        counted = listed(plural(manifest.examples(split), "example"), plural(len(of_split), "shard"), size)
        lines.append(f"{split:<11}{counted}")
        if manifest.num_classes:
            lines.append(f"{'':<11}{_classes(manifest, split)}")
    if skipped := manifest.source.get("skipped"):
        lines.append(f"{'left out':<11}{plural(skipped, 'example')} that {'is' if skipped == 1 else 'are'} broken")
    if before == shards:
        lines.append(f"{'time':<11}nothing to do: all {plural(shards, 'shard')} were there")
    else:
        kept = f", {plural(before, 'shard')} of an earlier command kept" if before else ""
        took = f"{prepared.seconds:.2f} s, of these {prepared.seconds_shards:.2f} s for the shards"
        lines.append(f"{'time':<11}{took}{kept}")
    return [*lines, f"{'next':<11}python -m pipeline data=tfrecord data.path={folder}"]


def _classes(manifest: Manifest, split: str) -> str:
    """Examples of each class, or the fewest and the most where there are many.

    >>> from pipeline.data.manifest import Shard
    >>> shard = Shard("a", 3, 9, "", {"0": 1, "1": 2})
    >>> _classes(Manifest((), {"train": (shard,)}, num_classes=2, class_names=("cat", "dog")), "train")
    '2 classes: cat 1, dog 2'
    """
    counts = manifest.classes(split)
    if len(counts) > CLASSES:
        return f"{len(counts)} classes of {min(counts.values()):,} to {max(counts.values()):,} examples"
    names = dict(enumerate(manifest.class_names or ()))
    texts = [f"{clean(names.get(int(label), label))} {counts[label]:,}" for label in sorted(counts, key=int)]
    return f"{plural(len(counts), 'class')}: {', '.join(texts)}"
