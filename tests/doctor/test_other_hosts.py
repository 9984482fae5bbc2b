"""Faults of other hosts: network namespaces that have another time, or a slow link."""

import json
import os
import subprocess
import sys

import pytest
from conftest import environment, launched, until
from namespaces import made

# On the second host a clock that is two minutes ahead.
PYTHON = """#!/bin/sh
case "$(ip -brief address)" in *{second}/*) export PYTHONPATH={other}:$PYTHONPATH ;; esac
exec {python} "$@"
"""
AHEAD = "import time\nnow = time.time\ntime.time = lambda: now() + 120\n"


@pytest.mark.slow
def test_a_wrong_clock_and_a_slow_link_are_found_and_the_link_is_kept(tmp_path):
    (tmp_path / "ssh").mkdir()
    with made(tmp_path / "ssh", 2) as hosts:
        first, second = hosts.addresses
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "sitecustomize.py").write_text(AHEAD)
        python = tmp_path / "python"
        python.write_text(PYTHON.format(second=second, other=tmp_path / "other", python=sys.executable))
        python.chmod(0o755)
        hosts.limit(2, "100mbit")
        told = launched(
            tmp_path, sys.executable, "-m", "pipeline", "doctor", "--json", *hosts.options(), "--only",
            "python,packages,clocks,link,names", f"cluster.options.python={python}", "hardware.link_gbps=1",
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
