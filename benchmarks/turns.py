"""Has contestants train in turn, round after round, and turns their stretches into tables and ratios.

`side_by_side.py` says why so; which contestants there are, and what is claimed of them, is each program's own.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import record
from contestants import ContestantFailed, Load, Ours, Rival, Timed

# Others who take no more than this share of the machine do not count.
OTHERS_SHARE = 0.05
# Fewer rounds without others than this say less than all rounds do.
ENOUGH_ROUNDS = 3
LOOK_SECONDS = 0.3
Contestant = Ours | Rival
# From those that run already, whose pace some take over.
Make = Callable[[Mapping[str, Contestant]], Contestant]


@dataclass(frozen=True)
class Claim:
    """One contestant's throughput is to be at least `least` times another's; of several, the best one's."""

    contestant: str
    against: tuple[str, ...]
    least: float

    @property
    def text(self) -> str:
        """The claim in words.

        >>> Claim("mirrored", ("limit",), 0.85).text
        'mirrored / limit >= 0.85'
        """
        return f"{self.contestant} / {'|'.join(self.against)} >= {self.least:g}"


@dataclass(frozen=True)
class Stretch:
    """One timed stretch, and the share of the machine that others took meanwhile."""

    round: int
    examples_per_second: float
    step_ms: float
    others_share: float


@dataclass(frozen=True)
class Judged:
    """What came of a claim: its ratio to the best of those it is against, of each round, and a line; None: nothing."""

    claim: str
    line: str
    against: str | None = None
    ratio: float | None = None
    ratios: Sequence[float] = ()
    passed: bool | None = None


def run_suites(
    suites: Mapping[str, Sequence[Claim]],
    make: Callable[[str], Mapping[str, Make]],
    arguments: argparse.Namespace,
    packages: Sequence[str] = (),
) -> None:
    """Runs the suites that were asked for and writes what came of them, with the versions of `packages`, as each ends.

    `make` has the contestants of a suite anew. Ends the program where one did not train.
    """
    report: dict[str, Any] = {}
    for suite, claims in suites.items():
        if wanted := asked_for(suite, suites, arguments.only):
            report[suite] = run_suite(suite, claims, wanted, partial(make, suite), arguments)
            record.write(arguments, arguments.rounds, report, packages)
    failed = [f"{suite}:{name}" for suite, told in report.items() for name in told["failed"]]
    if failed:
        sys.exit(f"Expected every contestant to train, received {len(failed)} that did not: {', '.join(failed)}.")


