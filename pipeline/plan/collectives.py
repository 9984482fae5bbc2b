"""Refuses what a collective cannot add, before anything is started."""

from pipeline.config.schema import Config, StrategyConfig
from pipeline.plan.errors import PlanError

HOROVOD = "horovod"
# Steps between two comparisons of weights that another collective than TensorFlow's adds up for.
COMPARED_EVERY = 100


def check_collective(config: Config) -> None:
    """Refuses another collective than TensorFlow's where replicas add nothing up by it. Raises `PlanError`."""
    strategy, asked = config.strategy, config.strategy.collective
    if strategy.asynchronous and asked != StrategyConfig.collective:
        raise PlanError(
            f"Expected strategy.collective={StrategyConfig.collective}, since the workers of {strategy.name} step by "
            f"themselves and add nothing up, received {asked}. Try strategy=multi_worker."
        )
    if strategy.asynchronous and config.train.compare_weights_every is not None:
        raise PlanError(
            f"Expected train.compare_weights_every=null, since the workers of {strategy.name} have no weights of their "
            f"own, received {config.train.compare_weights_every}. Try train.compare_weights_every=null."
        )
    if asked != HOROVOD:
        return
    if not strategy.spans_processes:
        raise PlanError(
            f"Expected a strategy of several processes for strategy.collective=horovod, which adds up over processes "
            f"with a device each, received strategy={strategy.name}. "
            f"Try strategy=multi_worker, or strategy.collective=tensorflow."
        )
    if config.train.gradient_bits == 16:
        raise PlanError(
            "Expected train.gradient_bits=32 under strategy.collective=horovod, which has no bfloat16, received 16. "
            "Try train.gradient_bits=32, or strategy.collective=tensorflow."
        )


def check_laid_out(config: Config, kind: str, per_process: int) -> None:
    """Refuses devices that a collective does not add over: so many of a kind in each process. Raises `PlanError`."""
    if config.strategy.collective != HOROVOD:
        return
    if per_process > 1:
        raise PlanError(
            f"Expected one device in each process under strategy.collective=horovod, received {per_process}. "
            f"Try strategy.devices_per_process=1, or strategy.collective=tensorflow."
        )
    if kind == "gpu":
        raise PlanError(
            "Expected CPUs under strategy.collective=horovod, which `make horovod` builds for them alone, received "
            "GPUs. Try hardware.kind=cpu, or strategy.collective=tensorflow, which adds up by NCCL."
        )


def compared_every(config: Config, workers: int) -> int | None:
    """After how many steps the weights of so many replicas are compared; None where they never are.

    >>> compared_every(Config(strategy=StrategyConfig("multi_worker", collective="horovod")), workers=2)
    100
    """
    if workers == 1:
        return None
    own = config.strategy.collective == StrategyConfig.collective
    return config.train.compare_weights_every or (None if own else COMPARED_EVERY)
