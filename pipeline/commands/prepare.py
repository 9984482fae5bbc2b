"""Turns the command line of `python -m pipeline prepare` into a filled folder, and that into an exit code."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import offered, targets
from pipeline.config.composing import config_of
from pipeline.config.schema import PrepareConfig
from pipeline.data.errors import DataError
from pipeline.data.folders import expect_data
from pipeline.data.records import Manifest
from pipeline.errors import UserError, amount, refuse
from pipeline.launch import LaunchError, signals, this_machine
from pipeline.plan.checks import check_numbers, check_path
from pipeline.prepare import cluster, filling
from pipeline.views import terminal as show
from pipeline.views.terminal.words import clean, duration, listed, plural, rate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LINE_SECONDS = 10.0
# Classes whose examples are told one by one.
CLASSES = 12


def prepare(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipeline prepare", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    if {"-h", "--help"} & set(arguments):
        print(_help(), end="")
        return 0
    typed, overrides = parser.parse_known_args(arguments)
    search = (os.getcwd(), *sys.path)
    try:
        config = config_of(PrepareConfig, overrides, typed.config_dir)
        check(config, search)
        console = show.console_on(sys.stdout)
        processes = config.processes or len(this_machine.usable_cores())
        start = partial(cluster.workers, processes, config.scheduler, Path(config.out or ""))
        with signals.interrupt(), closing(_Progress(console)) as progress:
            prepared = filling.prepare(config, search, start, progress)
    except signals.Interrupted as interrupted:
        message, code = f"Ended by {interrupted}. The same command goes on.", 128 + interrupted.number
    except UserError as error:
        message, code = str(error), 1 if isinstance(error, DataError | LaunchError) else 2
    except OSError as error:
        place, why = error.filename or config.out, error.strerror or error
        message, code = str(UserError(f"to be able to write {place}", why, "out=ANOTHER, or making space")), 1
    else:
        show.say(console, *summary_lines(prepared, str(config.out)))
        return 0
    show.say_error(message)
    return code


def check(config: PrepareConfig, search: Sequence[str]) -> None:
    """Refuses values that make no sense, and functions that are missing or not allowed, before any is imported."""
    check_numbers(config)
    size, fraction = config.shard_mib, config.validation_fraction
    both = f"processes={config.processes} with scheduler={config.scheduler}"
    refuse(
        (not config.out, "out to be the folder to fill", "none", "out=prepared"),
        ("://" in str(config.out), "out to be a folder that this machine can write to", config.out,
         "out=prepared, and copying it there afterwards"),
        (config.data.service is not None or config.data.profile, "keys of data that say what is prepared",
         "data.service or data.profile", "them when training"),
        (not 0 < size <= 1 << 20, "shard_mib to be a size in MiB, above 0", f"{size:g}", "shard_mib=64"),
        (not 0 <= fraction < 1, "validation_fraction to be 0 or more and below 1", f"{fraction:g}",
         "validation_fraction=0.2"),
        (None not in (config.scheduler, config.processes), "processes to be null where a scheduler has its own",
         both, "processes=null"),
    )  # fmt: skip
    if config.workers and config.shards and config.shards % config.workers:
        near = max(config.workers, round(config.shards / config.workers) * config.workers)
        raise UserError(f"shards that divide evenly over {config.workers} workers", config.shards, f"shards={near}")
    check_path(config.data)
    targets.check_allowed(config.allowed_targets)
    if targets.KEY not in config.data.build:
        raise UserError("data.build._target_ to name a function", "none", "data.build._target_=package.function")
    targets.check(config.data.build, "data.build", ("shard", "shards"), search, config.allowed_targets)
    if config.scheduler is None:
        try:
            expect_data(config.data.build)
        except DataError as error:
            raise UserError(error.expected, error.received, error.try_this) from error


def _help() -> str:
    choices = ", ".join(offered.choices()["data"])
    text = (offered.folder() / "prepare.yaml").read_text()
    keys = text[text.index("\nout:") :].strip()
    return (
        "Turns a source of data into TFRecord shards and a manifest, which data=tfrecord trains on.\n\n"
        "    python -m pipeline prepare data=SOURCE out=FOLDER [key=value ...]\n"
        "    python -m pipeline data=tfrecord data.path=FOLDER\n\n"
        "The same command continues an interrupted one. Exit codes: 0 done; 1 failed; 2 refused, nothing was started;\n"
        "128 + n ended by signal n.\n\n"
        f"== data=SOURCE ==\n{choices},\n"
        "your own function with data.build._target_=package.function, or your own choice with --config-dir FOLDER\n\n"
        f"== Keys and their values: key=value ==\n{keys}\n\n"
        "Keys of data: python -m pipeline --help data, and of each source --help data=SOURCE.\n"
    )


class _Progress(filling.Shows):
    """Shards that are done, examples a second, and the time that is left; shown until it is closed."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._bars: Progress | None = None

    def say(self, line: str) -> None:
        with suppress(OSError):
            self._console.print(clean(line), soft_wrap=True)

    def begin(self, label: str, total: int, before: int) -> None:
        self.close()
        self._label, self._total, self._before, self._done, self._examples = label, total, before, before, 0
        self._began = self._shown = time.monotonic()
        if self._console.is_interactive:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress

            columns = "{task.description:<10}", BarColumn(None), MofNCompleteColumn(), "{task.fields[figures]}"
            self._bars = Progress(*columns, console=self._console, transient=True, expand=True)
            self._bars.start()
            self._bars.add_task(label, total=total, completed=before, figures="")

    def done(self, examples: int) -> None:
        self._done += 1
        self._examples += examples
        now = time.monotonic()
        seconds = max(now - self._began, 1e-9)
        speed = f"{rate(self._examples / seconds)} examples/s" if self._examples else ""
        # What was there before took no time.
        left = (self._total - self._done) * seconds / (self._done - self._before)
        figures = listed(speed, f"{duration(left)} left" if left else "")
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=self._done, figures=figures)
        elif now - self._shown >= LINE_SECONDS:
            self._shown = now
            self.say(f"{self._label}: {listed(f'{self._done} of {self._total}', figures)}")

    def close(self) -> None:
        if self._bars is not None:
            with suppress(OSError):
                self._bars.stop()
        self._bars = None


