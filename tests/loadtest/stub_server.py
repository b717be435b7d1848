"""Stub of a completions server, in a thread of the test's process.

A `Script` per request says what the server sends and when. `Received.chunk_seconds` holds the time at which each chunk
was about to be written, by the clock that the client uses. As a program, the server runs one script until standard
input ends, to try the load test without a model.
"""

import asyncio
import json
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Certificate of localhost that signs itself, and its key.
CERTIFICATE = Path(__file__).parents[1] / "data" / "tls" / "localhost.pem"
MODEL = "stub"
PROMPT_TOKENS = 7


@dataclass(frozen=True, kw_only=True)
class Script:
    """Response of the stub server to one request.

    first_seconds, gap_seconds: least pauses before the first chunk and before every later chunk.
    num_tokens: chunks of text; None for the request's max_tokens. word: text of a chunk before its number.
    cut_after, error_after: number of chunks after which the connection is dropped, or an error event ends the stream.
    finish_reasons: number of finish reasons in the response; 1 is correct.
    """

    status: int = 200
    retry_after: str | None = None
    first_seconds: float = 0.0
    gap_seconds: float = 0.0
    num_tokens: int | None = None
    word: str = " w"
    cut_after: int | None = None
    error_after: int | None = None
    send_done: bool = True
    send_usage: bool = True
    finish_reasons: int = 1
    garbage: bytes | None = None
    newline: str = "\n"
    close_delimited: bool = False


@dataclass
class Received:
    """Request that the stub server received, and the times of the chunks that it sent in response."""

    path: str
    body: dict[str, Any]
    connection: int
    chunk_seconds: list[float] = field(default_factory=list)
    left_early: bool = False


Gate = Callable[[int], Awaitable[None]]


async def _open_gate(chunk: int) -> None:
    pass


class StubServer:
    """Context manager of a stub server on a free port of 127.0.0.1; with TLS if `is_secure`."""

    def __init__(
        self, script: Script | Callable[[int], Script] = Script(), gate: Gate = _open_gate, *, is_secure: bool = False
    ) -> None:
        self._is_secure = is_secure
        self._script = script if callable(script) else lambda ordinal: script
        self._gate = gate
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stub-server")
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._num_connections = 0
        self.port = 0
        self.requests: list[Received] = []
        self.keys: list[str | None] = []  # Authorization header of every request, to any route

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}" if self._is_secure else f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(60):
            raise RuntimeError("the stub server did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop = self._stop
        assert stop is not None
        self._loop.call_soon_threadsafe(stop.set)
        self._thread.join(60)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if self._is_secure else None
        if tls is not None:
            tls.load_cert_chain(CERTIFICATE)
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        number = self._num_connections
        try:
            while await self._request(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        fields = (line.split(": ", 1) for line in head[1:] if line)
        headers = {name.lower(): value for name, value in fields}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        received = Received(path, json.loads(body) if body else {}, number)
        self.keys.append(headers.get("authorization"))
        if method == "GET" and path == "/v1/models":
            _reply(writer, 200, {"object": "list", "data": [{"id": MODEL, "max_model_len": 512}]})
        elif path == "/tokenize":
            _reply(writer, 200, _tokenized(received.body))
        elif path == "/v1/completions":
            self.requests.append(received)
            script = self._script(len(self.requests) - 1)
            keep = await self._complete(script, received, writer)
            return keep and headers.get("connection") != "close"
        else:
            _reply(writer, 404, {"error": {"message": "no such route", "type": "not_found", "code": None}})
        await writer.drain()
        return headers.get("connection") != "close"

    async def _complete(self, script: Script, received: Received, writer: asyncio.StreamWriter) -> bool:
        num_tokens = received.body["max_tokens"] if script.num_tokens is None else script.num_tokens
        if script.garbage is not None:
            writer.write(script.garbage)
            await writer.drain()
            return False
        if script.status != 200:
            error = {"message": "as scripted", "type": "scripted", "param": None, "code": "scripted"}
            headers = "" if script.retry_after is None else f"Retry-After: {script.retry_after}\r\n"
            _reply(writer, script.status, {"error": error}, headers)
            return True
        if received.body.get("stream"):
            try:
                return await self._stream(script, num_tokens, received, writer)
            except ConnectionError:
                received.left_early = True
                raise
        await asyncio.sleep(script.first_seconds + script.gap_seconds * (num_tokens - 1))
        whole = _chunk("".join(_words(num_tokens, script.word)), "length")
        _reply(writer, 200, whole | {"usage": _usage(num_tokens)})
        return True

    async def _stream(self, script: Script, num_tokens: int, received: Received, writer: asyncio.StreamWriter) -> bool:
        transfer = "Connection: close" if script.close_delimited else "Transfer-Encoding: chunked"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n{transfer}\r\n\r\n"
        writer.write(head.encode())

        async def send(text: str) -> None:
            data = (text + script.newline * 2).encode()
            writer.write(data if script.close_delimited else b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
            if writer.transport.is_closing():
                raise ConnectionResetError("the client disconnected")

        await send(": keep-alive")
        for index, word in enumerate(_words(num_tokens, script.word)):
            if index == script.cut_after:
                return False
            if index == script.error_after:
                await send("data: " + json.dumps({"error": {"message": "as scripted", "type": "scripted"}}))
                break
            await self._gate(index)
            await asyncio.sleep(script.first_seconds if index == 0 else script.gap_seconds)
            received.chunk_seconds.append(time.perf_counter())
            last = index == num_tokens - 1
            await send("data: " + json.dumps(_chunk(word, "length" if last and script.finish_reasons else None)))
        for _ in range(script.finish_reasons - 1):
            await send("data: " + json.dumps(_chunk("", "length")))
        if script.send_usage:
            await send("data: " + json.dumps({"choices": [], "usage": _usage(num_tokens)}))
        if script.send_done:
            await send("data: [DONE]")
        if not script.close_delimited:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        return not script.close_delimited


def _tokenized(body: dict[str, Any]) -> dict[str, Any]:
    """Return the response of `/tokenize` with tokens of four characters."""
    prompt = body["prompt"]
    pieces = [prompt[start : start + 4] for start in range(0, len(prompt), 4)]
    strings = {"token_strs": pieces} if body.get("return_token_strs") else {}
    return {"count": len(pieces), "max_model_len": 512, "tokens": list(range(len(pieces))), **strings}


def _words(count: int, word: str) -> list[str]:
    return [f"{word}{index}" for index in range(count)]


def _usage(num_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": num_tokens,
        "total_tokens": PROMPT_TOKENS + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def _chunk(text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}


def _reply(writer: asyncio.StreamWriter, status: int, payload: dict[str, Any], headers: str = "") -> None:
    body = json.dumps(payload).encode()
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    writer.write(head.encode() + body)


if __name__ == "__main__":
    with StubServer(Script(first_seconds=0.05, gap_seconds=0.01)) as server:
        print(server.url, flush=True)
        sys.stdin.read()
