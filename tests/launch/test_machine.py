"""What a machine has (files and commands are made up) and gives its processes, from a fork server that may stay."""

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, came, until

from pipeline.driver.watch import BUSY_SHARE
from pipeline.errors import UserError
from pipeline.launch import child, local, standby, this_machine
from pipeline.record.events import Failed
from pipeline.record.log import from_line

ALLOWED = tuple(sorted(os.sched_getaffinity(0)))
SECONDS = 2.0
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
on_jax = pytest.mark.skipif(
    find_spec("jax") is None or platform.libc_ver()[0] != "glibc", reason="there is no jax, or no glibc"
)
# Prints the share of a core that it has used, and the share that counts.
PROGRAM = """
import sys, threading, time
from pipeline.launch.child import Computing

def beat():
    while True:
        time.sleep(0.1)
        computing.seconds()

computing, began, used = Computing(), time.monotonic(), time.process_time()
at_first = computing.seconds()
threading.Thread(target=beat, daemon=True).start()
while (passed := time.monotonic() - began) < float(sys.argv[1]):
    if sys.argv[2] == "sleeps":
        time.sleep(0.1)
print((time.process_time() - used) / passed, (computing.seconds() - at_first) / passed)
"""

# A command of one process, which says whose child that is; its server imports nothing slow.
COMMAND = """
import multiprocessing as mp, os, sys
from pipeline.launch import standby
standby.PRELOAD = []
def child(sender):
    sender.send((os.getppid(), os.environ.get("OWN"), os.getcwd()))
if __name__ == "__main__":
    server = standby.Standby(standby.seconds_of(sys.argv[1]))
    server.ensure()
    context = mp.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender,))
    process.start()
    print(*receiver.recv())
    process.join()
    assert process.exitcode == 0
    server.close()
"""


@pytest.fixture
def crowded_core():
    """A core that two others compute on for good."""
    core = min(os.sched_getaffinity(0))
    spins = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spins]) as one, subprocess.Popen(one.args) as other:
        time.sleep(0.3)
        yield core
        one.kill()
        other.kill()


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="Linux alone tells of waits")
@pytest.mark.slow
def test_what_waits_for_a_core_computes_and_what_sleeps_does_not(crowded_core):
    program = f"import os; os.sched_setaffinity(0, {{{crowded_core}}}); os.nice(10)\n{PROGRAM}"
    typed = [sys.executable, "-c", program, str(SECONDS)]
    computes, sleeps = (
        subprocess.Popen([*typed, what], cwd=ROOT, stdout=subprocess.PIPE, text=True) for what in ("computes", "sleeps")
    )
    (used, counted), (_, counted_asleep) = (map(float, one.communicate()[0].split()) for one in (computes, sleeps))
    # However many others there are, it counts for more than the little that it has used.
    assert counted > 5 * used
    assert counted_asleep < BUSY_SHARE


@on_jax
def test_a_step_is_handed_large_pages_unless_a_user_tells_glibc_otherwise(monkeypatch):
    with local._quiet_environment("jax"):
        # 16,384 of 4 KiB, or 32 of 2 MiB: the step has 64 MiB in between.
        large = came("pages")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    with local._quiet_environment("jax"):
        assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1:glibc.malloc.hugetlb=0"
        small = came("pages")
    assert small > 4096
    with local._quiet_environment("tensorflow"):
        assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"
    # Where the system has some to give.
    if HUGE.exists() and "[never]" not in HUGE.read_text():
        assert large < small / 4


