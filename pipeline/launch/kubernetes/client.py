"""Asks a cluster's API server, through the official client; what it refuses becomes a sentence with what to do.

The client is imported once something is to be made: a plan is printed without it.
"""

import json
import re
import socket
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config.schema import Object
from pipeline.launch import LaunchError
from pipeline.launch.kubernetes.jobset import LABEL, TOKEN_FILE, KubernetesOptions, secret_of

# Group, version and plural of each kind that the client's generic API reaches.
GROUPS = {
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "Job": ("batch", "v1", "jobs"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
}
# Seconds for a connection, and for an answer.
TIMEOUT = {"_request_timeout": (5, 30)}
LOG_LINES = 5
GONE = "it was deleted"
# How the client says that the API server did not open a stream for this user.
FORBIDDEN = re.compile(r"\b40[13]\b")
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Client:
    """The API server of a kubeconfig's context, or of the pod that this command runs in. Raises `LaunchError`."""

    def __init__(self, options: KubernetesOptions, environ: Mapping[str, str]) -> None:
        try:
            from kubernetes import client, config, stream
            from kubernetes.client.exceptions import ApiException
        except ImportError as error:
            raise LaunchError(
                "the official client of Kubernetes for cluster=kubernetes",
                f"none ({error})",
                "pip install 'kubernetes<37', or mode=plan, which needs none",
            ) from error
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
            pods = self._core.list_namespaced_pod(
                self.namespace, label_selector=f"{LABEL}={name}", resource_version="0", **TIMEOUT
            ).items
        return sorted(
            pods, key=lambda pod: (pod.metadata.creation_timestamp, pod.status.phase not in ("Succeeded", "Failed"))
        )

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
        try:
            log = self._core.read_namespaced_pod_log(
                pod, self.namespace, tail_lines=LOG_LINES, _preload_content=False, **TIMEOUT
            )
            return [line for line in log.data.decode(errors="replace").splitlines() if line.strip()]
        except Exception:
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
            if FORBIDDEN.search(reason):
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
        """Turns a refusal of the API server, or no answer, into a `LaunchError` that says what to do."""
        try:
            yield
        except Exception as error:
            status, reason, where = getattr(error, "status", None), _line(error), f"namespace {self.namespace}"
            remedy = "mode=plan, which prints what was to be made"
            if status == 401:
                remedy = "kubectl get pods, which logs you in where that is how your cluster is entered"
            elif status == 403 and "networkpolicies" in reason:
                remedy = "cluster.options.network_policy=false, in a network that others do not reach"
            elif status == 403:
                remedy = f"a role that may {action} in {where}, or another cluster.options.namespace"
            elif status == 404 and "namespaces" in reason:
                remedy = "a cluster.options.namespace that is there"
            elif status == 404 and action == "make a JobSet":
                reason = "an answer that it knows none"
                remedy = "cluster.options.kind=job, or have the JobSet controller installed (jobset.sigs.k8s.io)"
            elif status == 409:
                remedy = "another cluster.options.name, or null"
            elif not status:
                remedy = "kubectl get pods, and cluster.options.context for another cluster"
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
        raise LaunchError(
            "a kubeconfig that says where the Kubernetes cluster is",
            _line(error),
            "KUBECONFIG=FILE, cluster.options.context=NAME, or mode=plan, which needs none",
        ) from error


def _line(error: BaseException | None) -> str:
    """An error in one line: the API server's own message if it sent one."""
    body = getattr(error, "body", None)
    try:
        text = str(json.loads(body or "")["message"])
    except (TypeError, ValueError, KeyError):
        text = str(getattr(error, "reason", None) or error)
    return " ".join(text.split()).rstrip(".")[:500]
