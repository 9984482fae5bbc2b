"""What a plan is laid over: the facts of one host."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One host: its name, the cores this process may use, memory in GiB, and a name for each GPU and TPU chip.

    `tpu_name` is what the environment calls its TPU, a name or an address; `cache_bytes` what the last caches before
    memory hold, None where that is not known to decide what cores take from each other. `hosts` is how many like it the
    cluster reaches; where it is 1, this one stands for all. `tasks` are the kinds of the processes that something else
    has started for the run ("chief", "worker", "ps"), in order; empty where as many are started as a plan has.
    """

    hostname: str
    cores: tuple[int, ...]
    memory_gib: float
    cpu: str
    gpus: tuple[str, ...] = ()
    tpus: tuple[str, ...] = ()
    tpu_name: str | None = None
    cache_bytes: int | None = None
    hosts: int = 1
    tasks: tuple[str, ...] = ()
