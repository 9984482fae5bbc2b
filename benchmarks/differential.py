"""Trains models that nobody wrote, on one device and on two, and shows the smallest of those that differ.

    python benchmarks/differential.py --seed 7 --count 1000 --strategy multi_worker

Hypothesis draws models, data and settings; each is trained by the program's own loop under both. Losses, metrics,
weights and all state are to be equal to 1e-5, or within what the order of a batch's examples changes on one device, or
refused in words. What differs is made smaller as long as it differs, and printed as a script that shows it.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import record
from differing.case import Case, whole_script
from differing.compared import Judged, Verdict, judged
from differing.drawn import cases
from differing.pair import Pair
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyFailure

# Trainings of cases that are tried in place of one that differs.
SHRINKS = 60
# Hypothesis draws cases by what it has drawn before; so many, then anew.
TOGETHER = 25
STRATEGIES = ("mirrored", "multi_worker")


class DifferenceError(Exception):
    """A case trains something else under a strategy than on one device."""


class Search:
    """A search for cases that differ under a strategy: `done` of them were judged, `found` differ, each shrunk."""

    def __init__(self, strategy: str, folder: Path, keep: Path | None) -> None:
        self._pair, self._keep = Pair(strategy, folder), keep
        self.strategy = strategy
        self.verdicts = Counter[Verdict]()
        self.found: list[tuple[Case, Judged]] = []
        self.furthest = 0.0

    def run(self, first_seed: int, count: int) -> None:
        """Judges so many cases, beside those that are tried to shrink one."""
        number = 0
        while (left := count - self.verdicts.total()) > 0:
            self._some(first_seed * 1_000_003 + number, min(TOGETHER, left))
            number += 1

    def end(self) -> None:
        """Ends the processes that trained."""
        self._pair.end()

    def _some(self, number: int, count: int) -> None:
        smallest: list[tuple[Case, Judged]] = []
        judgements = dict[Case, Judged]()

        @seed(number)
        @settings(
            max_examples=count, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck), print_blob=False, report_multiple_bugs=False,
        )  # fmt: skip
        @given(cases())
        def are_equal(case: Case) -> None:
            if case not in judgements:
                if len(smallest) > SHRINKS:
                    return
                judgements[case] = judged(case, self._pair)
                if not smallest:
                    self._count(judgements[case])
                else:
                    smallest.append(smallest[-1])
            if judgements[case].verdict is Verdict.DIFFERENT:
                smallest.append((case, judgements[case]))
                raise DifferenceError

        try:
            are_equal()
        except (DifferenceError, FlakyFailure):
            self._tell(*smallest[-1])

    def _tell(self, case: Case, made: Judged) -> None:
        self.found.append((case, made))
        print(f"\n{made.words}\n\n{whole_script(case)}\n{case.to_json()}", flush=True)
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            kept = self._keep / f"{self.strategy}_{len(self.found)}"
            kept.with_suffix(".json").write_text(case.to_json())
            kept.with_suffix(".py").write_text(f'"""{made.words}"""\n\n{whole_script(case)}')

    def _count(self, made: Judged) -> None:
        self.verdicts[made.verdict] += 1
        if made.verdict is Verdict.EQUAL:
            self.furthest = max(self.furthest, made.apart)
        print(f"{self.strategy}, case {self.verdicts.total()}: {made.verdict.value}", flush=True)


def main() -> int:
    """Prints each case's verdict and each difference; returns 1 where there is one, or where most were not trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="cases under each strategy")
    parser.add_argument("--strategy", choices=STRATEGIES, help="one of them; left out: both")
    parser.add_argument("--keep", type=Path, help="folder for what differs, as NAME.json and NAME.py")
    arguments = record.parse(parser, smoke=["--count=1", "--strategy=mirrored"])
    # Ended by another program it ends those that train, as by a person's Ctrl-C; Hypothesis would catch `SystemExit`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # For the processes that train, and the server that they are forked from.
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": f"{record.ROOT}{os.pathsep}{Path(__file__).parent}"}
    rows = {}
    for strategy in [arguments.strategy] if arguments.strategy else STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            search, began = Search(strategy, Path(folder), arguments.keep), time.monotonic()
            try:
                search.run(arguments.seed, arguments.count)
            finally:
                search.end()
        minutes = (time.monotonic() - began) / 60
        rows[strategy] = {
            "verdicts": {verdict.value: search.verdicts[verdict] for verdict in Verdict},
            "furthest": search.furthest,
            "minutes": minutes,
        }
        done = search.verdicts.total()
        print(f"{strategy}: {done} cases, {len(search.found)} differ, {done / minutes:.1f} a minute", flush=True)
    record.write(arguments, arguments.count, rows)
    found = [row["verdicts"] for row in rows.values()]
    if idle := [told for told in found if told[Verdict.NOT_TRAINABLE.value] > sum(told.values()) / 2]:
        print(f"Expected most cases to be trained, received {idle}.")
    return int(bool(idle) or any(told[Verdict.DIFFERENT.value] for told in found))


if __name__ == "__main__":
    sys.exit(main())
