"""`cluster=kubernetes`: plans without a cluster, the API server's answers in words, and runs on the tests' stand-in."""

import contextlib
import json
import os
import signal
import time

import pytest
import yaml
from conftest import QUICK, ROOT, SUPPORT, UnderWay, weights
from kubernetes import client
from plans import pods as planned
from stand_in import StandIn
from stand_in.network import missing

from pipeline.config.schema import ClusterConfig
from pipeline.launch import LaunchError
from pipeline.launch.agents import dialling
from pipeline.launch.kubernetes import FILE, KubernetesCluster
from pipeline.launch.kubernetes.client import Client, Follower, state_of
from pipeline.launch.kubernetes.jobset import KubernetesOptions, Pods, manifests, shape_of
from pipeline.record.events import Warned
from pipeline.record.files import Kept
from pipeline.record.log import write_json

IMAGE, TOKEN = "registry.example/pipeline:1", b"6b6579"
HERE = ("cluster=kubernetes", f"cluster.options.image={IMAGE}")
TWO = (
    *QUICK, "strategy=multi_worker", "workers=2", "model=mlp", "data=digits", "train.deterministic=true",
    "train.steps=700", "train.steps_per_call=10", "checkpoint.every_steps=50",
)  # fmt: skip
needs_namespaces = pytest.mark.skipif(missing() is not None, reason=str(missing()))
PLAN = planned()
PODS = Pods("JobSet", "mine", shape_of(PLAN))
KINDS = ("jobsets", "jobs", "pods", "services", "secrets", "networkpolicies")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A stand-in that starts no process: its one image is another."""
    with StandIn(tmp_path / "cluster", "none") as made:
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
        yield made


@pytest.fixture
def running(tmp_path):
    """One that starts processes, with a claim, whose folder nobody but pods sees."""
    (kept := tmp_path / "kept").mkdir()
    with StandIn(tmp_path / "cluster", IMAGE, {"PYTHONPATH": f"{ROOT}:{SUPPORT}"}, claims={"kept": kept}) as made:
        yield made


def make(name: str = "mine", **options) -> Client:
    given = KubernetesOptions(**{"image": IMAGE, "name": name, **options})
    made = Client(given, os.environ)
    made.create(manifests(Pods(given.owner_kind, name, shape_of(PLAN)), given, PLAN.launch), TOKEN)
    return made


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_what_is_made_goes_with_its_jobset_or_job(cluster, kind):
    made = make(kind=kind)
    cluster.wait(lambda: len(made.pods("mine")) == 2)
    top = {"jobset": "JobSet", "job": "Job"}[kind]
    hosts = {state_of(pod).host for pod in made.pods("mine")}
    assert hosts == set(Pods(top, "mine", shape_of(PLAN)).hosts)
    (secret,) = cluster.objects.all("secrets")
    assert (secret["metadata"]["name"], secret["metadata"]["namespace"]) == ("mine-token", "training")
    assert cluster.objects.all("services")[0]["metadata"]["name"] == "mine"
    assert made.failure(top, "mine") is None
    made.delete(top, "mine")
    cluster.wait(lambda: not any(map(cluster.objects.all, KINDS)))
    assert made.failure(top, "mine") == "it was deleted"
    made.delete(top, "mine")


@pytest.fixture
def followed(cluster):
    """Makes a run's objects; what asks how its pods are, to be waited for."""
    with contextlib.ExitStack() as stack:

        def follow(**options):
            follower = stack.enter_context(contextlib.closing(Follower(make(**options), PODS)))
            return follower, lambda reached: cluster.wait(lambda: reached(follower), 20.0)

        yield follow


@pytest.mark.parametrize(("options", "images", "words"), [
    ({}, set(), r"Expected mine-chief-0-0 to run, received its image registry.example/pipeline:1 cannot be "
                r"pulled \(ImagePullBackOff: .*not found\). Try cluster.options.image, and cluster"),
    ({"secrets": ("absent",)}, {IMAGE}, 'CreateContainerConfigError: secret "absent" not found.*'
                                        "Try cluster.options.secrets that are there"),
])  # fmt: skip
def test_a_pod_that_will_never_run_ends_the_run_with_what_to_change(cluster, followed, options, images, words):
    cluster.kubelet.node.images = images
    _, wait = followed(**options)
    with pytest.raises(LaunchError, match=words):
        wait(lambda follower: follower.check(PODS.hosts, PODS.hosts))


