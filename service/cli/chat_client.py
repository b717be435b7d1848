"""Client of the chat API with the standard library: streamed answers, and errors of one line."""

import http.client
import json
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

SILENCE_SECONDS = 300.0  # Kvasir fills longer silences of a stream with comments
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control, format and surrogate characters, and separators of lines
_KEPT = "\n\t\u200c\u200d"  # line break, tab, and the joiners of emoji and of Indic and Persian text


class ChatError(RuntimeError):
    """Failed request. The message is the fact and the remedy; `reason` is the fact alone.

    retry_seconds: time after which a busy server asks for a retry; None: the server asks for none.
    """

    def __init__(self, reason: str, remedy: str, *, retry_seconds: float | None = None) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.retry_seconds = retry_seconds


class ChatClient:
    """HTTP client of one server. Every request has its own connection, so that closing it cancels the request."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            is_valid = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
        except ValueError:  # the port is not a number
            is_valid = False
        if not is_valid:
            raise ChatError(f"{url} is not an address", "write it as --url http://HOST:PORT")
        self.url = url
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )

    def find_model(self) -> str:
        """Return the name of the first model that the server lists. Raises ChatError."""
        with closing(self._connect()) as connection:
            response = self._request(connection, "GET", "/v1/models")
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ChatError(f"{self.url} lists no models", "check that --url is an OpenAI-compatible API") from None

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the deltas of an answer, and the `usage` of the last event as a delta of its own. Raises ChatError."""
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        with closing(self._connect()) as connection:
            response = self._request(connection, "POST", "/v1/chat/completions", json.dumps(streamed).encode())
            try:
                for line in response:
                    name, _, data = line.partition(b":")
                    if name != b"data":
                        continue
                    if data.strip() == b"[DONE]":
                        return
                    yield from _deltas(json.loads(data))
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(
                    f"the connection to the server was lost ({_cause(error)})", "/retry asks again"
                ) from None
            except ValueError:
                raise ChatError("the server sent an event that is not JSON", "/retry asks again") from None
        raise ChatError("the stream ended before the answer was finished", "/retry asks again")

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=SILENCE_SECONDS)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._rejection(response)
        except (OSError, http.client.HTTPException) as error:
            remedy = "start a server with `kvasir serve`, or choose another with --url"
            raise ChatError(f"{self.url} is not reachable ({_cause(error)})", remedy) from None
        return response

    def _rejection(self, response: http.client.HTTPResponse) -> ChatError:
        """Return the error to raise for a response whose status is not 200."""
        text = response.read(1 << 16).decode(errors="replace")
        try:
            reason = str(json.loads(text)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            reason = f"status {response.status} {response.reason}"
        match response.status:
            case 401 if "Authorization" in self._headers:
                return ChatError("the server rejects the API key", "check KVASIR_API_KEY")
            case 401:
                return ChatError("the server requires an API key", "set KVASIR_API_KEY")
            case 404:
                return ChatError(reason, "check --model and --url")
            case 429 | 503:
                seconds = retry_seconds(response)
                hint = "/retry asks again" + ("" if seconds is None else f", in {seconds:.0f} s at the earliest")
                return ChatError(f"the server is busy: {reason}", hint, retry_seconds=seconds)
        return ChatError(f"the server answered with an error: {reason}", f"status {response.status}")


def visible(text: str) -> str:
    """Return a text with U+FFFD for control characters, except line breaks and tabs. They could change the terminal."""
    return "".join(
        char if char in _KEPT or unicodedata.category(char) not in _INVISIBLE else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )


def _deltas(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "error" in event:
        raise ChatError(f"the server ended the answer: {event['error']['message']}", "/retry asks again")
    yield from (choice["delta"] for choice in event.get("choices") or ())
    if event.get("usage"):
        yield {"usage": event["usage"]}


def retry_seconds(response: http.client.HTTPResponse) -> float | None:
    """Return after how many seconds a response asks for a retry, from its headers; None without such a header."""
    try:
        if (milliseconds := response.headers["retry-after-ms"]) is not None:
            return float(milliseconds) / 1000
        return float(response.headers["retry-after"])
    except (TypeError, ValueError):
        return None


def _cause(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
