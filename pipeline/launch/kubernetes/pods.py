"""Looks at the pods of a run now and then, and says why they do not run, and whether waiting is of use."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipeline.launch import LaunchError
from pipeline.launch.kubernetes.client import Client
from pipeline.launch.kubernetes.jobset import Pods

# Between two looks: while pods are waited for, and once all are there.
SOON_SECONDS, LATER_SECONDS = 1.0, 3.0
# Pods count as waited for until so long after the last `check`.
WAITED_SECONDS = 10.0
# Hosts that are named in a sentence.
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
MAKING = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class PodState:
    """A pod: its host's name, its own and its id, whether it runs or has ended, and in words why.

    `remedy`: what to type if it will never run as it is.
    """

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
    ended = status.phase in ("Succeeded", "Failed")
    words, remedy = ("", None) if status.phase == "Succeeded" else _ending(status) if ended else _waiting(status)
    running = status.phase == "Running" and metadata.deletion_timestamp is None
    return PodState(spec.hostname or metadata.name, metadata.name, metadata.uid, running, ended, words, remedy)


def _waiting(status: Any) -> tuple[str, str | None]:
    """(The reason for which a pod does not run yet, what to type if it never will)."""
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"no node takes it ({condition.reason}: {_line(condition.message)})", None
    for container in status.container_statuses or ():
        waiting = container.state.waiting if container.state else None
        if waiting is None:
            continue
        reason, message = waiting.reason or "", _line(waiting.message)
        if reason in MAKING:
            return "its container is being made", None
        why = f"{reason}: {message}" if message else reason
        if "Pull" in reason or reason == "InvalidImageName":
            return f"its image {container.image} cannot be pulled ({why})", REMEDIES.get(reason)
        return f"its container cannot be started ({why})", REMEDIES.get(reason)
    return ("" if status.phase == "Running" else "no node was chosen for it yet"), None


def _ending(status: Any) -> tuple[str, str | None]:
    """(The way in which a pod has ended, what to type against that)."""
    if status.reason:
        return f"was {status.reason.lower()} ({_line(status.message)})", None
    for condition in status.conditions or ():
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return f"was taken away ({condition.reason}: {_line(condition.message)})", None
    for container in status.container_statuses or ():
        end = container.state.terminated if container.state else None
        if end is None:
            continue
        if end.reason == "OOMKilled":
            return "was killed for the memory it used (OOMKilled)", "more cluster.options.memory"
        if end.reason in REMEDIES:
            return f"could not be started ({end.reason}: {_line(end.message)})", REMEDIES[end.reason]
        return f"ended with exit code {end.exit_code}", None
    return "failed", None


class Follower:
    """Looks at the pods of a run in a thread of its own; `warn` gets a sentence for each that ends."""

    def __init__(self, client: Client, pods: Pods, warn: Callable[[str], None] = lambda text: None) -> None:
        self._client, self._pods, self._warn = client, pods, warn
        self._lock, self._over = threading.Lock(), threading.Event()
        self._states: dict[str, PodState] = {}
        self._failure: str | None = None
        # Ids of pods whose end was reported.
        self._reported = set[str]()
        self._soon_until = time.monotonic() + WAITED_SECONDS
        self._thread = threading.Thread(target=self._look, name="pods", daemon=True)
        self._thread.start()

    def pod(self, host: str) -> PodState | None:
        """The state of the last pod of a host; None if there is none yet."""
        with self._lock:
            return self._states.get(host)

    def check(self, absent: Sequence[str], never: Sequence[str]) -> None:
        """Raises `LaunchError` if absent hosts will not come; for those that were `never` there, an end is one.

        While it is called, the pods are looked at more often.
        """
        self._soon_until = time.monotonic() + WAITED_SECONDS
        with self._lock:
            states, failure = dict(self._states), self._failure
        for state in (states[host] for host in absent if host in states):
            if state.remedy is not None and not state.ended:
                raise LaunchError(f"{state.host} to run", state.words, state.remedy)
            if state.ended and state.host in never and state.words.startswith("ended"):
                raise self._end_of(state)
        if failure is not None:
            for state in states.values():
                if state.ended and state.words.startswith("ended"):
                    raise self._end_of(state)
            raise LaunchError(
                f"the {self._pods.kind} {self._pods.name} to go on",
                f"that it will not ({failure.rstrip('.')})",
                "the same command again, which goes on from the last checkpoint",
            )

    def waits_for(self, absent: Sequence[str], unreached: Mapping[str, str] = MappingProxyType({})) -> str:
        """The reasons for which hosts are not there yet, in words: hosts with one reason together.

        `unreached` says by host why there is no way to its agent.
        """
        hosts: dict[str, list[str]] = {}
        for host in absent:
            state = self.pod(host)
            words = "it has no pod yet" if state is None else state.words or unreached.get(host)
            hosts.setdefault(words or "its agent has not answered yet", []).append(host)
        return "; ".join(f"{_names(of_reason)}: {words}" for words, of_reason in hosts.items())

    def close(self) -> None:
        """Looks no more."""
        self._over.set()
        self._thread.join()

    def _end_of(self, state: PodState) -> LaunchError:
        lines = " | ".join(self._client.last_lines(state.name)) or "it has written nothing"
        return LaunchError(
            f"{state.host} to run an agent",
            f"a pod that {state.words}: {lines.rstrip('.')}",
            f"kubectl logs {state.name}, or another cluster.options.image",
        )

    def _look(self) -> None:
        while not self._over.is_set():
            try:
                states = list(map(state_of, self._client.pods(self._pods.name)))
                failure = self._client.failure(self._pods.kind, self._pods.name)
            except LaunchError:
                # The server may be there again later, and agents need it only where it is their way here.
                self._over.wait(SOON_SECONDS)
                continue
            with self._lock:
                self._states, self._failure = {state.host: state for state in states}, failure
            for state in states:
                if state.ended and state.words and state.uid not in self._reported:
                    self._reported.add(state.uid)
                    self._warn(f"{state.host} {state.words}. Kubernetes starts another pod in its place.")
            self._over.wait(SOON_SECONDS if time.monotonic() < self._soon_until else LATER_SECONDS)


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).rstrip(".")[:300]


def _names(hosts: Sequence[str]) -> str:
    """The names of hosts, of many the first.

    >>> _names(["a", "b"]), _names(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    more = len(hosts) - MOST_NAMED
    return ", ".join(hosts[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