@pytest.mark.parametrize(("options", "words"), [
    ({"cpu": 99}, "Insufficient cpu"),
    ({"gpus": 1}, "Insufficient nvidia.com/gpu"),
    ({"claim": "absent"}, 'persistentvolumeclaim "absent" not found'),
    ({"node_selector": {"disk": "ssd"}}, "didn't match Pod's node affinity/selector"),
])  # fmt: skip
def test_a_pod_that_no_node_takes_is_waited_for_and_the_reason_told(followed, options, words):
    follower, wait = followed(**options)
    said = wait(lambda follower: words in (why := follower.waits_for(PODS.hosts, {})) and why)
    assert said.startswith("mine-chief-0-0, mine-worker-0-0: no node takes it (Unschedulable: 0/1 nodes are available")
    follower.check(PODS.hosts, PODS.hosts)


@pytest.mark.parametrize(("spoil", "options", "words"), [
    ({"forbidden": {("create", "secrets")}}, {}, "Expected the Kubernetes cluster to make a Secret in namespace "
     "training, received User .ann. cannot create resource .secrets. .*Try a role that may make a Secret"),
    ({"forbidden": {("create", "jobsets")}}, {}, "to make a JobSet.*Try a role"),
    ({"forbidden": {("create", "networkpolicies")}}, {}, "NetworkPolicy.*Try cluster.options.network_policy=false"),
    ({"unknown": {"jobsets"}}, {}, "received an answer that it knows none. Try cluster.options.kind=job, or"),
    ({"token": "another"}, {}, "received Unauthorized. Try kubectl get pods"),
    ({}, {"namespace": "nowhere"}, "namespace nowhere, received namespaces .nowhere. not found.*that is there"),
    ({}, {"context": "nowhere"}, "Expected a kubeconfig that says where.*Try KUBECONFIG=FILE, cluster"),
])  # fmt: skip
def test_what_the_api_server_refuses_is_a_sentence_with_what_to_do(cluster, spoil, options, words):
    for key, value in spoil.items():
        setattr(cluster.api, key, value)
    with pytest.raises(LaunchError, match=words):
        make(**options)
    # What was made before is not left there.
    cluster.wait(lambda: not any(map(cluster.objects.all, KINDS)))


def test_a_name_that_is_taken_is_refused_and_no_server_is_told_of(cluster):
    make()
    with pytest.raises(LaunchError, match=r"already exists.* Try another cluster.options.name, or null"):
        make()
    cluster.api.close()
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"Expected the Kubernetes cluster to make a JobSet.*Try kubectl get pods"):
        make("other")
    assert time.monotonic() - began < 20.0


def test_what_a_killed_command_has_left_for_a_run_is_deleted_before_another_makes_its_own(
    cluster, tmp_path, monkeypatch
):
    make("earlier")
    make("anothers")
    write_json(tmp_path / FILE, Pods("JobSet", "earlier", shape_of(PLAN)))
    config = ClusterConfig("kubernetes", options={"image": IMAGE, "name": "mine"})
    mine = KubernetesCluster(config, os.environ)
    mine.end_earlier(tmp_path)
    job = mine.start(PLAN, "point", tmp_path)
    names = {made["metadata"]["name"] for made in cluster.objects.all("jobsets")}
    assert names == {"anothers", "mine"}
    said = cluster.wait(lambda: [event.text for event in job.events(0.1) if isinstance(event, Warned)], 10.0)
    assert "The pods of earlier, which an earlier command had left, were deleted." in said
    # Who attaches to it follows what it has made, and finds no agent of it here.
    monkeypatch.setattr(dialling, "ATTACH_SECONDS", 2.0)
    other = KubernetesCluster(config, os.environ)
    assert not other.attach(tmp_path)
    assert Kept.read(tmp_path).token.encode() == other.agents.endpoint.token == mine.agents.endpoint.token
    other.leave()
    other.close(0)
    job.stop(0.0)
    mine.close(1)
    cluster.wait(lambda: [made["metadata"]["name"] for made in cluster.objects.all("jobs")] == [
        "anothers-chief-0", "anothers-worker-0",
    ])  # fmt: skip


