"""Gives each pod a network namespace with an address of its own, and the names that headless Services give.

Addresses are made on this machine only: a bridge without an uplink, and a pair of interfaces for each pod.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from namespaces import Bridge

NAMES = Path("/etc/netns")
CLONE_NEWNET = 0x40000000


def missing() -> str | None:
    """Why there can be no namespaces here, in words; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "setpriv", "mount", "chroot"):
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install iproute2 util-linux"
    name = f"try{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this machine makes no network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


class Network:
    """The bridge that all pods are at, made once there is one; its own address is where the driver is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bridge: Bridge | None = None
        self._free = list(range(1, 250))
        # By their names, the numbers of the namespaces that there are.
        self._namespaces: dict[str, int] = {}

    @property
    def address(self) -> str:
        return self._begun().gateway

    def _begun(self) -> Bridge:
        with self._lock:
            if self._bridge is None:
                self._bridge = Bridge()
                self._bridge.begin()
            return self._bridge

    def add(self) -> tuple[str, str]:
        bridge = self._begun()
        with self._lock:
            number = self._free.pop(0)
            name = bridge.space(number)
            self._namespaces[name] = number
        (NAMES / name).mkdir(parents=True, exist_ok=True)
        # Nobody is asked for what the first file does not have.
        texts = {"hosts": "127.0.0.1 localhost", "resolv.conf": "# no name server", "nsswitch.conf": "hosts: files"}
        for file, text in texts.items():
            (NAMES / name / file).write_text(f"{text}\n")
        return name, bridge.add(number)

    def remove(self, name: str) -> None:
        with self._lock:
            number = self._namespaces.pop(name)
            self._free.append(number)
        self._begun().remove(number)
        shutil.rmtree(NAMES / name, ignore_errors=True)

    def publish(self, records: Iterable[tuple[str, str]]) -> None:
        """Has all namespaces know these names: (name, address)."""
        text = "".join(["127.0.0.1 localhost\n", *(f"{address} {name}\n" for name, address in records)])
        with self._lock:
            for name in self._namespaces:
                # The file itself is mounted over /etc/hosts: it is written anew, not replaced.
                with contextlib.suppress(FileNotFoundError), (NAMES / name / "hosts").open("r+") as hosts:
                    if hosts.read() != text:
                        hosts.seek(0)
                        hosts.write(text)
                        hosts.truncate()

    def close(self) -> None:
        for name in list(self._namespaces):
            self.remove(name)
        if self._bridge is not None:
            self._bridge.close()
        with contextlib.suppress(OSError):
            NAMES.rmdir()


def dial(namespace: str, port: int) -> socket.socket:
    """A connection to a port of a namespace's loopback interface, where a thread of its own goes, and ends."""

    def connect() -> socket.socket:
        with open(f"/run/netns/{namespace}") as where:
            if ctypes.CDLL(None, use_errno=True).setns(where.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        return socket.create_connection(("127.0.0.1", port), timeout=5.0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(connect).result()
