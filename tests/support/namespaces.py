"""Hosts for tests: network namespaces of this machine, each with an address, a link that can be cut, and a sshd.

They see the same files and processes, and reach each other through a bridge that only this machine has.
"""

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Bridge:
    """A bridge that only this machine has, and network namespaces at it by number, each with an address of its own."""

    def __init__(self) -> None:
        while True:
            self._tag = secrets.token_hex(2)
            # One of the ranges for tests (RFC 2544), which is nobody's.
            self._prefix = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"
            taken = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
            if self._prefix not in taken and self._tag not in taken:
                break
        self._name, self.gateway = f"br{self._tag}", f"{self._prefix}.1"

    def begin(self) -> None:
        ip("link", "add", self._name, "type", "bridge")
        ip("address", "add", f"{self.gateway}/24", "dev", self._name)
        ip("link", "set", self._name, "up")

    def space(self, number: int) -> str:
        return f"ns{self._tag}{number}"

    def link(self, number: int) -> str:
        """The end that this machine has of a namespace's link; the other one is eth0 there."""
        return f"v{self._tag}{number}"

    def add(self, number: int) -> str:
        """Makes a namespace; returns its address."""
        space, here, there = self.space(number), self.link(number), f"n{self._tag}{number}"
        address = f"{self._prefix}.{number + 1}"
        ip("netns", "add", space)
        ip("link", "add", here, "type", "veth", "peer", "name", there)
        ip("link", "set", here, "master", self._name, "up")
        ip("link", "set", there, "netns", space)
        for command in (
            ("link", "set", "lo", "up"),
            ("link", "set", there, "name", "eth0"),
            ("address", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            ip("-n", space, *command)
        return address

    def remove(self, number: int) -> None:
        subprocess.run(["ip", "link", "del", self.link(number)], capture_output=True)
        subprocess.run(["ip", "netns", "del", self.space(number)], capture_output=True)

    def close(self) -> None:
        subprocess.run(["ip", "link", "del", self._name], capture_output=True)


class Hosts(Bridge):
    """So many hosts, by number from 1. `addresses` are theirs, `gateway` is this machine's among them."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__()
        self.folder, self.addresses = folder, list[str]()
        self._servers: list[subprocess.Popen[bytes]] = []
        self._numbers = range(1, count + 1)

    def make(self) -> None:
        self.begin()
        # What sshd wants to be there, where no service has made it.
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host", "client"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / f"{name}_key"], check=True
            )
        shutil.copy(self.folder / "client_key.pub", self.folder / "authorized")
        for number in self._numbers:
            self.addresses.append(self.add(number))
            self._serve(number, self.addresses[-1])

    def cut(self, number: int) -> None:
        ip("link", "set", self.link(number), "down")

    def mend(self, number: int) -> None:
        """Takes it up again, until its sshd is reached: the bridge passes nothing on at first."""
        ip("link", "set", self.link(number), "up")
        self.expect_answer(number)

    def expect_answer(self, number: int, seconds: float = 20.0) -> None:
        """Waits until a host's sshd answers."""
        address, until = self.addresses[number - 1], time.monotonic() + seconds
        typed = ["ssh", "-F", str(self.folder / "ssh"), "-o", "ConnectTimeout=2", address, "true"]
        while subprocess.run(typed, capture_output=True).returncode:
            if time.monotonic() > until:
                raise RuntimeError(f"no sshd at {address}: {(self.folder / f'sshd{number}.log').read_text()}")
            time.sleep(0.1)

    def limit(self, number: int, rate: str, latency: str = "50ms") -> None:
        """Holds a host's link to a rate, as `1gbit`, in both directions; what would wait for longer is dropped."""
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", latency)
        for netns, device in (((), self.link(number)), (("-n", self.space(number)), "eth0")):
            subprocess.run(["tc", *netns, "qdisc", "replace", "dev", device, *shape], check=True)

    def run(self, number: int, *command: str, **given: Any) -> subprocess.CompletedProcess[str]:
        typed = ["ip", "netns", "exec", self.space(number), *command]
        return subprocess.run(typed, capture_output=True, text=True, check=False, **given)

    def options(self, count: int | None = None) -> tuple[str, ...]:
        """What a person types to train on them."""
        named = ",".join(self.addresses[:count])
        return ("cluster=hosts", f"cluster.hosts=[{named}]", f"cluster.options.ssh=[ssh,-F,{self.folder / 'ssh'}]")

    def left(self) -> list[str]:
        """The command lines of processes that are on a host still."""
        found = []
        for pid in self._processes():
            with suppress(psutil.Error):
                line = " ".join(psutil.Process(pid).cmdline())
                if line and "sshd" not in line:
                    found.append(line)
        return found

    def remove_all(self) -> None:
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for number in self._numbers:
            self.remove(number)
        for server in self._servers:
            server.wait()
        self.close()

    def _processes(self) -> Iterator[int]:
        for number in self._numbers:
            listed = subprocess.run(["ip", "netns", "pids", self.space(number)], capture_output=True, text=True)
            yield from map(int, listed.stdout.split())

    def _serve(self, number: int, address: str) -> None:
        config = self.folder / f"sshd{number}"
        config.write_text(
            f"ListenAddress {address}\nHostKey {self.folder / 'host_key'}\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder / 'authorized'}\nStrictModes no\nPasswordAuthentication no\n"
            f"PermitRootLogin prohibit-password\nMaxStartups 100\nAcceptEnv CI_*\n"
        )
        (self.folder / "ssh").write_text(
            f"Host *\n  IdentityFile {self.folder / 'client_key'}\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
            f"  UserKnownHostsFile {self.folder / 'known'}\n  LogLevel ERROR\n"
        )
        typed = ["ip", "netns", "exec", self.space(number), str(SSHD), "-D", "-f", str(config), "-E", f"{config}.log"]
        self._servers.append(subprocess.Popen(typed))


@contextmanager
def made(folder: Path, count: int) -> Iterator[Hosts]:
    """Hosts, until the block ends. Skips the test where they cannot be had."""
    if os.geteuid() or SSHD is None or shutil.which("ip") is None or shutil.which("ssh") is None:
        pytest.skip("Network namespaces need root, and iproute2, openssh-client and openssh-server of the system")
    hosts = Hosts(folder, count)
    try:
        try:
            hosts.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"Network namespaces cannot be had here: {error.stderr or error}")
        for number in hosts._numbers:
            hosts.expect_answer(number)
        yield hosts
    finally:
        hosts.remove_all()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
