"""What a process computes, and what the system gives it: cores that it waits for, and large pages under JAX."""

import multiprocessing
import os
import platform
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT
from scripts import came

from pipeline.driver.watch import BUSY_SHARE
from pipeline.launch import child, local
from pipeline.record.events import Failed
from pipeline.record.log import from_line

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
        made.append(computing.seconds())

computing, made, began, used = Computing(), [0.0], time.monotonic(), time.process_time()
at_first = computing.seconds()
threading.Thread(target=beat, daemon=True).start()
while (passed := time.monotonic() - began) < float(sys.argv[1]):
    if sys.argv[2] == "sleeps":
        time.sleep(0.1)
print((time.process_time() - used) / passed, (computing.seconds() - at_first) / passed)
"""


@pytest.fixture
def crowded_core():
    """A core that two others compute on for good."""
    core = min(os.sched_getaffinity(0))
    spins = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spins]) for _ in range(2)]
    time.sleep(0.3)
    yield core
    for other in others:
        other.kill()
        other.wait()


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="Linux alone tells of waits")
def test_what_waits_for_a_core_computes_and_what_sleeps_does_not(crowded_core):
    alone = f"import os; os.sched_setaffinity(0, {{{crowded_core}}}); os.nice(10)\n"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    computes, sleeps = (
        subprocess.Popen(
            [sys.executable, "-c", alone + PROGRAM, str(SECONDS), what], env=environ, stdout=subprocess.PIPE, text=True
        )
        for what in ("computes", "sleeps")
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
