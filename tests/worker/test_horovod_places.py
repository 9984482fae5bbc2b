"""What each process tells Horovod of its place, with nothing of Horovod there."""

import os

import pytest
from test_plan import config, machine, with_ports

from pipeline.config.schema import Kind
from pipeline.plan.planning import make
from pipeline.worker.loop import TrainingError
from pipeline.worker.tensorflow import horovod, rendezvous


def planned(**keys):
    keys = {"strategy__collective": "horovod", "hardware__kind": Kind.cpu} | keys
    return with_ports(make(config("multi_worker", "2x4gpu", 6, **keys), machine()))


def test_each_process_has_a_rank_of_all_and_one_of_its_host():
    plan = planned()
    places = [horovod.place(plan, process) for process in plan.processes]
    assert [place["HOROVOD_RANK"] for place in places] == list("012345")
    assert [place["HOROVOD_LOCAL_RANK"] for place in places] == list("012012")
    assert [place["HOROVOD_CROSS_RANK"] for place in places] == list("000111")
    assert {place["HOROVOD_HOSTNAME"] for place in places} == {"host0", "host1"}
    sizes = ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE")
    assert {tuple(place[name] for name in sizes) for place in places} == {("6", "3", "2")}


def test_processes_that_only_make_batches_are_none_of_its():
    plan = planned(data__service="1")
    assert len(plan.processes) == 8
    assert horovod.place(plan, plan.processes[5])["HOROVOD_SIZE"] == "6"


def test_it_is_told_where_to_meet_by_the_environment_which_is_put_back(monkeypatch):
    plan = planned()
    told = horovod.meeting(plan, plan.processes[1], rendezvous.address("127.0.0.1", 4000, "secret"), 4000)
    assert told["HOROVOD_GLOO_IFACE"] == "lo"
    where = (told["HOROVOD_GLOO_RENDEZVOUS_ADDR"], told["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    assert where == ("127.0.0.1:4000/secret", "4000")
    monkeypatch.setenv("HOROVOD_CONTROLLER", "mpi")
    before = dict(os.environ)
    with horovod.told(told):
        assert os.environ["HOROVOD_CONTROLLER"] == "gloo"
    assert dict(os.environ) == before


def test_an_address_of_no_interface_is_refused_in_words():
    plan = planned(cluster__host="192.0.2.1")
    with pytest.raises(TrainingError, match=r"Expected a network interface with the address 192\.0\.2\.1"):
        horovod.meeting(plan, plan.processes[0], "192.0.2.1", 4000)
