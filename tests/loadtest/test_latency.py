"""Who waits for whom: the arithmetic, the page and the picture of it, on a few tokens."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from loadtest.client.sse_client import Target
from loadtest.docgen import page_latency
from loadtest.measurement.provenance import shows
from loadtest.scenarios import bench_latency, latency_plot
from loadtest.scenarios.bench_latency import Arrivals
from loadtest.scenarios.service_process import ServiceFailed
from loadtest.scenarios.steady_streams import Stream, random_prompt
from loadtest.scenarios.stream_gaps import gaps_within, percentile, steps_between

STREAMS = [[0.0, 1.0, 2.0, 5.0, 6.0], [0.5, 1.5, 5.5]]


@pytest.mark.parametrize(("start", "end", "steps"), [(1.0, 5.0, 2), (0.9, 5.0, 3), (2.0, 4.9, 0), (5.0, 6.0, 1)])
def test_steps_are_the_tokens_of_who_got_most(start: float, end: float, steps: int) -> None:
    assert steps_between(STREAMS, start, end) == steps


@pytest.mark.parametrize(
    ("start", "end", "gaps"),
    [(1.2, 1.4, [1.0, 1.0]), (2.5, 4.0, [3.0, 4.0]), (2.0, 5.2, [3.0, 1.0, 4.0]), (6.0, 9.0, [])],
)
def test_gaps_count_where_any_part_of_them_does(start: float, end: float, gaps: list[float]) -> None:
    assert gaps_within(STREAMS, start, end) == gaps


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert [percentile(values, share) for share in (0.001, 0.5, 0.99, 1.0)] == [1.0, 100.0, 198.0, 200.0]
    for bad in (([], 0.5), ([1.0], 0.0), ([1.0], 1.1)):
        with pytest.raises(ValueError, match="a percentile needs values"):
            percentile(*bad)


def seen(slower: float) -> Arrivals:
    return Arrivals(
        ttft_seconds=[0.02, 0.04, 0.03],
        steps=[2, 1, 2],
        before=[[0.01] * 9, [0.02] * 9, [0.01] * 9],
        during=[[0.01 * slower] * 9, [0.02 * slower] * 9, [0.01 * slower] * 9],
    )


def result() -> dict[str, Any]:
    bounds = ((64, None, 1.5), (512, None, 4.0), (512, 1.75, 2.0))
    points = [
        {"max_batched_tokens": size, "prompt_slowdown": slowdown} | seen(slower).to_dict()
        for size, slowdown, slower in bounds
    ]
    return {
        "command": "python -m loadtest.scenarios.bench_latency",
        "shape": "S",
        "serve": ["--dtype", "bfloat16"],
        "short": {"streams": 63, "prompt_tokens": 16} | seen(1.0).to_dict(),
        "long": {"streams": 16, "prompt_tokens": 4096, "points": points},
    }


def test_arrivals_are_told_each_and_the_gaps_as_ratios_pair_by_pair() -> None:
    told = seen(4.0).to_dict()
    assert told["ttft_ms"]["median"] == pytest.approx(30.0)
    assert told["steps"]["values"] == [2.0, 1.0, 2.0]
    assert told["itl_p50_ms_before"] == pytest.approx(10.0)
    assert told["itl_p99_ms_before"]["max"] == pytest.approx(20.0)
    assert told["itl_p99_ratio"]["values"] == pytest.approx([4.0, 4.0, 4.0])
    json.dumps(told)


def test_the_page_tells_the_figures_of_the_result() -> None:
    page = page_latency.section(result(), "latency.png")
    assert "after 2 (1–2) engine steps" in page
    assert "| 64 | inf | 10.0 (10.0–20.0) | 15.0 (15.0–30.0) | 1.50 (1.50–1.50) | 30 (20–40) |" in page
    assert "| 512 | inf | 10.0 (10.0–20.0) | 40.0 (40.0–80.0) | 4.00 (4.00–4.00) | 30 (20–40) |" in page
    assert "| 512 | 1.75 | 10.0 (10.0–20.0) | 20.0 (20.0–40.0) | 2.00 (2.00–2.00) | 30 (20–40) |" in page
    assert "](latency.png)" in page


def test_the_picture_is_known_by_its_result(tmp_path: Path) -> None:
    path, other = tmp_path / "latency.png", result()
    other["long"]["streams"] = 17
    latency_plot.draw(path, result())
    assert shows(path, result())
    assert not shows(path, other)


def test_a_budget_that_leaves_nothing_for_a_prompt_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_latency.main(["--budgets", "16", "64"])
    assert ended.value.code == 2
    assert "--budgets: each value must be above --long-streams" in capsys.readouterr().err


def answering(*parts: bytes) -> tuple[list[float], list[bytes]]:
    """What a stream sees of a server that says these parts, and what it asked."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()

    async def run() -> list[float]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            stream = Stream(Target("127.0.0.1", port), [1, 2], 3, seed=4)
            first = await stream.begin()
            while len(stream.seconds) < 2:
                await asyncio.sleep(0)
            await stream.leave()
        assert first == stream.seconds[0] > stream.sent_seconds
        return stream.seconds

    return asyncio.run(asyncio.wait_for(run(), 60)), asked


def test_a_stream_tells_when_each_event_came() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    event = b"data: {}\n\n"
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    done = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    seconds, asked = answering(head + chunk, chunk[:7], chunk[7:] + done)
    assert len(seconds) == 2
    assert asked[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")


def test_a_refused_stream_says_why() -> None:
    with pytest.raises(ServiceFailed, match="429"):
        answering(b"HTTP/1.1 429 Too Many Requests\r\n\r\nfull")


def test_prompts_are_of_ids_that_end_no_text() -> None:
    prompt = random_prompt(random.Random(1), 1000, 5)
    assert (len(prompt), set(prompt)) == (1000, {0, 1, 2, 3})
