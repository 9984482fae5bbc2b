"""A real Slurm of four nodes that are all this machine, listening on 127.0.0.1, and gone when it is left."""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from pipeline.launch.signals import PR_SET_PDEATHSIG

NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
# Nodes are of these cores, however many this machine has.
CORES = 4
PATIENCE_SECONDS = 60.0
CONFIG = """
ClusterName=pretend
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
KillWait=8
MinJobAge=300
MessageTimeout=10
SlurmdTimeout=10
{nodes}
PartitionName=all Nodes=n[1-4] Default=YES MaxTime=60 State=UP
"""


def missing() -> str | None:
    """Why there can be no Slurm here, in words; None where there can."""
    absent = [program for program in PROGRAMS if not shutil.which(program, path=path())]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "Slurm's daemons start jobs as root alone"


def path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Slurm:
    """Four nodes, and what they are asked by a person."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path()}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(len(NODES) + 1)]
        ports = [each.getsockname()[1] for each in held]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={CORES} State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        )
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, ports=ports, nodes=nodes))
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for each in held:
            each.close()

    def start(self) -> None:
        """Starts the daemons, and waits until all nodes are there."""
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={self.folder}/munge.{end}" for option, end in files.items()]
        self._daemon("munged", "munged", "--foreground", "--force", "--num-threads=2", *munge)
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-i")
        for node in NODES:
            self.node_up(node)
        self._until(lambda: self.idle() == len(NODES), "nodes")

    def stop(self) -> None:
        """Ends all jobs and then the daemons; returns when nothing of them is left."""
        if "slurmctld" in self._daemons:
            self.ask("scancel", "--user=root", "--full", "--signal=KILL", check=False)
            self.ask("scancel", "--user=root", check=False)
            until = time.monotonic() + 20
            while self.ask("squeue", "-h", check=False).strip() and time.monotonic() < until:
                time.sleep(0.2)
        for name in reversed(self._daemons):
            self._daemons[name].terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in list(self._steps()):
            os.kill(pid, signal.SIGKILL)

    def ask(self, *command: str, check: bool = True, **environ: str) -> str:
        asked = subprocess.run(
            command, env=os.environ | self.environ | environ, capture_output=True, text=True, timeout=60
        )
        assert not check or asked.returncode == 0, f"{command}: {asked.stderr}"
        return asked.stdout

    def jobs(self, what: str = "%i %T") -> list[str]:
        return self.ask("squeue", "-h", "-o", what).splitlines()

    def idle(self) -> int:
        return sum(state == "idle" for state in self.ask("sinfo", "-h", "-N", "-o", "%t", check=False).split())

    def node_down(self, node: str) -> None:
        """Takes a node away as a power cut does: its daemon and all that it has started, at once."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        for pid in list(self._steps(node)):
            os.kill(pid, signal.SIGKILL)
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def node_up(self, node: str) -> None:
        self._daemon(node, "slurmd", "-D", "-N", node)

    def _daemon(self, name: str, program: str, *arguments: str) -> None:
        log = (self.folder / f"{name}.out").open("ab")
        found = shutil.which(program, path=path())
        assert found is not None
        with log:
            self._daemons[name] = subprocess.Popen(
                [found, *arguments],
                env=os.environ | self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    def _steps(self, node: str = "") -> Iterator[int]:
        """The daemons of steps, of which there is one for each step and node, and what they have started."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environ = process.environ()
                ours = environ.get("SLURM_CONF", "").startswith(str(self.folder))
                there = environ.get("SLURMD_NODENAME", "")
                if ours and (there == node if node else bool(there) or process.name() == "slurmstepd"):
                    yield process.pid

    def _until(self, reached: object, what: str) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        assert callable(reached)
        while not reached():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            logs = {name: (self.folder / f"{name}.out").read_text()[-500:] for name in ended}
            assert not ended, f"{logs}"
            assert time.monotonic() < until, f"Expected {what} of Slurm to come up: {self.ask('sinfo', check=False)}"
            time.sleep(0.1)


@contextmanager
def pretend_slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        slurm = Slurm(Path(folder))
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()