@pytest.mark.parametrize("seconds", [0.02, 0.5])
def test_a_terminals_ctrl_c_leaves_the_fork_server_to_the_driver_which_ends_it_soon(seconds):
    code = f"""
import os, signal, time
from multiprocessing import forkserver
from pipeline.config.schema import ClusterConfig
from pipeline.launch.local import LocalCluster
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: print("driver", flush=True))
    cluster = LocalCluster(ClusterConfig(), {{}})
    cluster.warm_up()
    time.sleep({seconds})
    os.killpg(0, signal.SIGINT)
    time.sleep(0.5)
    print("lives" if os.waitpid(forkserver._forkserver._forkserver_pid, os.WNOHANG) == (0, 0) else "lost")
    began = time.monotonic()
    cluster.close(130)
    print("soon" if time.monotonic() - began < 1 else "late")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, start_new_session=True, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["driver", "lives", "soon"], "")


def test_a_process_whose_log_is_on_a_full_disk_says_why_it_fails():
    ends = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    (events, tells), (takes, _), (lifeline, _) = ends
    process = multiprocessing.get_context("spawn").Process(
        target=child.main, args=("no plan", 0, "point", tells, takes, lifeline, "/dev/full")
    )
    process.start()
    tells.close()
    process.join(60)
    with os.fdopen(os.dup(events.fileno()), "rb") as lines:
        (failed,) = [event for event in map(from_line, lines) if isinstance(event, Failed)]
    assert failed.error
    assert process.exitcode == 1


@pytest.mark.parametrize(("quota", "cores"), [
    (None, ALLOWED), ("max 100000", ALLOWED), ("100000 100000", ALLOWED[:1]), ("50000 100000", ALLOWED[:1]),
    ("199999 100000", ALLOWED[:1]), (f"{len(ALLOWED) * 100_000} 100000", ALLOWED), ("99900000 100000", ALLOWED),
    ("not a quota at all", ALLOWED), ("", ALLOWED),
])  # fmt: skip
def test_cores_are_those_that_this_process_may_run_on_and_a_container_s_quota_counts(tmp_path, quota, cores):
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert this_machine.usable_cores(tmp_path / "cpu.max") == cores


@pytest.mark.parametrize(("text", "name"), [
    ("processor\t: 0\nmodel name\t: A: processor (R) @ 2 GHz\nmodel name\t: another\n", "A: processor (R) @ 2 GHz"),
    ("processor\t: 0\nBogoMIPS\t: 50\n", os.uname().machine),
    (None, os.uname().machine),
])  # fmt: skip
def test_the_processor_has_a_name(tmp_path, text, name):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert this_machine.cpu_name(tmp_path / "cpuinfo") == name


def test_last_caches_count_once_for_all_cores_that_share_them_unless_threads_of_one_core_do(tmp_path):
    own = [(core, 0, 1, "32K", core) for core in range(4)]
    last = [(core, 3, 3, "32768K", "0-1" if core < 2 else "2-3") for core in range(4)]
    threads = [(core, index, index, f"{index}K", "0-1") for core in (0, 1) for index in (1, 2)]
    found, shared = tmp_path / "a", tmp_path / "b"
    rows = [*((found, *row) for row in (*own, *last)), *((shared, *row) for row in threads)]
    # Each (folder, core, index, level, size, cores that share it), as Linux has them.
    for folder, core, index, *values in rows:
        for name, value in zip(("level", "size", "shared_cpu_list"), values, strict=True):
            files(folder, f"cpu{core}/cache/index{index}/{name}", text=f"{value}\n")
    for cores, folder, size in (
        ((0, 1), found, 32 * 2**20), ((0, 1, 2, 3), found, 64 * 2**20), ((0, 5), found, None), ((0,), tmp_path, None),
        ((0, 1), shared, None), ((0,), shared, 2048),
    ):  # fmt: skip
        assert this_machine.last_level_cache(cores, folder) == size


def nvidia_smi(folder, script, monkeypatch):
    """A stand-in for the program, or a path without any."""
    if script is not None:
        command = folder / "nvidia-smi"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


@pytest.mark.parametrize("script", ["echo", "echo 'NVIDIA-SMI has failed'; exit 9", "kill -SEGV $$", None])
def test_a_driver_that_lists_nothing_or_is_none_leaves_no_gpus(tmp_path, monkeypatch, script):
    nvidia_smi(tmp_path, script, monkeypatch)
    assert this_machine.installed_gpus() == ()


@pytest.mark.parametrize(("setting", "left"), [
    (None, "ABC"), ("", ""), ("-1", ""), ("NoDevFiles", ""), ("0", "A"), ("2", "C"), ("2,0", "CA"), ("0, 1", "AB"),
    ("1,-1,2", "B"), ("0,9,1", "A"), ("0,1,2,3", "ABC"),
    # A scheduler's names are counted.
    ("GPU-8932f937", "A"), ("GPU-8932f937,GPU-1", "AB"), ("MIG-GPU-8932f937/1/0", "A"),
])  # fmt: skip
def test_cuda_visible_devices_leaves_what_cuda_would(setting, left):
    assert this_machine.visible(("A", "B", "C"), setting) == tuple(left)


def files(folder, *names, text=""):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def bus(folder, vendor="0x1ae0", device="0x0063"):
    files(folder, "0000:00:05.0/vendor", text=f"{vendor}\n")
    return files(folder, "0000:00:05.0/device", text=f"{device}\n")


def test_tpu_chips_are_files_that_their_driver_makes(tmp_path):
    none = tmp_path / "none"
    old = files(tmp_path / "old", "accel0", "accel1", "accel/accel0")
    assert this_machine.installed_tpus({}, old, none) == (f"{old}/accel0", f"{old}/accel1")
    new = files(tmp_path / "new", "vfio/vfio", "vfio/0", "vfio/1")
    chips = (f"{new}/vfio/0", f"{new}/vfio/1")
    assert this_machine.installed_tpus({}, new, bus(tmp_path / "pci")) == chips
    assert this_machine.installed_tpus({"TPU_WORKER_ID": "0"}, new, none) == chips
    assert this_machine.installed_tpus({"TPU_NAME": "local"}, none, none) == ()
    # What else is passed on to a virtual machine is none.
    for identity in (("0x8086", "0x0063"), ("0x1ae0", "0x0042")):
        assert this_machine.installed_tpus({}, new, bus(tmp_path / "pci", *identity)) == ()


def test_a_machine_is_found_out_from_the_environment_and_the_affinity_that_are_given(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, "echo 'NVIDIA H100'; echo 'NVIDIA H100'", monkeypatch)
    found = this_machine.detect({"CUDA_VISIBLE_DEVICES": "1"})
    assert found.gpus == ("NVIDIA H100",)
    assert found.hostname == os.uname().nodename
    assert 0 < found.memory_gib < 1e5
    try:
        os.sched_setaffinity(0, ALLOWED[-1:])
        found = this_machine.detect({})
        assert (found.gpus, found.cores) == (("NVIDIA H100", "NVIDIA H100"), ALLOWED[-1:])
    finally:
        os.sched_setaffinity(0, ALLOWED)


def test_a_command_looks_at_the_machine_once_however_many_points_it_has(asked, tmp_path, monkeypatch):
    nvidia_smi(tmp_path, f"echo asked >> {tmp_path}/asked", monkeypatch)
    asked("-m", "mode=plan", "strategy=one_device,mirrored", "workers=1,2", PATH=os.environ["PATH"]).ok()
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_memory_is_no_more_than_a_control_group_may_have(tmp_path):
    all_of_it = this_machine.usable_memory_gib(tmp_path / "missing")
    assert all_of_it > 0.5
    limit = tmp_path / "memory.max"
    for written, expected in (("max\n", all_of_it), (f"{2**29}\n", 0.5), (f"{2**60}\n", all_of_it)):
        limit.write_text(written)
        assert this_machine.usable_memory_gib(limit) == expected


@pytest.fixture
def command(tmp_path_factory, monkeypatch):
    """Types a command of one user in one folder, with variables; returns the parent of its process, which had them."""
    # Short, as a socket's path has to be.
    folder = tmp_path_factory.getbasetemp() / f"k{time.monotonic_ns() % 10**6}"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "command.py").write_text(COMMAND)

    def typed(keep: str = "60s", **environ: str) -> int:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OWN": "", **environ}
        done = subprocess.run(
            [sys.executable, "command.py", keep], cwd=folder, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        parent, *told = done.stdout.split(" ")
        assert told == [env["OWN"], f"{folder}\n"]
        return int(parent)

    yield typed
    for pid, _ in standby.servers():
        os.kill(pid, signal.SIGKILL)


def test_commands_share_it_in_one_environment_and_the_next_begins_anew_where_it_was_killed_or_is_stopped(command):
    first = command()
    assert command() == first
    ((pid, ends),) = standby.servers()
    assert (pid, standby.children(pid)) == (first, [])
    assert time.time() < ends < time.time() + 61
    # It has a session of its own, and holds no terminal open.
    assert os.getsid(pid) == pid
    assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)} == {os.devnull}
    # Another environment has one of its own.
    other = command(OWN="another")
    assert other != first
    assert command(SHLVL="7") == first
    assert {pid for pid, _ in standby.servers()} == {first, other}
    os.kill(first, signal.SIGKILL)
    second = command()
    assert second != first
    os.kill(second, signal.SIGSTOP)
    assert command() not in (first, second)


def test_it_ends_by_itself_once_no_command_has_used_it_so_long_and_leaves_no_socket(command):
    command("1s")
    until(lambda: not [*standby.servers()], 60)
    assert not [*standby.folder().glob("*.s")]


def test_a_folder_that_others_can_open_is_refused(monkeypatch):
    # A socket's path is short, and a test's own folder is not.
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        folder = standby.folder()
        assert folder.stat().st_mode & 0o777 == 0o700
        for spoil in (lambda: folder.chmod(0o750), lambda: (folder.rmdir(), folder.symlink_to("/tmp"))):
            spoil()
            with pytest.raises(UserError, match="only you can open"):
                standby.folder()


@pytest.mark.parametrize("keep", ["", "10", "0m", "-1s", "1d", "10 m"])
def test_a_time_that_is_none_is_refused(keep):
    with pytest.raises(UserError, match=r"Try launch\.keep=10m"):
        standby.seconds_of(keep)
