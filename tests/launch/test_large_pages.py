"""What the system hands a process for each step, under JAX on a CPU."""

import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import OWN

from pipeline.launch.local import cluster

pytestmark = [
    pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install jax"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="Python runs on another C library than glibc"),
]


def pages():
    """How many pages a step is handed out that has 64 MiB in between: 16,384 of 4 KiB, or 32 of 2 MiB."""
    ran = subprocess.run([sys.executable, str(OWN / "pages.py")], capture_output=True, text=True, check=True)
    return int(ran.stdout)


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE.exists() or "[never]" in HUGE.read_text(), reason="the system has no large pages to give")
def test_a_step_is_handed_large_pages():
    before = pages()
    with cluster._quiet_environment("jax"):
        after = pages()
    assert after < before / 4, (before, after)


def test_what_a_person_tells_glibc_comes_last_and_holds(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    with cluster._quiet_environment("jax"):
        assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1:glibc.malloc.hugetlb=0"
        assert pages() > 4096
    with cluster._quiet_environment("tensorflow"):
        assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"
