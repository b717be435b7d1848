"""Errors of the load test's client: its TTFT and ITL beside the times at which a stub server sent each chunk.

    python -m tests.loadtest.known_delays [--streams 1 64 512]

The stub is another process. Each of its chunks carries the time just before its send, by the clock of all processes.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np

from loadtest.client.outcome import LoadRun, Outcome
from loadtest.client.sse_client import CompletionClient, Target
from loadtest.client.workload import LoadRequest
from loadtest.measurement.figures import Column, table
from loadtest.scenarios.service_benchmark import check_success, run_closed

FIRST_SECONDS = 0.05
COLUMNS = (
    Column("streams", "streams"),
    Column("chunks/s", "chunks_per_second", ",.0f"),
    *(
        Column(f"{metric} error {figure}, ms", f"{metric}.{figure}", ".3f")
        for metric in ("TTFT", "ITL")
        for figure in ("p50", "p99", "max")
    ),
    Column("client CPU, cores", "client_cpu_share", ".2f"),
)


class Stub(asyncio.Protocol):
    """Connection that answers each completion request with a stream of chunks at known delays."""

    def __init__(self, gap_seconds: float) -> None:
        self._gap_seconds = gap_seconds
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        _, _, body = self._received.partition(b"\r\n\r\n")
        if not body.endswith(b"}"):  # of the JSON object
            return
        self._received = b""
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        # The random part spreads the first chunks of streams that begin together.
        due = time.monotonic() + FIRST_SECONDS + random.uniform(0.0, self._gap_seconds)
        loop = asyncio.get_running_loop()
        count = json.loads(body)["max_tokens"]
        for number in range(count):
            loop.call_at(due + number * self._gap_seconds, self._send, number, count)

    def _send(self, number: int, count: int) -> None:
        is_last = number == count - 1
        choice = {"text": f"{time.perf_counter()!r} ", "finish_reason": "length" if is_last else None}
        event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        if is_last:
            usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}}
            event += b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"
        end = b"0\r\n\r\n" if is_last else b""
        self._transport.write(b"%x\r\n%s\r\n%s" % (len(event), event, end))


def serve(gap_seconds: float, port: Connection) -> None:
    """Serve on a free port of 127.0.0.1, and send the port."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Stub(gap_seconds), "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def load(num_streams: int, gap_seconds: float, seconds: float) -> LoadRun:
    """Read from `num_streams` streams for about `seconds`, of a stub in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    stub = context.Process(target=serve, args=(gap_seconds, theirs), daemon=True)
    stub.start()
    try:
        client = CompletionClient(Target.parse(f"http://127.0.0.1:{ours.recv()}"))
        # Lengths differ, so that the streams of many clients do not begin and end together.
        length = max(2, round(min(2.0, seconds / 3) / gap_seconds))
        count = num_streams * max(1, round(seconds / (FIRST_SECONDS + length * gap_seconds)))
        requests = (LoadRequest(index=i, prompt="Once", max_tokens=2 + (7 * i) % (2 * length)) for i in range(count))
        run = run_closed(client, requests, num_streams=num_streams)
        client.close()
    finally:
        stub.terminate()
        stub.join()
    check_success(run.outcomes)
    return run


def errors_ms(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Return percentiles of the absolute errors of TTFT and ITL, in milliseconds."""

    def errors() -> Iterator[tuple[float, "np.ndarray[tuple[int], np.dtype[np.float64]]"]]:
        for outcome in outcomes:
            late = np.array(outcome.chunk_seconds) - np.array(outcome.text.split(), dtype=np.float64)
            yield late[0], np.diff(late)

    ttft, itl = zip(*errors(), strict=True)
    figures = {}
    for name, values in (("TTFT", np.array(ttft)), ("ITL", np.concatenate(itl))):
        p50, p99, most = np.percentile(1e3 * np.abs(values), (50, 99, 100)).tolist()
        figures[name] = {"p50": p50, "p99": p99, "max": most}
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Print the errors at each number of streams as a table."""
    parser = argparse.ArgumentParser(description="Print the errors of the load test's client beside a stub server.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512], help="numbers of concurrent streams")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration for each number of streams")
    text = "chunks per second that all streams together get at most; a stream gets at most 100 (default: %(default)g)"
    parser.add_argument("--rate", type=float, default=3200.0, help=text)
    arguments = parser.parse_args(argv)
    rows = []
    for num_streams in arguments.streams:
        run = load(num_streams, max(0.01, num_streams / arguments.rate), arguments.seconds)
        rate = sum(len(outcome.chunk_seconds) for outcome in run.outcomes) / run.duration_seconds
        figures = {"streams": num_streams, "chunks_per_second": rate, "client_cpu_share": run.client_cpu_share}
        rows.append(figures | errors_ms(run.outcomes))
    print(table(COLUMNS, rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
