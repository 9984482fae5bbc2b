"""A Kubernetes that is none: it takes what the official client sends and runs pods as processes in namespaces.

What it does it does as the manifest says: names, environment, user, files, restarts. `api` speaks HTTP,
`controllers` keeps what was made, and makes jobs of JobSets and pods of jobs, `kubelet` starts and ends what pods hold,
`network` gives them addresses and names.

A test starts all of it: `with StandIn(folder, image=...) as cluster: ... cluster.kubeconfig`.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from stand_in.api import Api
from stand_in.controllers import PODS, Controllers, Made, Objects
from stand_in.kubelet import Kubelet, Node
from stand_in.network import Network

STEP_SECONDS = 0.05


class StandIn:
    """A cluster of one pretended node, whose image is this checkout; it sets `environ` for containers."""

    def __init__(self, folder: Path, image: str, environ: Mapping[str, str] | None = None, **node: Any) -> None:
        self.folder = folder
        folder.mkdir()
        self.objects = Objects()
        self.network = Network()
        self.kubelet = Kubelet(self.objects, self.network, Node(images={image}, **node), folder, dict(environ or {}))
        self.api = Api(self.objects, self.kubelet, secrets.token_hex(8))
        self._controllers = Controllers(self.objects)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self.problem: BaseException | None = None
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "stand-in",
            "clusters": [{"name": "here", "cluster": {"server": self.api.address}}],
            "users": [{"name": "ann", "user": {"token": self.api.token}}],
            "contexts": [{"name": "stand-in", "context": {"cluster": "here", "user": "ann", "namespace": "training"}}],
        }))  # fmt: skip

    def __enter__(self) -> "StandIn":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        self._thread.join()
        self.kubelet.close()
        self.network.close()
        self.api.close()
        if self.problem is not None and error is None:
            raise self.problem

    def _live(self) -> None:
        while not self._over.wait(STEP_SECONDS):
            try:
                self._controllers.step()
                self.kubelet.step()
            except BaseException as error:
                self.problem = error
                raise

    def pods(self, kind: str = "") -> list[Made]:
        """The pods whose host's name has a part, in the order in which they were made."""
        return [pod for pod in self.objects.all(PODS) if kind in pod["spec"]["hostname"]]

    def running(self, kind: str = "") -> list[Made]:
        return [pod for pod in self.pods(kind) if pod["metadata"]["uid"] in self.kubelet.running]

    def wait(self, reached: Callable[[], Any], seconds: float = 60.0) -> Any:
        """What becomes true, once it has."""
        until = time.monotonic() + seconds
        while not (found := reached()):
            assert self.problem is None, self.problem
            assert time.monotonic() < until, self.describe()
            time.sleep(0.05)
        return found

    def describe(self) -> str:
        """How pods are, and the last that they wrote."""
        lines = ["it never came"]
        for pod in self.pods():
            lines.append(f"{pod['metadata']['name']}: {pod['status']}")
            lines += [f"    {line}" for line in self.kubelet.log(pod).splitlines()[-15:]]
        return "\n".join(lines)
