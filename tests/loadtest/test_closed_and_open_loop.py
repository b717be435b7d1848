"""Closed and open loop of completion requests against a stub server."""

import itertools
from collections.abc import Iterator
from contextlib import closing

import gevent

from loadtest.client.outcome import Ending, LoadRun
from loadtest.client.requests import LoadRequest
from loadtest.client.sse_client import CompletionClient, Target
from loadtest.scenarios.service_benchmark import run_closed
from loadtest.sweep.open_loop import OpenLoop
from tests.loadtest.stub_server import Script, StubServer


def some_requests(count: int) -> Iterator[LoadRequest]:
    return (LoadRequest(index=index, prompt="Once", max_tokens=4) for index in range(count))


def closed(server: StubServer, *, count: int, num_streams: int) -> LoadRun:
    client = CompletionClient(Target.parse(server.url))
    run = run_closed(client, some_requests(count), num_streams=num_streams)
    client.close()
    return run


def test_a_closed_loop_has_one_request_per_stream() -> None:
    with StubServer(Script(gap_seconds=0.002)) as server:
        run = closed(server, count=12, num_streams=3)
    assert sorted(outcome.index for outcome in run.outcomes) == list(range(12))
    moves = sorted(m for o in run.outcomes for m in ((o.sent_seconds, 1), (o.end_seconds, -1)))
    assert max(itertools.accumulate(change for _, change in moves)) == 3
    assert len({received.connection for received in server.requests}) == 3
    assert run.client_cpu_share > 0.0


def test_a_rejected_client_waits_for_retry_after() -> None:
    with StubServer(lambda ordinal: Script(status=429, retry_after="1") if ordinal == 0 else Script()) as server:
        run = closed(server, count=2, num_streams=1)
    rejected, served = run.outcomes
    assert (rejected.ending, served.ending) == (Ending.SHED, Ending.OK)
    assert served.sent_seconds - rejected.end_seconds >= 1.0


def test_an_open_loop_sends_on_time_to_a_slow_server() -> None:
    # Requests one after the other would take 90 s.
    with StubServer(Script(first_seconds=3.0)) as server, closing(CompletionClient(Target.parse(server.url))) as client:
        windows = OpenLoop(client, some_requests(30), model="stub", seed=3).windows(10, 0.05)
        first, *_, last = itertools.islice(windows, 3)
        with gevent.Timeout(30):
            while len(server.requests) < 30:
                gevent.sleep(0.01)
        windows.close()
    times = [outcome.intended_seconds for outcome in last.outcomes]
    assert times == sorted(times)
    assert len(times) == 30
    assert sum(first.ended_seconds - 0.05 <= moment < first.ended_seconds for moment in times) == 10
    assert all(outcome.sent_seconds >= outcome.intended_seconds - 1e-3 for outcome in last.outcomes)
