"""HTTP server with the service's routes but without a model, which fails on request.

`StubServer` serves the playground page and the routes that the page calls. A word of `FAULTS` in the prompt selects a
failure; without such a word the server streams `STORY` token by token. A word of `ANSWERS` in a message selects a
canned answer of `/v1/chat/completions`, with reasoning, tool calls or Markdown, in OpenAI's streaming format. `_send`
writes a stream in chunks cut at seeded random bytes, also inside characters and line ends.
"""

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

from tests.playground import attention

PAGE = Path(__file__).parents[2] / "service" / "api" / "playground" / "index.html"
MODEL = "stub-stories"
CONTEXT_LENGTH = 512
FAULTS = ("<400>", "<429>", "<503>", "<html>", "<error>", "<cut>", "<truncated>", "<slow>", "<steady>")

STORY = (
    " He did not know what it opened, so he carried it home and hid it in a little blue cup. That night the key began"
    " to sing.\n\nThe fox sat up. “Who is there?” he asked. The key sang again, very softly, and a small door of light"
    " opened in the wall. Behind it was a garden where it was still summer, and in the garden stood an old hare with a"
    " café table and two cups of tea.\n\n“You are late,” said the hare, “but the tea is still warm.” The fox laughed 🦊"
    " and sat down. They talked until the stars went out, and from then on the fox came every night."
)
# Markup must reach the page as text: these words would become an element if it did not.
HOSTILE = '<img src=x onerror="document.title=1"> & <b>bold</b> </script><script>document.title=2</script>'

REASONING = "The user greets me. A short greeting is enough."
MARKDOWN = """## A plan

Take **three** steps, with `care`:

1. Open the *box*
   - gently
2. Read <script>document.title=3</script>

```python
print("<b>hello</b>")
```

| key | door |
|---|---|
| gold | <img src=x onerror=document.title=4> |

> See [the docs](https://example.org/a?b=1), [not this](javascript:document.title=5) or https://example.org/x.
"""
CALLS = [("call_1", "weather", '{"city": "Bergen", "days": 2}'), ("call_2", "clock", "{}")]
ESCAPES = "\x1b[2J\x1b]0;owned\x07 a\rb\x9b31m \u202etxt 👩\u200d🔬\n"  # a terminal must not obey these
ANSWERS = ("<think>", "<tools>", "<markdown>", "<escapes>")


