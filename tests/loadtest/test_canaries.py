"""Canaries: known questions in a load, and the failure kind of a changed answer."""

import itertools
from functools import partial

import pytest

from loadtest.client.canaries import Canaries
from loadtest.client.outcome import Ending
from loadtest.client.sse_client import CompletionClient, Target, discover
from loadtest.client.workload import WorkloadSpec
from loadtest.measurement.benchmark_program import MeasurementFailed
from tests.loadtest.stub_server import Script, StubServer

_ASKED = 8  # four questions, each twice


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_changed_answer_under_load_is_a_failure_of_its_own_kind(is_changed: bool) -> None:
    other = Script(word=" x" if is_changed else " w")
    with StubServer(lambda ordinal: Script() if ordinal < _ASKED else other) as server:
        client = CompletionClient(Target.parse(server.url))
        _, workload = discover(client.target, WorkloadSpec())
        canaries = Canaries.ask(client.complete, workload, 0.5)
        requests = list(canaries.mix(map(workload.request, range(30)), seed=1))
        outcomes = [client.complete(request) for request in requests]
        client.close()
    assert [request.index for request in requests] == list(range(30))
    asked = [request.expected is not None for request in requests]
    assert 5 < sum(asked) < 25
    assert all(request.temperature == 0.0 for request in requests if request.expected is not None)
    expected = [Ending.CHANGED if is_canary and is_changed else Ending.OK for is_canary in asked]
    assert [outcome.ending for outcome in outcomes] == expected
    if is_changed:
        assert Ending.CHANGED.is_failure
        changed = next(outcome for outcome in outcomes if outcome.ending is Ending.CHANGED)
        assert "' x0 x1" in changed.detail
        assert "' w0 w1" in changed.detail


def test_an_idle_server_must_answer_a_question_in_one_way() -> None:
    with StubServer(lambda ordinal: Script(word=f" {ordinal}w")) as server:
        client = CompletionClient(Target.parse(server.url))
        _, workload = discover(client.target, WorkloadSpec())
        with pytest.raises(MeasurementFailed, match="in two ways; use --canary-share 0"):
            Canaries.ask(partial(client.complete, model="stub"), workload, 0.1)
        none = Canaries.ask(client.complete, workload, 0.0)
        client.close()
    assert len(server.requests) == 2, "a share of 0 asks nothing"
    requests = list(map(workload.request, range(5)))
    assert list(itertools.islice(none.mix(iter(requests), seed=1), 5)) == requests
