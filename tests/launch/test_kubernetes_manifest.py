"""What cluster=kubernetes would make, held against the published schemas, and what it says of each wrong option."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from plans import config
from plans import pods as planned
from stand_in.api import validate

from pipeline.config.schema import ClusterConfig
from pipeline.launch import LaunchError, mpi, options_of
from pipeline.launch import hosts as ssh
from pipeline.launch.kubernetes.jobset import KubernetesOptions, Pods, manifests, shape_of, to_yaml
from pipeline.launch.slurm.script import SlurmOptions
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.plan.planning import baseline_of, make

CONF = Path(__file__).resolve().parents[2] / "conf" / "cluster" / "kubernetes.yaml"
# The oldest that a cluster may well have, and the newest that schemas are there for.
VERSIONS = ("1.29", "1.37")
# Every option set to something, none of it what it is by itself.
EVERY = {
    "image": "registry.example:5000/me/pipeline:1@sha256:" + "0" * 64, "name": "mine", "namespace": "training",
    "cpu": 3, "memory": "7Gi", "gpus": 2, "gpu_resource": "amd.com/gpu", "shm": "2Gi", "claim": "kept",
    "claim_path": "/mnt/kept", "workdir": "/app", "user": 4321, "secrets": ["s3"], "env": {"LEVEL": 2, "TEXT": "a: b"},
    "mlflow": "https://mlflow.example/x", "image_pull_policy": "Always", "image_pull_secrets": ["pull"],
    "node_selector": {"disk": "ssd"}, "tolerations": [{"key": "gpu", "operator": "Exists"}], "priority_class": "low",
    "labels": {"kueue.x-k8s.io/queue-name": "ours"}, "annotations": {"note": "two\nlines"},
    "network_policy": True, "port": 5000, "ttl": 60,
}  # fmt: skip


def pods(plan: Plan, kind: str = "JobSet") -> Pods:
    return Pods(kind, "mine", shape_of(plan))


def made(plan: Plan, dialled: str | None = None, **given: Any) -> list[dict[str, Any]]:
    """The objects to create, as one who reads the YAML sees them."""
    usual = {"name": "mine", "image": "here/pipeline:1"}
    chosen = options_of(ClusterConfig("kubernetes", options={**usual, **given}), KubernetesOptions)
    objects = manifests(pods(plan, chosen.owner_kind), chosen, plan.launch, dialled)
    return list(yaml.safe_load_all(to_yaml(objects)))


def pod_specs(objects: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The pods of each job, and what their one container is."""
    jobs = [each["template"] for each in objects[-1]["spec"].get("replicatedJobs", [{"template": objects[-1]}])]
    specs = [job["spec"]["template"]["spec"] for job in jobs]
    return [(spec, *spec["containers"]) for spec in specs]


@pytest.mark.parametrize("kind", ["jobset", "job"])
@pytest.mark.parametrize("options", [{}, EVERY], ids=["usual", "every"])
@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server", "mirrored"])
def test_what_is_made_is_what_the_published_schemas_allow_and_a_key_that_they_do_not_know_is_not(
    kind, options, strategy
):
    *_, owner = objects = made(planned(strategy), **options | {"kind": kind})
    for each in objects:
        validate(each, *VERSIONS)
    job = owner if kind == "job" else owner["spec"]["replicatedJobs"][0]["template"]
    job["spec"]["completion"] = 1
    with pytest.raises((kubernetes_validate.ValidationError, AssertionError)):
        validate(owner, *VERSIONS)


