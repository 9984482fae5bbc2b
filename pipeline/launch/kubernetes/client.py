"""Asks a cluster's API server, through the official client, and says in a sentence what it answers instead.

The client is imported once something is to be made: a plan is printed without it.
"""

import json
import re
import socket
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config.json import Object
from pipeline.launch.errors import LaunchError
from pipeline.launch.kubernetes.manifest import LABEL, TOKEN_FILE, secret_of
from pipeline.launch.kubernetes.options import Options
from pipeline.launch.kubernetes.pods import PodState, state_of

T = TypeVar("T")
GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
# Seconds for a connection, and for an answer.
TIMEOUT = (5, 30)
LOG_LINES = 5
GONE = "it was deleted"
# How the client says that the API server did not open a stream for who asked.
FORBIDDEN = re.compile(r"\b40[13]\b")
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Client:
    """The API server of a kubeconfig's context, or of the pod that this command runs in. Raises `LaunchError`."""

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
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
        configuration = client.Configuration()
        usual = _configured(config, configuration, options.context, environ.get("KUBECONFIG"))
        self.namespace = options.namespace or usual
        # One that is not there is to be told of soon, and what follows a run asks again by itself.
        configuration.retries = False
        self._configuration = configuration
        api = client.ApiClient(configuration)
        self._core, self._batch = client.CoreV1Api(api), client.BatchV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._makers: dict[str, Callable[..., Any]] = {
            "JobSet": lambda namespace, body, **how: self._custom.create_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, body, **how
            ),
            "Job": self._batch.create_namespaced_job,
            "Service": self._core.create_namespaced_service,
            "NetworkPolicy": client.NetworkingV1Api(api).create_namespaced_network_policy,
            "Secret": self._core.create_namespaced_secret,
        }

    def create(self, objects: Sequence[Object], token: bytes) -> None:
        """Makes what a run is, and the Secret that holds its token. All others go when the last object does."""
        *others, owner = objects
        name = str(owner["metadata"]["name"])  # type: ignore[index,call-overload]
        made = self._make(str(owner["kind"]), owner)
        uid = made["metadata"]["uid"] if owner["kind"] == "JobSet" else made.metadata.uid
        owned = [{"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": name, "uid": uid}]
        labels = owner["metadata"]["labels"]  # type: ignore[index,call-overload]
        secret: Object = {
            "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
            "metadata": {"name": secret_of(name), "labels": labels, "ownerReferences": owned},
            "data": {TOKEN_FILE: b64encode(token).decode()},
        }  # fmt: skip
        try:
            for each in others:
                metadata = {**each["metadata"], "ownerReferences": owned}  # type: ignore[dict-item]
                self._make(str(each["kind"]), each | {"metadata": metadata})
            self._make("Secret", secret)
        except LaunchError:
            self.delete(str(owner["kind"]), name)
            raise

    def _make(self, kind: str, body: Object) -> Any:
        make = self._makers[kind]
        return self._ask(f"make a {kind}", lambda: make(self.namespace, body, _request_timeout=TIMEOUT))

    def pods(self, name: str) -> list[PodState]:
        """How the pods of a run are: of several of one host, the one that was made last comes last."""
        listed = self._ask("list pods", lambda: self._core.list_namespaced_pod(
            self.namespace, label_selector=f"{LABEL}={name}", resource_version="0",
            _request_timeout=TIMEOUT))  # fmt: skip
        states = [(pod.metadata.creation_timestamp, state_of(pod)) for pod in listed.items]
        return [state for _, state in sorted(states, key=lambda made: (made[0], not made[1].ended))]

    def failed(self, kind: str, name: str) -> str | None:
        """Why a JobSet or Job has failed, or that it is not there any more; None while it goes on."""
        try:
            if kind == "JobSet":
                made = self._custom.get_namespaced_custom_object(
                    GROUP, VERSION, self.namespace, PLURAL, name, _request_timeout=TIMEOUT
                )
                conditions = (made.get("status") or {}).get("conditions") or []
            else:
                job = self._batch.read_namespaced_job(name, self.namespace, _request_timeout=TIMEOUT)
                conditions = [condition.to_dict() for condition in job.status.conditions or []]
        except self._refused as error:
            return GONE if error.status == 404 else None
        except Exception:
            # A server that does not answer now may do so again: what runs goes on.
            return None
        said = [each for each in conditions if each["type"] == "Failed" and each["status"] == "True"]
        return f"{said[0].get('reason')}: {said[0].get('message')}" if said else None

    def last_lines(self, pod: str) -> list[str]:
        """The last lines that a pod's container has written; none where they cannot be had."""
        try:
            answer = self._core.read_namespaced_pod_log(
                pod, self.namespace, tail_lines=LOG_LINES, _request_timeout=TIMEOUT, _preload_content=False
            )
            return [line for line in answer.data.decode(errors="replace").splitlines() if line.strip()]
        except Exception:
            return []

    def forward(self, pod: str, port: int) -> socket.socket:
        """A connection to a port of a pod's loopback interface. Raises `OSError`."""
        # Of its own: while it opens a stream, the client sends all requests of an `ApiClient` that way.
        core = self._library.CoreV1Api(self._library.ApiClient(self._configuration))
        try:
            made = self._stream.portforward(
                core.connect_get_namespaced_pod_portforward, pod, self.namespace, ports=str(port)
            )
        except Exception as error:
            # Over an answer without a body the client stumbles; what it was about to raise is behind that.
            hidden = isinstance(error, AttributeError) and isinstance(error.__context__, self._refused)
            said = _line(error.__context__ if hidden else error)
            if FORBIDDEN.search(said):
                raise PermissionError(
                    f"Expected a role that may get and create pods/portforward in namespace {self.namespace}, by which "
                    f"this command reaches pods, received: {said}. Try one that may, or "
                    f"cluster.options.conductor=HOST, an address of this machine that pods reach."
                ) from error
            raise OSError(f"there is no way to its agent ({said})") from error
        # What the client wraps it in only keeps options of TCP from a socket that is none.
        connected: socket.socket = made.socket(port)._socket
        return connected

    def delete(self, kind: str, name: str) -> None:
        """Deletes a JobSet or Job, and with it all that it owns. One that is gone already is no error."""
        how = {"propagation_policy": "Foreground", "_request_timeout": TIMEOUT}
        try:
            if kind == "JobSet":
                self._custom.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name, **how)
            else:
                self._batch.delete_namespaced_job(name, self.namespace, **how)
        except self._refused as error:
            if error.status != 404:
                raise self._words(f"delete {kind} {name}", error) from error
        except Exception as error:
            raise self._words(f"delete {kind} {name}", error) from error

    def _ask(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:
            raise self._words(what, error) from error

    def _words(self, what: str, error: Exception) -> LaunchError:
        """What a person can do about an answer, or about none."""
        status = getattr(error, "status", None)
        said, where = _line(error), f"namespace {self.namespace}"
        if status == 401:
            instead = "Try kubectl get pods, which logs you in where that is how your cluster is entered."
        elif status == 403 and "networkpolicies" in said:
            instead = "Try cluster.options.network_policy=false, in a network that others do not reach."
        elif status == 403:
            instead = f"Try a role that may {what} in {where}, or another cluster.options.namespace."
        elif status == 404 and "namespaces" in said:
            instead = "Try a cluster.options.namespace that is there."
        elif status == 404 and what == "make a JobSet":
            said = "an answer that it knows none"
            instead = "Try cluster.options.kind=job, or have the JobSet controller installed (jobset.sigs.k8s.io)."
        elif status == 409:
            instead = "Try another cluster.options.name, or null."
        elif not status:
            instead = "Try kubectl get pods, and cluster.options.context for another cluster."
        else:
            instead = "Try mode=plan, which prints what was to be made."
        return LaunchError(f"Expected the Kubernetes cluster to {what} in {where}, received: {said}. {instead}")


def _configured(config: Any, configuration: Any, context: str | None, file: str | None) -> str:
    """Fills in where the API server is and who asks; the namespace of that."""
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
            f"Expected a kubeconfig that says where the Kubernetes cluster is, received: {_line(error)}. "
            f"Try KUBECONFIG=FILE, cluster.options.context=NAME, or mode=plan, which needs none."
        ) from error


def _line(error: BaseException | None) -> str:
    """What an error says, in one line: the API server's own message where it sent one."""
    body = getattr(error, "body", None)
    try:
        text = str(json.loads(body or "")["message"])
    except (TypeError, ValueError, KeyError):
        text = str(getattr(error, "reason", None) or error)
    return " ".join(text.split()).rstrip(".")[:500]
