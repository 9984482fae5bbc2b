"""A process computes where it uses a core or waits for one, and not where it sleeps among others that compute."""

import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from pipeline.run.watch import BUSY_SHARE

SECONDS = 2.0
# Prints the share of a core that it has used, and the share that counts.
PROGRAM = """
import sys, threading, time
from pipeline.launch.computing import Computing

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
@pytest.mark.parametrize(("what", "computes"), [("computes", True), ("sleeps", False)])
def test_what_waits_for_a_core_computes_and_what_sleeps_does_not(crowded_core, what, computes):
    alone = f"import os; os.sched_setaffinity(0, {{{crowded_core}}}); os.nice(10)\n"
    said = subprocess.run(
        [sys.executable, "-c", alone + PROGRAM, str(SECONDS), what],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    used, counted = map(float, said.stdout.split())
    # However many others there are, it counts for more than the little that it has used.
    assert (counted > 5 * used) if computes else (counted < BUSY_SHARE)
