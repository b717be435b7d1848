"""On which terms a request waits for its turn: whose it is, how long it may, and whether it was here before.

A deadline bounds the wait and not the answer: what has begun is finished. It comes from the body (`timeout`), from
`x-request-timeout`, and from what the SDKs of OpenAI say of themselves: their own timeouts, after which nobody is left
to read an answer (`x-stainless-read-timeout` in Python, `x-stainless-timeout` in Node.js, both in seconds).
"""

import ipaddress
import math
from dataclasses import dataclass

from starlette.requests import Request

from service.access import KEY_NAME
from service.errors import InvalidRequest
from service.settings import ServeSettings

TIMEOUT_HEADER = "x-request-timeout"
_SDK_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
# How often a client of OpenAI's has been refused or failed with this request.
_RETRY_COUNT = "x-stainless-retry-count"
# A site of IPv6 has a network of this length, and all the addresses in it (RFC 6177).
_IPV6_SITE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueTerms:
    """The terms of one request.

    owner: whose it is. Among owners, not among requests, places and room are shared.
    cache_namespace: requests of different namespaces share no prefixes.
    timeout_seconds: after so long in the queue it is ended.
    patience_seconds: what would wait longer, by prediction, is refused.
    is_retry: the client was refused before, and has come back.
    """

    owner: str = ""
    cache_namespace: str = ""
    timeout_seconds: float = math.inf
    patience_seconds: float = math.inf
    is_retry: bool = False

    def deadline(self, arrival_seconds: float) -> float | None:
        """When a request that came then has waited too long; None for never."""
        return arrival_seconds + self.timeout_seconds if math.isfinite(self.timeout_seconds) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """What the server allows.

    max_seconds: the longest wait of any request, and so of a `timeout`.
    target_seconds: the patience of a request that says nothing of it.
    shares_prefix_cache: API keys share one namespace of the prefix cache.
    """

    max_seconds: float = math.inf
    target_seconds: float = math.inf
    shares_prefix_cache: bool = False

    def terms(self, request: Request, timeout: float | None) -> QueueTerms:
        """The terms of a request whose body has that `timeout`.

        Raises:
            InvalidRequest: the header is no number of seconds above 0.
        """
        asked = [timeout] if timeout is not None else []
        if (given := request.headers.get(TIMEOUT_HEADER)) is not None:
            if (seconds := _seconds(given)) is None:
                raise InvalidRequest(f"{TIMEOUT_HEADER} must be a number of seconds above 0", param=TIMEOUT_HEADER)
            asked.append(seconds)
        told = [seconds for name in _SDK_TIMEOUTS if (seconds := _seconds(request.headers.get(name, ""))) is not None]
        limit = min(self.max_seconds, *asked, *told, math.inf)
        is_retry = request.headers.get(_RETRY_COUNT, "0").strip("0").isdecimal()
        return QueueTerms(
            owner=owner_of(request),
            cache_namespace="" if self.shares_prefix_cache else getattr(request.state, KEY_NAME, ""),
            timeout_seconds=limit,
            # Who asks for a time is content to wait that long; an SDK always says one, and means no such thing. But it
            # comes back twice and then gives up: who was refused once is let in where there is room.
            patience_seconds=limit if asked or is_retry else min(self.target_seconds, limit),
            is_retry=is_retry,
        )


def queue_limits(settings: ServeSettings) -> QueueLimits:
    """What the settings allow; 0 is no limit."""
    longest, target = settings.max_queue_seconds, settings.target_queue_seconds
    return QueueLimits(
        max_seconds=longest if longest > 0.0 else math.inf,
        target_seconds=target if target > 0.0 else math.inf,
        shares_prefix_cache=settings.share_prefix_cache,
    )


def owner_of(request: Request) -> str:
    """The name of the request's API key; without keys, where it comes from."""
    if (name := getattr(request.state, KEY_NAME, None)) is not None:
        return f"key {name}"
    host = "" if request.client is None else request.client.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"address {host}"
    if address.version == 4:
        return f"address {host}"
    return f"address {ipaddress.ip_network((address, _IPV6_SITE), strict=False)}"


def _seconds(text: str) -> float | None:
    """A positive number of seconds; None where the text is none."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None
