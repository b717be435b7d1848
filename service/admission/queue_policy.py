"""Queueing terms of a request: its tenant, its longest wait, and whether it is a retry.

A timeout bounds the time in the queue, not the response: a request that has started is finished. The shortest of the
body's `timeout`, the header `x-request-timeout`, the timeout of OpenAI's SDKs and `--max-queue-seconds` applies.
"""

import ipaddress
import math
from dataclasses import dataclass

from starlette.requests import Request

from service.config.settings import ServeSettings
from service.http.middleware import KEY_NAME
from service.http.request_io import TIMEOUT_HEADER
from service.protocol.errors import InvalidRequest

# Seconds after which a client of OpenAI's SDKs no longer reads, in Python and in Node.js.
_SDK_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
# Header of OpenAI's SDKs: number of earlier attempts at this request that failed or were rejected.
_RETRY_COUNT = "x-stainless-retry-count"
# Prefix length that counts as one IPv6 tenant, since a site has all addresses of its network (RFC 6177).
_IPV6_SITE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuePolicy:
    """Queueing terms of one request.

    tenant: name of the API key, or address of the client. Slots and queue room are shared fairly among tenants, not
        among requests.
    cache_namespace: requests of different namespaces share no cached prefixes.
    timeout_seconds: time in the queue after which the request is ended.
    max_predicted_wait_seconds: predicted wait above which the request is rejected.
    is_retry: the SDK reports an earlier attempt at this request.
    """

    tenant: str = ""
    cache_namespace: str = ""
    timeout_seconds: float = math.inf
    max_predicted_wait_seconds: float = math.inf
    is_retry: bool = False

    def deadline(self, arrival_seconds: float) -> float | None:
        """Return the time after which a request that arrived then is ended unstarted; None: no deadline."""
        return arrival_seconds + self.timeout_seconds if math.isfinite(self.timeout_seconds) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """Queueing limits of the server.

    max_seconds: longest wait of any request; caps every `timeout`.
    target_seconds: longest predicted wait that a request without an explicit timeout accepts.
    shares_prefix_cache: all API keys share one namespace of the prefix cache.
    """

    max_seconds: float = math.inf
    target_seconds: float = math.inf
    shares_prefix_cache: bool = False

    def terms(self, request: Request, timeout: float | None) -> QueuePolicy:
        """Return the terms of a request.

        Args:
            timeout: the body's `timeout`.

        Raises:
            InvalidRequest: `x-request-timeout` is not a number of seconds above 0.
        """
        header = request.headers.get(TIMEOUT_HEADER)
        header_seconds = math.inf if header is None else _seconds(header)
        if header_seconds is None:
            raise InvalidRequest(f"{TIMEOUT_HEADER} must be a number of seconds above 0", param=TIMEOUT_HEADER)
        sdk_limits = (_seconds(request.headers.get(name, "")) or math.inf for name in _SDK_TIMEOUTS)
        limit = min(self.max_seconds, math.inf if timeout is None else timeout, header_seconds, *sdk_limits)
        is_explicit = timeout is not None or header is not None
        is_retry = request.headers.get(_RETRY_COUNT, "0").strip("0").isdecimal()
        return QueuePolicy(
            tenant=tenant_of(request),
            cache_namespace="" if self.shares_prefix_cache else getattr(request.state, KEY_NAME, ""),
            timeout_seconds=limit,
            # An explicit timeout is a willingness to wait that long. SDK default timeouts are not. But an SDK gives up
            # after two retries, so a retry is queued if there is room.
            max_predicted_wait_seconds=limit if is_explicit or is_retry else min(self.target_seconds, limit),
            is_retry=is_retry,
        )


def queue_limits(settings: ServeSettings) -> QueueLimits:
    """Return the queueing limits of the settings. A setting of 0 means no limit."""
    return QueueLimits(
        max_seconds=settings.max_queue_seconds or math.inf,
        target_seconds=settings.target_queue_seconds or math.inf,
        shares_prefix_cache=settings.share_prefix_cache,
    )


def tenant_of(request: Request) -> str:
    """Return the tenant: the name of the request's API key, or the client's address if there are no keys."""
    if (name := getattr(request.state, KEY_NAME, None)) is not None:
        return f"key {name}"
    host = "" if request.client is None else request.client.host
    try:
        return f"address {ipaddress.IPv6Network((host, _IPV6_SITE), strict=False)}"
    except ValueError:
        return f"address {host}"


def _seconds(text: str) -> float | None:
    """Parse a positive, finite number of seconds. Return None for any other text."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None
