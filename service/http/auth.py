"""ASGI middleware around the routes: API keys, CORS, request ids, early rejection. Pure ASGI."""

import logging
from collections.abc import Callable
from typing import Any, Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service.config.settings import ServeSettings
from service.http.api_keys import ApiKeys
from service.http.load_shedding import LoadShedding
from service.http.request_io import REQUEST_ID, RequestId, json_response
from service.protocol.errors import ApiError, Unauthorized

logger = logging.getLogger(__name__)

PROBES: Final = frozenset({"/health", "/ready"})
METRICS: Final = frozenset({"/metrics"})
# The playground, where the user types an API key, and the OpenAPI document. Neither contains a secret.
ALWAYS_OPEN: Final = frozenset({"/", "/playground", "/openapi.json"})
# Response headers that scripts of allowed origins may read: the request id for support, and the retry hints.
_EXPOSED_HEADERS: Final = (REQUEST_ID, "retry-after", "retry-after-ms", "x-should-retry", "idempotent-replayed")
# Attribute of `request.state` with the name of the API key that the request was authenticated by.
KEY_NAME: Final = "api_key_name"


def middlewares(
    settings: ServeSettings,
    keys: ApiKeys,
    count: Callable[[ApiError], None],
    reject_from_headers: Callable[[Scope], None] = lambda scope: None,
) -> list[tuple[type, dict[str, Any]]]:
    """Return the middleware around the routes, innermost first: early rejection, API keys, CORS, request id.

    In this order every rejection has a request id, and a script of an allowed origin can read the rejection.

    Args:
        count: receives the error of each rejection.
        reject_from_headers: see `LoadShedding`.
    """
    around: list[tuple[type, dict[str, Any]]] = [(LoadShedding, {"refuse": reject_from_headers, "count": count})]
    if keys:
        around.append((Authentication, {"keys": keys, "open_paths": open_paths(settings), "count": count}))
    if settings.cors_origins:
        cors = {
            "allow_origins": settings.cors_origins,
            "allow_methods": ("GET", "POST"),
            "allow_headers": ("*",),  # the OpenAI SDKs send a dozen extra headers
            "expose_headers": _EXPOSED_HEADERS,
            # No route reads cookies, and with credentials any allowed origin could use those of the browser.
            "allow_credentials": False,
        }
        around.append((CORSMiddleware, cors))
    return [*around, (RequestId, {})]


def open_paths(settings: ServeSettings) -> frozenset[str]:
    """Return the paths that need no API key. Every other path needs one, unknown paths included."""
    probes = PROBES if settings.open_probes else frozenset()
    return ALWAYS_OPEN | probes | (METRICS if settings.open_metrics else frozenset())


class Authentication:
    """ASGI middleware that rejects requests without a known API key, and stores the key's name.

    The name is stored as `request.state.api_key_name`.

    Args:
        open_paths: paths that need no key.
        count: receives the error of each rejection.
    """

    def __init__(
        self, app: ASGIApp, *, keys: ApiKeys, open_paths: frozenset[str], count: Callable[[ApiError], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        try:
            name = self._name(scope)
        except Unauthorized as error:
            self._count(error)
            await json_response(error.body(), error.status, error.headers())(scope, receive, send)
            return
        # The raw path, since a decoded path may contain line breaks, which would forge log lines.
        path = scope["raw_path"].decode("ascii", "replace")
        logger.debug("%s %s: API key %s", scope["method"], path, name)
        scope.setdefault("state", {})[KEY_NAME] = name
        await self._app(scope, receive, send)

    def _name(self, scope: Scope) -> str:
        """Return the name of the request's API key.

        Raises:
            Unauthorized: the request has no API key, or an unknown one.
        """
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].strip().partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not key.strip():
            raise Unauthorized("this server requires an API key; send it as Authorization: Bearer KEY")
        name = self._keys.name_of(key.strip())
        if name is None:
            # litellm raises BadRequestError for a 401 unless the message begins as OpenAI's does.
            raise Unauthorized("Incorrect API key provided: this server does not know it")
        return name