def test_a_role_that_may_not_forward_ports_is_told_what_it_lacks(cluster):
    made = make()
    (pod, _) = cluster.wait(lambda: len(made.pods("mine")) == 2 and made.pods("mine"))
    cluster.api.forbidden.add(("get", "pods/portforward"))
    with pytest.raises(OSError, match=r"Expected a role that may get and create pods/portforward .*conductor=HOST"):
        made.forward(pod.metadata.name, 2221)
    cluster.api.forbidden.clear()
    # One whose pod does not run yet is tried again.
    with pytest.raises(OSError, match="there is no way to its agent"):
        made.forward(pod.metadata.name, 2221)


def ended(**status) -> client.V1Pod:
    """A pod that has failed, as the official client has it."""
    return client.V1Pod(
        metadata=client.V1ObjectMeta(name="mine-0-x", uid="1"),
        spec=client.V1PodSpec(containers=[], hostname="mine-0"),
        status=client.V1PodStatus(phase="Failed", **status),
    )


def test_how_a_pod_has_ended_is_said_by_its_reason():
    def terminated(code, reason):
        state = client.V1ContainerState(terminated=client.V1ContainerStateTerminated(exit_code=code, reason=reason))
        status = client.V1ContainerStatus(name="a", image="i", image_id="", ready=False, restart_count=0, state=state)
        return state_of(ended(container_statuses=[status]))

    evicted = state_of(ended(reason="Evicted", message="The node was low on resource: memory. "))
    assert (evicted.words, evicted.ended) == ("was evicted (The node was low on resource: memory)", True)
    assert terminated(137, "OOMKilled").remedy == "more cluster.options.memory"
    assert terminated(3, "Error").words == "ended with exit code 3"
    gone = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "by b"}
    taken = state_of(ended(conditions=[client.V1PodCondition(**gone)]))
    assert taken.words == "was taken away (PreemptionByScheduler: by b)"


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
@pytest.mark.waits
def test_pods_that_are_killed_and_evicted_are_made_anew_and_weights_are_those_of_a_run_on_this_machine(
    running, tmp_path
):
    # Meanwhile, since pods mostly wait.
    on_this_machine = UnderWay(tmp_path / "here", *TWO)
    # Slow enough to be harmed on the way: each call of ten steps waits a while.
    slow = "train.callbacks=[{_target_: own.pausing, seconds: 0.3}]"
    run = UnderWay(tmp_path, *TWO, *HERE, slow, "cluster.options.claim=kept", KUBECONFIG=str(running.kubeconfig))

    def saved(step: int) -> None:
        running.wait(lambda: run.step("checkpoint") >= step or run.process.poll() is not None, 180.0)

    saved(100)
    # Its conductor killed outright, and another in its place.
    run.kill()
    (folder,) = tmp_path.glob("outputs/runs/*")
    step = run.step("checkpoint")
    run.type("attach", folder.name)
    saved(step + 50)
    # Of what is taken away all save a checkpoint first; of what dies none can.
    (chief,) = running.running("chief")
    running.kubelet.evict(chief)
    running.wait(lambda: run.restarted() or run.process.poll() is not None, 60.0)
    saved(run.step("checkpoint") + 50)
    assert "was asked to leave by SIGTERM to chief 0" in run.restarted()[0]
    # Nothing that was made before is made again.
    made = [event["step"] for event in run.told("steps")]
    assert len(made) == len(set(made))
    (worker,) = running.running("worker")
    running.kubelet.kill(worker)
    ran = run.ended(240.0)
    assert ran.code == 0, ran.out + ran.err + running.describe()
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
    running.wait(lambda: not any(map(running.objects.all, KINDS)))
    assert list((tmp_path / "kept").glob("pipeline/*/checkpoints"))


@needs_namespaces
@pytest.mark.waits
def test_a_job_whose_pods_dial_trains_with_parameter_servers_and_ctrl_c_deletes_all(running, tmp_path):
    run = UnderWay(
        tmp_path, *QUICK, "strategy=parameter_server", "workers=2", "model=mlp", "data=digits", "train.steps=100000",
        "checkpoint.every_steps=100", *HERE, "cluster.options.kind=job",
        f"cluster.options.conductor={running.network.address}", KUBECONFIG=str(running.kubeconfig),
    )  # fmt: skip
    running.wait(lambda: run.step("checkpoint") >= 100 or run.process.poll() is not None, 180.0)
    assert len(running.running()) == 4, running.describe()
    run.harm(signal.SIGINT)
    run.ended(60.0).failed(130)
    running.wait(lambda: not any(map(running.objects.all, KINDS)))
