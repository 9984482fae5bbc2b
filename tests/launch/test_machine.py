"""What a machine has, as far as this process may use it; files and commands are made up."""

import os
import stat
import subprocess
import sys

import pytest

from pipeline.launch import this_machine

ALLOWED = tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("quota", "cores"), [
    (None, ALLOWED), ("max 100000", ALLOWED), ("100000 100000", ALLOWED[:1]), ("50000 100000", ALLOWED[:1]),
    ("199999 100000", ALLOWED[:1]), (f"{len(ALLOWED) * 100_000} 100000", ALLOWED), ("99900000 100000", ALLOWED),
    ("not a quota at all", ALLOWED), ("", ALLOWED),
])  # fmt: skip
def test_cores_are_those_that_this_process_may_run_on_and_a_container_s_quota_counts(tmp_path, quota, cores):
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert this_machine.usable_cores(tmp_path / "cpu.max") == cores


def test_affinity_counts():
    code = (
        "import os; os.sched_setaffinity(0, {%d})\nfrom pipeline.launch import this_machine\n"
        "print(this_machine.detect({}).cores)"
    )
    shown = subprocess.run([sys.executable, "-c", code % ALLOWED[-1]], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == f"({ALLOWED[-1]},)"


@pytest.mark.parametrize(("text", "name"), [
    ("processor\t: 0\nmodel name\t: A: processor (R) @ 2 GHz\nmodel name\t: another\n", "A: processor (R) @ 2 GHz"),
    ("processor\t: 0\nBogoMIPS\t: 50\n", os.uname().machine),
    (None, os.uname().machine),
])  # fmt: skip
def test_the_processor_has_a_name(tmp_path, text, name):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert this_machine.cpu_name(tmp_path / "cpuinfo") == name


def caches(folder, *rows):
    """Files as Linux has them of caches, each (core, index, level, size, cores that share it)."""
    for core, index, *values in rows:
        cache = folder / f"cpu{core}" / "cache" / f"index{index}"
        cache.mkdir(parents=True)
        for name, value in zip(("level", "size", "shared_cpu_list"), values, strict=True):
            (cache / name).write_text(f"{value}\n")
    return folder


def test_last_caches_count_once_for_all_cores_that_share_them(tmp_path):
    own = [(core, 0, 1, "32K", core) for core in range(4)]
    last = [(core, 3, 3, "32768K", "0-1" if core < 2 else "2-3") for core in range(4)]
    found = caches(tmp_path, *own, *last)
    assert this_machine.last_level_cache((0, 1), found) == 32 * 2**20
    assert this_machine.last_level_cache((0, 1, 2, 3), found) == 64 * 2**20
    assert this_machine.last_level_cache((0, 5), found) is None
    assert this_machine.last_level_cache((0,), tmp_path / "none") is None


def test_threads_of_one_core_do_not_only_share_the_last_cache(tmp_path):
    found = [(core, index, index, f"{index}K", "0-1") for core in (0, 1) for index in (1, 2)]
    assert this_machine.last_level_cache((0, 1), caches(tmp_path, *found)) is None
    assert this_machine.last_level_cache((0,), tmp_path) == 2048


def nvidia_smi(folder, script, monkeypatch):
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


@pytest.mark.parametrize("script", ["echo", "echo 'NVIDIA-SMI has failed'; exit 9", "kill -SEGV $$", None])
def test_a_driver_that_lists_nothing_or_is_none_leaves_no_gpus(tmp_path, monkeypatch, script):
    nvidia_smi(tmp_path, script or "", monkeypatch)
    if script is None:
        (tmp_path / "nvidia-smi").unlink()
    assert this_machine.installed_gpus() == ()


@pytest.mark.parametrize(("setting", "left"), [
    (None, "ABC"), ("", ""), ("-1", ""), ("NoDevFiles", ""), ("0", "A"), ("2", "C"), ("2,0", "CA"), ("0, 1", "AB"),
    ("1,-1,2", "B"), ("0,9,1", "A"), ("0,1,2,3", "ABC"),
    # A scheduler's names are counted.
    ("GPU-8932f937", "A"), ("GPU-8932f937,GPU-1", "AB"), ("MIG-GPU-8932f937/1/0", "A"),
])  # fmt: skip
def test_cuda_visible_devices_leaves_what_cuda_would(setting, left):
    assert this_machine.visible(("A", "B", "C"), setting) == tuple(left)


def files(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def bus(folder, vendor="0x1ae0", device="0x0063"):
    for place, text in (("vendor", vendor), ("device", device)):
        (files(folder, f"0000:00:05.0/{place}") / "0000:00:05.0" / place).write_text(f"{text}\n")
    return folder


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


def test_a_machine_is_found_out_from_the_environment_that_is_given(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, "echo 'NVIDIA H100'; echo 'NVIDIA H100'", monkeypatch)
    found = this_machine.detect({"CUDA_VISIBLE_DEVICES": "1"})
    assert found.gpus == ("NVIDIA H100",)
    assert found.hostname == os.uname().nodename
    assert 0 < found.memory_gib < 1e5
    assert this_machine.detect({}).gpus == ("NVIDIA H100", "NVIDIA H100")
    assert not hasattr(this_machine, "tensorflow")


def test_a_command_looks_at_the_machine_once_however_many_points_it_has(asked, tmp_path):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\n")
    tool.chmod(0o755)
    path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    asked("-m", "mode=plan", "strategy=one_device,mirrored", "workers=1,2", PATH=path).ok()
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_memory_is_no_more_than_a_control_group_may_have(tmp_path):
    all_of_it = this_machine.usable_memory_gib(tmp_path / "missing")
    assert all_of_it > 0.5
    limit = tmp_path / "memory.max"
    for written, expected in (("max\n", all_of_it), (f"{2**29}\n", 0.5), (f"{2**60}\n", all_of_it)):
        limit.write_text(written)
        assert this_machine.usable_memory_gib(limit) == expected
