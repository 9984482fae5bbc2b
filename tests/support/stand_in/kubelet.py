"""Takes pods onto one pretended node, starts what their containers say as processes, and tells how that goes.

A container is a process in namespaces of its own for the network, mounts, processes and the host's name. Its root
holds the machine's programs, Python's environment and this checkout, which are the image, and what the manifest mounts;
nothing else. What the manifest says of users, capabilities and read-only file systems holds; of resources the sums.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from pipeline.launch.kubernetes.jobset import bytes_of
from stand_in.controllers import PODS, SERVICES, Made, Objects, condition, now
from stand_in.network import Network

ROOT = Path(__file__).resolve().parents[3]
# What a container sees of the machine.
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "dev", "sys", "proc")


@dataclass
class Node:
    """What pods have to share, and where their volumes lie."""

    resources: dict[str, float] = field(default_factory=lambda: {"cpu": 64.0, "memory": 2.0**40})
    labels: dict[str, str] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)
    claims: dict[str, Path] = field(default_factory=dict)


@dataclass
class Running:
    """A pod's process, its namespace, its folder, and when it is killed if it was told to end."""

    process: subprocess.Popen[bytes]
    namespace: str
    folder: Path
    kill_at: float | None = None
    evicted: str | None = None
    killed: bool = False

    def signal(self, number: int) -> None:
        """Sends a signal to the container's first process, with which all others end.

        It is the child of the one that made its namespaces, which waits for it and ends as it does.
        """
        pid, self.killed = self.process.pid, number == signal.SIGKILL
        with contextlib.suppress(OSError, ValueError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            # It may not be made yet.
            for child in map(int, children or [pid]):
                os.kill(child, number)


class Kubelet:
    """The node, and what runs on it."""

    def __init__(self, objects: Objects, network: Network, node: Node, folder: Path, environ: dict[str, str]) -> None:
        self._objects, self._network, self.node, self._folder = objects, network, node, folder
        self._environ = environ
        self.running: dict[str, Running] = {}
        self._waits: dict[str, float] = {}

    def step(self) -> None:
        with self._objects.lock:
            pods = self._objects.all(PODS)
            for pod in pods:
                uid = pod["metadata"]["uid"]
                if uid in self.running:
                    self._look_at(pod, self.running[uid])
                elif "deletionTimestamp" in pod["metadata"]:
                    self._objects.remove(PODS, pod)
                elif pod["status"].get("phase") == "Pending":
                    self._begin(pod, pods)
            self._publish()

    def log(self, pod: Made) -> str:
        path = self._folder / pod["metadata"]["uid"] / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, pod: Made) -> None:
        self.running[pod["metadata"]["uid"]].signal(signal.SIGKILL)

    def evict(self, pod: Made, message: str = "The node was low on resource: memory.") -> None:
        """Takes a pod off the node, as a kubelet does that lacks memory."""
        running = self.running[pod["metadata"]["uid"]]
        running.evicted = message
        condition(pod, "DisruptionTarget", "True", "TerminationByKubelet", message)
        self._end(pod, running)

    def close(self) -> None:
        for running in self.running.values():
            running.signal(signal.SIGKILL)
            running.process.wait()
            self._network.remove(running.namespace)

    def _begin(self, pod: Made, pods: list[Made]) -> None:
        spec, status = pod["spec"], pod["status"]
        if why := self._no_room(pod, pods):
            condition(pod, "PodScheduled", "False", "Unschedulable", why)
            return
        if "nodeName" not in spec:
            spec["nodeName"] = "pretended"
            condition(pod, "PodScheduled", "True", "", "")
        (container,) = spec["containers"]
        if reason := self._not_ready(pod, container):
            _state(pod, container, {"waiting": reason})
            return
        running = self._run(pod, container)
        self.running[pod["metadata"]["uid"]] = running
        status |= {"phase": "Running", "startTime": now()}
        _state(pod, container, {"running": {"startedAt": now()}})

    def _no_room(self, pod: Made, pods: list[Made]) -> str | None:
        """Why no node takes a pod, as the scheduler says it."""
        if "nodeName" in pod["spec"]:
            return None
        used = [other for other in pods if other["metadata"]["uid"] in self.running] + [pod]
        requests = [other["spec"]["containers"][0].get("resources", {}).get("requests", {}) for other in used]
        for name in requests[-1]:
            if sum(bytes_of(one.get(name, "0")) for one in requests) > self.node.resources.get(name, 0):
                return f"0/1 nodes are available: 1 Insufficient {name}."
        if not (pod["spec"].get("nodeSelector") or {}).items() <= self.node.labels.items():
            return "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
        volumes = pod["spec"].get("volumes", ())
        for name in (each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each):
            if name not in self.node.claims:
                return f'0/1 nodes are available: persistentvolumeclaim "{name}" not found.'
        return None

    def _not_ready(self, pod: Made, container: Any) -> dict[str, str] | None:
        """Why a container cannot start yet."""
        uid, namespace, image = pod["metadata"]["uid"], pod["metadata"]["namespace"], container["image"]
        if image not in self.node.images:
            what = f'failed to pull and unpack image "{image}": not found'
            if self._waits.setdefault(uid, time.monotonic()) + 0.5 > time.monotonic():
                return {"reason": "ErrImagePull", "message": what}
            return {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}": {what}'}
        for name in (source["secretRef"]["name"] for source in container.get("envFrom", ())):
            if self._objects.get("secrets", namespace, name) is None:
                return {"reason": "CreateContainerConfigError", "message": f'secret "{name}" not found'}
        context = _context(pod)
        if context.get("runAsNonRoot") and context.get("runAsUser", 0) == 0:
            why = "container has runAsNonRoot and image will run as root"
            return {"reason": "CreateContainerConfigError", "message": why}
        secrets = [each["secret"]["secretName"] for each in pod["spec"].get("volumes", ()) if "secret" in each]
        missing = [name for name in secrets if self._objects.get("secrets", namespace, name) is None]
        return {"reason": "ContainerCreating"} if missing else None

    def _run(self, pod: Made, container: Any) -> Running:
        namespace, address = self._network.add()
        folder = self._folder / pod["metadata"]["uid"]
        folder.mkdir()
        pod["status"]["podIP"] = address
        context, named = _context(pod), f"hostname {pod['spec']['hostname']}"
        script = "\n".join([named, *self._mounts(pod, container, context, folder), _command(container, context)])
        apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, *apart, "sh", "-ec", script],
                env={"PATH": os.environ["PATH"], **self._environ, **self._variables(pod, container)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
            )  # fmt: skip
        return Running(process, namespace, folder)

    def _variables(self, pod: Made, container: Any) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            secret = self._objects.get("secrets", pod["metadata"]["namespace"], source["secretRef"]["name"])
            found |= {name: b64decode(value).decode() for name, value in (secret or {}).get("data", {}).items()}
        return found | {variable["name"]: str(variable["value"]) for variable in container.get("env", ())}

    def _mounts(self, pod: Made, container: Any, context: Any, folder: Path) -> list[str]:
        """The lines that make a container's root, in an order in which none hides what a later one needs."""
        (root := folder / "root").mkdir()
        read_only = context.get("readOnlyRootFilesystem", False)
        lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 root {root}"]
        lines += _image([f"/{name}" for name in SYSTEM if Path("/", name).is_dir()], root, read_only)
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            source, target = self._volume(pod, volumes[mount["name"]], folder), f"{root}{quote(mount['mountPath'])}"
            lines += [f"mkdir -p {target}", f"mount --bind {quote(str(source))} {target}"]
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {target}")
        # Last, since they may lie in a folder that a volume hides.
        python = dict.fromkeys(map(str, (Path(sys.base_prefix), Path(sys.prefix), ROOT)))
        lines += _image(list(python), root, read_only)
        if read_only:
            lines.append(f"mount -o remount,ro {root}")
        return [*lines, f"cd {root}", f"set -- {quote(container.get('workingDir', '/'))}"]

    def _volume(self, pod: Made, volume: Any, folder: Path) -> Path:
        group = pod["spec"].get("securityContext", {}).get("fsGroup", 0)
        if "persistentVolumeClaim" in volume:
            path = self.node.claims[volume["persistentVolumeClaim"]["claimName"]]
        else:
            path = folder / "volumes" / volume["name"]
            path.mkdir(parents=True)
        if "secret" in volume:
            held = self._objects.get("secrets", pod["metadata"]["namespace"], volume["secret"]["secretName"])
            for name, value in (held or {}).get("data", {}).items():
                (path / name).write_bytes(b64decode(value))
                os.chown(path / name, 0, group)
                (path / name).chmod(volume["secret"].get("defaultMode", 0o644))
        os.chown(path, 0, group)
        path.chmod(0o2775)
        return path

    def _look_at(self, pod: Made, running: Running) -> None:
        """Notes how a process has ended, and ends one whose pod was deleted."""
        if "deletionTimestamp" in pod["metadata"] and running.kill_at is None:
            self._end(pod, running)
        if running.process.poll() is None:
            if running.kill_at is not None and time.monotonic() > running.kill_at:
                running.signal(signal.SIGKILL)
            return
        del self.running[pod["metadata"]["uid"]]
        self._network.remove(running.namespace)
        code = 128 + signal.SIGKILL if running.killed else running.process.returncode
        code = 128 - code if code < 0 else code
        pod["status"]["phase"] = "Succeeded" if code == 0 and not running.evicted else "Failed"
        if running.evicted:
            pod["status"] |= {"reason": "Evicted", "message": running.evicted}
        (container,) = pod["spec"]["containers"]
        _state(pod, container, {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}})
        shutil.rmtree(running.folder / "volumes", ignore_errors=True)

    def _end(self, pod: Made, running: Running) -> None:
        running.kill_at = time.monotonic() + pod["spec"].get("terminationGracePeriodSeconds", 30)
        running.signal(signal.SIGTERM)

    def _publish(self) -> None:
        """Has pods know the names that headless Services give to those which they select."""
        records: list[tuple[str, str]] = []
        for service in self._objects.all(SERVICES):
            spec, metadata = service["spec"], service["metadata"]
            headless = spec.get("clusterIP") == "None" and spec.get("publishNotReadyAddresses")
            for pod in self._objects.all(PODS, metadata["namespace"]) if headless else ():
                chosen = spec["selector"].items() <= pod["metadata"].get("labels", {}).items()
                named = pod["spec"].get("subdomain") == metadata["name"]
                if chosen and named and pod["metadata"]["uid"] in self.running:
                    records.append((f"{pod['spec']['hostname']}.{metadata['name']}", pod["status"]["podIP"]))
        self._network.publish(records)


