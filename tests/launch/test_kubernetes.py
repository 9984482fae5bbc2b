"""`cluster=kubernetes`: plans printed without a cluster, and runs whose pods are what the manifests say."""

import json
import signal

import pytest
import yaml
from conftest import QUICK, ROOT, SUPPORT
from run_events import weights
from stand_in.cluster import StandIn
from stand_in.network import missing
from under_way import UnderWay

IMAGE = "registry.example/me/pipeline:1"
HERE = ("cluster=kubernetes", f"cluster.options.image={IMAGE}")
TWO = (
    *QUICK, "strategy=multi_worker", "workers=2", "model=mlp", "data=digits", "train.deterministic=true",
    "train.steps=700", "train.steps_per_call=10", "checkpoint.every_steps=50",
)  # fmt: skip
needs_namespaces = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def cluster(tmp_path):
    """A stand-in with a claim, whose folder nobody but pods sees."""
    kept = tmp_path / "kept"
    kept.mkdir()
    with StandIn(tmp_path / "cluster", IMAGE, {"PYTHONPATH": f"{ROOT}:{SUPPORT}"}, claims={"kept": kept}) as made:
        yield made


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_a_plan_prints_what_would_be_made_without_a_cluster_or_its_client(asked, tmp_path, kind):
    # Whoever imports the client finds none.
    (tmp_path / "kubernetes.py").write_text("raise ImportError('there is none')")
    given = ("mode=plan", "strategy=multi_worker", "workers=4", *HERE, f"cluster.options.kind={kind}")
    ran = asked(*given, KUBECONFIG=str(tmp_path / "none")).ok()
    kinds = {"jobset": ["NetworkPolicy", "JobSet"], "job": ["NetworkPolicy", "Service", "Job"]}[kind]
    _, _, text = ran.out.partition("\n# The Secret")
    assert [each["kind"] for each in yaml.safe_load_all(f"# {text}".partition("\n\n")[0])] == kinds
    shown = " ".join(ran.out.split())
    assert "4 (1 chief, 3 workers) on 4 hosts" in shown
    # What a pod's address is, no key of the config says.
    assert "Keep others out of this network." in shown


def test_a_run_without_an_image_or_the_client_says_what_to_do(asked, tmp_path):
    ran = asked("strategy=multi_worker", "workers=2", "cluster=kubernetes", "tracking=none").failed(2)
    assert "Expected an image that pods run, received none. Try cluster.options.image=..." in " ".join(ran.err.split())
    (tmp_path / "kubernetes.py").write_text("raise ImportError('there is none')")
    ran = asked("strategy=multi_worker", "workers=2", *HERE, "tracking=none").failed(2)
    assert "Expected the official client of Kubernetes" in " ".join(ran.err.split())
    ran = asked("mode=plan", "cluster=kubernetes", "cluster.options.cpus=2")
    assert (ran.code, "cluster.options.cpu" in ran.err) == (2, True)


@needs_namespaces
@pytest.mark.slow
@pytest.mark.waits
def test_pods_that_are_killed_and_evicted_are_made_anew_and_weights_are_those_of_a_run_on_this_machine(
    cluster, tmp_path
):
    # Meanwhile, since pods mostly wait.
    on_this_machine = UnderWay(tmp_path / "here", *TWO)
    # Slow enough to be harmed on the way: each call of ten steps waits a while.
    slow = "train.callbacks=[{_target_: own.Pausing, seconds: 0.3}]"
    run = UnderWay(tmp_path, *TWO, *HERE, slow, "cluster.options.claim=kept", KUBECONFIG=str(cluster.kubeconfig))

    def saved(step: int) -> None:
        cluster.wait(lambda: run.step("checkpoint") >= step or run.process.poll() is not None, 180.0)

    saved(100)
    # Its conductor killed outright, and another in its place.
    run.kill()
    (folder,) = tmp_path.glob("outputs/runs/*")
    step = run.step("checkpoint")
    run.type("attach", folder.name)
    saved(step + 50)
    # Of what is taken away all save a checkpoint first; of what dies none can.
    (chief,) = cluster.running("chief")
    cluster.kubelet.evict(chief)
    cluster.wait(lambda: run.restarted() or run.process.poll() is not None, 60.0)
    saved(run.step("checkpoint") + 50)
    assert "was asked to leave by SIGTERM to chief 0" in run.restarted()[0]
    # Nothing that was made before is made again.
    made = [event["step"] for event in run.told("steps")]
    assert len(made) == len(set(made))
    (worker,) = cluster.running("worker")
    cluster.kubelet.kill(worker)
    ran = run.ended(240.0)
    assert ran.code == 0, ran.out + ran.err + cluster.describe()
    (folder,), (kept,) = ran.run_folders, on_this_machine.ended(240.0).ok().run_folders
    then, now = (json.loads((each / "result.json").read_text()) for each in (kept, folder))
    assert (now["loss"], now["val_loss"], now["metrics"]) == (then["loss"], then["val_loss"], then["metrics"])
    assert weights(kept) == weights(folder) != []
    assert now["restarts"] == 2
    # What was made again after the worker's death alone.
    assert now["steps_repeated"] <= 100
    assert "was evicted (The node was low on resource: memory)" in " ".join(ran.out.split())
    # Logs of both are here, and nothing is left there, but what the claim keeps.
    assert {log.name for log in folder.glob("point-*.log")} == {"point-0.log", "point-1.log"}
    cluster.wait(
        lambda: not any(map(cluster.objects.all, ("jobsets", "jobs", "pods", "services", "secrets", "networkpolicies")))
    )
    assert list((tmp_path / "kept").glob("pipeline/*/checkpoints"))


@needs_namespaces
@pytest.mark.slow
@pytest.mark.waits
def test_a_job_whose_pods_dial_trains_with_parameter_servers_and_ctrl_c_deletes_all(cluster, tmp_path):
    run = UnderWay(
        tmp_path, *QUICK, "strategy=parameter_server", "workers=2", "model=mlp", "data=digits", "train.steps=100000",
        "checkpoint.every_steps=100", *HERE, "cluster.options.kind=job",
        f"cluster.options.conductor={cluster.network.address}", KUBECONFIG=str(cluster.kubeconfig),
    )  # fmt: skip
    cluster.wait(lambda: run.step("checkpoint") >= 100 or run.process.poll() is not None, 180.0)
    assert len(cluster.running()) == 4, cluster.describe()
    run.harm(signal.SIGINT)
    run.ended(60.0).failed(130)
    cluster.wait(lambda: not any(map(cluster.objects.all, ("jobs", "pods", "services", "secrets", "networkpolicies"))))
