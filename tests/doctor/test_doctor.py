"""What is wrong with a host, this one or another, is found, and said beside what was expected and what to type."""

import contextlib
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from conftest import environment, launched, until
from namespaces import made
from tracked_runs import Request, serving

from pipeline.commands import verbs
from pipeline.commands.doctor import clock_of, examine, measure_links, turns
from pipeline.config.schema import Store, TrackingConfig
from pipeline.doctor import judge, look
from pipeline.doctor.judge import FAULT, FINE, WARNING, Accelerator, Expected, Finding, Gpus, LinkFacts
from pipeline.launch import Helpers, LaunchError, line_to
from pipeline.views.mlflow import stores
from pipeline.views.mlflow.stores import open_client


def found(told, check: str) -> list[str]:
    """The lines of a check, and what they say to type."""
    rows = told.out.splitlines()
    places = [place for place, row in enumerate(rows) if row.split()[1:2] == [check]]
    return [f"{rows[place]}\n{rows[place + 1] if rows[place + 1].startswith('   ') else ''}" for place in places]


def test_a_port_that_is_taken_and_an_mlflow_server_that_is_dead_are_faults_with_what_to_type(asked):
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as dead:
        port, gone = taken.getsockname()[1], dead.getsockname()[1]
        dead.close()
        server = ("tracking=server", f"tracking.uri=http://127.0.0.1:{gone}")
        told = asked("doctor", "--only", "ports,store,plan", f"cluster.base_port={port}", "workers=1", *server)
    assert told.code == 3
    (line,) = found(told, "ports")
    assert f"  {os.uname().nodename}  127.0.0.1:{port}: Address already in use, " in line
    assert f"({os.getpid()}) listens there" in line
    assert "Try cluster.base_port=null for free ports" in line
    (line,) = found(told, "store")
    assert f"no answer of http://127.0.0.1:{gone}: Connection refused" in line
    assert "Try python -m pipeline ui" in line
    assert told.out.rstrip().endswith("2 faults, 0 warnings, 1 fine.")


def test_a_name_that_has_no_address_is_a_fault_and_json_says_so(asked):
    told = asked("doctor", "--json", "--only", "names,cores", "cluster.host=nowhere.invalid")
    assert (told.code, told.err) == (3, "")
    said = json.loads(told.out)
    (wrong,) = [finding for finding in said["findings"] if finding["severity"] != "fine"]
    assert (said["code"], wrong["check"], wrong["host"]) == (3, "names", os.uname().nodename)
    assert wrong["found"].startswith("nowhere.invalid: ")
    assert "/etc/hosts" in wrong["remedy"]
    usable = [finding["figures"]["usable"] for finding in said["findings"] if finding["check"] == "cores"]
    assert usable == [len(os.sched_getaffinity(0))]


@pytest.mark.parametrize(("before", "only", "words"), [
    ("ulimit -n 128; ulimit -f 2048", ["files,disk"], ["File too large", "128 at once", "LimitNOFILE=65536"]),
    ("mount -t tmpfs -o size=1m none small; head -c 1048576 /dev/zero > small/all", ["disk", "output_dir=small"],
     ["FAULT", "small: 0 B free, No space left on device", "Try making space (du -xh small"]),
], ids=["limits", "full"])  # fmt: skip
def test_limits_of_a_process_and_a_file_system_that_is_full_are_faults_with_what_allows_more(
    tmp_path, before, only, words
):
    space = ["unshare", "-Urm"] if "mount" in before else []
    if space and subprocess.run([*space, "true"], capture_output=True).returncode:
        pytest.skip("Expected to be allowed to mount in a namespace of its own.")
    (tmp_path / "small").mkdir()
    doctor = [sys.executable, "-m", "pipeline", "doctor", "--only", *only]
    told = launched(tmp_path, *space, "sh", "-ec", f'{before}; exec "$@"', "sh", *doctor)
    assert told.code == 3, told.err
    assert [word for word in words if word not in told.out] == []


