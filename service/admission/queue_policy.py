"""Queueing terms of a request: tenant, longest wait in the queue, and whether the request is a retry."""

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

    tenant: name of the API key, or address of the client. Slots and queue room are shared fairly among tenants.
    cache_namespace: requests of different namespaces share no cached prefixes.
    timeout_seconds: time in the queue after which the request is ended. A request that has started is finished.
    max_predicted_wait_seconds: predicted wait above which the request is rejected.
    is_retry: the SDK reports an earlier attempt at this request.
    """

    tenant: str = ""
    cache_namespace: str = ""
    timeout_seconds: float = math.inf
    max_predicted_wait_seconds: float = math.inf
    is_retry: bool = False

    def deadline(self, arrival_seconds: float) -> float | None:
        """Return the end of the queue time of a request that arrived at `arrival_seconds`; None: no limit."""
        return arrival_seconds + self.timeout_seconds if math.isfinite(self.timeout_seconds) else None


def read_queue_policy(request: Request, timeout: float | None, settings: ServeSettings) -> QueuePolicy:
    """Return the queueing terms of a request with the body's `timeout`.

    The shortest of `timeout`, the header `x-request-timeout`, the timeout of OpenAI's SDKs and `--max-queue-seconds`
    applies. Raises InvalidRequest: `x-request-timeout` is not a number of seconds above 0.
    """
    header = request.headers.get(TIMEOUT_HEADER)
    header_seconds = math.inf if header is None else _seconds(header)
    if header_seconds is None:
        raise InvalidRequest(f"{TIMEOUT_HEADER} must be a number of seconds above 0", param=TIMEOUT_HEADER)
    sdk_limits = (_seconds(request.headers.get(name, "")) or math.inf for name in _SDK_TIMEOUTS)
    # A setting of 0 means no limit.
    limit = min(settings.max_queue_seconds or math.inf, timeout or math.inf, header_seconds, *sdk_limits)
    is_retry = request.headers.get(_RETRY_COUNT, "0").strip("0").isdecimal()
    # An explicit timeout is a willingness to wait that long. SDK default timeouts are not. But an SDK gives up after
    # two retries, so a retry is queued if there is room.
    accepts_wait = timeout is not None or header is not None or is_retry
    return QueuePolicy(
        tenant=tenant_of(request),
        cache_namespace="" if settings.share_prefix_cache else getattr(request.state, KEY_NAME, ""),
        timeout_seconds=limit,
        max_predicted_wait_seconds=limit if accepts_wait else min(settings.target_queue_seconds or math.inf, limit),
        is_retry=is_retry,
    )


def tenant_of(request: Request) -> str:
    """Return the tenant of a request: the name of its API key, or the client's address if there are no keys."""
    if (name := getattr(request.state, KEY_NAME, None)) is not None:
        return f"key {name}"
    host = "" if request.client is None else request.client.host
    try:
        return f"address {ipaddress.IPv6Network((host, _IPV6_SITE), strict=False)}"
    except ValueError:
        return f"address {host}"


def _seconds(text: str) -> float | None:
    """Return a positive, finite number of seconds; None for any other text."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None
