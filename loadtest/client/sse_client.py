"""HTTP client of OpenAI completions that records the arrival time of each streamed chunk when `recv` returns its bytes.

Ordinary HTTP clients buffer: locust's `iter_lines` waits for 1,024 bytes. The sockets are gevent's, as locust needs.
"""

import argparse
import itertools
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import urlsplit

import gevent
import httptools
import msgspec
from gevent import socket
from gevent import ssl as gevent_ssl

from loadtest.client.http1 import Pace, ResponseReader, request_bytes
from loadtest.client.outcome import Ending, Outcome
from loadtest.client.requests import LoadRequest
from loadtest.client.workload import Passages, Workload, WorkloadSpec, tales
from loadtest.measurement.benchmark_program import MeasurementFailed, add_options

# For a service without `/tokenize`. A sentence full of names may have more than twice the expected tokens.
_CHARS_PER_TOKEN, _OVERSHOOT = 4, 2.5
# OpenSSL's codes of a certificate that signs itself, or whose CA is not trusted.
_UNTRUSTED = (18, 19, 20, 21)
_THOUGHTS = ("reasoning_content", "reasoning")  # texts of a reasoning model before its answer


@dataclass(frozen=True, slots=True)
class Target:
    """Address of the service under test, the API key to send, and the check of its certificate (None: plain HTTP).

    The key comes from the environment, because process lists show flags.
    """

    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(cls, url: str, ca_file: str | None = None) -> Self:
        """Parse `http://host[:port]` or `https://...`, and read `KVASIR_API_KEY`.

        ca_file: certificates to trust besides those of the system. Raises `ValueError` if URL, key or file is invalid.
        """
        parts, key = urlsplit(url), os.environ.get("KVASIR_API_KEY", "").strip()
        if parts.scheme not in ("http", "https") or parts.hostname is None or parts.path not in ("", "/"):
            raise ValueError(f"the URL of the service must look like http://127.0.0.1:8000, not {url!r}")
        if key and not re.fullmatch(r"[!-~]+", key):
            raise ValueError("environment variable KVASIR_API_KEY: must be one word of visible ASCII characters")
        if parts.scheme == "http":
            return cls(parts.hostname, parts.port or 80, key or None)
        tls = gevent_ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the certificate and its host name
        tls.load_default_certs()
        try:
            if ca_file:
                tls.load_verify_locations(ca_file)
        except OSError as error:
            raise ValueError(f"--ca-file {ca_file}: {error.strerror}") from error
        return cls(parts.hostname, parts.port or 443, key or None, tls)

    @property
    def netloc(self) -> str:
        """Host and port, as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Base URL of the service under test."""
        return f"http{'s' if self.tls else ''}://{self.netloc}"

    @property
    def authorization(self) -> dict[str, str]:
        """`Authorization` header with the API key, as a dictionary; empty without a key."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def fetch_json(self, path: str, payload: Any = None) -> Any:
        """Send a GET, or a POST with `payload` as JSON, and return the parsed JSON of the response.

        Raises `OSError` if the request fails, also by its status, and `ValueError` if the response is not JSON.
        """
        return json.loads(self.fetch(path, None if payload is None else json.dumps(payload).encode()))

    def fetch(self, path: str, body: bytes | None = None) -> bytes:
        """Send a GET, or a POST with a JSON body, and return the body of the response.

        Raises `OSError` if the request fails, and `MeasurementFailed` without a TLS connection to trust.
        """
        headers = {"Content-Type": "application/json"} | self.authorization
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self.tls) as response:
                content: bytes = response.read()
                return content
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLError):
                raise
            text = f"{self.url} does not speak TLS ({error.reason.reason}); perhaps its URL begins with http://"
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                text = f"the certificate of {self.url} is not valid: {error.reason.verify_message.rstrip('.')}"
                text += "; for a private CA, give --ca-file FILE" if error.reason.verify_code in _UNTRUSTED else ""
            raise MeasurementFailed(text) from error

    def connect(self, pace: Pace) -> socket.socket:
        """Connect to the service, for a client that reads at this pace. Raises `OSError` if that fails."""
        addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(addresses, 1):
            connection = socket.socket(family, kind, protocol)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pace.prepare(connection)
                connection.connect(address)
                break
            except OSError as error:
                connection.close()
                if number == len(addresses) or isinstance(error, TimeoutError):
                    raise
        return self.tls.wrap_socket(connection, server_hostname=self.host) if self.tls else connection


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add command-line options for requests to a service to a parser, without its URL."""
    parser.add_argument("--model", help="model id to request (default: the first of /v1/models)")
    add_options(parser, {"request-timeout": (120.0, "timeout of a request in seconds")})
    text = "file of certificates to trust besides the system's, for https"
    parser.add_argument("--ca-file", metavar="FILE", help=text)


