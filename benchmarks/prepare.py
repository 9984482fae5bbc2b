"""Times preparing data with one Dask process and with two, in turn: what the second brings.

    python benchmarks/prepare.py --rounds 5 --examples 50000

It prepares synthetic images of 28x28 and the digits, and checks that the shards are the same bytes. Two times are told:
of the whole command, and of the making of shards alone. In the rest of the command Dask starts and every process calls
the data set's function for itself, so that more processes shorten none of it. Who goes first changes with the round;
ratios are medians over rounds. Arguments with `=` go to every command.
"""

import argparse
import hashlib
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import record

PROCESSES = (1, 2)


def main() -> int:
    """Prints each round's seconds and their ratios; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", type=int, default=50_000, help="synthetic images: %(default)s")
    parser.add_argument("overrides", nargs="*", help="for every command, such as shard_mib=16")
    arguments = record.parse(parser, smoke=["--rounds=1", "--examples=500"])
    synthetic = ["data=synthetic", f"data.build.train_examples={arguments.examples}", "shards=16"]
    sources = {f"{arguments.examples:,} images": synthetic, "digits": ["data=digits", "shards=4"]}
    if arguments.smoke:
        del sources["digits"]
    rows = {}
    for label, source in sources.items():
        rows[label] = _compare(label, [*source, *arguments.overrides], arguments.rounds)
    record.write(arguments, arguments.rounds, rows)
    return 0 if all(row["same_bytes"] for row in rows.values()) else 1


def _compare(label: str, source: list[str], rounds: int) -> dict[str, list[float] | bool]:
    """Times one source; how many times as fast two processes are, and whether all shards were the same bytes."""
    whole, making, checksums = [], [], set()
    for number in range(rounds):
        told = {}
        for processes in PROCESSES if number % 2 == 0 else PROCESSES[::-1]:
            *told[processes], checksum = _run([*source, f"processes={processes}"])
            checksums.add(checksum)
        (one, one_making), (two, two_making) = told[1], told[2]
        whole.append(one / two)
        making.append(one_making / two_making)
        print(
            f"{label}, round {number + 1}: one process {one:.2f} s ({one_making:.2f} s for the shards), "
            f"two {two:.2f} s ({two_making:.2f} s)",
            flush=True,
        )
    print(
        f"{label}: two processes are {statistics.median(making):.2f} times as fast at the shards and "
        f"{statistics.median(whole):.2f} times in all, median of {rounds} rounds; "
        f"{'the same' if len(checksums) == 1 else 'NOT the same'} bytes"
    )
    return {"shards": making, "whole": whole, "same_bytes": len(checksums) == 1}


def _run(arguments: list[str]) -> tuple[float, float, str]:
    """(seconds of the command, seconds that its shards took, a checksum of all of them)."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        ran = record.typed(folder, "prepare", *arguments, f"out={folder}/out")
        seconds = time.monotonic() - began
        making = re.search(r"of these ([\d.]+) s for the shards", ran.stdout)
        if making is None:
            sys.exit(f"Expected pipeline prepare to tell the seconds of shards, received: {ran.stdout}")
        checksum = hashlib.sha256()
        for path in sorted(Path(folder, "out").glob("*.tfrecord")):
            checksum.update(path.read_bytes())
        return seconds, float(making[1]), checksum.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