def test_a_host_without_the_package_and_one_with_another_version_are_named_with_what_to_type(tmp_path):
    about = tmp_path / "keras-3.14.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: keras\nVersion: 3.14.0\n")
    packages = {"keras": ">=3", "numpy": ">=2"}
    versions, checks = {name: look.installed(name) for name in packages}, ("python", "packages")
    expected = Expected(checks, packages=packages, versions=versions, driver="a")
    lines = {
        "a": line_to(os.environ),
        "b": line_to(os.environ, sys.executable, "-I", "-S", "-m", "pipeline.doctor"),
        "d": line_to(environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.getcwd()}")),
    }
    helpers = Helpers(lines, absent={"c": "No route to host."})
    findings, _ = examine(helpers, dict.fromkeys(lines, expected), "a", checks)
    for line in lines.values():
        line.close()
    python = {finding.host: finding.severity for finding in findings if finding.check == "python"}
    assert python == {"a": FINE, "b": FAULT, "c": FAULT, "d": FINE}
    wrong = {finding.host: finding for finding in findings if finding.severity}
    assert set(wrong) == {"b", "c", "d"}
    assert "No module named" in wrong["b"].found
    assert (bool(wrong["b"].remedy), wrong["c"].found) == (True, "No route to host.")
    assert (wrong["d"].check, wrong["d"].found) == ("packages", "keras 3.14.0")
    assert "as a has" in wrong["d"].expected
    assert wrong["d"].remedy.startswith("python -m pip install 'keras==3")


def test_a_doctor_that_lacks_what_it_is_made_of_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hydra", None)
    monkeypatch.setattr(sys, "argv", ["pipeline", "doctor"])
    assert verbs.main() == 3
    assert "Expected Python's module hydra to be installed" in capsys.readouterr().err


def test_a_process_answers_every_question_or_is_given_up_and_by_its_clock_two_minutes_are_a_fault():
    line, silent = line_to(os.environ), line_to(os.environ, "sleep", "60")
    with pytest.raises(LaunchError, match=r"no answer within 0\.2 s"):
        silent.ask({"do": "clock"}, 0.2)
    silent.close()
    with pytest.raises(LaunchError, match="No such file"):
        line_to(os.environ, "/nowhere/at/all")
    with pytest.raises(LaunchError, match="Expected a request that is known"):
        line.ask({"do": "dance"})
    with pytest.raises(LaunchError, match="Expected `str`"):
        line.ask({"do": "look", "host": "a", "expected": {"python": [1]}})
    folder = "/nowhere/\udcff"
    (disk,) = line.ask({"do": "look", "host": "a", "expected": {"checks": ["disk"], "folders": [folder]}})
    assert disk["found"].startswith(folder)
    ahead, right = clock_of(line, lambda: time.time() - 120), clock_of(line)
    line.close()
    finding = judge.judge_clock("b", "a", *ahead)
    assert finding.severity is FAULT
    # As exact as the line is quick.
    assert re.fullmatch(r"1(19|20)\.\d{3} s ahead of a", finding.found)
    assert judge.judge_clock("b", "a", *right).severity is FINE


GIB, TWO = 1 << 30, ("A100", "A100")
BUILT = Accelerator(cuda="12.5.1", cudnn="9")
KERAS = Expected(packages={"keras": ">=3.15,<3.16"})
PACKAGE = "pip install 'keras>=3.15,<3.16'"
OTHERS = Expected(others=("a.lan", "b"))
AT_LEAST = Expected(python=">=3.11")
SLOW = LinkFacts(1e-4, ((10**9, 80.0),))


def of_gpus(gpus: Gpus, expected: int = 0, accelerator: Accelerator = BUILT) -> Finding:
    return judge.gpus("here", gpus, accelerator, Expected(gpus=expected))


