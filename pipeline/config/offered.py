"""Finds what there is to choose, ours and what installed packages offer, and the names that a person probably meant."""

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# Hardware without a file of its own, as it is completed and offered: any number of hosts and devices is as good.
LAYOUTS = ("1cpu", "2cpu", "4cpu", "8cpu", "1gpu", "2gpu", "4gpu", "8gpu", "2x1cpu", "2x4gpu")
# How alike two names are that may be meant for each other, from 0 to 1.
ALIKE = 0.6
# That of two with the same letters in another order.
SWAPPED = 0.95
# Shorter ones are in too many others.
LEAST_LETTERS = 3

# What other programs call a key, and what is typed here for it; "{}" is the value.
ELSEWHERE = {
    name: line
    for line, names in {
        "train.learning_rate={}": "lr initial_lr base_lr eta",
        "train.global_batch={}": "batch_size batch bs train_batch_size",
        "train.replica_batch={}": "per_device_batch_size per_device_train_batch_size per_gpu_batch_size "
        "per_replica_batch_size local_batch_size micro_batch_size micro_batch",
        "train.epochs={}": "epoch num_epochs n_epochs max_epochs nb_epoch",
        "train.steps={}": "max_steps num_steps n_steps iterations iters train_steps",
        "train.seed={}": "random_seed random_state manual_seed",
        "hardware={}gpu": "gpu gpus num_gpus n_gpus ngpu gpus_per_node",
        "hardware={}cpu": "cpus num_cpus",
        "hardware.hosts={}": "nodes nnodes num_nodes num_hosts num_machines",
        "workers={}": "nproc_per_node nproc np world_size num_processes n_workers replicas num_replicas devices "
        "n_devices num_devices ntasks",
        "workers={} or data.parallel_reads={}": "num_workers dataloader_num_workers",
        "train.precision={}": "dtype mixed_precision dtype_policy",
        "train.precision=mixed_float16": "fp16 amp half",
        "train.precision=mixed_bfloat16": "bf16",
        "output_dir={}": "output out out_dir output_path output_folder log_dir logdir save_dir results_dir",
        "data.path={}": "data_dir data_path dataset_path train_dir train_data",
        "tracking.experiment={}": "name run_name job_name project project_name experiment_name",
        "tracking.uri={}": "mlflow_uri tracking_uri mlflow_tracking_uri",
        "cluster.base_port={}": "master_port port",
        "cluster.host={}": "master_addr bind_address",
        "resume={}": "resume_from resume_from_checkpoint restore load_from",
        "checkpoint.every_steps={}": "save_every save_steps checkpoint_every",
        "launch.max_restarts={}": "max_restarts restarts",
        "mode=plan": "dry_run dry dryrun",
        "sweep.repeats={}": "n_repeats num_runs trials n_trials",
        "model={}": "arch architecture net network",
        "train.callbacks=[{_target_: keras.callbacks.EarlyStopping}]": "early_stopping",
        "train.optimizer={_target_: keras.optimizers.Adam, clipnorm: 1.0}": "gradient_clipping",
        "train.optimizer={_target_: keras.optimizers.Adam, gradient_accumulation_steps: {}}": "accumulate_grad_batches "
        "gradient_accumulation_steps grad_accum gradient_accumulation",
        "train.optimizer={_target_: keras.optimizers.AdamW, weight_decay: {}}": "weight_decay",
        "train.optimizer={_target_: keras.optimizers.SGD, momentum: {}}": "momentum",
    }.items()
    for name in names.split()
}
# The same of values and choices.
CALLED = {
    name: line
    for line, names in {
        "mixed_float16": "fp16 float16 half amp 16 16-mixed",
        "mixed_bfloat16": "bf16 bfloat16 bf16-mixed",
        "float32": "fp32 full 32 single",
        "plan": "dry dry_run dryrun dry-run",
        "multi_worker": "ddp distributed multiworker multi_node allreduce multiworkermirroredstrategy",
        "mirrored": "dp data_parallel dataparallel",
        "model_parallel": "fsdp tensor_parallel pipeline_parallel deepspeed zero",
        "parameter_server": "ps async",
        "kubernetes": "k8s kubeflow",
        "hosts": "ssh remote",
        "env": "tf_config vertex sagemaker",
        "slurm": "sbatch srun submitit",
        "mpi": "mpirun openmpi",
        "multi_worker strategy.collective=horovod": "horovod",
        "sqlite": "mlflow",
        "sparse_categorical_crossentropy": "crossentropy cross_entropy nll",
        "binary_crossentropy": "bcewithlogits bce_with_logits",
        "mean_absolute_error": "l1 l1_loss",
        "mean_squared_error": "l2 l2_loss",
        "f1_score": "f1",
        "none": "off no disabled",
    }.items()
    for name in names.split()
}


