"""Reads the host lists that Slurm writes, as `n[1-4,7],m[01-03]`, without `scontrol`, which containers lack.

The form is that of "Node Ranges" in Slurm's documentation: parts with commas between, in each any number of brackets,
in a bracket numbers and ranges, whose zeros at the front are kept.
"""

import re
from collections.abc import Sequence
from itertools import product

from pipeline.launch import LaunchError

# A comma outside of brackets.
BETWEEN = re.compile(r",(?![^\[]*\])")
BRACKET = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")
# What a plan may have; a list that is broken may name billions.
MOST_HOSTS = 65_536
# How often a count holds, as in 4(x3).
TIMES = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts_of(text: str) -> list[str]:
    """The hosts that a list names, in order. Raises `LaunchError` for what is no host list.

    >>> hosts_of("n[1-3,7],m[08-10],login"), hosts_of("rack[1-2]n[1-2]-ib")
    (['n1', 'n2', 'n3', 'n7', 'm08', 'm09', 'm10', 'login'], ['rack1n1-ib', 'rack1n2-ib', 'rack2n1-ib', 'rack2n2-ib'])
    >>> hosts_of("")
    []
    """
    hosts: list[str] = []
    for part in filter(None, BETWEEN.split(text.strip())):
        # At odd places what stood in brackets.
        pieces = BRACKET.split(part)
        if any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
            raise _unread(text)
        choices = [[piece] if place % 2 == 0 else _numbers(piece, text) for place, piece in enumerate(pieces)]
        for names in product(*choices):
            hosts.append("".join(names))
            if len(hosts) > MOST_HOSTS:
                raise _unread(text)
    return hosts


def counts_of(text: str) -> list[int]:
    """A count for each host, of Slurm's short form, as `SLURM_JOB_CPUS_PER_NODE` has it. Raises `LaunchError`.

    >>> counts_of("4(x2),8")
    [4, 4, 8]
    """
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        read = TIMES.fullmatch(part.strip())
        if read is None:
            raise LaunchError("counts of Slurm's as 4(x2),8", text, "to start the job's command again")
        counts += [int(read[1])] * min(int(read[2] or 1), MOST_HOSTS)
    return counts


def folded(hosts: Sequence[str]) -> str:
    """Names for a user to read, those that follow each other drawn together.

    >>> folded(["n1", "n2", "n3", "n7", "login"]), folded(["n09", "n10"])
    ('n[1-3,7],login', 'n[09-10]')
    """
    # Numbers as wide as each other: what is in one bracket keeps its zeros.
    groups: dict[tuple[str, int], list[list[int]]] = {}
    for host in hosts:
        name = host.rstrip("0123456789")
        digits = host[len(name) :]
        spans = groups.setdefault((name, len(digits)), [])
        number = int(digits or 0)
        if spans and spans[-1][-1] + 1 == number:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join(_folded(name, width, spans) for (name, width), spans in groups.items())


def _folded(name: str, width: int, spans: Sequence[Sequence[int]]) -> str:
    if not width:
        return name
    numbers = ["-".join(f"{number:0{width}}" for number in span) for span in spans]
    return f"{name}{numbers[0]}" if len(spans) == len(spans[0]) == 1 else f"{name}[{','.join(numbers)}]"


def _numbers(inside: str, text: str) -> Sequence[str]:
    """The numbers of a bracket, as wide as they were written."""
    numbers: list[str] = []
    for part in inside.split(","):
        read = RANGE.fullmatch(part.strip())
        if read is None:
            raise _unread(text)
        first, last = int(read[1]), int(read[2] or read[1])
        if last < first or last - first >= MOST_HOSTS:
            raise _unread(text)
        numbers += [f"{number:0{len(read[1])}}" for number in range(first, last + 1)]
    return numbers


def _unread(text: str) -> LaunchError:
    return LaunchError("a host list of Slurm's as n[1-4,7],m[01-03]", text[:200], "to start the job's command again")
