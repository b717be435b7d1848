"""Completion reader and client, tested with a scripted server."""

import asyncio
import itertools
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.client.outcome import ClientKind, Ending, Outcome
from loadtest.client.requests import LoadRequest
from loadtest.client.sse_client import CompletionClient, CompletionReader, SseParser, Target
from loadtest.measurement.benchmark_program import MeasurementFailed
from tests.loadtest.stub_server import CERTIFICATE, MODEL, PROMPT_TOKENS, Script, StubServer


def drive(server: StubServer, request: LoadRequest, *, timeout_seconds: float = 60.0) -> Outcome:
    """Send one completion request to the stub server."""
    client = CompletionClient(Target.parse(server.url), timeout_seconds=timeout_seconds)
    outcome = client.complete(request, model=MODEL)
    client.close()
    return outcome


def streaming(max_tokens: int = 5, **changes: Any) -> LoadRequest:
    return LoadRequest(index=0, prompt="Once upon", max_tokens=max_tokens, **changes)


class Handshake:
    """Gate that lets the server write chunk i + 1 only after the client has reported chunk i.

    A client that buffers would wait for ever. So the order of events shows that chunks are reported at once, and each
    time lies between two times of the server, at any speed of the machine.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reported = threading.Semaphore(1)
        self.stalled = False
        original = CompletionReader.read

        def read(reader: CompletionReader, data: bytes) -> None:
            original(reader, data)
            self._reported.release()

        monkeypatch.setattr(CompletionReader, "read", read)

    async def gate(self, chunk: int) -> None:
        acquired = await asyncio.to_thread(self._reported.acquire, timeout=60)
        self.stalled |= not acquired


def test_every_chunk_is_reported_before_the_next_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    handshake = Handshake(monkeypatch)
    with StubServer(Script(first_seconds=0.03, gap_seconds=0.01), gate=handshake.gate) as server:
        outcome = drive(server, streaming(12))
        sent = server.requests[0].chunk_seconds
    assert not handshake.stalled
    assert outcome.ending is Ending.OK
    assert len(outcome.chunk_seconds) == len(sent) == 12
    assert all(before <= seen for before, seen in zip(sent, outcome.chunk_seconds, strict=True))
    assert all(seen <= after for seen, after in zip(outcome.chunk_seconds, sent[1:], strict=False))


def test_known_delays_are_never_reported_shorter() -> None:
    with StubServer(Script(first_seconds=0.08, gap_seconds=0.02)) as server:
        outcome = drive(server, streaming(6))
    assert outcome.ttft_seconds is not None
    assert outcome.ttft_seconds >= 0.08
    # A delay of one chunk on its way shortens the gap after it, so only the sum of the gaps has a lower bound.
    assert outcome.e2e_seconds >= 0.08 + 5 * 0.02
    assert outcome.tpot_seconds == pytest.approx((outcome.e2e_seconds - outcome.ttft_seconds) / 5)
    assert sum(outcome.itl_seconds) == pytest.approx(outcome.chunk_seconds[-1] - outcome.chunk_seconds[0])


def test_a_finished_stream_is_complete() -> None:
    with StubServer() as server:
        outcome = drive(server, streaming(5))
    assert (outcome.ending, outcome.detail) == (Ending.OK, "")
    assert outcome.text == " w0 w1 w2 w3 w4"
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (PROMPT_TOKENS, 5)
    assert server.requests[0].body["stream_options"] == {"include_usage": True}


def test_a_response_that_is_not_streamed_has_no_ttft() -> None:
    with StubServer() as server:
        outcome = drive(server, streaming(5, client=ClientKind.WHOLE))
    assert outcome.ending is Ending.OK
    assert outcome.text == " w0 w1 w2 w3 w4"
    assert outcome.ttft_seconds is outcome.tpot_seconds is None
    assert "stream" not in server.requests[0].body


def test_a_cancelling_client_disconnects_after_its_chunks() -> None:
    async def gate(chunk: int) -> None:
        if chunk == 3:  # the server sends no more: only the client's disconnect ends the stream
            await asyncio.sleep(3600.0)

    with StubServer(gate=gate) as server:
        outcome = drive(server, streaming(50, client=ClientKind.CANCELLING, cancel_after=3))
    assert outcome.ending is Ending.CANCELLED
    assert outcome.completion_tokens == len(outcome.chunk_seconds) == 3


def test_a_slow_client_reads_at_its_rate_on_a_connection_of_its_own() -> None:
    with StubServer() as server:
        client = CompletionClient(Target.parse(server.url))
        slow = streaming(20, client=ClientKind.SLOW, bytes_per_second=50_000.0)
        first, outcome, _ = (client.complete(each, model=MODEL) for each in (streaming(20), slow, streaming(20)))
        client.close()
    assert (outcome.ending, outcome.text) == (Ending.OK, first.text)
    # Each chunk of the stub server has more than 150 bytes, and a read has at most 256.
    assert outcome.e2e_seconds >= 20 * 150 / 50_000.0 - 256 / 50_000.0
    assert [received.connection for received in server.requests] == [1, 2, 1]


@pytest.mark.parametrize(
    ("script", "ending", "detail"),
    [
        (Script(status=429), Ending.SHED, "scripted: as scripted"),
        (Script(status=503), Ending.HTTP_ERROR, "503 scripted: as scripted"),
        (Script(error_after=2), Ending.STREAM_ERROR, "scripted: as scripted"),
        (Script(cut_after=2), Ending.CONNECTION, "the connection ended before the response"),
        (Script(send_done=False), Ending.CONTRACT, "a stream without [DONE]"),
        (Script(send_usage=False), Ending.CONTRACT, "no usage"),
        (Script(finish_reasons=0), Ending.CONTRACT, "0 finish reasons"),
        (Script(finish_reasons=2), Ending.CONTRACT, "2 finish reasons"),
        (Script(num_tokens=4), Ending.CONTRACT, "finish reason length after 4 of 5 tokens"),
        (Script(num_tokens=6), Ending.CONTRACT, "6 tokens where at most 5 were asked for"),
        (Script(garbage=b"what is HTTP?\r\n\r\n"), Ending.CONNECTION, None),
        (Script(garbage=b""), Ending.CONNECTION, "the connection ended before the response"),
    ],
)
def test_each_server_behaviour_has_its_ending(script: Script, ending: Ending, detail: str | None) -> None:
    with StubServer(script) as server:
        outcome = drive(server, streaming(5))
    assert outcome.ending is ending
    assert detail is None or outcome.detail == detail


@pytest.mark.parametrize(("retry_after", "seconds"), [(None, 0.0), ("3", 3.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0)])
def test_a_rejection_reports_retry_after_in_seconds(retry_after: str | None, seconds: float) -> None:
    with StubServer(Script(status=429, retry_after=retry_after)) as server:
        outcome = drive(server, streaming(5))
    assert (outcome.ending, outcome.retry_after_seconds) == (Ending.SHED, seconds)


def test_a_silent_server_times_out() -> None:
    with StubServer(Script(first_seconds=3600.0)) as server:
        outcome = drive(server, streaming(5), timeout_seconds=0.2)
    assert outcome.ending is Ending.TIMEOUT
    assert outcome.e2e_seconds >= 0.2


def test_a_closed_port_is_a_connection_failure() -> None:
    with StubServer() as server:
        pass
    assert drive(server, streaming(5)).ending is Ending.CONNECTION


@pytest.mark.parametrize("script", [Script(newline="\r\n"), Script(newline="\r"), Script(close_delimited=True)])
def test_any_line_end_and_a_body_without_length_are_read(script: Script) -> None:
    with StubServer(script) as server:
        outcome = drive(server, streaming(5))
    assert (outcome.ending, outcome.detail) == (Ending.OK, "")
    assert outcome.text == " w0 w1 w2 w3 w4"


def test_connections_are_reused_and_a_closed_one_is_replaced() -> None:
    with StubServer(lambda ordinal: Script(close_delimited=ordinal == 1)) as server:
        client = CompletionClient(Target.parse(server.url))
        outcomes = [client.complete(streaming(2), model=MODEL) for _ in range(3)]
        client.close()
    assert [outcome.ending for outcome in outcomes] == [Ending.OK] * 3
    assert [received.connection for received in server.requests] == [1, 1, 2]


def test_a_request_on_an_idle_connection_that_the_server_closed_is_sent_again() -> None:
    with StubServer(lambda ordinal: Script(garbage=b"" if ordinal == 1 else None)) as server:
        client = CompletionClient(Target.parse(server.url))
        outcomes = [client.complete(streaming(2), model=MODEL) for _ in range(2)]
        client.close()
    assert [outcome.ending for outcome in outcomes] == [Ending.OK] * 2
    assert [received.connection for received in server.requests] == [1, 1, 2]


def test_latency_counts_from_the_intended_send() -> None:
    with StubServer() as server:
        client = CompletionClient(Target.parse(server.url))
        outcome = client.complete(streaming(2), model=MODEL, intended_seconds=time.perf_counter() - 100.0)
        client.close()
    assert outcome.ttft_seconds is not None
    assert outcome.e2e_seconds >= outcome.ttft_seconds > 100.0
    assert outcome.sent_seconds - outcome.intended_seconds > 100.0


def test_https_checks_the_certificate_and_reuses_connections() -> None:
    with StubServer(is_secure=True) as server:
        client = CompletionClient(Target.parse(server.url, str(CERTIFICATE)))
        assert client.target.fetch_json("/v1/models")["data"][0]["id"] == MODEL
        outcomes = [client.complete(streaming(2), model=MODEL) for _ in range(2)]
        client.close()
        assert [each.ending for each in outcomes] == [Ending.OK] * 2
        assert len({received.connection for received in server.requests}) == 1
        assert drive(server, streaming(2)).ending is Ending.CONNECTION
        for url, ca_file, reason in (
            (server.url, None, "self-signed certificate; for a private CA, give --ca-file FILE"),
            (server.url.replace("localhost", "127.0.0.1"), str(CERTIFICATE), "IP address mismatch, .*127.0.0.1'$"),
        ):
            with pytest.raises(MeasurementFailed, match=f"the certificate of {url} is not valid: {reason}"):
                Target.parse(url, ca_file).fetch_json("/v1/models")
    with pytest.raises(ValueError, match="--ca-file nothing: No such file"):
        Target.parse("https://localhost:1", "nothing")


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "127.0.0.1:8000", "http://", "http://a/b"])
def test_an_invalid_address_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="must look like"):
        Target.parse(url)


def test_an_api_key_of_several_words_is_rejected_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_API_KEY", "sk-Secret\r\nX-Evil: 1")
    with pytest.raises(ValueError, match="environment variable KVASIR_API_KEY: must be one word") as raised:
        Target.parse("http://127.0.0.1:1")
    assert "sk-" not in str(raised.value)
    monkeypatch.setenv("KVASIR_API_KEY", "")
    assert Target.parse("http://127.0.0.1:1").api_key is None
    monkeypatch.setenv("KVASIR_API_KEY", "sk-Secret")
    assert "sk-" not in repr(Target.parse("http://127.0.0.1:1"))


EVENTS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), max_size=6)


@settings(deadline=None)
@given(events=EVENTS, newline=st.sampled_from(["\n", "\r\n", "\r"]), cuts=st.lists(st.integers(0, 400)))
def test_events_do_not_depend_on_the_boundaries_of_reads(events: list[str], newline: str, cuts: list[int]) -> None:
    stream = "".join(f": note{newline}data: {event}{newline}{newline}" for event in events).encode()
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    parser = SseParser()
    seen = [event for start, end in itertools.pairwise(places) for event in parser.feed(stream[start:end])]
    assert seen == [event.encode() for event in events]


def test_data_lines_of_one_event_are_joined_and_other_fields_skipped() -> None:
    parser = SseParser()
    assert parser.feed(b"event: x\ndata:a\ndata: b\nid: 7\nretry: 5\n\n: note\n\ndata: c") == [b"a\nb"]
    assert parser.feed(b"\n\n") == [b"c"]


def test_a_body_read_byte_by_byte_is_complete_at_its_end() -> None:
    reader = CompletionReader(streaming(client=ClientKind.WHOLE))
    wire = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n" + b'{"choices":[]}'
    for position in range(len(wire)):
        assert not reader.is_complete
        reader.feed(wire[position : position + 1], 0.0)
    assert reader.is_complete
    assert reader.is_reusable
    assert reader.finish().detail == "0 finish reasons"