def folder() -> Path:
    """Returns the folder of the choices: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def defaults() -> dict[str, str]:
    """Returns the choice of each group that has one by default."""
    return dict(re.findall(r"^  - (\w+): (?!null\b)(\S+)", (folder() / "config.yaml").read_text(), re.M))


def choices() -> dict[str, list[str]]:
    """Returns the shipped choices of each group, by the names of their files, and layouts of hardware."""
    names = {
        group.name: sorted(path.stem for path in group.glob("[!_]*.yaml")) for group in sorted(folder().glob("*/"))
    }
    return names | {"hardware": [*names["hardware"], *LAYOUTS]}


def load_offer(kind: str, name: str, key: str, ours: Mapping[str, str], instead: str) -> Any:
    """Returns what a `key`'s `name` is: one of `ours` ("module:attribute"), or an entry point of pipeline.KIND."""
    offered = check_offer(kind, name, key, ours, instead)
    if name in ours:
        module, _, attribute = ours[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    try:
        return offered[name].load()
    except Exception as error:
        expected = f"{offered[name].value}, which a package offers as {key}={name}, to be there"
        instead = f"{instead}, or install that package again"
        raise UserError(expected, f"{type(error).__name__}: {error}", instead) from error


def check_offer(kind: str, name: str, key: str, ours: Mapping[str, str], instead: str) -> dict[str, "EntryPoint"]:
    """Returns what packages offer of a kind, unimported, where `name` is not ours. Raises `UserError` for no name."""
    if name in ours:
        return {}
    # Reads a file of each package that is installed.
    from importlib import metadata

    offered = {point.name: point for point in metadata.entry_points(group=f"pipeline.{kind}")}
    if name not in offered:
        names = ", ".join(sorted({*ours, *offered})) or "none is installed"
        closest = near(name, [*ours, *offered])
        raise UserError(f"{key} to be one that is there ({names})", name, f"{key}={closest[0]}" if closest else instead)
    return offered


def elsewhere(name: str, value: str) -> list[str]:
    """Returns what is typed here for what other programs call `name`, with its value; nothing for a name that none has.

    >>> elsewhere("lr", "0.1"), elsewhere("gpus", "4"), elsewhere("colour", "red")
    (['train.learning_rate=0.1'], ['hardware=4gpu'], [])
    """
    form = ELSEWHERE.get(name.lower().replace("-", "_"))
    return [] if form is None else form.replace("{}", value).split(" or ")


def near(word: str, names: Iterable[str], count: int = 1) -> list[str]:
    """The names nearest to a word, the nearest first: those that hold it or are in it, and those that are spelt alike.

    >>> near("stratgy", ["strategy", "hardware"]), near("input_shape", ["noise", "shape"]), near("foo", ["bar"])
    (['strategy'], ['shape'], [])
    """
    typed, likeness = word.lower(), dict[str, float]()
    for name in names:
        shorter, longer = sorted((typed, name.lower()), key=len)
        spelt, held = difflib.SequenceMatcher(None, typed, name.lower()).ratio(), 0.0
        if sorted(shorter) == sorted(longer):
            held = SWAPPED
        elif len(shorter) >= LEAST_LETTERS and shorter in longer:
            held = ALIKE + (1 - ALIKE) * len(shorter) / len(longer)
        likeness[name] = max(spelt, held)
    if (called := CALLED.get(typed)) is not None and called.partition(" ")[0] in likeness:
        return [called]
    return sorted((name for name in likeness if likeness[name] >= ALIKE), key=lambda name: -likeness[name])[:count]


def near_keys(key: str, keys: Sequence[str], count: int = 2) -> list[str]:
    """The dotted keys nearest to one: those with its last name in another group, or the one that is spelt alike.

    >>> keys = ["train.steps", "measure.steps", "train.epochs", "workers"]
    >>> near_keys("steps", keys), near_keys("trian.epochs", keys), near_keys("wokers", keys)
    (['train.steps', 'measure.steps'], ['train.epochs'], ['workers'])
    """
    group, _, name = key.rpartition(".")
    if same := [candidate for candidate in keys if candidate.rpartition(".")[2] == name and candidate != key]:
        return (near(group, same, count) if group and len(same) > count else same)[:count]
    groups = {candidate.rpartition(".")[0] for candidate in keys}
    # In the group that was typed, or those that are spelt alike; without one, in any.
    meant = {group} if group in groups and group else set(near(group, groups, count)) if group else groups
    names = {one.rpartition(".")[2]: one for one in reversed(keys) if one.rpartition(".")[0] in meant}
    return [names[last] for last in near(name, reversed(names))]
