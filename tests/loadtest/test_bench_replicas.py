"""Benchmark of replicas: traffic with conversations, a client that retries, and failures behind a fake router."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.client.outcome import Ending
from loadtest.client.requests import ChatRequest, LoadRequest
from loadtest.client.sse_client import Target, discover
from loadtest.client.workload import WorkloadKind, WorkloadSpec
from loadtest.scenarios import bench_replicas
from loadtest.scenarios.bench_replicas import RetryingClient, traffic
from tests.loadtest import fake_router, fake_service
from tests.loadtest.stub_server import MODEL, Script, StubServer

REQUEST = LoadRequest(index=0, prompt="There was a dog", max_tokens=3)


def test_half_of_the_traffic_continues_conversations() -> None:
    with StubServer() as server:
        _, workload = discover(Target.parse(server.url), WorkloadSpec(kind=WorkloadKind.MIXED, seed=3))
    requests = list(itertools.islice(traffic(workload), 400))
    assert requests == list(itertools.islice(traffic(workload), 400))
    chats = [request for request in requests if isinstance(request, ChatRequest)]
    assert 160 < len(chats) < 240
    assert {len(chat.prompt) for chat in chats} == {1, 3, 5, 7, 9}
    earlier = [tuple(chat.prompt) for chat in chats]
    assert all(tuple(chat.prompt[:-2]) in earlier[:place] for place, chat in enumerate(chats) if len(chat.prompt) > 1)
    messages = chats[-1].body(MODEL)["messages"]
    assert [message["content"] for message in messages] == chats[-1].prompt
    assert {message["role"] for message in messages[::2]} == {"user"}


def test_the_client_repeats_failed_and_rejected_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_replicas, "_FIRST_BACKOFF_SECONDS", 0.0)
    scripts = [Script(status=503), Script(cut_after=1), Script(), *[Script(status=429)] * 3]
    with StubServer(scripts.__getitem__) as server:
        client = RetryingClient(Target.parse(server.url), MODEL)
        assert client.complete(REQUEST).ending is Ending.OK
        assert [reason.partition(":")[0] for reason in client.retried] == ["http_error", "connection"]
        assert client.complete(REQUEST).ending is Ending.SHED
        client.close()
    assert [request.body["model"] for request in server.requests] == [MODEL] * 6


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(bench_replicas, "kvasir_serve", lambda *_: [sys.executable, fake_service.__file__])
    router = f"{sys.executable} {fake_router.__file__}"
    options = ["--checkpoint", "none", "--router", router, "--out", str(out), "--output-tokens", "8", *arguments]
    assert bench_replicas.main(options) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_no_request_fails_while_one_replica_is_killed_and_the_other_drained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run(monkeypatch, tmp_path / "out.json", "--parts", "failures", "--settle-seconds", "0.3")["failures"]
    assert (result["failed"], result["shed"], result["failures"]) == (0, 0, {})
    assert result["completed"] > 0


def test_hits_and_throughput_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--parts", "hits", "throughput", "--requests", "40", "--repeats", "1"]
    arguments += ["--seconds", "0.3", "--settle-seconds", "0.1"]
    result = run(monkeypatch, tmp_path / "out.json", *arguments)
    for hits, num_replicas in zip(result["hits"], (1, 2, 2), strict=True):
        assert (hits["completed"], hits["failed"], hits["hit_share"]) == (40, 0, 0.0)
        assert len(hits["share_of_each_replica"]) == num_replicas
        assert sum(hits["share_of_each_replica"]) == pytest.approx(1.0, abs=0.01)
    throughput = result["throughput"]
    (one,), (two,), (routed,) = (
        [sum(case["tokens_per_second"]) for case in throughput["cases"][name]] for name in ("one", "two", "routed")
    )
    assert throughput["ratio"]["values"] == [pytest.approx(routed / one)]
    assert throughput["ratio_without_router"]["values"] == [pytest.approx(two / one)]
    assert (
        throughput["cases"]["one"][0]["tokens_per_second"][1]
        == 0
        < throughput["cases"]["routed"][0]["tokens_per_second"][1]
    )
