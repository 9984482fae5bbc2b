"""Horovod's places and the rendezvous of its processes, with nothing of Horovod there."""

import http.client
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from plans import config, machine, with_ports

from pipeline.config.schema import Kind
from pipeline.plan.planning import make
from pipeline.worker.model_error import TrainingError
from pipeline.worker.tensorflow import horovod


def planned(**keys):
    keys = {"strategy__collective": "horovod", "hardware__kind": Kind.cpu} | keys
    return with_ports(make(config("multi_worker", "2x4gpu", 6, **keys), machine()))


def test_each_process_that_trains_has_a_rank_of_all_and_one_of_its_host():
    plan = planned()
    places = [horovod.place(plan, process) for process in plan.processes]
    assert [place["HOROVOD_RANK"] for place in places] == list("012345")
    assert [place["HOROVOD_LOCAL_RANK"] for place in places] == list("012012")
    assert [place["HOROVOD_CROSS_RANK"] for place in places] == list("000111")
    assert {place["HOROVOD_HOSTNAME"] for place in places} == {"host0", "host1"}
    sizes = ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE")
    assert {tuple(place[name] for name in sizes) for place in places} == {("6", "3", "2")}
    with_batches = planned(data__service="1")
    assert len(with_batches.processes) == 8
    assert horovod.place(with_batches, with_batches.processes[5])["HOROVOD_SIZE"] == "6"


def test_it_is_told_where_to_meet_by_the_environment_which_is_put_back_and_by_no_other_interface(monkeypatch):
    plan = planned()
    told = horovod.meeting(plan, plan.processes[1], "127.0.0.1:4000/secret", 4000)
    assert told["HOROVOD_GLOO_IFACE"] == "lo"
    where = (told["HOROVOD_GLOO_RENDEZVOUS_ADDR"], told["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    assert where == ("127.0.0.1:4000/secret", "4000")
    monkeypatch.setenv("HOROVOD_CONTROLLER", "mpi")
    before = dict(os.environ)
    with horovod.told(told):
        assert os.environ["HOROVOD_CONTROLLER"] == "gloo"
    assert dict(os.environ) == before
    plan = planned(cluster__host="192.0.2.1")
    with pytest.raises(TrainingError, match=r"Expected a network interface with the address 192\.0\.2\.1"):
        horovod.meeting(plan, plan.processes[0], "192.0.2.1", 4000)


def asked(port, method, path, body=None):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        line.request(method, path, body)
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def test_what_one_leaves_others_find_who_know_the_token_until_it_is_taken_back_or_the_rendezvous_is_over():
    with horovod.served("127.0.0.1") as (port, token):
        first, second, elsewhere = (f"/{token}:{port}/{key}" for key in ("global_/0", "global_/1", "local_host0/0"))
        assert asked(port, "GET", first)[0] == 404
        assert asked(port, "PUT", first, b"\0\1 bytes")[0] == 200
        strange = f"/{'0' * len(token)}:{port}/global_/0"
        for other in ("/global_/0", strange, f"/{token[:-1]}", "/", first[1:], f"/a{first}"):
            assert [asked(port, method, other, b"b")[0] for method in ("GET", "PUT", "DELETE")] == [403] * 3
        # Many at once.
        with ThreadPoolExecutor(16) as threads:
            assert {*threads.map(lambda _: asked(port, "GET", first), range(16))} == {(200, b"\0\1 bytes")}
        # Of another scope.
        assert asked(port, "GET", elsewhere)[0] == 404
        # One that is too large.
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        line.putrequest("PUT", second)
        line.putheader("Content-Length", str(1 << 40))
        line.endheaders()
        assert line.getresponse().status == 413
        line.close()
        assert asked(port, "DELETE", first)[0] == asked(port, "DELETE", second)[0] == 200
        assert asked(port, "GET", first)[0] == 404
        mine = [at.laddr for at in psutil.Process().net_connections("tcp") if at.laddr.port == port]
        assert {at.ip for at in mine} == {"127.0.0.1"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