def run_suite(
    suite: str,
    claims: Sequence[Claim],
    wanted: Callable[[str], bool],
    make: Callable[[], Mapping[str, Make]],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Starts the contestants of one model, which `make` has anew for each of their lives, takes their turns and prints
    tables; returns all stretches and ratios.
    """
    stretches: dict[str, list[Stretch]] = {}
    failed: dict[str, str] = {}
    per_call: dict[str, int] = {}
    patience = Patience(arguments.patience)
    lives = min(arguments.lives, arguments.rounds)
    for life in range(lives):
        rounds = range(arguments.rounds)[life::lives]
        running: dict[str, Contestant] = {}
        try:
            failed |= start(make(), wanted, running)
            per_call |= {name: contestant.steps_per_call for name, contestant in running.items()}
            take_turns(running, stretches, failed, rounds, arguments.seconds, patience)
        finally:
            for contestant in running.values():
                contestant.stop()
    judged = [judge(claim, stretches) for claim in claims if wanted(claim.contestant)]
    lines = [*_table(suite, per_call, stretches, failed), "", *(ratio.line for ratio in judged)]
    print("\n".join(lines), flush=True)
    return {
        "stretches": {name: [dataclasses.asdict(stretch) for stretch in taken] for name, taken in stretches.items()},
        "steps_per_call": per_call,
        "claims": [dataclasses.asdict(ratio) for ratio in judged],
        "failed": failed,
    }


def start(made: Mapping[str, Make], wanted: Callable[[str], bool], running: dict[str, Contestant]) -> dict[str, str]:
    """Adds the contestants that start to `running`; returns why the others do not."""
    failed: dict[str, str] = {}
    for name, make in made.items():
        if wanted(name):
            _say(f"starting {name}")
            try:
                running[name] = make(running)
            except ContestantFailed as failure:
                failed[name] = str(failure)
                _say(f"{name} failed: {failure}")
    return failed


def take_turns(
    running: Mapping[str, Contestant],
    stretches: dict[str, list[Stretch]],
    failed: dict[str, str],
    rounds: Iterable[int],
    seconds: float,
    patience: "Patience",
) -> None:
    """Adds a stretch of each contestant for each round to `stretches`, after one that warms up, or adds to `failed`."""
    for number in (-1, *rounds):
        _say("warming up" if number < 0 else f"round {number + 1}")
        names = list(running)
        first = (number * 3) % max(1, len(names))
        for name in names[first:] + names[:first]:
            if name in failed:
                continue
            try:
                taken = _take(running[name], number, seconds, patience if number >= 0 else Patience(0))
            except ContestantFailed as failure:
                failed[name] = str(failure)
                _say(f"{name} failed: {failure}")
                continue
            if number >= 0:
                stretches.setdefault(name, []).append(taken)


def judge(claim: Claim, stretches: Mapping[str, Sequence[Stretch]]) -> Judged:
    """The claim's ratio: median, lowest and highest over rounds, and a line that says whether it holds."""
    against = [name for name in claim.against if stretches.get(name)]
    judged = Judged(claim.text, f"  not measured  {claim.text}")
    if not stretches.get(claim.contestant) or not against:
        return judged
    everyone = {name: paired(stretches[claim.contestant], stretches[name]) for name in against}
    everyone = {name: ratios for name, ratios in everyone.items() if ratios}
    if not everyone:
        return judged
    best = min(everyone, key=lambda name: statistics.median(everyone[name]))
    ratios = everyone[best]
    ratio = statistics.median(ratios)
    verdict = "PASS " if ratio >= claim.least else "below"
    line = (
        f"  {verdict}  {ratio:5.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds), "
        f"wanted {claim.least:g}: {claim.contestant} / {best}"
    )
    return Judged(claim.text, line, best, ratio, ratios, ratio >= claim.least)


def paired(contestant: Sequence[Stretch], against: Sequence[Stretch]) -> list[float]:
    """Ratios of throughputs in the rounds that both took part in, without disturbed ones where enough remain.

    >>> paired([Stretch(0, 90.0, 1.0, 0.0), Stretch(1, 50.0, 1.0, 0.0)], [Stretch(0, 100.0, 1.0, 0.0)])
    [0.9]
    """
    there = {stretch.round: stretch for stretch in against}
    pairs = [(stretch, there[stretch.round]) for stretch in contestant if stretch.round in there]
    quiet = [pair for pair in pairs if max(stretch.others_share for stretch in pair) <= OTHERS_SHARE]
    chosen = quiet if len(quiet) >= ENOUGH_ROUNDS else pairs
    return [ours.examples_per_second / theirs.examples_per_second for ours, theirs in chosen]


def _take(contestant: Contestant, number: int, seconds: float, patience: "Patience") -> Stretch:
    """A stretch without others on the machine, or of several tries the one with the fewest."""
    tries: list[tuple[float, Timed]] = []
    while not tries or (tries[-1][0] > OTHERS_SHARE and patience.left > 0):
        began = time.monotonic()
        patience.wait_for_quiet()
        load = Load(contestant.pids)
        tries.append((0.0, contestant.time(seconds)))
        tries[-1] = (load.others(), tries[-1][1])
        patience.left -= (time.monotonic() - began) * (len(tries) > 1)
    others, timed = min(tries, key=lambda taken: taken[0])
    return Stretch(number, timed.examples_per_second, timed.step_ms, others)


@dataclass
class Patience:
    """Seconds that may still be spent on waiting for others, and on taking stretches again."""

    left: float

    def wait_for_quiet(self) -> None:
        """Returns once others leave the machine alone, or when patience is over."""
        while self.left > 0:
            load = Load(())
            time.sleep(LOOK_SECONDS)
            if load.others() <= OTHERS_SHARE:
                return
            self.left -= LOOK_SECONDS


def _table(
    suite: str, per_call: Mapping[str, int], stretches: Mapping[str, Sequence[Stretch]], failed: Mapping[str, str]
) -> list[str]:
    limit = "limit" if stretches.get("limit") else next((name for name, taken in stretches.items() if taken), "")
    titles = f"{'examples/s, median (range)':>30} {'of ' + limit:>10} {'ms a step':>10} {'a call':>7} {'others':>7}"
    lines = ["", f"{suite:24} {titles}"]
    for name, everything in stretches.items():
        if not everything:
            continue
        taken = _undisturbed(everything)
        values = [stretch.examples_per_second for stretch in taken]
        middle = f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"
        ratio = statistics.median(paired(everything, stretches[limit]) or [float("nan")])
        step_ms = statistics.median(stretch.step_ms for stretch in taken)
        others = statistics.median(stretch.others_share for stretch in taken)
        lines.append(f"{name:24} {middle:>30} {ratio:10.2f} {step_ms:10.2f} {per_call[name]:7} {others:7.0%}")
    return lines + [f"{name:24} failed: {why}" for name, why in failed.items()]


def _undisturbed(taken: Sequence[Stretch]) -> Sequence[Stretch]:
    quiet = [stretch for stretch in taken if stretch.others_share <= OTHERS_SHARE]
    return quiet if len(quiet) >= ENOUGH_ROUNDS else taken


def asked_for(suite: str, suites: Iterable[str], only: Sequence[str]) -> Callable[[str], bool] | None:
    """Which contestants of one of the `suites` were asked for, by their names, the suite's, or suite:name; None for
    none of it.
    """
    if not only or suite in only:
        return lambda name: True
    mine = [name for name in only if ":" not in name or name.startswith(f"{suite}:")]
    names = {name.removeprefix(f"{suite}:") for name in mine}
    names -= set(suites)
    return (lambda name: name in names) if names else None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what every program takes whose contestants train in turn."""
    parser.add_argument("--rounds", type=int, default=9, help="timed stretches of each contestant; 5 or more")
    parser.add_argument("--lives", type=int, default=3, help="how often contestants are started, sharing the rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a timed stretch, about")
    parser.add_argument("--workers", type=int, default=2, help="CPU workers")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds a model may wait for others to leave")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="mlp, NAME or mlp:NAME, ...")


def smallest(contestants: Sequence[str]) -> list[str]:
    """These options for the smallest run, of these contestants."""
    return ["--rounds=1", "--lives=1", "--seconds=0.1", "--patience=0", f"--only={','.join(contestants)}"]


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the program where these options make no sense."""
    if min(arguments.lives, arguments.rounds) < 1 or arguments.workers < 2 or not arguments.seconds > 0:
        parser.error("Expected --rounds and --lives of 1 or more, --workers of 2 or more and --seconds above 0.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