def _context(pod: Made) -> Any:
    return pod["spec"].get("securityContext", {}) | pod["spec"]["containers"][0].get("securityContext", {})


def _image(paths: list[str], root: Path, read_only: bool) -> list[str]:
    lines: list[str] = []
    for path, target in ((path, f"{root}{quote(path)}") for path in paths):
        if Path(path).is_symlink():
            lines.append(f"ln -s {quote(os.readlink(path))} {target}")
            continue
        lines += [f"mkdir -p {target}", f"mount --rbind {quote(path)} {target}"]
        if read_only and path not in ("/dev", "/proc", "/sys"):
            lines.append(f"mount -o remount,bind,ro {target}")
    return lines


def _command(container: Any, context: Any) -> str:
    """The last line: what a container runs, as whom, in its root."""
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    names = {variable["name"]: str(variable["value"]) for variable in container.get("env", ())}

    def expanded(word: str) -> str:
        for name, value in names.items():
            word = word.replace(f"$({name})", value)
        return quote(word)

    user, group = context.get("runAsUser", 0), context.get("runAsGroup", 0)
    who = [f"--reuid={user}", f"--regid={group}", f"--groups={context.get('fsGroup', group)}"]
    if context.get("allowPrivilegeEscalation") is False:
        who.append("--no-new-privs")
    if "ALL" in (context.get("capabilities") or {}).get("drop", ()):
        who += ["--bounding-set=-all", "--inh-caps=-all"]
    words = " ".join(map(expanded, [*container.get("command", ()), *container.get("args", ())]))
    run = f'setpriv {" ".join(who)} sh -c \'cd "$0" && exec "$@"\' "$1" {words}'
    return f'enter=$(command -v chroot)\nexport PATH={quote(path)}\nexec "$enter" . {run}'


def _state(pod: Made, container: Any, state: dict[str, Any]) -> None:
    running = "running" in state
    told = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0, "ready": running}
    pod["status"]["containerStatuses"] = [told | {"state": state}]
