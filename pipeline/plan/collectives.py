"""Refuses what a collective cannot add, before anything is started."""

from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.plan.plan import AUTO, SHARED_MEMORY, TENSORFLOW, Plan

HOROVOD = "horovod"
# Ours, which all replicas are known to have the same sums by.
OURS = (AUTO, TENSORFLOW, SHARED_MEMORY)
# What is asked for of another collective: where it adds, in words.
OVER_PROCESSES = {
    HOROVOD: "adds up over processes with a device each",
    SHARED_MEMORY: "adds up over the processes of a host",
}
# Steps between two comparisons of weights that another collective than ours adds up for.
COMPARED_EVERY = 100


def check_collective(config: Config) -> None:
    """Refuses another collective than TensorFlow's where replicas add nothing up by it. Raises `UserError`."""
    strategy, asked = config.strategy, config.strategy.collective
    if strategy.asynchronous and asked not in (AUTO, TENSORFLOW):
        raise UserError(
            f"strategy.collective={AUTO}, since the workers of {strategy.name} step by themselves and add nothing up",
            asked,
            "strategy=multi_worker",
        )
    if strategy.asynchronous and config.train.compare_weights_every is not None:
        raise UserError(
            f"train.compare_weights_every=null, since the workers of {strategy.name} have no weights of their own",
            config.train.compare_weights_every,
            "train.compare_weights_every=null",
        )
    if asked in OVER_PROCESSES and not strategy.spans_processes:
        raise UserError(
            f"a strategy of several processes for strategy.collective={asked}, which {OVER_PROCESSES[asked]}",
            f"strategy={strategy.name}",
            "strategy=multi_worker, or strategy.collective=auto",
        )
    if asked == HOROVOD and config.train.gradient_bits == 16:
        raise UserError(
            "train.gradient_bits=32 under strategy.collective=horovod, which has no bfloat16",
            "16",
            "train.gradient_bits=32, or strategy.collective=auto",
        )


def check_laid_out(config: Config, kind: str, per_process: int, hosts: int) -> None:
    """Refuses devices that a collective does not add over: so many of a kind in each process. Raises `UserError`."""
    asked = config.strategy.collective
    if asked == HOROVOD and per_process > 1:
        raise UserError(
            "one device in each process under strategy.collective=horovod",
            per_process,
            "strategy.devices_per_process=1, or strategy.collective=auto",
        )
    if asked == SHARED_MEMORY and hosts > 1:
        raise UserError("one host under strategy.collective=shared_memory", hosts, "strategy.collective=auto")
    if asked in OVER_PROCESSES and kind == "gpu":
        why = "`make horovod` builds for them alone" if asked == HOROVOD else "have their gradients in a host's memory"
        raise UserError(
            f"CPUs under strategy.collective={asked}, which {why}",
            "GPUs",
            "hardware.kind=cpu, or strategy.collective=auto, which adds up by NCCL",
        )


def compared_every(config: Config, workers: int) -> int | None:
    """After how many steps the weights of so many replicas are compared; None where they never are.

    >>> from pipeline.config.schema import StrategyConfig
    >>> compared_every(Config(strategy=StrategyConfig("multi_worker", collective="horovod")), workers=2)
    100
    """
    if workers == 1:
        return None
    ours = config.strategy.collective in OURS
    return config.train.compare_weights_every or (None if ours else COMPARED_EVERY)


def notes_on_sums(plan: Plan) -> list[str]:
    """Returns why processes of a host that compute on CPUs share no memory, where that was left to the plan."""
    count, hosts = len(plan.leaders), plan.hardware.hosts
    left = plan.strategy.collective == AUTO and plan.collective == TENSORFLOW and plan.backend == TENSORFLOW
    if not left or plan.hardware.kind != "cpu" or count <= hosts:
        return []
    why = f"are on {hosts} hosts" if hosts > 1 else "are to communicate by its rings"
    return [f"{count} processes add gradients by TensorFlow, since they {why} (strategy.collective=auto)."]
