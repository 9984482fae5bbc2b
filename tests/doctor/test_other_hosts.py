"""Faults of other hosts: network namespaces that lack the package, have another version, another time, a slow link."""

import json
import os
import subprocess
import sys

import pytest
from conftest import environment, launched
from namespaces import made
from under_way import until

# On the second host an older Keras, and a clock that is two minutes ahead; on the third no package at all.
PYTHON = """#!/bin/sh
case "$(ip -brief address)" in
    *{second}/*) PYTHONPATH={other}:$PYTHONPATH exec {python} "$@" ;;
    *{third}/*) exec {python} -I -S "$@" ;;
    *) exec {python} "$@" ;;
esac
"""
AHEAD = "import time\nnow = time.time\ntime.time = lambda: now() + 120\n"


@pytest.mark.slow
def test_what_is_wrong_with_each_host_and_the_links_between_them_is_found(tmp_path):
    (tmp_path / "ssh").mkdir()
    with made(tmp_path / "ssh", 3) as hosts:
        first, second, third = hosts.addresses
        other = tmp_path / "other"
        (other / "keras-3.14.0.dist-info").mkdir(parents=True)
        (other / "keras-3.14.0.dist-info" / "METADATA").write_text("Name: keras\nVersion: 3.14.0\n")
        (other / "sitecustomize.py").write_text(AHEAD)
        python = tmp_path / "python"
        python.write_text(PYTHON.format(second=second, third=third, other=other, python=sys.executable))
        python.chmod(0o755)
        hosts.limit(2, "100mbit")
        told = launched(
            tmp_path, sys.executable, "-m", "pipeline", "doctor", "--json", *hosts.options(), "--only",
            "python,packages,clocks,link,names", f"cluster.options.python={python}", "hardware.link_gbps=1",
        )  # fmt: skip
        assert told.code == 3, told.err
        wrong = [finding for finding in json.loads(told.out)["findings"] if finding["severity"] == "fault"]
        faults = {(finding["check"], finding["host"]): finding for finding in wrong}
        assert set(faults) == {
            ("python", third), ("packages", second), ("clocks", second), ("link", f"{first} - {second}"),
        }  # fmt: skip
        assert "No module named" in faults["python", third]["found"]
        assert faults["packages", second]["found"] == "keras 3.14.0"
        assert "pip install 'keras>=" in faults["packages", second]["remedy"]
        assert faults["clocks", second]["figures"]["ahead_seconds"] == pytest.approx(120, abs=5)
        slow = faults["link", f"{first} - {second}"]
        assert slow["figures"]["gbps"] < 0.1
        assert f"hardware.link_gbps={slow['figures']['gbps']:.2g} if" in slow["remedy"]
        kept = json.loads((tmp_path / "outputs" / "links.json").read_text())["links"]
        assert [link["hosts"] for link in kept] == [[first, second]]


@pytest.mark.slow
def test_tasks_of_an_environment_are_asked_by_their_agents(tmp_path):
    (tmp_path / "ssh").mkdir()
    with made(tmp_path / "ssh", 2) as hosts:
        tasks = {"worker": [f"{address}:2222" for address in hosts.addresses]}
        commands = []
        for index in (1, 0):
            said = json.dumps({"cluster": tasks, "task": {"type": "worker", "index": index}})
            home = tmp_path / f"worker{index}"
            home.mkdir()
            command = [sys.executable, "-m", "pipeline", "doctor", "cluster=env", "--only", "python,cores,clocks,link"]
            on, pipe = ["ip", "netns", "exec", hosts.space(index + 1), *command], subprocess.PIPE
            env = environment(TF_CONFIG=said)
            commands.append(subprocess.Popen(on, cwd=home, env=env, stdout=pipe, stderr=pipe, text=True))
        (_, err), (out, _) = (command.communicate(timeout=180) for command in commands)
        assert [command.returncode for command in commands] in ([0, 0], [1, 1]), out + err
        assert "has ended with" in err
        assert f"{hosts.addresses[0]} - {hosts.addresses[1]}" in out
        assert [line for line in out.splitlines() if "clocks" in line and hosts.addresses[1] in line]
        until(lambda: not hosts.left(), 10)
    assert os.path.exists(tmp_path / "worker0" / "outputs" / "links.json")
