"""A cluster, a collective and views of a package outside the checkout, found by the names it offers them under."""

import json
import os

import pytest
from conftest import ROOT, SUPPORT
from run_events import logged, losses

SMALL = ("model=mlp", "data=digits", "train.steps=6", "measure.steps=0", "tracking=none")
OFFERS = """
[pipeline.clusters]
theirs = theirs:Cluster
broken = theirs:Broken
partial = theirs:Partial
lost = theirs_that_is_gone:Cluster

[pipeline.collectives]
sums = theirs:Sums
broken = theirs:NoSums
half = theirs:HalfOfSums
unlike = theirs:Unlike
lost = theirs_that_is_gone:Sums

[pipeline.engines]
mean = theirs:Mean
fails = theirs:Fails

[pipeline.views]
lines = theirs:Lines
falls = theirs:Falls
"""


@pytest.fixture
def offered(tmp_path):
    """A package's offers and its configs, beside what a person types."""
    site = tmp_path / "site"
    about = site / "theirs-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(OFFERS)
    (site / "theirs.py").write_text((SUPPORT / "theirs.py").read_text())
    conf = tmp_path / "conf" / "cluster"
    conf.mkdir(parents=True)
    for name in ("theirs", "broken", "partial", "lost", "nowhere"):
        (conf / f"{name}.yaml").write_text(f"name: {name}\noptions: {{folders: {tmp_path}/elsewhere}}\n")
    return (f"--config-dir={tmp_path / 'conf'}", *SMALL), {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


THERE = ", to be there, received ModuleNotFoundError"


@pytest.mark.parametrize(("key", "words"), [
    (
        "cluster",
        {
            "nowhere": "is there (broken, env, hosts, kubernetes, local, lost, mpi, partial, slurm, theirs), "
            "received nowhere",
            "lost": f"which a package offers as cluster=lost{THERE}",
            "partial": "Expected cluster=partial to have serve(), received one without. Try cluster=local.",
            "broken": "Expected cluster=broken to work, received KeyError: 'no such partition'. Try cluster",
        },
    ),
    (
        "strategy.collective",
        {
            "rings": "(auto, broken, half, horovod, lost, shared_memory, sums, tensorflow, unlike), received rings",
            "lost": f"which a package offers as strategy.collective=lost{THERE}",
            "broken": "Expected strategy.collective=broken to work, received KeyError: 'no such ring'. Try strat",
            "half": "Expected strategy.collective=half to have sum, received one without. Try strategy.collective=",
        },
    ),
    ("backend", {"torch": "to be one that is there (fails, jax, mean, tensorflow), received torch. Try backend"}),
    ("views", {"[pages]": "views to be one that is there (falls, lines), received pages. Try views=[]."}),
], ids=["cluster", "collective", "backend", "views"])  # fmt: skip
def test_what_is_not_there_or_broken_is_refused_in_a_sentence(pipeline, asked, offered, key, words):
    arguments, environ = offered
    typed = ("strategy=mirrored", "workers=2", "hardware=2cpu", f"{key}={','.join(words)}")
    # What is wrong inside of a cluster or a collective shows once it is used.
    used = key in ("cluster", "strategy.collective")
    ran = (pipeline if used else asked)(*["-m"] * (len(words) > 1), *arguments, *typed, **environ)
    ran.failed(1 if used else 2)
    assert not [each for each in words.values() if each not in ran.err], ran.err


MULTI_WORKER = ("strategy=multi_worker", "workers=2", "hardware=2cpu", "train.check=off")


@pytest.mark.slow
def test_a_cluster_a_collective_and_a_view_of_another_package_train_to_the_losses_of_ours(pipeline, offered, tmp_path):
    arguments, environ = offered
    found = []
    for cluster, collective in (("local", "tensorflow"), ("theirs", "sums")):
        pipeline(
            *arguments, *MULTI_WORKER, f"cluster={cluster}", f"strategy.collective={collective}", "views=[lines]",
            f"output_dir={tmp_path / collective}", "train.deterministic=true",
            "train.callbacks=[{_target_: keras.callbacks.EarlyStopping}]", **environ,
        ).ok()  # fmt: skip
        (folder,) = (tmp_path / collective).glob("runs/*")
        found.append(folder)
        told = (folder / "lines.txt").read_text().splitlines()
        assert told[-1] == "end 2"
        assert told[:-1] == [event["event"] for event in logged(folder)][: len(told) - 1]
        assert "finished" in told
    ours, theirs = found
    assert (tmp_path / "elsewhere" / "point-1").is_dir()
    assert losses(ours) == losses(theirs)
    ended = [sorted((event["rank"], event["weights"]) for event in logged(run, "finished")) for run in found]
    assert ended[0] == ended[1]
    validated = [[event["val_loss"] for event in logged(run, "epoch")] for run in found]
    assert validated[0] == validated[1]
    (parameters,) = {event["parameters"] for event in logged(theirs, "built") if event["rank"] == 0}
    sent = [int(line) for line in (tmp_path / "sums" / "sums-1.txt").read_text().split()]
    # Gradients and the loss, each step; what is validated and what callbacks decide goes the same way.
    assert sent.count(4 * (parameters + 1)) == 6
    assert len(sent) > 6
    (told,) = (event["sent_bytes"] for event in logged(theirs, "finished") if event["rank"] == 0)
    assert told == 4 * parameters


@pytest.mark.slow
def test_a_collective_that_adds_otherwise_on_each_rank_ends_the_run_by_name(pipeline, offered):
    arguments, environ = offered
    ran = pipeline(
        *arguments, *MULTI_WORKER, "strategy.collective=unlike", "train.compare_weights_every=2",
        "train.steps_per_call=2", **environ,
    ).failed()  # fmt: skip
    assert "Expected the same weights on all replicas after step 2, received others on rank 1 than on rank 0" in ran.err


def test_a_collective_is_refused_for_workers_that_add_nothing_up(asked, offered):
    arguments, environ = offered
    typed = ("strategy=parameter_server", "workers=2", "hardware=2cpu", "strategy.collective=sums")
    assert "add nothing up, received sums." in asked(*arguments, *typed, **environ).failed(2).err


def test_an_engine_of_another_package_is_measured_trained_and_recorded_like_ours_whatever_else_of_it_fails(
    pipeline, offered
):
    arguments, environ = offered
    small = [given for given in arguments if given != "measure.steps=0"]
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
