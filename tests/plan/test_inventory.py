"""A plan is laid over the hosts as they are, names them, says how they differ, and refuses by them."""

import dataclasses
import time

import pytest
from plans import config

from pipeline.config.schema import Kind
from pipeline.errors import UserError
from pipeline.plan.machine import Host, Machine, inventory
from pipeline.plan.planning import baseline_of, make
from pipeline.views.terminal.plan_text import plan_lines


def host(name: str, *cores: int, gpus: int = 0, cpu: str = "A processor") -> Host:
    return Host(name, cores, 16.0, cpu, ("H100",) * gpus)


def over(machine: Machine, strategy: str = "multi_worker", workers: int | None = None, **hardware):
    asked = config(strategy, "4cpu", workers)
    auto = {"name": "auto", "hosts": None, "devices_per_host": None, "kind": asked.hardware.kind} | hardware
    return make(dataclasses.replace(asked, hardware=dataclasses.replace(asked.hardware, **auto)), machine)


def test_processes_are_on_the_cores_that_their_own_host_has_and_hosts_are_named():
    plan = over(inventory([host("a", 0, 1), host("b", 8, 9)]))
    assert [(plan.host_of(process), process.cores) for process in plan.processes] == [("a", (0, 1)), ("b", (8, 9))]
    assert plan.hardware.host_names == ("a", "b")
    text = "\n".join(plan_lines(plan, full=True))
    assert "on 2 hosts (a, b)" in text
    assert baseline_of(plan, inventory([host("a", 0, 1), host("b", 8, 9)])).processes[0].cores == (0,)


def test_different_hosts_are_said_and_the_least_decides():
    plan = over(inventory([host("a", *range(16)), host("b", *range(8)), host("c", *range(16))]))
    assert plan.workers == 24
    assert plan.notes[0] == "b has 8 cores, the others 16: the slowest decides."
    plan = over(inventory([host("a", 0), host("b", 0, cpu="Another")]))
    assert plan.notes[0] == "b has Another, the others A processor: the slowest decides."


@pytest.mark.parametrize(("hosts", "asked", "words"), [
    ([host("a", *range(8)), host("b", 0, 1)], {"workers": 16},
     r"Expected hosts with 8 cores for 8 workers each, received b with 2. Try workers=4, or the cluster without"),
    ([host("a", 0, gpus=4), host("b", 0, gpus=2)], {"name": "2x4gpu", "kind": "gpu", "hosts": 2,
     "devices_per_host": 4}, "hardware=2x4gpu has 4 GPUs, b has 2"),
    ([host("a", 0), host("b", 0)], {"hosts": 3, "devices_per_host": 1},
     r"no more hosts than the 2 of the cluster \(a and b\), received hardware.hosts=3. Try hardware.hosts=2."),
    ([host("a", 0), host("b", 0)], {"workers": 3}, "divide evenly over 2 hosts, received workers=3"),
])  # fmt: skip
def test_what_the_hosts_have_not_is_refused_by_name(hosts, asked, words):
    asked = asked | ({"kind": Kind[asked["kind"]]} if "kind" in asked else {})
    with pytest.raises(UserError, match=words):
        over(inventory(hosts), **asked)


def test_one_process_takes_the_first_host():
    plan = over(inventory([host("a", 0, 1), host("b", 0, 1)]), "mirrored")
    assert (plan.workers, plan.hardware.hosts, plan.host_of(plan.processes[0])) == (2, 1, "a")


def test_sixty_five_thousand_workers_on_their_own_hosts_are_planned_in_under_two_seconds():
    machine = inventory([host(f"node{number}", *range(128)) for number in range(512)])
    began = time.process_time()
    plan = over(machine)
    took = time.process_time() - began
    assert (plan.workers, len(plan.processes), plan.hardware.hosts) == (65_536, 512, 512)
    one_each = over(machine, "parameter_server", workers=65_536 - 512)
    assert one_each.workers > 65_000
    assert took < 2