def test_a_pod_is_a_host_and_names_are_those_that_the_headless_service_gives():
    plan = planned("multi_worker", 4, cores=2)
    addresses = ["mine-chief-0-0.mine:2222", "mine-worker-0-0.mine:2222"]
    assert pods(plan).addresses(pods(plan).ranks(plan), 2222) == addresses
    plan = planned("parameter_server", 2)
    assert [role.role for role in plan.processes] == ["coordinator", "worker", "worker", "parameter server"]
    hosts = ["mine-chief-0-0", "mine-worker-0-0", "mine-worker-0-1", "mine-ps-0-0"]
    assert list(pods(plan).ranks(plan)) == pods(plan).hosts == hosts
    # An Indexed Job has them in one row.
    assert pods(plan, "Job").hosts == ["mine-0", "mine-1", "mine-2", "mine-3"]
    # The baseline runs where a worker does, and fewer workers on pods that are left.
    for strategy, host in (("multi_worker", "mine-chief-0-0"), ("parameter_server", "mine-worker-0-0")):
        baseline = baseline_of(plan := planned(strategy), Machine("pod", (0,), 4.0, ""))
        assert shape_of(plan).holds(shape_of(baseline))
        assert list(pods(plan).ranks(baseline)) == [host]
    left = ["mine-chief-0-0", "mine-worker-0-1", "mine-worker-0-0"]
    ranks = pods(planned("multi_worker", 3)).ranks(planned("multi_worker", 2), left)
    assert ranks == {"mine-chief-0-0": [0], "mine-worker-0-1": [1]}
    # Several processes of a pod have a port each.
    each = config("multi_worker", "auto", 4, strategy__devices_per_process=1, hardware__hosts=2)
    plan = make(each, Machine("pod", (0, 1), 4.0, "", hosts=2))
    chief, worker = "mine-chief-0-0.mine", "mine-worker-0-0.mine"
    expected = [f"{chief}:2222", f"{chief}:2223", f"{worker}:2222", f"{worker}:2223"]
    assert pods(plan).addresses(pods(plan).ranks(plan), 2222) == expected


def test_a_replicated_job_for_each_kind_has_as_many_pods_as_the_plan_has_hosts_and_thousands_take_no_more_text():
    plan = planned("parameter_server", 8, gpus=1)
    policy, jobset = made(plan, gpus=1)
    # Those that train alone have GPUs.
    asked = ["nvidia.com/gpu" in container["resources"]["limits"] for _, container in pod_specs([jobset])]
    assert asked == [False, True, False]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
    counts = {job["name"]: job["template"]["spec"]["completions"] for job in jobset["spec"]["replicatedJobs"]}
    assert counts == {"chief": 1, "worker": 8, "ps": 2}
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == plan.launch.max_restarts
    assert jobset["spec"]["network"]["publishNotReadyAddresses"] is True
    _, service, job = made(plan, kind="job")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 11
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    many, few = (len(to_yaml(made(planned("multi_worker", count)))) for count in (4096, 2))
    assert many - few < 50


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_pods_have_no_rights_that_they_do_not_need(kind):
    for spec, container in pod_specs(made(planned("parameter_server"), kind=kind, claim="kept")):
        assert spec["automountServiceAccountToken"] is False
        rights = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
        assert rights.items() <= spec["securityContext"].items()
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        # All that can be written to is a volume, and the token is not.
        assert [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")] == [
            "/tmp", "/dev/shm", "/data",
        ]  # fmt: skip
        assert not {"serviceAccountName", "hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec["volumes"])


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_no_image_and_no_host_is_named_that_the_config_does_not_name_and_nothing_secret_is_held(kind):
    plan, given = planned("parameter_server"), EVERY | {"kind": kind}
    text = to_yaml(made(plan, "conductor.example:4444", **given))
    known = [*map(str, given.values()), "conductor.example", "pipeline"]
    # Whatever looks like a host with a domain is of the config, or the name of an API.
    apis = ("jobset.x-k8s.io", "app.kubernetes.io", "networking.k8s.io")
    for host in re.findall(r"[a-z0-9-]+(?:\.[a-z0-9-]+)+(?=[:/])", text):
        assert host in apis or any(host in word for word in known), host
    assert "kind: Secret" not in text
    assert not re.search(r"^\s*(data|stringData):", text, re.M)
    for _, container in pod_specs(made(plan, **given)):
        assert container["image"] == given["image"]
        assert not [variable for variable in container["env"] if "TOKEN" in variable["name"]]
        assert "--token-file=/run/pipeline/token" in container["args"]


def test_what_options_say_is_where_it_belongs():
    *_, jobset = objects = made(planned(gpus=2, cores=3, workers=4), **EVERY)
    assert (jobset["metadata"]["namespace"], jobset["spec"]["ttlSecondsAfterFinished"]) == ("training", 60)
    assert jobset["metadata"]["annotations"] == {"note": "two\nlines"}
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "ours"
    for spec, container in pod_specs(objects):
        resources = {"cpu": "3", "memory": "7Gi", "amd.com/gpu": "2"}
        assert container["resources"] == {"limits": resources, "requests": resources}
        environ = {variable["name"]: variable["value"] for variable in container["env"]}
        expected = {"LEVEL": "2", "TEXT": "a: b", "MLFLOW_TRACKING_URI": "https://mlflow.example/x"}
        assert expected.items() <= environ.items()
        assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
        assert (container["workingDir"], container["imagePullPolicy"]) == ("/app", "Always")
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
        assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"disk": "ssd"}, "low")
        assert {"name": "data", "persistentVolumeClaim": {"claimName": "kept"}} in spec["volumes"]
        assert {"name": "data", "mountPath": "/mnt/kept"} in container["volumeMounts"]