def summary_lines(prepared: filling.Prepared, folder: str) -> list[str]:
    """Returns the contents of a folder of prepared data, what this command did for it, and how to train on it."""
    manifest, before = prepared.manifest, prepared.reused
    shards, rows = sum(map(len, manifest.splits.values())), []
    for split, of_split in manifest.splits.items():
        size = amount(sum(shard.bytes for shard in of_split))
        counted = listed(plural(manifest.examples(split), "example"), plural(len(of_split), "shard"), size)
        rows += [(split, counted), *[("", _classes(manifest, split))] * bool(manifest.num_classes)]
    if skipped := manifest.source.get("skipped"):
        rows.append(("left out", f"{plural(skipped, 'example')} that {'is' if skipped == 1 else 'are'} broken"))
    took = f"nothing to do: all {plural(shards, 'shard')} were there"
    if before != shards:
        reused = f", {plural(before, 'shard')} of an earlier command kept" if before else ""
        took = f"{prepared.seconds:.2f} s, of these {prepared.seconds_shards:.2f} s for the shards{reused}"
    rows += [("time", took), ("next", f"python -m pipeline data=tfrecord data.path={folder}")]
    return [f"{label:<11}{text}" for label, text in rows]


def _classes(manifest: Manifest, split: str) -> str:
    """Examples of each class, or the fewest and the most where there are many."""
    counts = manifest.classes(split)
    if len(counts) > CLASSES:
        return f"{len(counts)} classes of {min(counts.values()):,} to {max(counts.values()):,} examples"
    names = dict(enumerate(manifest.class_names or ()))
    texts = [f"{clean(names.get(int(label), label))} {counts[label]:,}" for label in sorted(counts, key=int)]
    return f"{plural(len(counts), 'class')}: {', '.join(texts)}"
