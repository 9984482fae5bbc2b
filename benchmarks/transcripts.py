"""Types commands that README and docs show with what a terminal says to them, and keeps what it said.

python benchmarks/transcripts.py
"""

import argparse
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass

import record

# What bars show on a terminal, in place of lines.
PASSING = re.compile(r"(starting|joined|built|preparing|training|measuring its first steps|repeat \d+ of \d+|saved): ")
TIME = re.compile(r"\d\d:\d\d:\d\d ")
WIDTHS = "model.build.hidden=[256],[2048]"
SEEN = ("strategy=mirrored", "model=mlp", "train.replica_batch=512", "hardware.price_per_hour=2", "tracking=none")


@dataclass(frozen=True)
class Transcript:
    """A command, those before it in the same folder, and where what is shown begins and ends; all, if not said."""

    typed: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    begins: str = ""
    ends: str = ""


TRANSCRIPTS = {
    "start": Transcript(()),
    "explain": Transcript(
        ("strategy=multi_worker", "workers=2", "measure.explain=true", "tracking=none"), begins="lost", ends="training"
    ),
    "predict": Transcript(
        ("mode=predict", "workers=2", "model.build.hidden=[512]", *SEEN),
        before=(("-m", "workers=1,2", WIDTHS, "measure.baseline=none", *SEEN),),
        begins="predicted",
    ),
}


def main() -> int:
    """Prints what was said to each; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TRANSCRIPTS, default=list(TRANSCRIPTS))
    parser.add_argument("overrides", nargs="*", help="for every command, such as model=mlp")
    small = ["--only=start", "model=mlp", "data=digits", "train.steps=5", "measure.steps=5", "tracking=none"]
    arguments = record.parse(parser, smoke=small)
    os.environ["COLUMNS"] = "120"
    rows = {}
    for name in arguments.only:
        asked = TRANSCRIPTS[name]
        with tempfile.TemporaryDirectory() as folder:
            for command in asked.before:
                record.typed(folder, *command, *arguments.overrides)
            began = time.monotonic()
            # Folders as from where the command was typed.
            said = record.typed(folder, *asked.typed, *arguments.overrides).stdout.replace(f"{folder}/", "")
            seconds = time.monotonic() - began
        lines = shown(said.splitlines(), asked.begins, asked.ends)
        print("\n".join(lines), flush=True)
        rows[name] = {"lines": lines, "seconds": seconds}
    record.write(arguments, 1, rows)
    return 0


def shown(said: list[str], begins: str, ends: str) -> list[str]:
    """The lines that stay on a terminal, from that which begins with a word to the one before another word.

    >>> shown(["plan   a", "joined: 1", "lost   b", "       c", "batch  d"], "lost", "batch")
    ['lost   b', '       c']
    """
    said = [line for line in (TIME.sub("", line) for line in said) if not PASSING.match(line)]
    first = next(place for place, line in enumerate(said) if line.startswith(begins))
    last = next((place for place, line in enumerate(said) if ends and place > first and line.startswith(ends)), None)
    return said[first:last]


if __name__ == "__main__":
    sys.exit(main())
