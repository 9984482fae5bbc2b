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
    with rendezvous.served("127.0.0.1") as port:
        assert asked(port, "GET", "/global/0")[0] == 404
        assert asked(port, "PUT", "/global/0", b"\0\1 bytes")[0] == 200
        assert asked(port, "GET", "/global/0") == (200, b"\0\1 bytes")
        # Of another scope.
        assert asked(port, "GET", "/local_host0/0")[0] == 404
        assert asked(port, "DELETE", "/global/0")[0] == asked(port, "DELETE", "/global/1")[0] == 200
        assert asked(port, "GET", "/global/0")[0] == 404
        mine = [at.laddr for at in psutil.Process().net_connections("tcp") if at.laddr.port == port]
        assert {at.ip for at in mine} == {"127.0.0.1"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_many_ask_at_once_and_what_is_too_large_is_refused():
    found = []
    with rendezvous.served("127.0.0.1") as port:
        asked(port, "PUT", "/global/0", b"here")
        threads = [threading.Thread(target=lambda: found.append(asked(port, "GET", "/global/0"))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        line.putrequest("PUT", "/global/1")
        line.putheader("Content-Length", str(1 << 40))
        line.endheaders()
        assert line.getresponse().status == 413
        line.close()
    assert found == [(200, b"here")] * 16