def discover(target: Target, spec: WorkloadSpec) -> tuple[str, Workload]:
    """Return the id of a service's model, and the workload with prompt lengths in tokens of that model.

    The service's `/tokenize` counts the tokens. Without `/tokenize`, a token counts as four characters. The context
    length in `/v1/models`, if any, replaces that of `spec`. Both are read as vLLM and as llama.cpp write them. Raises
    `OSError` if the service cannot be reached.
    """
    listed, text, tokenized = target.fetch_json("/v1/models")["data"][0], tales(), dict[str, Any]()
    question: dict[str, Any] = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    if listed.get("owned_by") == "llamacpp":
        question = {"content": text, "with_pieces": True}
    with suppress(urllib.error.HTTPError):
        tokenized = target.fetch_json("/tokenize", question)
    try:
        passages = Passages(text, _token_strs(tokenized))
    except ValueError:  # no strings, or strings that do not spell the text: use tokens of equal length
        count = tokenized.get("count", len(text) // _CHARS_PER_TOKEN)
        ends = [number * len(text) // count for number in range(count + 1)]
        guess = [text[start:end] for start, end in itertools.pairwise(ends)]
        passages = Passages(text, guess, overshoot=_OVERSHOOT)
    limit = listed.get("max_model_len") or (listed.get("meta") or {}).get("n_ctx") or spec.max_context_tokens
    return listed["id"], Workload(replace(spec, max_context_tokens=limit), passages)


def _token_strs(tokenized: Mapping[str, Any]) -> list[str]:
    """Return the texts of the tokens: `token_strs` of vLLM, or the pieces of llama.cpp; empty if there are none."""
    pieces = [str(token["piece"]) for token in tokenized.get("tokens", ()) if isinstance(token, Mapping)]
    return tokenized.get("token_strs") or pieces


class SseParser:
    """Incremental parser of a stream of server-sent events (WHATWG HTML, section 9.2.6)."""

    def __init__(self) -> None:
        self._tail = b""
        self._skip_newline = False  # the last bytes ended in CR: skip an LF that follows

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes of the stream, and return the `data` of each event that these bytes complete."""
        if self._skip_newline:
            data = data.removeprefix(b"\n")
        self._skip_newline = data.endswith(b"\r")
        *events, self._tail = (self._tail + data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).split(b"\n\n")
        fields = (
            [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"] for event in events
        )
        return [b"\n".join(values) for values in fields if values]


class CompletionReader(ResponseReader):
    """Reader of the response to one completion request: takes bytes and fills in the `Outcome`."""

    def __init__(self, request: LoadRequest, intended_seconds: float | None = None) -> None:
        super().__init__(now := time.perf_counter())
        intended = now if intended_seconds is None else intended_seconds
        self.request = request
        self.outcome = Outcome(index=request.index, client=request.client, intended_seconds=intended, sent_seconds=now)
        self.outcome.kind = request.kind
        self._sse: SseParser | None = None
        self._content = bytearray()
        self._finish_reasons: list[str] = []
        self._has_usage = False
        self._saw_done = False
        self._error: str | None = None
        self._broken: str | None = None

    @property
    def is_over(self) -> bool:
        """True if the response has ended, or if the client has received the chunks after which it is to disconnect."""
        limit = self.request.cancel_after
        return self.is_complete or (limit is not None and len(self.outcome.chunk_seconds) >= limit)

    def on_headers_complete(self) -> None:
        """Store the status of the response and detect an event stream."""
        super().on_headers_complete()
        self._sse = SseParser() if self.is_stream else None

    def on_body(self, body: bytes) -> None:
        """Handle a part of the response's body: parse the events of a stream, or store the part of a JSON body."""
        if self._sse is None:
            self._content.extend(body)
            return
        for event in self._sse.feed(body):
            self.read(event)

    def on_message_complete(self) -> None:
        """Mark the response as complete, and read a JSON body."""
        super().on_message_complete()
        if self._sse is None:
            self.read(bytes(self._content))
            self._saw_done = True

    def read(self, data: bytes) -> None:
        """Update the outcome from the `data` of one event of a stream, or from a JSON body that is not streamed."""
        if data == b"[DONE]":
            self._saw_done = True
            return
        if self._saw_done:
            self._broken = "an event after [DONE]"
        outcome = self.outcome
        try:
            completion = msgspec.json.decode(data)
            if (error := completion.get("error")) is not None:
                self._error = f"{error.get('code') or error.get('type') or 'error'}: {error.get('message', '')}"
            for choice in completion.get("choices", ()):
                message = choice.get("delta") or choice.get("message") or choice
                text = str(message.get("content") or message.get("text") or "")
                outcome.text += text
                calls = message.get("tool_calls") or ()
                self._add_calls(calls)
                is_thought = any(map(message.get, _THOUGHTS))
                if self._sse is not None and (text or calls or is_thought or choice.get("token_ids")):
                    outcome.chunk_seconds.append(self.now)
                if choice.get("finish_reason") is not None:
                    self._finish_reasons.append(choice["finish_reason"])
            if (usage := completion.get("usage")) is not None:
                self._has_usage = True
                outcome.prompt_tokens = usage["prompt_tokens"]
                outcome.completion_tokens = usage.get("completion_tokens", 0)  # an embedding has none
            for each in completion.get("data", ()):
                outcome.embedding_size = len(each["embedding"])
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            self._broken = f"not a completion: {error}"

    def _add_calls(self, calls: Iterable[Mapping[str, Any]]) -> None:
        """Add the tool calls of a message, or their parts in an event, to the outcome."""
        known = self.outcome.tool_calls
        for number, part in enumerate(calls):
            if part.get("index", number) >= len(known):
                known.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call, function = known[part.get("index", number)], part.get("function") or {}
            call["id"] = part.get("id") or call["id"]
            for name in ("name", "arguments"):
                call["function"][name] += function.get(name) or ""

    def end(self, ending: Ending, detail: str) -> Outcome:
        """End the request now with this result and this explanation, and return its completed outcome."""
        outcome = self.outcome
        outcome.ending, outcome.detail, outcome.end_seconds = ending, detail, time.perf_counter()
        if not self._has_usage:
            outcome.completion_tokens = len(outcome.chunk_seconds)
        retry_after = self.headers.get("retry-after", "")  # a date counts as 0 seconds
        if ending is Ending.SHED and retry_after.isdecimal():
            outcome.retry_after_seconds = float(retry_after)
        return outcome

    def finish(self) -> Outcome:
        """End the request with the result that its response shows, and return its outcome.

        Its end time is the arrival of the response's last bytes, or the end of the connection.
        """
        self.end(*self._ending()).end_seconds = self.now
        return self.outcome

    def _ending(self) -> tuple[Ending, str]:
        """Return the result of the request and an explanation. A complete response must also keep the API contract."""
        if not self.is_complete and self.is_over:
            return Ending.CANCELLED, ""
        if not self.is_complete or self.status is None:
            return Ending.CONNECTION, "the connection ended before the response"
        if self.status == 429:
            return Ending.SHED, self._error or "429"
        if self.status != 200:
            return Ending.HTTP_ERROR, f"{self.status} {self._error or self._broken or ''}".rstrip()
        if self._error is not None:
            return Ending.STREAM_ERROR, self._error
        count, limit, reasons = self.outcome.completion_tokens, self.request.max_tokens, self._finish_reasons
        breaches = {
            str(self._broken): self._broken is not None,
            "a stream without [DONE]": not self._saw_done,
            f"{len(reasons)} finish reasons": len(reasons) != self.request.num_choices,
            "no usage": not self._has_usage,
            f"{count} tokens where at most {limit} were asked for": count > limit,
            f"finish reason length after {count} of {limit} tokens": "length" in reasons and count < limit,
        }
        breach = next((text for text, is_breach in breaches.items() if is_breach), "")
        expected = self.request.expected
        if not breach and expected not in (None, self.outcome.text):
            return Ending.CHANGED, f"{self.outcome.text[:40]!r} instead of {expected[:40]!r}"
        if not breach and (flaw := self.request.flaw(self.outcome)):
            return Ending.INVALID, flaw
        return Ending.CONTRACT if breach else Ending.OK, breach


class CompletionClient:
    """HTTP client of one service, with reused connections, for any number of concurrent greenlets."""

    def __init__(self, target: Target, *, timeout_seconds: float = 120.0) -> None:
        self.target = target
        self._timeout_seconds = timeout_seconds
        self._idle: list[socket.socket] = []

    def complete(
        self, request: LoadRequest, *, model: str | None = None, intended_seconds: float | None = None
    ) -> Outcome:
        """Send one completion request, and return its outcome after the response or the planned disconnect.

        Failures are outcomes, not exceptions.
        """
        return self.read(CompletionReader(request, intended_seconds), model=model)

    def read(self, reader: CompletionReader, *, model: str | None = None) -> Outcome:
        """Send the reader's request, feed the response to the reader, and return its outcome, as `complete` does.

        Meanwhile, `reader.outcome` gets the time of each chunk on its arrival.
        """
        body = json.dumps(reader.request.body(model)).encode()
        headers = {"Host": self.target.netloc, "User-Agent": "kvasir-loadtest"}
        sent = request_bytes(reader.request.path, body, headers | self.target.authorization)
        reader.outcome.sent_seconds = time.perf_counter()
        try:
            with gevent.Timeout(self._timeout_seconds, TimeoutError):
                self._send(sent, reader)
            outcome = reader.finish()
        except TimeoutError:
            outcome = reader.end(Ending.TIMEOUT, f"the response did not end within {self._timeout_seconds:g} s")
        except (OSError, httptools.HttpParserError) as error:
            outcome = reader.end(Ending.CONNECTION, f"{type(error).__name__}: {error}")
        if reader.request.on_end is not None:
            reader.request.on_end(reader.request, outcome)
        return outcome

    def close(self) -> None:
        """Close the idle connections. The connection of a request in progress stays open."""
        while self._idle:
            self._idle.pop().close()

    def _send(self, payload: bytes, reader: CompletionReader) -> None:
        pace = Pace.of(reader.request.bytes_per_second)
        if self._idle and not pace.pause_seconds:
            with suppress(ConnectionError):
                self._exchange(self._idle.pop(), payload, reader, pace)
            if reader.status is not None:
                return
            # The server closed the idle connection before the request arrived; nothing of a response was received.
        self._exchange(self.target.connect(pace), payload, reader, pace)

    def _exchange(self, connection: socket.socket, payload: bytes, reader: CompletionReader, pace: Pace) -> None:
        """Send a whole request and feed the response to the reader, until the response or the connection ends."""
        try:
            connection.sendall(payload)
            while not reader.is_over:
                data, now = connection.recv(pace.num_bytes), time.perf_counter()
                if not data:
                    reader.end_of_connection(now)
                    break
                reader.feed(data, now)
                if pace.pause_seconds:
                    gevent.sleep(pace.pause_seconds)
        finally:
            if reader.is_complete and reader.is_reusable and not pace.pause_seconds:
                self._idle.append(connection)
            else:
                connection.close()