@pytest.mark.parametrize(("workers", "cores", "gpus", "strategy", "hosts"), [
    (4, 1, 0, "multi_worker", 4), (4, 2, 0, "multi_worker", 2), (3, 2, 0, "multi_worker", 3),
    (8, 4, 2, "multi_worker", 4), (2, 2, 0, "mirrored", 1), (3, 1, 0, "parameter_server", 3),
    (65_536, 1, 0, "multi_worker", 65_536),
])  # fmt: skip
def test_as_many_pods_are_laid_over_as_the_workers_divide_evenly_over(workers, cores, gpus, strategy, hosts):
    pod = Machine("pod", tuple(range(cores)), 4.0, "", ("GPU",) * gpus, grows=True)
    plan = make(config(strategy, "auto", workers, hardware__hosts=None), pod)
    assert 1 + max(process.host for process in plan.processes) == hosts
    assert plan.workers == workers
    assert not plan.hardware.rehearsal


def test_the_file_of_options_names_each_with_what_it_means_and_all_are_as_the_program_has_them():
    text = CONF.read_text()
    given = yaml.safe_load(text)["options"]
    assert list(given) == [field.name for field in dataclasses.fields(KubernetesOptions)]
    usual = {name: getattr(KubernetesOptions(), name) for name in given}
    assert {name: usual[name] if value in ({}, []) else value for name, value in given.items()} == usual
    for name in given:
        assert re.search(rf"^  {name}: .* # \S", text, re.M), name


@pytest.mark.parametrize(("kind", "name", "value"), [
    *((KubernetesOptions, *row) for row in (
        ("image", "two words"), ("kind", "pod"), ("name", "Mine_1"), ("namespace", "a b"), ("cpu", 0), ("cpu", "two"),
        ("cpu", None), ("memory", "4 GB"), ("memory", "0"), ("gpus", True), ("user", 0), ("claim_path", "/../etc"),
        ("secrets", "mine"), ("env", {"A B": "c"}), ("mlflow", "http://ann:secret@there"), ("conductor", "a b:1"),
        ("conductor", "host:70000"), ("port", 80), ("timeout", -1), ("imgae", "x"), ("context", " "), ("shm", "1Ki\n"),
        ("tolerations", ["gpu"]), ("labels", {"": "x"}), ("network_policy", "no"), ("ttl", -1),
        ("image_pull_policy", "X"),
    )),
    *((SlurmOptions, *row) for row in (
        ("nodse", 2), ("nodes", "two"), ("nodes", 0), ("time", "soon"), ("extra", ["high"]), ("partition", "a\nb"),
        ("conductor", "login1:99999"), ("modules", "cuda"),
    )),
    *((ssh.HostsOptions, *row) for row in (
        ("conductor", "here:port"), ("conductor", ":1"), ("timeout", 0), ("ssh", []),
    )),
    # Whatever is wrong, what is offered is accepted.
    *((kind, field.name, object()) for kind in (KubernetesOptions, SlurmOptions, ssh.HostsOptions, mpi.MpiOptions)
      for field in dataclasses.fields(kind)),
])  # fmt: skip
def test_an_option_that_is_wrong_is_refused_by_its_name_and_another_offered(kind, name, value):
    with pytest.raises(LaunchError) as refused:
        options_of(ClusterConfig("any", options={name: value}), kind)
    key, _, offered = refused.value.try_this.partition("=")
    meant = {"imgae": "image, as in conf", "nodse": "nodes, as in conf"}.get(name, name)
    assert key.startswith(f"cluster.options.{meant}")
    if meant == name:
        options_of(ClusterConfig("any", options={name: yaml.safe_load(offered.strip("'"))}), kind)
