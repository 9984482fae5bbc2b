"""Where processes leave each other their addresses."""

import http.client
import socket
import threading

import psutil
import pytest

from pipeline.worker.tensorflow import rendezvous


def asked(port, method, path, body=None):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        line.request(method, path, body)
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def test_what_one_leaves_others_find_until_it_is_taken_back_or_the_rendezvous_is_over():
    with rendezvous.served("127.0.0.1") as (port, token):
        first, second, elsewhere = (f"/{token}:{port}/{key}" for key in ("global_/0", "global_/1", "local_host0/0"))
        assert asked(port, "GET", first)[0] == 404
        assert asked(port, "PUT", first, b"\0\1 bytes")[0] == 200
        assert asked(port, "GET", first) == (200, b"\0\1 bytes")
        # Of another scope.
        assert asked(port, "GET", elsewhere)[0] == 404
        assert asked(port, "DELETE", first)[0] == asked(port, "DELETE", second)[0] == 200
        assert asked(port, "GET", first)[0] == 404
        mine = [at.laddr for at in psutil.Process().net_connections("tcp") if at.laddr.port == port]
        assert {at.ip for at in mine} == {"127.0.0.1"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_who_does_not_know_the_token_reads_and_leaves_nothing():
    with rendezvous.served("127.0.0.1") as (port, token):
        path = f"/{token}:{port}/global_/0"
        assert asked(port, "PUT", path, b"here")[0] == 200
        for other in (
            "/global_/0",
            f"/{'0' * len(token)}:{port}/global_/0",
            f"/{token[:-1]}",
            "/",
            path[1:],
            f"/a{path}",
        ):
            assert [asked(port, method, other, b"b")[0] for method in ("GET", "PUT", "DELETE")] == [403] * 3
        assert asked(port, "GET", path) == (200, b"here")


def test_many_ask_at_once_and_what_is_too_large_is_refused():
    found = []
    with rendezvous.served("127.0.0.1") as (port, token):
        path = f"/{token}/global_/0"
        asked(port, "PUT", path, b"here")
        threads = [threading.Thread(target=lambda: found.append(asked(port, "GET", path))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        line.putrequest("PUT", f"/{token}/global_/1")
        line.putheader("Content-Length", str(1 << 40))
        line.endheaders()
        assert line.getresponse().status == 413
        line.close()
    assert found == [(200, b"here")] * 16
