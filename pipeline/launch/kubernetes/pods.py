"""Turns what the API server says of a pod into how it is, in words, and whether waiting is of use."""

from dataclasses import dataclass
from typing import Any

# Reasons for which a container waits that no waiting mends, and what to type instead.
WRONG = {
    "InvalidImageName": "cluster.options.image",
    "ErrImageNeverPull": "cluster.options.image_pull_policy",
    "ImagePullBackOff": "cluster.options.image, and cluster.options.image_pull_secrets where it is private",
    "CreateContainerConfigError": "cluster.options.secrets that are there",
    "CreateContainerError": "another cluster.options.image or cluster.options.workdir",
    "RunContainerError": "another cluster.options.image or cluster.options.workdir",
    "StartError": "another cluster.options.image or cluster.options.workdir",
    "CrashLoopBackOff": "another cluster.options.image",
}
MAKING = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class PodState:
    """A pod: its host's name, its own, and which one it is; does it run, has it ended; why not and why, in words.

    `instead`: what to type where it will never run as it is.
    """

    host: str
    name: str
    uid: str
    running: bool = False
    ended: bool = False
    words: str = ""
    instead: str | None = None


def state_of(pod: Any) -> PodState:
    """How a pod of the official client is."""
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    words, instead, phase = "", None, status.phase
    if phase == "Failed":
        words, instead = _ending(status)
    elif phase != "Succeeded":
        words, instead = _waiting(spec, status)
    return PodState(
        host=spec.hostname or metadata.name,
        name=metadata.name,
        uid=metadata.uid,
        running=phase == "Running" and metadata.deletion_timestamp is None,
        ended=phase in ("Succeeded", "Failed"),
        words=words,
        instead=instead,
    )


def _waiting(spec: Any, status: Any) -> tuple[str, str | None]:
    """Why a pod does not run yet, and what to type where it never will."""
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
        said = f"{reason}: {message}" if message else reason
        if "Pull" in reason or reason == "InvalidImageName":
            return f"its image {container.image} cannot be pulled ({said})", WRONG.get(reason)
        return f"its container cannot be started ({said})", WRONG.get(reason)
    return ("" if status.phase == "Running" else "no node was chosen for it yet"), None


def _ending(status: Any) -> tuple[str, str | None]:
    """How a pod has ended, and what to type against that."""
    if status.reason:
        return f"was {status.reason.lower()} ({_line(status.message)})", None
    for condition in status.conditions or ():
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return f"was taken away ({condition.reason}: {_line(condition.message)})", None
    for container in status.container_statuses or ():
        ended = container.state.terminated if container.state else None
        if ended is None:
            continue
        if ended.reason == "OOMKilled":
            return "was killed for the memory it used (OOMKilled)", "more cluster.options.memory"
        if ended.reason in WRONG:
            return f"could not be started ({ended.reason}: {_line(ended.message)})", WRONG[ended.reason]
        return f"ended with exit code {ended.exit_code}", None
    return "failed", None


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).rstrip(".")[:300]