# What is found on a host that should have something, and how bad that is; words of what was found, and of what to type.
JUDGED = [
    (judge.packages("here", {"keras": "3.15.1"}, KERAS), FINE, "keras 3.15.1", ""),
    (judge.packages("here", {"keras": None}, KERAS), FAULT, "keras missing", PACKAGE),
    (judge.packages("here", {"keras": "3.14"}, KERAS), FAULT, "keras 3.14", PACKAGE),
    (judge.packages("here", {"keras": "no version"}, KERAS), FAULT, "keras no version", PACKAGE),
    (judge.python("here", "3.9.1", AT_LEAST), FAULT, "3.9.1", "venv"),
    (judge.python("here", "3.12.1", replace(AT_LEAST, python_version="3.11.7")), FAULT, "3.12.1", "Python 3.11"),
    (judge.memory("here", 8 * GIB, GIB), WARNING, "1.0 GiB", "workers=1"),
    (judge.memory("here", 8 * GIB, GIB // 4), FAULT, "256 MiB", "workers=1"),
    (judge.shm("here", 64 << 20, gpus=2), WARNING, "64 MiB", "docker run --shm-size=1024m,"),
    (judge.shm("here", 64 << 20, gpus=0), FINE, "64 MiB", ""),
    (judge.cores("here", 1, 8, Expected()), WARNING, "1 of 8", "--cpus-per-task"),
    (judge.threads("here", 100), WARNING, "100", "ulimit -u"),
    (judge.open_files("here", 128, 8192), FAULT, "128", "ulimit -n 4096"),
    (judge.open_files("here", 512, 512), WARNING, "512", "LimitNOFILE"),
    (judge.proxy("here", ["https_proxy"], "localhost", OTHERS), WARNING, "https_proxy",
     "export no_proxy=localhost,127.0.0.1,a.lan,b"),
    (judge.proxy("here", ["https_proxy"], "localhost,127.0.0.1,.lan,b", OTHERS), FINE, "spared", ""),
    # A name that leads a host back to itself.
    (judge.name("b", "a", ["127.0.1.1"], Expected(others=("a", "b"))), FAULT, "which is b itself", "/etc/hosts"),
    (judge.name("b", "b", ["127.0.1.1"], Expected(others=("a", "b"))), FINE, "b is 127.0.1.1", ""),
    (of_gpus(Gpus(on_bus=2)), FAULT, "2 on the PCI bus, and no driver", "docker run --gpus all"),
    (of_gpus(Gpus(0, TWO, (), ""), 2), FAULT, "CUDA_VISIBLE_DEVICES='' hides 2", "unset CUDA_VISIBLE_DEVICES"),
    (of_gpus(Gpus(0, TWO, TWO), accelerator=Accelerator()), FAULT, "built without CUDA", "pip install"),
    (of_gpus(Gpus(0, TWO, TWO, driver="11.4")), FAULT, "the driver does CUDA 11.4", "525.60.13"),
    (of_gpus(Gpus(0, TWO, TWO), 4, Accelerator(gpus=TWO, cuda="12")), FAULT, "the host has 2", "devices_per_host=2"),
    (of_gpus(Gpus(), 1), FAULT, "the host has none", "hardware=auto"),
    (of_gpus(Gpus(0, TWO, TWO)), FAULT, "neither driver nor libraries", "pipeline.worker.seen tensorflow"),
    # A link by what the config says of it, or by Gigabit Ethernet.
    (judge.judge_link("a", "b", SLOW, 10.0), FAULT, "0.1 Gbit/s each way", "hardware.link_gbps=0.1 if"),
    (judge.judge_link("a", "b", SLOW, None), WARNING, "0.1 Gbit/s each way", "train.gradient_bits=16"),
    (judge.judge_link("a", "b", SLOW, 0.1), FINE, "0.1 Gbit/s each way", ""),
    (judge.judge_link("a", "b", LinkFacts(error="refused"), None), FAULT, "refused", "a firewall"),
    (judge.judge_clock("b", "a", -3.0, 0.1), WARNING, "3.000 s behind a", "chronyc makestep"),
]  # fmt: skip


@pytest.mark.parametrize(("finding", "severity", "words", "remedy"), JUDGED)
def test_what_is_found_is_judged_by_what_a_training_needs(finding, severity, words, remedy):
    assert finding.severity is severity
    assert words in finding.found
    assert remedy in finding.remedy
    assert bool(finding.remedy) is bool(severity)


def test_gpus_that_tensorflow_does_not_see_are_told_with_the_library_that_is_missing(tmp_path, monkeypatch):
    # NVIDIA's tool tells of two.
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA A100; echo NVIDIA A100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there = look.gpus(environment(), BUILT, tmp_path)
    assert there.visible == ("NVIDIA A100", "NVIDIA A100")
    if there.driver_error is None:
        pytest.skip("Expected a host without NVIDIA's driver.")
    # With a driver that works, what else is missing is told.
    works = replace(there, driver="12.4", driver_error=None)
    for facts, words, remedy in (
        (there, "libcuda.so.1", "NVIDIA's driver 525.60.13 or later"),
        (works, "libcudart.so.12 cannot be loaded", "python -m pip install 'distributed-keras-pipeline[gpu]'"),
    ):
        finding = of_gpus(facts)
        assert finding.severity is FAULT
        assert words in finding.found
        assert remedy in finding.remedy


def test_each_library_is_loaded_for_trial_and_the_one_that_is_missing_named(tmp_path):
    maths = next(path for path in Path("/").glob("lib/*/libm.so.6"))
    for library in (*(f"lib{name}.so.{number}" for name, number in look.OF_CUDA["12"].items()), look.NCCL):
        folder = tmp_path / "nvidia" / library.split(".")[0] / "lib"
        folder.mkdir(parents=True)
        shutil.copy(maths, folder / library)
    (tmp_path / "nvidia" / "libcufft" / "lib" / "libcufft.so.11").write_text("no library")
    missing = look.missing("12.5.1", "9", [str(tmp_path)])
    assert sorted(missing) == ["libcudnn.so.9", "libcufft.so.11"]
    assert "cannot open shared object file" in missing["libcudnn.so.9"]


@pytest.mark.parametrize(("count", "pairs"), [(2, 1), (3, 3), (8, 28), (16, 120), (101, 101)])
def test_every_pair_of_hosts_is_measured_once_and_none_twice_in_a_turn(count, pairs):
    made = turns([f"h{number}" for number in range(count)])
    every = [frozenset(pair) for turn in made for pair in turn]
    assert len(every) == len(set(every)) == pairs
    assert all(len({host for pair in turn for host in pair}) == 2 * len(turn) for turn in made)


def test_two_processes_measure_the_link_between_them_and_a_stranger_is_hung_up_on():
    both = {"a": line_to(os.environ), "b": line_to(os.environ)}
    port = both["b"].ask({"do": "answer", "host": "127.0.0.1", "token": "00" * 32})
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.sendall(b"x" * 64)
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    told = both["a"].ask({"do": "measure", "host": "127.0.0.1", "port": port, "token": "11" * 32})
    assert (bool(told["error"]), told["exchanges"]) == (True, [])
    ((_, _, link),) = measure_links(both, {"a": "127.0.0.1", "b": "127.0.0.1"})
    for line in both.values():
        line.close()
    assert (link.error, [size for size, _ in link.exchanges][:2]) == (None, [64 << 10, 1 << 20])
    assert link.gbps > 0.1
    assert 0 < link.round_trip < 1


def test_a_server_that_wants_a_login_gets_the_environment_s_and_else_is_a_fault():
    def answer(request: Request) -> tuple[int, bytes]:
        return (200 if request.headers.get("Authorization") == "Basic YW5uOnNlY3JldA==" else 401), b"{}"

    login = {"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": "secret"}
    with serving(answer) as uri:
        tracking = TrackingConfig(store=Store.server, uri=uri)
        right = stores.examine(tracking, Path("outputs"), login, "here")
        wrong = stores.examine(tracking, Path("outputs"), {}, "here")
        late = stores.examine(tracking, Path("outputs"), login, "here", lambda: time.time() + 120)
    assert [finding.severity for finding in (right, wrong, late)] == [FINE, FAULT, WARNING]
    assert "MLFLOW_TRACKING_USERNAME" in wrong.remedy
    assert "its clock is +1" in late.found


def test_a_store_that_mlflow_has_made_is_fine_and_one_that_is_broken_or_of_another_mlflow_a_fault(tmp_path):
    examine_it = partial(stores.examine, TrackingConfig(), tmp_path, {}, "here")
    assert examine_it().severity is FINE
    store = tmp_path / "mlflow.db"
    open_client(f"sqlite:///{store}", None)
    assert (examine_it().severity, "has 0 runs" in examine_it().found) == (FINE, True)
    with sqlite3.connect(store) as opened:
        opened.execute("UPDATE alembic_version SET version_num = 'before'")
    assert "mlflow db upgrade" in examine_it().remedy
    store.write_text("spoilt")
    assert examine_it().severity is FAULT


@pytest.mark.slow
def test_a_host_that_is_well_is_said_to_be_so(asked):
    told = asked("doctor", "tracking=none", timeout=300.0)
    assert told.code in (0, 1), told.out
    assert {row.split()[1] for row in told.out.splitlines()[:-2]} >= {"python", "packages", "backend", "gpus", "plan"}
    assert "computes" in found(told, "backend")[0]


# On the second host a clock that is two minutes ahead.
AHEAD = "import time\nnow = time.time\ntime.time = lambda: now() + 120\n"
PYTHON = """#!/bin/sh
case "$(ip -brief address)" in *{second}/*) export PYTHONPATH={other}:$PYTHONPATH ;; esac
exec {python} "$@"
"""


@pytest.mark.slow
def test_a_wrong_clock_and_a_slow_link_are_found_the_link_is_kept_and_tasks_of_an_environment_asked_too(tmp_path):
    """Network namespaces stand for hosts: one that has another time, and a slow link."""
    for name in ("ssh", "other", "worker0", "worker1"):
        (tmp_path / name).mkdir()
    doctor = (sys.executable, "-m", "pipeline", "doctor")
    with made(tmp_path / "ssh", 2) as hosts:
        first, second = hosts.addresses
        (tmp_path / "other" / "sitecustomize.py").write_text(AHEAD)
        python = tmp_path / "python"
        python.write_text(PYTHON.format(second=second, other=tmp_path / "other", python=sys.executable))
        python.chmod(0o755)
        hosts.limit(2, "100mbit")
        told = launched(
            tmp_path, *doctor, "--json", *hosts.options(), "--only", "python,packages,clocks,link,names",
            f"cluster.options.python={python}", "hardware.link_gbps=1",
        )  # fmt: skip
        assert told.code == 3, told.err
        wrong = [finding for finding in json.loads(told.out)["findings"] if finding["severity"] == "fault"]
        clock, slow = sorted(wrong, key=lambda finding: finding["check"])
        assert (clock["check"], clock["host"]) == ("clocks", second)
        assert (slow["check"], slow["host"]) == ("link", f"{first} - {second}")
        assert clock["figures"]["ahead_seconds"] == pytest.approx(120, abs=5)
        assert slow["figures"]["gbps"] < 0.1
        assert f"hardware.link_gbps={slow['figures']['gbps']:.2g} if" in slow["remedy"]
        (link,) = json.loads((tmp_path / "outputs" / "links.json").read_text())["links"]
        assert link["hosts"] == [first, second]
        # Tasks of an environment are asked by their agents.
        tasks, commands = {"worker": [f"{address}:2222" for address in hosts.addresses]}, []
        for index in (1, 0):
            env = environment(TF_CONFIG=json.dumps({"cluster": tasks, "task": {"type": "worker", "index": index}}))
            on, pipe = ["ip", "netns", "exec", hosts.space(index + 1), *doctor, "cluster=env"], subprocess.PIPE
            on, home = [*on, "--only", "python,cores,clocks,link"], tmp_path / f"worker{index}"
            commands.append(subprocess.Popen(on, cwd=home, env=env, stdout=pipe, stderr=pipe, text=True))
        (_, err), (out, _) = (command.communicate(timeout=180) for command in commands)
        assert [command.returncode for command in commands] in ([0, 0], [1, 1]), out + err
        assert "has ended with" in err
        assert f"{first} - {second}" in out
        assert [line for line in out.splitlines() if "clocks" in line and second in line]
        until(lambda: not hosts.left(), 10)
    assert (tmp_path / "worker0" / "outputs" / "links.json").exists()