@dataclass
class Record:
    """Requests to the stub server: bodies of completion requests, and number of streams that clients disconnected."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_left: int = 0
    num_busy: int = 0


class StubServer:
    """Stub server on a free port of 127.0.0.1, from `start` to `stop`."""

    def __init__(
        self,
        *,
        token_seconds: float = 0.01,
        line_end: str = "\n",
        looks: bool = True,
        key: str = "",
        chats: bool = True,
    ) -> None:
        self.record = Record()
        attributes = {"record": self.record, "token_seconds": token_seconds, "line_end": line_end, "looks": looks}
        attributes |= {"key": key, "chats": chats}
        handler = type("Handler", (_Handler,), attributes)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def start(self) -> "StubServer":
        Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def split_tokens(text: str) -> list[str]:
    """Split a text into words with their leading spaces, similar to byte-level BPE."""
    tokens: list[str] = []
    for char in text:
        if tokens and char.isalpha() and (tokens[-1][-1].isalpha() or tokens[-1] == " "):
            tokens[-1] += char
        else:
            tokens.append(char)
    return tokens


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    record: ClassVar[Record]
    token_seconds: ClassVar[float]
    line_end: ClassVar[str]
    looks: ClassVar[bool]
    key: ClassVar[str]
    chats: ClassVar[bool]

    def parse_request(self) -> bool:
        """Reject a request without the API key, except for the page itself."""
        if not super().parse_request():
            return False
        has_key = self.key in ("", (self.headers["Authorization"] or "").removeprefix("Bearer "))
        is_open = has_key or self.path in ("/", "/playground", "/ready")
        if not is_open:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self._answer_error(401, "this server asks for an API key", "invalid_api_key")
        return is_open

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log: it would hide the output of the checks."""

    def do_GET(self) -> None:
        model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "stub", "max_model_len": CONTEXT_LENGTH}
        routes: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": [model]},
            "/version": {"version": "0.1.0"},
            "/tokenizer_info": {"chat_template": "a template" if self.chats else None},
            "/ready": {"state": "ready", "phase": "serving", "elapsed_s": 3.2, "eta_s": None},
        }
        if self.path in ("/", "/playground"):
            self._answer(200, PAGE.read_bytes(), {"Content-Type": "text/html; charset=utf-8"})
        elif self.path == "/inspect/attention":
            self._answer_look(lambda: attention.limits(MODEL))
        elif self.path in routes:
            self._answer_json(200, routes[self.path])
        else:
            self._answer_error(404, "no such route", "not_found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            text = "".join(message["content"] for message in body["messages"]) if "messages" in body else body["prompt"]
            self._answer_json(200, {"count": len(split_tokens(text)), "max_model_len": CONTEXT_LENGTH})
        elif self.path == "/inspect/attention":
            if "<429>" in body["prompt"]:
                self._answer_error(429, "4 looks are under way; try again later", "queue_full")
            else:
                self._answer_look(lambda: attention.answer(MODEL, split_tokens(body["prompt"]), body["layer"]))
        elif self.path == "/v1/completions":
            self.record.bodies.append(body)
            self._complete(body)
        elif body.get("model", MODEL) != MODEL:
            self._answer_error(404, f"the model {body['model']} does not exist", "model_not_found", param="model")
        elif self.path == "/v1/chat/completions" and self.chats:
            self.record.bodies.append(body)
            self._complete(body | {"prompt": body["messages"][-1]["content"]})
        else:
            self._answer_error(404, "no such route", "not_found")

    def _answer_look(self, answer: Callable[[], dict[str, Any]]) -> None:
        if self.looks:
            self._answer_json(200, answer())
        else:
            self._answer_error(403, "attention inspection is switched off on this server", "switched_off")

    def _complete(self, body: dict[str, Any]) -> None:
        fault = next((fault for fault in FAULTS if fault in body["prompt"]), "")
        if fault == "<400>":
            self._answer_error(400, "top_k must not be negative, not -3", "invalid_value", param="top_k")
        elif fault == "<429>" and self.record.num_busy < 1:
            self.record.num_busy += 1
            self._answer_error(
                429,
                "the queue is full: 64 requests are waiting",
                "queue_full",
                headers={"retry-after": "2", "retry-after-ms": "1500"},
            )
        elif fault == "<503>":
            self._answer_error(503, "the server is shutting down", "draining", headers={"retry-after": "30"})
        elif fault == "<html>":
            self._answer(502, b"<html><b>Bad Gateway</b></html>", {"Content-Type": "text/html"})
        else:
            self._stream(body, fault)

    def _stream(self, body: dict[str, Any], fault: str) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        deltas = _deltas(body)
        pause = {"<slow>": 0.25, "<steady>": 0.03}.get(fault, self.token_seconds)
        try:
            self._send_deltas(body, deltas, fault, pause)
            if fault != "<truncated>":
                self._send(f"data: [DONE]{self.line_end * 2}")
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            self.record.num_left += 1
            self.close_connection = True

    def _send_deltas(self, body: dict[str, Any], deltas: list[dict[str, Any]], fault: str, pause: float) -> None:
        started = time.perf_counter()
        draws = random.Random(len(body["prompt"]))
        offset = 0
        self._send(f": keep-alive{self.line_end * 2}")
        time.sleep(4 * pause)
        prefill = time.perf_counter() - started
        for index, delta in enumerate(deltas):
            if fault in ("<error>", "<cut>", "<truncated>") and index == 12:
                return self._break(fault)
            text = delta.get("content", "")
            logprobs = None
            if text and "messages" in body and body.get("logprobs"):
                logprobs = _chat_logprobs(text, body["top_logprobs"], draws)
            elif text and body.get("logprobs"):
                logprobs = _logprobs(text, offset, body["logprobs"], draws)
            reason = ("tool_calls" if "tool_calls" in delta else "length") if index == len(deltas) - 1 else None
            said = {"delta": delta} if "messages" in body else {"text": text}
            choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": reason, "stop_reason": None}
            self._send_event({"choices": [choice]})
            offset += len(text)
            time.sleep(0 if reason else pause * draws.uniform(0.6, 1.4))
        total = time.perf_counter() - started
        self._send_event({"choices": []} | _closing_facts(len(deltas), prefill, total))

    def _break(self, fault: str) -> None:
        if fault == "<error>":
            message = "the worker failed twice on this request"
            self._send_event({"error": {"message": message, "type": "server_error", "param": None, "code": "worker"}})
        elif fault == "<cut>":
            self.close_connection = True
            raise ConnectionResetError

    def _send_event(self, event: dict[str, Any]) -> None:
        envelope = {"id": "cmpl-stub", "object": "text_completion", "created": 1, "model": MODEL}
        # Our service escapes nothing that UTF-8 can carry; raw characters make the cuts below harder.
        self._send(f"data: {json.dumps(envelope | event, ensure_ascii=False)}{self.line_end * 2}")

    def _send(self, text: str) -> None:
        """Write `text` in at most four HTTP chunks, cut at any byte."""
        data = text.encode()
        cuts = sorted(random.Random(data).choices(range(1, len(data)), k=3))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            if piece := data[start:end]:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.flush()

    def _answer_error(
        self, status: int, message: str, code: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        kind = "invalid_request_error" if status < 429 else "server_error"
        error = {"message": message, "type": kind, "param": param, "code": code}
        self._answer_json(status, {"error": error}, headers)

    def _answer_json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._answer(status, json.dumps(body).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _deltas(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the deltas of a stream's events: one token of the answer each."""
    said = body["prompt"]
    if "<think>" in said:
        reasoning = [{"reasoning_content": token} for token in split_tokens(REASONING)]
        return reasoning + [{"content": token} for token in split_tokens("Hello! I am a stub.")]
    if "<tools>" in said and "tools" in body:
        return [{"content": "Let me look."}, *_call_deltas()]
    canned = {"<markdown>": MARKDOWN, "<hostile>": HOSTILE, "<escapes>": ESCAPES}
    text = next((text for word, text in canned.items() if word in said), STORY)
    if body.get("messages", [{}])[-1].get("role") == "tool":
        text = "The tools say: " + " and ".join(m["content"] for m in body["messages"] if m["role"] == "tool") + "."
    tokens = [HOSTILE] if text == HOSTILE else split_tokens(text)
    return [{"content": token} for token in tokens[: body.get("max_tokens") if text == STORY else None]]


def _call_deltas() -> list[dict[str, Any]]:
    """Return the deltas of `CALLS`: the name first, then the arguments in pieces of 4 characters."""
    parts: list[dict[str, Any]] = []
    for index, (call_id, name, arguments) in enumerate(CALLS):
        function = {"name": name, "arguments": ""}
        parts.append({"index": index, "id": call_id, "type": "function", "function": function})
        pieces = [arguments[at : at + 4] for at in range(0, len(arguments), 4)]
        parts += [{"index": index, "function": {"arguments": piece}} for piece in pieces]
    return [{"tool_calls": [part]} for part in parts]


def _token_names(text: str) -> list[str]:
    """Return the names of a text's tokens. A character outside the basic plane is two incomplete tokens."""
    halves = [text.encode()[:2], text.encode()[2:]] if max(text) > "\uffff" and len(text) == 1 else []
    return ["bytes:" + "".join(f"\\x{byte:02x}" for byte in half) for half in halves] or [text]


def _chat_logprobs(text: str, num_top: int, draws: random.Random) -> dict[str, Any]:
    """Return the logprobs of one delta in the form of chat completions."""
    names = _token_names(text)
    pieces = [text.encode()] if len(names) == 1 else [text.encode()[:2], text.encode()[2:]]
    content = []
    for name, piece in zip(names, pieces, strict=True):
        top = [
            {"token": token, "logprob": p, "bytes": None} for token, p in _alternatives(name, num_top, draws).items()
        ]
        content.append({"token": name, "logprob": top[0]["logprob"], "bytes": [*piece], "top_logprobs": top})
    return {"content": content, "refusal": None}


def _logprobs(text: str, offset: int, num_top: int, draws: random.Random) -> dict[str, Any]:
    """Return one logprobs entry per token."""
    names = _token_names(text)
    tops = [_alternatives(name, num_top, draws) for name in names]
    return {
        "tokens": names,
        "token_logprobs": [top[name] for name, top in zip(names, tops, strict=True)],
        "top_logprobs": tops,
        "text_offset": [offset] * len(names),
    }


def _alternatives(name: str, num_top: int, draws: random.Random) -> dict[str, float]:
    top = {name: math.log(draws.betavariate(2.0, 0.9))}
    for word in draws.sample([" the", " a", " and", ".", ",", " one", " old", " so", " was", " then"], num_top):
        left = 1 - sum(map(math.exp, top.values()))
        top.setdefault(word, math.log(max(1e-6, left * draws.uniform(0.3, 0.8))))
    return top


def _closing_facts(num_tokens: int, prefill: float, total: float) -> dict[str, Any]:
    decode = total - prefill
    return {
        "usage": {
            "prompt_tokens": 18,
            "completion_tokens": num_tokens,
            "total_tokens": 18 + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
        "timings": {
            "queue_ms": 0.4,
            "prefill_ms": 1000 * prefill - 0.4,
            "ttft_ms": 1000 * prefill,
            "decode_ms": 1000 * decode,
            "tokens_per_second": (num_tokens - 1) / max(decode, 1e-9),
        },
    }
