"""The facts of the hosts that a plan is laid over."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One host: its name, the cores this process may use, memory in GiB, and a name for each GPU and TPU chip.

    `tpu_name` is what the environment calls its TPU, a name or an address; `cache_bytes` what the last caches before
    memory hold, None where that is not known to decide what cores take from each other.
    """

    hostname: str
    cores: tuple[int, ...]
    memory_gib: float
    cpu: str
    gpus: tuple[str, ...] = ()
    tpus: tuple[str, ...] = ()
    tpu_name: str | None = None
    cache_bytes: int | None = None


@dataclass(frozen=True)
class Machine(Host):
    """The hosts of a cluster, by what the least of them has.

    `hosts` is how many the cluster reaches; where it is 1, this one stands for all. `members` are the hosts as they
    are, in order, where that is known; empty where all are like this one. `tasks` are the kinds of the processes that
    something else has started for the run ("chief", "worker", "ps"), in order; empty where as many are started as a
    plan has. `grows`: as many hosts like this one are started as a plan needs. `link_gbps` is what the slowest link
    between them was measured to do, None where none was.
    """

    hosts: int = 1
    tasks: tuple[str, ...] = ()
    members: tuple[Host, ...] = ()
    grows: bool = False
    link_gbps: float | None = None

    def member(self, host: int) -> Host:
        """The host of that number."""
        return self.members[host] if host < len(self.members) else self


def inventory(members: Sequence[Host]) -> Machine:
    """The hosts of a cluster as they are. What is laid over all of them alike fits the least of them.

    >>> found = inventory([Host("a", (0, 1), 8.0, "A processor"), Host("b", (0,), 16.0, "A processor")])
    >>> found.hosts, found.cores, found.memory_gib
    (2, (0,), 8.0)
    """
    fewest = min(members, key=lambda host: len(host.cores))
    caches = [host.cache_bytes for host in members if host.cache_bytes is not None]
    return Machine(
        hostname=members[0].hostname,
        cores=fewest.cores,
        memory_gib=min(host.memory_gib for host in members),
        cpu=fewest.cpu,
        gpus=min((host.gpus for host in members), key=len),
        tpus=min((host.tpus for host in members), key=len),
        tpu_name=members[0].tpu_name,
        cache_bytes=min(caches) if len(caches) == len(members) else None,
        hosts=len(members),
        members=tuple(members),
    )


def differences(members: Sequence[Host]) -> list[str]:
    """In words, what some hosts have and others have not.

    >>> differences([Host("a", (0, 1), 8.0, "X"), Host("b", (0,), 8.0, "X"), Host("c", (0, 1), 8.0, "X")])
    ['b has 1 core, the others 2']
    """
    sentences: list[str] = []
    for what, values in (
        ("core", [str(len(host.cores)) for host in members]),
        ("GPU", [str(len(host.gpus)) for host in members]),
        ("", [host.cpu for host in members]),
        ("", [", ".join(sorted(set(host.gpus))) for host in members]),
    ):
        # What most have comes last, of as many what the first host has.
        kinds = sorted(dict.fromkeys(values), key=lambda value: (values.count(value), -values.index(value)))
        if len(kinds) < 2 or (not what and "" in kinds):
            continue
        usual = kinds[-1]
        for value in kinds[:-1]:
            names = [host.hostname for host, has in zip(members, values, strict=True) if has == value]
            who = f"{_listed(names)} {'has' if len(names) == 1 else 'have'}"
            plural = f" {what}{'s' * (value != '1')}" if what else ""
            sentences.append(f"{who} {value}{plural}, the others {usual}")
    return sentences


def some(hosts: Sequence[Host]) -> str:
    """Hosts by their names."""
    return _listed([host.hostname for host in hosts])


def _listed(names: Sequence[str]) -> str:
    """The names, or the first of many.

    >>> _listed(["a"]), _listed(["a", "b", "c"]), _listed(["a", "b", "c", "d", "e", "f"])
    ('a', 'a, b and c', 'a, b, c and 3 more')
    """
    if len(names) == 1:
        return names[0]
    shown = names[:3]
    if len(names) > 4:
        return f"{', '.join(shown)} and {len(names) - 3} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"
