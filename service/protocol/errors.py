"""Exceptions that become error responses, with their HTTP statuses and error codes.

ApiError                        500  server_error
├── InvalidRequest              400  invalid_request_error
│   ├── ContextLengthExceeded   400  context_length_exceeded
│   ├── HeadTooLarge            431  head_too_large
│   ├── IdempotencyKeyReused    400  idempotency_key_reused; see service.requests.response_store
│   ├── RequestTimeout          408  request_timeout
│   └── UnsupportedEncoding     415  unsupported_encoding
├── Unauthorized                401  invalid_api_key, with WWW-Authenticate
├── ModelNotFound               404  model_not_found
├── RouteNotFound               404  route_not_found
├── ResponseGone                404  answer_gone; see service.requests.response_store
├── MethodNotAllowed            405  method_not_allowed
├── BodyTooLarge                413  body_too_large
├── ClientGone                  499  (never sent: the client disconnected)
├── RouteDisabled               403  switched_off; see service.api.attention
├── EngineFailed                500  engine_failed
└── RetryLater                  500  (base class of the errors with Retry-After)
    ├── Overloaded              429  queue_full
    │   ├── WaitTooLong         429  queue_time
    │   └── TooManyConnections  503  too_many_connections
    ├── QueueTimeout            408  queue_timeout
    └── Draining                503  draining
"""

import math
from typing import Any, ClassVar


class ApiError(Exception):
    """Base class of error responses. The client sees the message, so a message contains no path and no traceback."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def headers(self) -> dict[str, str]:
        """Return the headers that this error adds to the response."""
        return {}

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object, always with these four keys."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(ApiError):
    status, type, code = 400, "invalid_request_error", "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(ApiError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class ModelNotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "model_not_found"


class RouteNotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "route_not_found"


class ResponseGone(ApiError):
    status, type, code = 404, "invalid_request_error", "answer_gone"


class MethodNotAllowed(ApiError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTooLarge(ApiError):
    status, type, code = 413, "invalid_request_error", "body_too_large"


class HeadTooLarge(InvalidRequest):
    status, code = 431, "head_too_large"


class IdempotencyKeyReused(InvalidRequest):
    code = "idempotency_key_reused"


class RequestTimeout(InvalidRequest):
    status, code = 408, "request_timeout"


class UnsupportedEncoding(InvalidRequest):
    status, code = 415, "unsupported_encoding"


class ClientGone(ApiError):
    status, type, code = 499, "client_closed_request", None


class EngineFailed(ApiError):
    """Failure of the computation. OpenAI's SDKs retry a 500 twice, unless `retry` is False."""

    code = "engine_failed"

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "true" if self.retry else "false"}


class RetryLater(ApiError):
    """Error that a later retry can avoid. Sends all three retry headers that OpenAI's SDKs read."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds

    def headers(self) -> dict[str, str]:
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_seconds))),
            "retry-after-ms": str(max(1, round(self.retry_after_seconds * 1000))),
            "x-should-retry": "true",
        }


class Overloaded(RetryLater):
    status, type, code = 429, "rate_limit_error", "queue_full"


class WaitTooLong(Overloaded):
    code = "queue_time"


class TooManyConnections(Overloaded):
    status, type, code = 503, "server_error", "too_many_connections"


class QueueTimeout(RetryLater):
    status, type, code = 408, "timeout_error", "queue_timeout"


class Draining(RetryLater):
    status, type, code = 503, "server_error", "draining"

    def headers(self) -> dict[str, str]:
        # The client's retry must open a new connection, which a load balancer routes to another server.
        return {**super().headers(), "connection": "close"}
