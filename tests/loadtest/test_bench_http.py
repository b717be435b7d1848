"""bench_http: closed and open loop, command line, exit codes."""

import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.client.outcome import Ending, LoadRun
from loadtest.client.sse_client import CompletionClient, Target
from loadtest.client.workload import LoadRequest
from loadtest.scenarios import bench_http, closed_and_open_loop
from loadtest.scenarios.closed_and_open_loop import arrivals
from tests.loadtest.stub_server import Script, StubServer


def some_requests(count: int) -> Iterator[LoadRequest]:
    return (LoadRequest(index=index, prompt="Once", max_tokens=4) for index in range(count))


def closed(server: StubServer, *, count: int, num_streams: int) -> LoadRun:
    client = CompletionClient(Target.parse(server.url))
    run = closed_and_open_loop.run_closed(client, some_requests(count), num_streams=num_streams)
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
    with StubServer(Script(first_seconds=0.3)) as server:
        client = CompletionClient(Target.parse(server.url))
        run = closed_and_open_loop.run_open(client, some_requests(10), offsets=arrivals(200.0, 3))
        client.close()
    times = sorted(outcome.intended_seconds for outcome in run.outcomes)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    expected = list(itertools.islice(arrivals(200.0, 3), 10))
    assert gaps == pytest.approx([later - earlier for earlier, later in itertools.pairwise(expected)], abs=1e-6)
    assert all(outcome.ending is Ending.OK and outcome.sent_seconds >= outcome.intended_seconds - 1e-3
               for outcome in run.outcomes)  # fmt: skip
    # Ten requests of 0.3 s each were under way together: one after the other they would take 3 s.
    assert times[-1] < min(outcome.end_seconds for outcome in run.outcomes)


def test_arrivals_are_a_seeded_poisson_process() -> None:
    def take(rate: float, seed: int) -> list[float]:
        return list(itertools.islice(arrivals(rate, seed), 4000))

    gaps = [later - earlier for earlier, later in itertools.pairwise(take(10.0, 1))]
    # Exponential gaps: mean and standard deviation are both 1 / rate; 5 standard errors of 4,000 are 8 %.
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.12)
    assert take(10.0, 1) == take(10.0, 1) != take(10.0, 2)


def test_a_sweep_writes_a_result_per_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer() as server:
        code = bench_http.main(
            [
                *("--url", server.url, "--streams", "1", "4", "--rate", "500", "--requests", "8"),
                *("--output-tokens", "4", "--out", str(tmp_path)),
            ]
        )
    assert code == 0
    assert len(server.requests) == 4 + 3 * 8  # the warm-up's, and each run's own
    prompts = [received.body["prompt"] for received in server.requests]
    assert len(set(prompts)) == len(prompts)
    results = [json.loads((tmp_path / f"results-{name}.json").read_text()) for name in ("1-stream", "500-per-s")]
    assert [result["completed"] for result in results] == [8, 8]
    assert [result["max_concurrency"] for result in results] == [1, None]
    assert [result["request_rate"] for result in results] == ["inf", 500.0]
    assert {"commit", "machine", "versions", "command", "date", "model_id"} <= set(results[0])
    assert "| 4 streams | 8 | 8 |" in capsys.readouterr().out


def test_the_api_key_is_sent_and_never_printed_or_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASIR_API_KEY", "sk-Secret")
    with StubServer() as server:
        flags = ("--streams", "1", "--requests", "2", "--output-tokens", "4", "--out", str(tmp_path))
        assert bench_http.main(["--url", server.url, *flags]) == 0
        assert "sk-" not in repr(Target.parse(server.url, api_key="sk-Secret"))
    assert server.keys == ["Bearer sk-Secret"] * (2 + len(server.requests)), "models and tokens are asked for too"
    written = [path.read_bytes() for path in tmp_path.iterdir()]
    assert written
    assert not any(b"sk-Secret" in each for each in written)
    assert "sk-Secret" not in "".join(capsys.readouterr())
    monkeypatch.setenv("KVASIR_API_KEY", "sk-Secret\r\nX-Evil: 1")
    with pytest.raises(SystemExit):
        bench_http.main(["--url", server.url])
    said = capsys.readouterr().err
    assert "KVASIR_API_KEY: must be one word" in said
    assert "sk-" not in said
    monkeypatch.delenv("KVASIR_API_KEY")
    with StubServer() as server:
        assert bench_http.main(["--url", server.url, "--streams", "1", "--requests", "2"]) == 0
    assert set(server.keys) == {None}


def test_exit_codes_are_one_for_failures_and_two_for_no_service(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(Script(status=503)) as server:
        assert bench_http.main(["--url", server.url, "--streams", "1", "--requests", "2"]) == 1
    assert bench_http.main(["--url", server.url, "--streams", "1", "--requests", "2"]) == 2
    assert "Connection refused" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_http.main(["--url", "ftp://nowhere"])
    assert "must look like" in capsys.readouterr().err
