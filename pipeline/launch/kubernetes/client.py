"""Asks a cluster's API server, through the official client; what it refuses becomes a sentence with what to do.

Looks at the pods of a run now and then, and says why they do not run, and whether waiting is of use.
The client is imported once something is to be made: a plan is printed without it.
"""

import json
import re
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.schema import Object
from pipeline.errors import first_of
from pipeline.launch import LaunchError
from pipeline.launch.kubernetes.jobset import LABEL, TOKEN_FILE, KubernetesOptions, Pods, secret_of

# Group, version and plural of each kind that the client's generic API reaches.
GROUPS = {
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "Job": ("batch", "v1", "jobs"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
}
# Seconds for a connection, and for an answer.
TIMEOUT = {"_request_timeout": (5, 30)}
LOG_LINES = 5
GONE, ENDED = "it was deleted", ("Succeeded", "Failed")
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# Between two looks: while pods are waited for, and once all are there.
SOON_SECONDS, LATER_SECONDS = 1.0, 3.0
# Pods count as waited for until so long after the last `check`.
WAITED_SECONDS = 10.0
MOST_NAMED = 3
# Reasons that no waiting mends, and what to type instead.
NO_START = "another cluster.options.image or cluster.options.workdir"
REMEDIES = {
    "InvalidImageName": "cluster.options.image",
    "ErrImageNeverPull": "cluster.options.image_pull_policy",
    "ImagePullBackOff": "cluster.options.image, and cluster.options.image_pull_secrets where it is private",
    "CreateContainerConfigError": "cluster.options.secrets that are there",
    "CreateContainerError": NO_START,
    "RunContainerError": NO_START,
    "StartError": NO_START,
    "CrashLoopBackOff": "another cluster.options.image",
}


class Client:
    """The API server of a kubeconfig's context, or of the pod that this command runs in. Raises `LaunchError`."""

    def __init__(self, options: KubernetesOptions, environ: Mapping[str, str]) -> None:
        try:
            from kubernetes import client, config, stream
            from kubernetes.client.exceptions import ApiException
        except ImportError as error:
            received, instead = f"none ({error})", "pip install 'kubernetes<37', or mode=plan, which needs none"
            raise LaunchError("the official client of Kubernetes for cluster=kubernetes", received, instead) from error
        self._refused, self._stream, self._library = ApiException, stream, client
        self._configuration = client.Configuration()
        namespace = _configure(config, self._configuration, options.context, environ.get("KUBECONFIG"))
        self.namespace = options.namespace or namespace
        # A server that is down is reported soon, and the follower of a run asks again by itself.
        self._configuration.retries = False
        api = client.ApiClient(self._configuration)
        self._core, self._custom = client.CoreV1Api(api), client.CustomObjectsApi(api)

    def create(self, objects: Sequence[Object], token: bytes) -> None:
        """Creates the objects of a run and the Secret that holds its token; all go when the last object does."""
        owner: dict[str, Any] = objects[-1]
        kind, name = owner["kind"], owner["metadata"]["name"]
        uid = self._create(owner)["metadata"]["uid"]
        reference = {"apiVersion": owner["apiVersion"], "kind": kind, "name": name, "uid": uid}
        secret: Object = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {"name": secret_of(name), "labels": owner["metadata"]["labels"]},
            "data": {TOKEN_FILE: b64encode(token).decode()},
        }
        try:
            for each in (*objects[:-1], secret):
                metadata: Any = each["metadata"]
                self._create(each | {"metadata": {**metadata, "ownerReferences": [reference]}})
        except LaunchError:
            self.delete(kind, name)
            raise

    def _create(self, body: dict[str, Any]) -> Any:
        kind = body["kind"]
        with self._refusals(f"make a {kind}"):
            if kind in GROUPS:
                return self._custom.create_namespaced_custom_object(*self._path(kind), body, **TIMEOUT)
            create = {"Service": self._core.create_namespaced_service, "Secret": self._core.create_namespaced_secret}
            return create[kind](self.namespace, body, **TIMEOUT)

    def pods(self, name: str) -> list[Any]:
        """The pods of a run, as the client has them; of several of one host, the one that was made last comes last."""
        with self._refusals("list pods"):
            chosen = {"label_selector": f"{LABEL}={name}", "resource_version": "0", **TIMEOUT}
            pods = self._core.list_namespaced_pod(self.namespace, **chosen).items
        return sorted(pods, key=lambda pod: (pod.metadata.creation_timestamp, pod.status.phase not in ENDED))

    def failure(self, kind: str, name: str) -> str | None:
        """The reason for which a JobSet or Job has failed, or `GONE`; None while it goes on."""
        try:
            owner = self._custom.get_namespaced_custom_object(*self._path(kind), name, **TIMEOUT)
        except self._refused as error:
            return GONE if error.status == 404 else None
        except Exception:
            # A server that does not answer now may do so again: what runs goes on.
            return None
        for condition in (owner.get("status") or {}).get("conditions") or []:
            if condition["type"] == "Failed" and condition["status"] == "True":
                return f"{condition.get('reason')}: {condition.get('message')}"
        return None

    def last_lines(self, pod: str) -> list[str]:
        """The last lines that a pod's container has written; none if they cannot be had."""
        with suppress(Exception):
            limits = {"tail_lines": LOG_LINES, "_preload_content": False, **TIMEOUT}
            log = self._core.read_namespaced_pod_log(pod, self.namespace, **limits)
            return [line for line in log.data.decode(errors="replace").splitlines() if line.strip()]
        return []

    def forward(self, pod: str, port: int) -> socket.socket:
        """A connection to a port of a pod's loopback interface. Raises `OSError`."""
        # A client of its own: while it opens a stream, it sends all requests of an `ApiClient` that way.
        core = self._library.CoreV1Api(self._library.ApiClient(self._configuration))
        try:
            forwarding = self._stream.portforward(
                core.connect_get_namespaced_pod_portforward, pod, self.namespace, ports=str(port)
            )
        except Exception as error:
            # Over an answer without a body the client stumbles; what it was about to raise is behind that.
            hidden = isinstance(error, AttributeError) and isinstance(error.__context__, self._refused)
            reason = _line(error.__context__ if hidden else error)
            if re.search(r"\b40[13]\b", reason):
                role = f"a role that may get and create pods/portforward in namespace {self.namespace}"
                remedy = "one that may, or cluster.options.conductor=HOST, an address of this machine that pods reach"
                raise PermissionError(str(LaunchError(role, reason, remedy))) from error
            raise OSError(f"there is no way to its agent ({reason})") from error
        # What the client wraps it in only keeps options of TCP from a socket that is none.
        connection: socket.socket = forwarding.socket(port)._socket
        return connection

    def delete(self, kind: str, name: str) -> None:
        """Deletes a JobSet or Job, and with it all that it owns. One that is gone already is no error."""
        with self._refusals(f"delete {kind} {name}"):
            try:
                how = {"propagation_policy": "Foreground", **TIMEOUT}
                self._custom.delete_namespaced_custom_object(*self._path(kind), name, **how)
            except self._refused as error:
                if error.status != 404:
                    raise

    def _path(self, kind: str) -> tuple[str, str, str, str]:
        group, version, plural = GROUPS[kind]
        return group, version, self.namespace, plural

    @contextmanager
    def _refusals(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            status, reason, where = getattr(error, "status", None), _line(error), f"namespace {self.namespace}"
            unknown = status == 404 and "namespaces" not in reason and action == "make a JobSet"
            reason = "an answer that it knows none" if unknown else reason
            remedy = next(remedy for applies, remedy in (
                (status == 401, "kubectl get pods, which logs you in where that is how your cluster is entered"),
                (status == 403 and "networkpolicies" in reason,
                 "cluster.options.network_policy=false, in a network that others do not reach"),
                (status == 403, f"a role that may {action} in {where}, or another cluster.options.namespace"),
                (status == 404 and "namespaces" in reason, "a cluster.options.namespace that is there"),
                (unknown, "cluster.options.kind=job, or have the JobSet controller installed (jobset.sigs.k8s.io)"),
                (status == 409, "another cluster.options.name, or null"),
                (not status, "kubectl get pods, and cluster.options.context for another cluster"),
                (True, "mode=plan, which prints what was to be made"),
            ) if applies)  # fmt: skip
            raise LaunchError(f"the Kubernetes cluster to {action} in {where}", reason, remedy) from error


def _configure(config: Any, configuration: Any, context: str | None, file: str | None) -> str:
    """Fills in the API server's address and the login; returns the namespace of the context."""
    try:
        try:
            config.load_kube_config(file or None, context, client_configuration=configuration)
            contexts, active = config.list_kube_config_contexts(file or None)
            chosen = next((each for each in contexts if each["name"] == context), active)
            return str(chosen["context"].get("namespace") or "default")
        except config.ConfigException:
            if context is not None or not OWN_NAMESPACE.exists():
                raise
            config.load_incluster_config(client_configuration=configuration)
            return OWN_NAMESPACE.read_text().strip()
    except (config.ConfigException, OSError, KeyError, TypeError) as error:
        instead = "KUBECONFIG=FILE, cluster.options.context=NAME, or mode=plan, which needs none"
        raise LaunchError("a kubeconfig that says where the Kubernetes cluster is", _line(error), instead) from error


def _line(error: BaseException | None) -> str:
    try:
        text = str(json.loads(getattr(error, "body", None) or "")["message"])
    except (TypeError, ValueError, KeyError):
        text = str(getattr(error, "reason", None) or error)
    return _short(text, 500)


def _short(text: str | None, most: int = 300) -> str:
    return " ".join((text or "").split()).rstrip(".")[:most]


@dataclass(frozen=True)
class PodState:
    """A pod: its host's name, its own and its id, its state, in words why, and the remedy if it will never run so."""

    host: str
    name: str
    uid: str
    running: bool = False
    ended: bool = False
    words: str = ""
    remedy: str | None = None


def state_of(pod: Any) -> PodState:
    """The state of a pod of the official client."""
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    ended = status.phase in ENDED
    words, remedy = ("", None) if status.phase == "Succeeded" else _ending(status) if ended else _waiting(status)
    running = status.phase == "Running" and metadata.deletion_timestamp is None
    return PodState(spec.hostname or metadata.name, metadata.name, metadata.uid, running, ended, words, remedy)


def _waiting(status: Any) -> tuple[str, str | None]:
    """(The reason for which a pod does not run yet, what to type if it never will)."""
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"no node takes it ({condition.reason}: {_short(condition.message)})", None
    for container in (each for each in status.container_statuses or () if each.state and each.state.waiting):
        reason, message = container.state.waiting.reason or "", _short(container.state.waiting.message)
        if reason in ("ContainerCreating", "PodInitializing"):
            return "its container is being made", None
        why = f"{reason}: {message}" if message else reason
        if "Pull" in reason or reason == "InvalidImageName":
            return f"its image {container.image} cannot be pulled ({why})", REMEDIES.get(reason)
        return f"its container cannot be started ({why})", REMEDIES.get(reason)
    return ("" if status.phase == "Running" else "no node was chosen for it yet"), None


def _ending(status: Any) -> tuple[str, str | None]:
    if status.reason:
        return f"was {status.reason.lower()} ({_short(status.message)})", None
    for condition in status.conditions or ():
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return f"was taken away ({condition.reason}: {_short(condition.message)})", None
    for end in (each.state.terminated for each in status.container_statuses or () if each.state):
        if end is None:
            continue
        if end.reason == "OOMKilled":
            return "was killed for the memory it used (OOMKilled)", "more cluster.options.memory"
        if end.reason in REMEDIES:
            return f"could not be started ({end.reason}: {_short(end.message)})", REMEDIES[end.reason]
        return f"ended with exit code {end.exit_code}", None
    return "failed", None


class Follower:
    """Looks at the pods of a run in a thread of its own; `warn` gets a sentence for each that ends."""

    def __init__(self, client: Client, pods: Pods, warn: Callable[[str], None] = lambda text: None) -> None:
        self._client, self._pods, self._warn = client, pods, warn
        self._over, self._reported = threading.Event(), set[str]()
        # The states of the last pods by their hosts, and the failure of what owns them, as they were seen together.
        self._seen: tuple[dict[str, PodState], str | None] = {}, None
        self._soon_until = time.monotonic() + WAITED_SECONDS
        self._thread = threading.Thread(target=self._look, name="pods", daemon=True)
        self._thread.start()

    def pod(self, host: str) -> PodState | None:
        """The state of the last pod of a host; None if there is none yet."""
        return self._seen[0].get(host)

    def check(self, absent: Sequence[str], never: Sequence[str]) -> None:
        """Raises `LaunchError` if absent hosts will not come; an end is one for those that were `never` there."""
        self._soon_until = time.monotonic() + WAITED_SECONDS
        states, failure = self._seen
        for state in (states[host] for host in absent if host in states):
            if state.remedy is not None and not state.ended:
                raise LaunchError(f"{state.host} to run", state.words, state.remedy)
        for state in states.values():
            awaited = failure is not None or (state.host in absent and state.host in never)
            if awaited and state.ended and state.words.startswith("ended"):
                lines = " | ".join(self._client.last_lines(state.name)) or "it has written nothing"
                received = f"a pod that {state.words}: {lines.rstrip('.')}"
                instead = f"kubectl logs {state.name}, or another cluster.options.image"
                raise LaunchError(f"{state.host} to run an agent", received, instead)
        if failure is not None:
            expected = f"the {self._pods.kind} {self._pods.name} to go on"
            instead = "the same command again, which goes on from the last checkpoint"
            raise LaunchError(expected, f"that it will not ({failure.rstrip('.')})", instead)

    def waits_for(self, absent: Sequence[str], unreached: Mapping[str, str]) -> str:
        """The reasons, in words, for which hosts are not there yet, or by host, for which they are `unreached`."""
        hosts: dict[str, list[str]] = {}
        for host in absent:
            state = self.pod(host)
            words = "it has no pod yet" if state is None else state.words or unreached.get(host)
            hosts.setdefault(words or "its agent has not answered yet", []).append(host)
        return "; ".join(f"{first_of(named, MOST_NAMED, ', ', ' and')}: {words}" for words, named in hosts.items())

    def close(self) -> None:
        """Looks no more."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            try:
                states = list(map(state_of, self._client.pods(self._pods.name)))
                failure = self._client.failure(self._pods.kind, self._pods.name)
            except LaunchError:
                # The server may be there again later, and agents need it only where it is their way here.
                self._over.wait(SOON_SECONDS)
                continue
            self._seen = {state.host: state for state in states}, failure
            for state in states:
                if state.ended and state.words and state.uid not in self._reported:
                    self._reported.add(state.uid)
                    self._warn(f"{state.host} {state.words}. Kubernetes starts another pod in its place.")
            self._over.wait(SOON_SECONDS if time.monotonic() < self._soon_until else LATER_SECONDS)
