"""The objects of the cluster, and what makes jobs and a headless Service of a JobSet, and pods of a job, by manifests.

Sources: the API reference of Kubernetes (Job v1: completionMode, backoffLimit, podFailurePolicy) and that of JobSet.
"""

import copy
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from random import choices
from string import ascii_lowercase
from typing import Any

JOBSETS, JOBS, PODS, SERVICES = "jobsets", "jobs", "pods", "services"
JOBSET = "jobset.sigs.k8s.io"
ENDED = ("Succeeded", "Failed")
Made = dict[str, Any]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Objects:
    """All objects. Whoever looks at several at once, or changes one, holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._made = dict[tuple[str, str, str], Made]()

    def create(self, kind: str, namespace: str, made: Made) -> Made:
        """Keeps a new object. Raises `KeyError` where there is one of that name."""
        with self.lock:
            metadata = made.setdefault("metadata", {})
            key = (kind, namespace, metadata["name"])
            if key in self._made:
                raise KeyError(metadata["name"])
            metadata |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
            made.setdefault("status", {})
            self._made[key] = made
            return made

    def get(self, kind: str, namespace: str, name: str) -> Made | None:
        with self.lock:
            return self._made.get((kind, namespace, name))

    def all(self, kind: str, namespace: str | None = None) -> list[Made]:
        """Those of a kind, in the order in which they were made."""
        with self.lock:
            return [made for (of, where, _), made in self._made.items() if of == kind and namespace in (None, where)]

    def owned(self, owner: Made, kind: str) -> list[Made]:
        return [made for made in self.all(kind) if owner["metadata"]["uid"] in owners(made)]

    def remove(self, kind: str, made: Made) -> None:
        with self.lock:
            metadata = made["metadata"]
            self._made.pop((kind, metadata["namespace"], metadata["name"]), None)

    def delete(self, kind: str, made: Made) -> None:
        """Removes an object; a pod is left to who runs it, which ends it first."""
        if kind == PODS:
            made["metadata"].setdefault("deletionTimestamp", now())
        else:
            self.remove(kind, made)

    def orphans(self) -> Iterator[tuple[str, Made]]:
        """The objects whose owners are all gone."""
        with self.lock:
            there = {made["metadata"]["uid"] for made in self._made.values()}
            for (kind, _, _), made in list(self._made.items()):
                if owners(made) and not owners(made) & there:
                    yield kind, made


def owners(made: Made) -> set[str]:
    return {owner["uid"] for owner in made["metadata"].get("ownerReferences", ())}


def owned_by(owner: Made) -> list[Made]:
    """The owner references of an object that another one makes."""
    metadata = owner["metadata"]
    return [{"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"],
             "uid": metadata["uid"], "controller": True}]  # fmt: skip


def selected(made: Made, labels: str) -> bool:
    """True if an object has the labels that a request selects by."""
    own = made["metadata"].get("labels", {})
    return all(own.get(name) == value for name, _, value in (each.partition("=") for each in labels.split(",") if each))


def condition(made: Made, kind: str, status: str, reason: str, message: str) -> None:
    others = [other for other in made["status"].get("conditions", ()) if other["type"] != kind]
    new = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}
    made["status"]["conditions"] = [*others, new]


def has(made: Made, *kinds: str) -> bool:
    """True if one of some conditions of an object is true."""
    return any(other["type"] in kinds and other["status"] == "True" for other in made["status"].get("conditions", ()))


class Controllers:
    """Looks at all jobsets and jobs, and takes a step towards what they want. `backoff`: seconds before another pod."""

    def __init__(self, objects: Objects, backoff: float = 0.5) -> None:
        self._objects, self._backoff = objects, backoff
        self._ended_at: dict[str, float] = {}

    def step(self) -> None:
        with self._objects.lock:
            for jobset in self._objects.all(JOBSETS):
                self._jobset(jobset)
            for job in self._objects.all(JOBS):
                self._job(job)
            for kind, orphan in list(self._objects.orphans()):
                self._objects.delete(kind, orphan)

    def _jobset(self, jobset: Made) -> None:
        name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
        spec = jobset["spec"]
        if has(jobset, "Completed"):
            return
        network = spec.get("network", {})
        subdomain = network.get("subdomain", name)
        if network.get("enableDNSHostnames", True) and not self._objects.get(SERVICES, namespace, subdomain):
            service = {
                "apiVersion": "v1", "kind": "Service",
                "metadata": {"name": subdomain, "ownerReferences": owned_by(jobset)},
                "spec": {
                    "clusterIP": "None", "selector": {f"{JOBSET}/jobset-name": name},
                    "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
                },
            }  # fmt: skip
            self._objects.create(SERVICES, namespace, service)
        jobs = self._objects.owned(jobset, JOBS)
        assert not any(has(job, "Failed") for job in jobs), "no JobSet begins anew here"
        for replicated in spec["replicatedJobs"]:
            for number in range(replicated.get("replicas", 1)):
                if not self._objects.get(JOBS, namespace, f"{name}-{replicated['name']}-{number}"):
                    self._make_job(jobset, replicated, number, subdomain)
        wanted = sum(each.get("replicas", 1) for each in spec["replicatedJobs"])
        if len(jobs) == wanted and all(has(job, "Complete") for job in jobs):
            condition(jobset, "Completed", "True", "AllJobsCompleted", "jobset completed successfully")

    def _make_job(self, jobset: Made, replicated: Any, number: int, subdomain: str) -> None:
        name = jobset["metadata"]["name"]
        labels = {
            f"{JOBSET}/jobset-name": name, f"{JOBSET}/replicatedjob-name": replicated["name"],
            f"{JOBSET}/job-index": str(number),
        }  # fmt: skip
        job = copy.deepcopy(replicated["template"])
        template = job["spec"]["template"]
        template["spec"]["subdomain"] = subdomain
        template.setdefault("metadata", {})["labels"] = template.get("metadata", {}).get("labels", {}) | labels
        metadata = {"name": f"{name}-{replicated['name']}-{number}", "labels": labels}
        job |= {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata | {"ownerReferences": owned_by(jobset)}}
        self._objects.create(JOBS, jobset["metadata"]["namespace"], job)

    def _job(self, job: Made) -> None:
        if has(job, "Complete", "Failed"):
            return
        spec, status = job["spec"], job["status"]
        pods = self._objects.owned(job, PODS)
        failed = status.setdefault("failed", 0)
        reason = None
        for pod in pods:
            if pod["status"].get("phase") == "Failed" and not pod["metadata"].get("counted"):
                pod["metadata"]["counted"] = True
                action = _action(spec, pod)
                failed += action != "Ignore"
                reason = "PodFailurePolicy" if action == "FailJob" else reason
                self._ended_at[job["metadata"]["uid"]] = time.monotonic()
        status["failed"] = failed
        if reason or failed > spec.get("backoffLimit", 6):
            condition(job, "Failed", "True", reason or "BackoffLimitExceeded", "Job has failed for its pods")
            for pod in pods:
                if pod["status"].get("phase") not in ENDED:
                    self._objects.delete(PODS, pod)
            return
        there = {_index(pod) for pod in pods if pod["status"].get("phase") != "Failed"}
        # With a pod failure policy, another is made once the last one has ended wholly.
        there |= {_index(pod) for pod in pods if "deletionTimestamp" in pod["metadata"]}
        waits = time.monotonic() < self._ended_at.get(job["metadata"]["uid"], 0.0) + self._backoff
        for index in range(spec["completions"]):
            if index not in there and not waits:
                self._make_pod(job, index)
        if sum(pod["status"].get("phase") == "Succeeded" for pod in pods) == spec["completions"]:
            condition(job, "Complete", "True", "CompletionsReached", "")

    def _make_pod(self, job: Made, index: int) -> None:
        assert job["spec"]["completionMode"] == "Indexed", "no other is known here"
        name, template = job["metadata"]["name"], copy.deepcopy(job["spec"]["template"])
        labels = template.get("metadata", {}).get("labels", {}) | {
            "job-name": name, "batch.kubernetes.io/job-name": name,
            "batch.kubernetes.io/job-completion-index": str(index),
        }  # fmt: skip
        spec = template["spec"]
        spec["hostname"] = f"{name}-{index}"
        for container in spec["containers"]:
            container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        metadata = {
            "name": f"{name}-{index}-{''.join(choices(ascii_lowercase, k=5))}", "labels": labels,
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)}, "ownerReferences": owned_by(job),
        }  # fmt: skip
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}
        self._objects.create(PODS, job["metadata"]["namespace"], pod)


def _index(pod: Made) -> int:
    return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


def _action(spec: Any, pod: Made) -> str:
    """The action of the first rule of a job's failure policy that is of a pod's failure; to count it if none is."""
    state = pod["status"].get("containerStatuses", [{}])[0].get("state", {})
    code = state.get("terminated", {}).get("exitCode")
    for rule in (spec.get("podFailurePolicy") or {}).get("rules", ()):
        conditions = [asked["type"] for asked in rule.get("onPodConditions", ()) if asked["status"] == "True"]
        codes = rule.get("onExitCodes", {"operator": "In", "values": ()})
        if (conditions and has(pod, *conditions)) or (code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
    return "Count"
