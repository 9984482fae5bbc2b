"""What packages add, found by name or built beside ours: clusters, collectives, Horovod, engines, views, choices."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CONF, LONG, ROOT, SUPPORT, Ran, UnderWay, launched, left_behind, logged, losses, sampled, weights

DIGITS = ("model=mlp", "data=digits", "train.steps=6", "measure.steps=0", "tracking=none")
OFFERS = {
    "clusters": "theirs=theirs:Cluster broken=theirs:Broken partial=theirs:Partial lost=theirs_that_is_gone:Cluster",
    "collectives": "sums=theirs:Sums broken=theirs:NoSums half=theirs:HalfOfSums unlike=theirs:Unlike lost=gone:Sums",
    "engines": "mean=theirs:Mean fails=theirs:Fails",
    "views": "lines=theirs:Lines falls=theirs:Falls",
}
# What a package has its configs found by: Hydra's own seam.
SEARCHED = """
from hydra.plugins.search_path_plugin import SearchPathPlugin


class Theirs(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        search_path.append("theirs", "pkg://their_conf")
"""
GROUPS = ("strategy", "model", "data")
FUNCTIONS = {"strategy": "hierarchical", "model": "line", "data": "corners"}
ARGUMENTS = {"strategy": "packs: 1", "model": "units: 8", "data": "examples: 256"}
WRONG = {"strategy": "pack: 1", "model": "unit: 8", "data": "example: 256"}
FACTS = {"strategy": "spans_devices: true\n", "model": "name: theirs\n", "data": "num_classes: 4\n"}
FEW = ("hardware=2cpu", "workers=2", "train.steps=4", "measure.steps=0", "tracking=none")


@pytest.fixture
def environ(tmp_path):
    """Where a package is found beside ours: its offers, and its choices, named theirs or by what is wrong with them."""
    files = {
        "theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n",
        "theirs-1.0.dist-info/entry_points.txt": "\n".join(
            f"[pipeline.{group}]\n" + names.replace(" ", "\n") for group, names in OFFERS.items()
        ),
        "hydra_plugins/theirs.py": SEARCHED,
        "theirs.py": (SUPPORT / "theirs.py").read_text(),
        "their_ruin.py": "import nothing_there\n\n\ndef anything():\n    pass\n",
        "their_conf/__init__.py": "",
    }
    for name in ("theirs", "broken", "partial", "lost", "nowhere"):
        files[f"their_conf/cluster/{name}.yaml"] = f"name: {name}\noptions: {{folders: {tmp_path}/elsewhere}}\n"
    for group in GROUPS:
        for name, function, arguments in (
            ("theirs", f"theirs.{FUNCTIONS[group]}", ARGUMENTS[group]),
            ("gone", f"theirs.{FUNCTIONS[group]}s", ARGUMENTS[group]),
            ("signature", f"theirs.{FUNCTIONS[group]}", WRONG[group]),
            ("ruin", "their_ruin.anything", ""),
            ("fails", "theirs.fails", ""),
        ):
            build = f"build:\n  _target_: {function}\n  {arguments}\n"
            files[f"their_conf/{group}/{name}.yaml"] = build + FACTS[group]
        files[f"their_conf/{group}/empty.yaml"] = FACTS[group]
    for name, text in files.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}


THERE = ", to be there, received ModuleNotFoundError"


@pytest.mark.parametrize(("key", "words"), [
    ("cluster", {
        "nowhere": "(broken, env, hosts, kubernetes, local, lost, mpi, partial, slurm, theirs), received nowhere",
        "lost": f"which a package offers as cluster=lost{THERE}",
        "partial": "Expected cluster=partial to have serve(), received one without. Try cluster=local.",
        "broken": "Expected cluster=broken to work, received KeyError: 'no such partition'. Try cluster",
    }),
    ("strategy.collective", {
        "rings": "(auto, broken, half, horovod, lost, shared_memory, sums, tensorflow, unlike), received rings",
        "lost": f"which a package offers as strategy.collective=lost{THERE}",
        "broken": "Expected strategy.collective=broken to work, received KeyError: 'no such ring'. Try strat",
        "half": "Expected strategy.collective=half to have sum, received one without. Try strategy.collective=",
    }),
    ("backend", {"torch": "to be one that is there (fails, jax, mean, tensorflow), received torch. Try backend"}),
    ("views", {"[pages]": "views to be one that is there (falls, lines), received pages. Try views=[]."}),
], ids=["cluster", "collective", "backend", "views"])  # fmt: skip
def test_what_is_not_there_or_broken_is_refused_in_a_sentence(pipeline, asked, environ, key, words):
    typed = ("strategy=mirrored", "workers=2", "hardware=2cpu", f"{key}={','.join(words)}")
    # What is wrong inside of a cluster or a collective shows once it is used.
    used = key in ("cluster", "strategy.collective")
    ran = (pipeline if used else asked)(*["-m"] * (len(words) > 1), *DIGITS, *typed, **environ)
    ran.failed(1 if used else 2)
    assert not [each for each in words.values() if each not in ran.err], ran.err


MULTI_WORKER = ("strategy=multi_worker", "workers=2", "hardware=2cpu", "train.check=off")


@pytest.mark.slow
def test_a_cluster_a_collective_and_a_view_of_another_package_train_to_the_losses_of_ours(pipeline, environ, tmp_path):
    found = []
    for cluster, collective in (("local", "tensorflow"), ("theirs", "sums")):
        pipeline(
            *DIGITS, *MULTI_WORKER, f"cluster={cluster}", f"strategy.collective={collective}", "views=[lines]",
            f"output_dir={tmp_path / collective}", "train.deterministic=true",
            "train.callbacks=[{_target_: keras.callbacks.EarlyStopping}]", **environ,
        ).ok()  # fmt: skip
        (folder,) = (tmp_path / collective).glob("runs/*")
        told = (folder / "lines.txt").read_text().splitlines()
        assert told.pop() == "end 2"
        assert told == [event["event"] for event in logged(folder)][: len(told)]
        assert "finished" in told
        ended = sorted((event["rank"], event["weights"]) for event in logged(folder, "finished"))
        found.append((losses(folder), ended, [event["val_loss"] for event in logged(folder, "epoch")]))
    assert found[0] == found[1]
    assert (tmp_path / "elsewhere" / "point-1").is_dir()
    (parameters,) = {event["parameters"] for event in logged(folder, "built") if event["rank"] == 0}
    sent = [int(line) for line in (tmp_path / "sums" / "sums-1.txt").read_text().split()]
    # Gradients and the loss, each step; what is validated and what callbacks decide goes the same way.
    assert sent.count(4 * (parameters + 1)) == 6 < len(sent)
    assert [event["sent_bytes"] for event in logged(folder, "finished") if event["rank"] == 0] == [4 * parameters]


@pytest.mark.slow
def test_a_collective_that_adds_otherwise_on_each_rank_ends_the_run_by_name(pipeline, environ):
    compared = ("strategy.collective=unlike", "train.compare_weights_every=2", "train.steps_per_call=2")
    ran = pipeline(*DIGITS, *MULTI_WORKER, *compared, **environ).failed()
    assert "Expected the same weights on all replicas after step 2, received others on rank 1 than on rank 0" in ran.err


def test_an_engine_of_another_package_is_measured_and_recorded_like_ours_whatever_else_fails(pipeline, environ):
    small = [given for given in DIGITS if given != "measure.steps=0"]
    typed = ("strategy=one_device", "hardware=1cpu", "train.steps=4", "train.replica_batch=32", "views=[falls]")
    ran = pipeline("-m", *small, *typed, "backend=mean,fails", "train.save=false", **environ).failed()
    assert "The view falls failed with OSError: the disk is full. The run goes on without it." in ran.out
    mean, fails = ran.results
    assert (fails["status"], "ArithmeticError: the mean of nothing" in fails["error"]) == ("FAILED", True)
    assert (mean["examples_per_second"], mean["speedup"]) == (pytest.approx(3200.0), pytest.approx(1.0))
    assert mean["versions"]["mean"] == "1.0"
    weight = 0.0
    for first in (0, 32, 64, 0):
        batch = range(first, first + 32)
        loss = sum((weight - value) ** 2 for value in batch) / 32
        weight += 0.1 * (sum(batch) / 32 - weight)
    assert mean["loss"] == pytest.approx(loss)
    assert json.loads((ran.run_folders[0] / "plan.json").read_text())["backend"] == "mean"


def test_a_strategy_a_model_and_a_data_set_of_another_package_train_together(pipeline, environ):
    ran = pipeline("strategy=theirs", "model=theirs", "data=theirs", *FEW, **environ).ok()
    result = {"strategy": "theirs", "model": "theirs", "data": "theirs", "workers": 2, "processes": 1}
    assert ran.result.items() >= {**result, "status": "FINISHED", "saved": "model.keras"}.items()
    assert ran.result["val_loss"] > 0


@pytest.mark.parametrize("group", GROUPS)
def test_a_choice_of_another_package_that_cannot_be_made_is_refused_before_anything_starts(asked, environ, group):
    names = "empty", "gone", "signature"
    ran = asked("-m", f"{group}={','.join(names)}", "mode=plan", *FEW, **environ).failed(2)
    function, wrong = FUNCTIONS[group], WRONG[group].partition(":")[0]
    assert f"Expected {group}.build._target_ to name a function, received none." in ran.err
    assert f"to name a function that exists, received theirs.{function}s: no {function}s in" in ran.err
    assert f"Expected an argument of theirs.{function} (" in ran.err
    assert f"received {group}.build.{wrong}. Try {group}.build.{wrong}s." in ran.err
    assert not list(ran.folder.glob("outputs/**/events.jsonl"))
    # A name that no package has is refused with those that are there.
    ran = asked(f"{group}=nowhere", "mode=plan", **environ).failed(2)
    assert re.search(r"[( ]theirs[,)].* received nowhere", ran.err)


@pytest.mark.slow
@pytest.mark.parametrize("group", sampled(GROUPS, 1))
def test_a_choice_of_another_package_that_fails_is_named_with_its_own_lines(pipeline, environ, group):
    others = [f"{other}=theirs" for other in GROUPS if other != group]
    ran = pipeline("-m", f"{group}=ruin,fails", *others, *FEW, "measure.baseline=none", **environ).failed()
    assert "pipeline: ModuleNotFoundError: No module named 'nothing_there'" in ran.err
    assert "pipeline: ValueError: the moon is full" in ran.err
    assert "in fails" in ran.out
    assert "Traceback" not in ran.err + ran.out


@pytest.mark.parametrize(("strategies", "wrong"), [("default,one_device", "devices"), ("mirrored", "processes")])
def test_a_strategy_that_spans_less_than_its_file_says_is_refused(pipeline, strategies, wrong):
    said = (f"strategy={strategies}", f"strategy.spans_{wrong}=true", "model=mlp", "data=digits", "train.check=off")
    ran = pipeline("-m", *said, *FEW, "measure.baseline=none").failed()
    refused = "Expected strategy.build to make a strategy of 2 replicas, received one of 1. Try strategy.spans_devices"
    assert ran.err.count(refused) == len(strategies.split(","))


PYTHON = ROOT / ".venv-horovod" / "bin" / "python"
TWO = ("strategy=multi_worker", "strategy.collective=horovod", "workers=2", "hardware=2cpu")
SMALL = ("model=mlp", "data=digits", "train.steps=20", "measure.steps=0", "tracking=none")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
WRAPPED = ("model.build._target_=mistaken.wrapped", "data=digits", "train.steps=4", "measure.steps=0", "tracking=none")
REFUSED = (
    "Expected an optimizer without Horovod's DistributedOptimizer, which averages nothing under Keras 3, received Adam "
    "in it. Try the optimizer that it wraps, with strategy=multi_worker strategy.collective=horovod."
)


def of_horovod(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test as one of Horovod itself, which is skipped where that is not built."""
    ready = (PYTHON.parents[1] / ".ready").exists()
    built = pytest.mark.skipif(not ready, reason="Horovod is not built: make horovod")
    return built(pytest.mark.horovod(pytest.mark.slow(test)))


def typed(folder: Path, *arguments: str, launcher: tuple[str, ...] = (), timeout: float = 300.0) -> Ran:
    """A command of the Python that has Horovod."""
    ran = launched(folder, *launcher, str(PYTHON), "-m", "pipeline", *arguments, timeout=timeout)
    assert not left_behind(folder)
    return ran


def test_where_it_is_not_built_choosing_it_says_what_to_type(asked):
    ran = asked(*TWO, *SMALL).failed(2)
    assert "Expected Horovod, built for this TensorFlow, for strategy.collective=horovod, received a Python" in ran.err
    assert "`.venv-horovod/bin/python -m pipeline`" in ran.err
    assert ("make horovod" in ran.err) == (not PYTHON.exists())
    assert not ran.run_folders


def test_make_says_what_it_lacks_to_build_it(tmp_path):
    for program in ("make", "bash", "sh", "c++", "python3"):
        (tmp_path / program).symlink_to(shutil.which(program) or sys.executable)
    # What is set up is taken as it is.
    command = ["make", "-o", ".venv/.ready", f"HOROVOD={tmp_path / 'built'}", "horovod"]
    ran = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "Expected cmake, which compiles Horovod, received none. On Debian: apt-get install cmake" in ran.stdout
    assert not (tmp_path / "built").exists()


@pytest.mark.slow
def test_its_wrapper_of_an_optimizer_and_its_callbacks_are_refused(pipeline):
    ran = pipeline("strategy=multi_worker", "workers=2", "hardware=2cpu", *WRAPPED).failed()
    assert REFUSED in ran.err
    ran = pipeline("strategy=one_device", *SMALL, "train.callbacks=[{_target_: mistaken.broadcasts}]").failed()
    assert "Expected no callback of Horovod's among train.callbacks" in ran.err
    assert "received BroadcastGlobalVariablesCallback. Try leaving it out." in ran.err


@of_horovod
def test_its_real_wrapper_is_refused_too(tmp_path):
    assert REFUSED in typed(tmp_path, *TWO, *WRAPPED, "+model.build.standing_in=false").failed().err


@of_horovod
@pytest.mark.parametrize(
    ("workers", "model"), [(2, ("model=cnn", "model.build.dropout=0", "train.optimizer=sgd")), (4, ("model=mlp",))]
)
def test_two_and_four_workers_train_to_the_losses_of_one_device_with_equal_weights(tmp_path, workers, model):
    batch = ("train.global_batch=64", "train.deterministic=true", "hardware=4cpu", "train.compare_weights_every=5")
    one = typed(tmp_path / "one", *SMALL, *model, *batch, "strategy=one_device", "workers=1")
    ran = typed(tmp_path / "all", *TWO, *SMALL, *model, *batch, f"workers={workers}").ok()
    assert losses(*ran.run_folders) == pytest.approx(losses(*one.run_folders), rel=0, abs=1e-5)
    assert ran.result["val_loss"] == pytest.approx(one.result["val_loss"], abs=1e-5)
    assert len(weights(*ran.run_folders)) == 1
    assert (ran.result["collective"], ran.result["check"]["outcome"]) == ("horovod", "equal")
    assert "multi_worker/horovod on 4cpu" in ran.out


@of_horovod
def test_rows_of_embeddings_and_statistics_of_batches_are_added_as_tensorflow_adds_them(tmp_path):
    for name, arguments in {
        "rows": ("model=recommender", "data=clicks", "data.build.train_examples=2000"),
        "statistics": ("--config-dir={CONF}", "model=normalised", "data=digits"),
    }.items():
        told = []
        for collective in ("tensorflow", "horovod"):
            ran = typed(
                tmp_path / f"{name}-{collective}", *TWO, *SMALL, *(one.format(CONF=CONF) for one in arguments),
                f"strategy.collective={collective}", "train.compare_weights_every=5",
            ).ok()  # fmt: skip
            told.append((*losses(*ran.run_folders).values(), *ran.result["val_metrics"].values()))
            assert len(weights(*ran.run_folders)) == 1
        assert told[0] == pytest.approx(told[1], rel=0, abs=1e-5)


@of_horovod
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_and_ends_the_run_within_a_minute(tmp_path, rank):
    long = (*TWO, *LONG, "measure.steps=0", "tracking=none", "launch.max_restarts=0")
    with UnderWay(tmp_path, *long, python=PYTHON) as run:
        run.until_told("steps")
        run.harm(signal.SIGKILL, rank)
        ran = run.ended(60).failed()
    assert f"{['chief 0', 'worker 1'][rank]} was killed by SIGKILL" in ran.err
    assert not left_behind(tmp_path)


@of_horovod
def test_a_run_that_is_killed_goes_on_from_its_checkpoint_to_the_weights_of_one_that_was_not(tmp_path):
    often = ("checkpoint.every_steps=5", "train.steps_per_call=5", "train.deterministic=true")
    dies = f"train.callbacks=[{{_target_: dying.Dies, at: 3, marker: {tmp_path / 'died'}}}]"
    killed = typed(tmp_path / "killed", *TWO, *SMALL, *often, dies).ok()
    assert killed.result["restarts"] == 1
    whole = typed(tmp_path / "whole", *TWO, *SMALL, *often, dies)
    assert whole.result["restarts"] == 0
    assert weights(*killed.run_folders) == weights(*whole.run_folders)
    assert killed.result["val_loss"] == whole.result["val_loss"]


@of_horovod
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed: apt-get install openmpi-bin")
def test_places_of_an_mpi_job_are_joined_in_the_same_way(tmp_path):
    same = ("train.deterministic=true", "train.global_batch=64")
    here = typed(tmp_path / "here", *TWO, *SMALL, *same)
    placed = ("cluster=mpi", *(word for word in TWO if "hardware" not in word))
    there = typed(tmp_path / "there", *placed, *SMALL, *same, launcher=(*MPIRUN, "-n", "2")).ok()
    assert there.result["hosts"] == 2
    assert weights(*there.run_folders) == weights(*here.run_folders)
