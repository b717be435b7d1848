"""ASGI middleware around the routes: request ids, CORS, authentication and load shedding."""

import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.config.settings import ServeSettings
from service.http.api_keys import ApiKeys
from service.http.request_io import REQUEST_ID, error_response, keep_error
from service.protocol.errors import ApiError, Unauthorized
from service.protocol.messages import is_messages_path

logger = logging.getLogger(__name__)

# The playground, where the user types an API key, and the OpenAPI document. Neither contains a secret.
ALWAYS_OPEN: Final = frozenset({"/", "/playground", "/openapi.json"})
KEY_NAME: Final = "api_key_name"  # attribute of `request.state`: the name of the request's API key
_SAFE_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")  # safe to echo into a header and a log line
# Response headers that scripts of allowed origins may read: the request id for support, and the retry hints.
_EXPOSED_HEADERS: Final = (REQUEST_ID, "retry-after", "retry-after-ms", "x-should-retry", "idempotent-replayed")
# With the first two headers, a response may already be buffered. A compressed body cannot be searched for `timeout`.
_UNSHED_HEADERS: Final = frozenset({b"idempotency-key", b"last-event-id", b"content-encoding"})


def middlewares(
    settings: ServeSettings,
    keys: ApiKeys,
    count: Callable[[ApiError], None],
    waiting_paths: frozenset[str],
    reject_from_headers: Callable[[Scope], None],
) -> list[tuple[type, dict[str, Any]]]:
    """Return the ASGI middleware around the routes, innermost first: early rejection, CORS, request id.

    In this order every rejection has a request id, and a script of an allowed origin can read the rejection. `count`
    gets the error of each rejection. For `waiting_paths` and `reject_from_headers` see `EarlyRejection`.
    """
    # A path that does not exist needs an API key too.
    open_paths = ALWAYS_OPEN | ({"/health", "/ready"} if settings.open_probes else set())
    open_paths |= {"/metrics"} if settings.open_metrics else set()
    rejection = {"waiting_paths": waiting_paths, "reject": reject_from_headers, "count": count}
    checks = {"keys": keys, "open_paths": open_paths, **rejection}
    around: list[tuple[type, dict[str, Any]]] = [(EarlyRejection, checks)]
    if settings.cors_origins:
        cors = {
            "allow_origins": settings.cors_origins,
            "allow_methods": ("GET", "POST", "DELETE"),
            "allow_headers": ("*",),  # the OpenAI SDKs send a dozen extra headers
            "expose_headers": _EXPOSED_HEADERS,
            # No route reads cookies, and with credentials any allowed origin could use those of the browser.
            "allow_credentials": False,
        }
        around.append((CORSMiddleware, cors))
    return [*around, (RequestId, {})]


class RequestId:
    """ASGI middleware: set `x-request-id` on every response: the request's id if it is safe in logs, else a new id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID.encode(), b"").decode("latin-1")
        request_id = given if _SAFE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})[REQUEST_ID] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if is_messages_path(scope["path"]):
                    headers["request-id"] = request_id  # the name that Anthropic's clients read
            await send(message)

        await self._app(scope, receive, send_with_id)


@dataclass(frozen=True, slots=True)
class EarlyRejection:
    """ASGI middleware: reject requests without a known API key and, judged by headers alone, requests to a full server.

    A rejection by a route, with its checks and error handlers, costs over twice as much CPU time. Requests that cannot
    be judged by their headers pass, and their routes decide.

    waiting_paths: paths of the routes whose requests wait for the engine.
    reject: raises an `ApiError` if no request with these headers would be admitted, unless its body sets `timeout`.
    """

    app: ASGIApp
    keys: ApiKeys
    open_paths: frozenset[str]
    waiting_paths: frozenset[str]
    reject: Callable[[Scope], None]
    count: Callable[[ApiError], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        unread: list[Message] = []

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        try:
            if self.keys and scope["path"] not in self.open_paths:
                self._authenticate(scope)
            if self._waits_for_the_engine(scope):
                unread.append(first := await receive())
                if first["type"] == "http.request" and not first.get("more_body") and b'"timeout"' not in first["body"]:
                    self.reject(scope)
        except ApiError as error:
            self.count(error)
            keep_error(scope, error)
            await error_response(error, scope)(scope, receive, send)
            return
        await self.app(scope, receive_again, send)

    def _waits_for_the_engine(self, scope: Scope) -> bool:
        """Return True if a request may be rejected by its headers: it needs the engine and has no buffered response."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self.waiting_paths:
            return False
        return not any(
            name in _UNSHED_HEADERS or (name == b"accept" and value.strip().lower() == b"text/event-stream")
            for name, value in scope["headers"]
        )

    def _authenticate(self, scope: Scope) -> None:
        """Store the name of the request's API key in the request's state. Raises Unauthorized: no key, or unknown."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        # Anthropic's clients send the key itself in a header of its own.
        given = given or [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
        scheme, _, key = given[0].strip().partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not key.strip():
            raise Unauthorized(
                "this server requires an API key; send it as Authorization: Bearer KEY or x-api-key: KEY"
            )
        name = self.keys.name_of(key.strip())
        if name is None:
            # litellm raises BadRequestError for a 401 unless the message begins as OpenAI's does.
            raise Unauthorized("Incorrect API key provided: this server does not know the key")
        # The raw path, since a decoded path may contain line breaks, which would forge log lines.
        path = scope["raw_path"].decode("ascii", "replace")
        logger.debug("%s %s: API key %s", scope["method"], path, name)
        scope.setdefault("state", {})[KEY_NAME] = name
