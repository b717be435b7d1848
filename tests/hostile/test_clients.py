"""Slow, numerous and disconnected clients, which must not affect other clients."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse

import pytest

from tests.e2e.process import PATIENCE_SECONDS, Service, wait_until
from tests.hostile.raw import BEARER, MAX_CONNECTIONS, Answer, connect, exchange, is_well, post, request

pytestmark = pytest.mark.slow

BODY = b'{"prompt": "a", "max_tokens": 2}'
# 32 choices with 20 logprobs per token are 15 MB of events, more than the kernel buffers for one connection.
LONG = {"prompt": "once", "n": 32, "max_tokens": 500, "logprobs": 20, "ignore_eos": True, "stream": True, "seed": 1}


@contextmanager
def crowd(service: Service, number: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Open this number of connections, and send the same bytes on each."""
    with ExitStack() as stack:
        connections = []
        for _ in range(number):
            connections.append(stack.enter_context(connect(service)))
            connections[-1].sendall(sent)
        yield connections


def rest(connection: socket.socket) -> Answer:
    """Return all bytes until the server closes the connection."""
    text = b""
    try:
        while piece := connection.recv(65536):
            text += piece
    except ConnectionResetError:
        pass
    return Answer(text, is_closed=True)


@pytest.mark.parametrize(
    ("beginning", "drop", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\n", b"a: b\r\n", 408),
        (request(b"content-length: 1000"), b" ", 408),
        (request(b"transfer-encoding: chunked"), b"1\r\n \r\n", 408),
        (b"", b"\r\n", 0),
    ],
)
def test_a_client_that_sends_byte_by_byte_times_out(
    service: Service, beginning: bytes, drop: bytes, status: int
) -> None:
    with connect(service) as connection:
        connection.sendall(beginning)
        connection.settimeout(0.2)
        deadline, text = time.monotonic() + PATIENCE_SECONDS, b""
        while time.monotonic() < deadline:
            try:
                connection.sendall(drop)
                if not (piece := connection.recv(65536)):
                    break
                text += piece
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the connection stayed open")
    assert Answer(text, is_closed=True).statuses == ([status] if status else [])
    assert is_well(service)


def test_idle_connections_over_the_limit_make_room(service: Service) -> None:
    """With three times the allowed connections opened, idle ones are closed for clients that send a request."""
    for sent in (b"", b"GET / HTTP/1.1\r\nhost: ", request(b"content-length: 1000")):
        with crowd(service, 3 * MAX_CONNECTIONS, sent):
            wait_until(lambda: is_well(service), what="connections that are idle for long enough")
            for _ in range(5):
                assert is_well(service)
            wait_until(lambda: service.api.num_fds() < MAX_CONNECTIONS + 64, what="rejected connections to be closed")
    wait_until(lambda: service.api.num_fds() < 64, what="the connections to be closed")


def test_a_connection_gets_503_while_all_connections_wait_for_responses(service: Service) -> None:
    worker = service.worker
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    before = num_asked(service)
    worker.suspend()
    try:
        with crowd(service, MAX_CONNECTIONS, request(b"content-length: %d" % len(body), body=body)) as waiting:
            # By the log: a request for metrics could close a connection whose request has not been read yet.
            wait_until(lambda: num_asked(service) == before + MAX_CONNECTIONS, what="all connections to be in use")
            assert_rejected(service)
            worker.resume()
            assert [rest(each).statuses for each in waiting] == [[200]] * MAX_CONNECTIONS
    finally:
        worker.resume()
    assert is_well(service)
    assert service.metric("llm_admission_rejections_total", reason="too_many_connections") >= 1


def num_asked(service: Service) -> int:
    """Return the number of requests that the server has read so far, from its log."""
    return service.log.read_text().count("POST /v1/completions: API key alice")


def assert_rejected(service: Service) -> None:
    """Send a request that is larger than the kernel buffers, and only then read: the whole error arrives."""
    body = b" " * 10_000_000
    with connect(service) as connection:
        connection.sendall(request(b"content-length: %d" % len(body), body=body))
        answer = rest(connection)
    assert answer.statuses == [503]
    assert "retry-after: 1" in answer.head
    assert answer.error["code"] == "too_many_connections"


def test_a_client_that_reads_nothing_is_disconnected_and_slows_no_other_client(service: Service) -> None:
    """The write timeout ends the connection, and its request is cancelled."""
    body = json.dumps(LONG).encode()
    before, cancelled = service.api.memory_info().rss, service.metric("llm_requests_cancelled_total")
    with ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", int(service.url.rpartition(":")[2])))
            connection.sendall(request(b"content-length: %d" % len(body), body=body))
        for _ in range(5):
            assert is_well(service)
        wait_until(lambda: service.metric("llm_requests_cancelled_total") >= cancelled + 3, what="the cuts")
    running = ("llm_num_requests_running", "llm_num_requests_waiting", "llm_kv_cache_usage_perc")
    wait_until(lambda: sum(map(service.metric, running)) == 0, what="an idle engine")
    assert service.api.memory_info().rss - before < 200 * 2**20


def test_the_last_bytes_of_a_response_time_out(service: Service) -> None:
    """The response is one body for a client that neither reads nor closes."""
    body = json.dumps({"prompt": "a" * 1_900_000}).encode()
    idle = service.api.num_fds()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(service.url.rpartition(":")[2])))
        line = b"POST /tokenize HTTP/1.1"
        connection.sendall(request(b"content-length: %d" % len(body), line=line, body=body))
        assert connection.recv(1)
        wait_until(lambda: service.api.num_fds() <= idle, what="the connection to be cut")
    assert is_well(service)


def test_a_disconnect_at_any_moment_leaves_no_state(service: Service) -> None:
    sent = request(b"content-length: %d" % len(BODY), body=BODY)
    for cut in (*range(0, len(sent), 15), len(sent)):
        with connect(service) as connection:
            connection.sendall(sent[:cut])
    assert is_well(service)
    wait_until(lambda: service.api.num_fds() < 64, what="the connections to be closed")


def test_an_idle_keep_alive_connection_does_not_time_out_as_slow(service: Service) -> None:
    """An answered connection may be idle for longer than the timeout of a request."""
    sent = request(b"content-length: %d" % len(BODY), body=BODY, is_last=False)
    with connect(service) as connection:
        connection.sendall(sent)
        assert answered(connection) == 200
        assert exchange(service, b"GET / HTTP/1.1\r\nhost: ").statuses == [408]  # waits for the timeout of a request
        assert exchange(service, b"GET / HTTP/1.1\r\nhost: ").statuses == [408]
        connection.sendall(sent)
        assert answered(connection) == 200


def answered(connection: socket.socket) -> int:
    """Read a response to its end on a connection that stays open, and return its status."""
    response = HTTPResponse(connection)
    response.begin()
    assert response.read()
    return response.status


def test_rejected_requests_are_counted(service: Service) -> None:
    post(service, BODY, **{"content-encoding": "gzip"})
    exchange(service, b"GARBAGE\r\n\r\n")
    for status in ("400", "408", "415"):
        assert service.metric("llm_request_failures_total", status=status) >= 1, status
    assert BEARER["authorization"] not in service.get("/metrics").text
