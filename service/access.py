"""Who may ask, and from which pages: the middleware around the routes. Pure ASGI."""

import logging
from collections.abc import Callable
from typing import Any, Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api_keys import ApiKeys
from service.early_refusal import EarlyRefusal
from service.errors import ApiError, Unauthorized
from service.requests import REQUEST_ID, RequestId, json_response
from service.settings import ServeSettings

logger = logging.getLogger(__name__)

PROBES: Final = frozenset({"/health", "/ready"})
METRICS: Final = frozenset({"/metrics"})
# The page, whose reader types a key into it, and the document that says where keys go: neither tells a secret.
ALWAYS_OPEN: Final = frozenset({"/", "/playground", "/openapi.json"})
# What scripts may read of an answer beside its body: for support, and for when to come back.
_EXPOSED_HEADERS: Final = (REQUEST_ID, "retry-after", "retry-after-ms", "x-should-retry", "idempotent-replayed")
# Where `request.state` has the name of the key that came with the request.
KEY_NAME: Final = "api_key_name"


def middlewares(
    settings: ServeSettings,
    keys: ApiKeys,
    count: Callable[[ApiError], None],
    refuse_unread: Callable[[Scope], None] = lambda scope: None,
) -> list[tuple[type, dict[str, Any]]]:
    """What stands around the routes, from inside out: early refusals, then keys, then CORS, then the request's id.

    So that a refusal has an id, and a page that may ask can read that it was refused.

    Args:
        count: told of each refusal.
        refuse_unread: see `EarlyRefusal`.
    """
    around: list[tuple[type, dict[str, Any]]] = [(EarlyRefusal, {"refuse": refuse_unread, "count": count})]
    if keys:
        around.append((Authentication, {"keys": keys, "open_paths": open_paths(settings), "count": count}))
    if settings.cors_origins:
        cors = {
            "allow_origins": settings.cors_origins,
            "allow_methods": ("GET", "POST"),
            "allow_headers": ("*",),  # the SDKs send a dozen of their own
            "expose_headers": _EXPOSED_HEADERS,
            # Cookies are not looked at; with credentials any page could use what the browser knows.
            "allow_credentials": False,
        }
        around.append((CORSMiddleware, cors))
    return [*around, (RequestId, {})]


def open_paths(settings: ServeSettings) -> frozenset[str]:
    """The routes that ask for no key. A path that is none of ours is guarded, too."""
    probes = PROBES if settings.open_probes else frozenset()
    return ALWAYS_OPEN | probes | (METRICS if settings.open_metrics else frozenset())


class Authentication:
    """ASGI middleware: lets nobody pass without a key; `request.state.api_key_name` says whose it was.

    Args:
        open_paths: where no key is asked for.
        count: told of each refusal.
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
        path = scope["raw_path"].decode("ascii", "replace")  # as it came: decoded, it may hold lines of its own
        logger.debug("%s %s: by the key of %s", scope["method"], path, name)
        scope.setdefault("state", {})[KEY_NAME] = name
        await self._app(scope, receive, send)

    def _name(self, scope: Scope) -> str:
        """Whose key came with the request.

        Raises:
            Unauthorized: none did, or one that nobody has.
        """
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].strip().partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not key.strip():
            raise Unauthorized("this server asks for an API key: send it as Authorization: Bearer KEY")
        name = self._keys.name_of(key.strip())
        if name is None:
            # litellm takes a 401 for a BadRequestError unless it has OpenAI's first words.
            raise Unauthorized("Incorrect API key provided: this server does not know it")
        return name
