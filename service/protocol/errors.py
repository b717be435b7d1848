"""Exceptions that become error responses, with their HTTP statuses and error codes."""

import math
from typing import Any, ClassVar, Self


class ApiError(Exception):
    """Base class of exceptions that become error responses. Clients see the message: no paths and no tracebacks.

    A subclass sets its `status`, `type` and `code` as class arguments, or inherits them.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init_subclass__(cls, *, status: int = 0, type: str = "", code: str = "") -> None:
        cls.status, cls.type, cls.code = status or cls.status, type or cls.type, code or cls.code

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def headers(self) -> dict[str, str]:
        """Return the headers that this error adds to its response."""
        return {}

    def body(self) -> dict[str, Any]:
        """Return the error response's JSON body in OpenAI's form: message, type, param and code."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(ApiError, status=400, type="invalid_request_error", code="invalid_request"):
    """Rejection of a request that cannot be served unless the client changes it."""

    @classmethod
    def of(cls, param: str, problem: str) -> Self:
        """Return the error of the field `param`. Its message is the field's name, followed by `problem`."""
        return cls(f"{param}{problem}", param=param)


class ThreadUnsupported(InvalidRequest, code="thread_unsupported_request"):
    """Rejection of a Messages request that continues a conversation held by the server. The code is Anthropic's."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """Rejection of a prompt that does not fit the context with its completion, or exceeds the inspection limit."""


class Unauthorized(ApiError, status=401, type="invalid_request_error", code="invalid_api_key"):
    """Rejection of a request without a valid API key."""

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class ModelNotFound(ApiError, status=404, type="invalid_request_error", code="model_not_found"):
    """Rejection of a request that names an unknown model."""


class RouteNotFound(ApiError, status=404, type="invalid_request_error", code="route_not_found"):
    """Rejection of a request to an unknown path."""


class ResponseGone(ApiError, status=404, type="invalid_request_error", code="answer_gone"):
    """Rejection of a request to resume or repeat a response of which the next part is no longer buffered."""


class ResponseNotFound(ApiError, status=404, type="invalid_request_error", code="response_not_found"):
    """Rejection of a request that names a response which is not stored."""


class MethodNotAllowed(ApiError, status=405, type="invalid_request_error", code="method_not_allowed"):
    """Rejection of an HTTP method that the route does not support."""


class BodyTooLarge(ApiError, status=413, type="invalid_request_error", code="body_too_large"):
    """Rejection of a request body over the size limit."""


class HeadTooLarge(InvalidRequest, status=431, code="head_too_large"):
    """Rejection of a request line and headers over the size limit."""


class IdempotencyKeyReused(InvalidRequest, code="idempotency_key_reused"):
    """Rejection of a request whose idempotency key was used by an earlier, different request."""


class RequestTimeout(InvalidRequest, status=408, code="request_timeout"):
    """Rejection of a request whose headers or body arrive too slowly."""


class UnsupportedEncoding(InvalidRequest, status=415, code="unsupported_encoding"):
    """Rejection of a compressed request body."""


class ClientGone(ApiError, status=499, type="client_closed_request", code="client_closed_request"):
    """End of a request whose client has disconnected or reads too slowly. No response has this error."""


class EngineFailed(ApiError, code="engine_failed"):
    """Failure of the engine, chat template or grammar compiler. `retry`: True if OpenAI's SDKs should retry."""

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "true" if self.retry else "false"}


class RetryLater(ApiError):
    """Base class of errors that a later retry can avoid. Their responses have the retry headers of OpenAI's SDKs."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds

    def headers(self) -> dict[str, str]:
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_seconds))),
            "retry-after-ms": str(max(1, round(self.retry_after_seconds * 1000))),
            "x-should-retry": "true",
        }


class RouteDisabled(ApiError, status=403, type="invalid_request_error", code="switched_off"):
    """Rejection of a request to a route that is disabled on this server."""


class Overloaded(RetryLater, status=429, type="rate_limit_error", code="queue_full"):
    """Rejection of a request because a queue or another limit on concurrent work is full."""


class WaitTooLong(Overloaded, code="queue_time"):
    """Rejection of a request because its predicted time in the queue is too long."""


class ResponseStoreFull(Overloaded, code="response_store_full"):
    """Rejection of a request to store a response, because running background responses fill the store."""


class TooManyConnections(Overloaded, status=503, type="server_error", code="too_many_connections"):
    """Rejection of a request because the server has reached its limit of connections."""


class QueueTimeout(RetryLater, status=408, type="timeout_error", code="queue_timeout"):
    """End of a request that has waited in the queue for its whole timeout."""


class Draining(RetryLater, status=503, type="server_error", code="draining"):
    """Rejection of a new request, or end of a running request, because the server is shutting down."""

    def headers(self) -> dict[str, str]:
        # The client's retry must open a new connection, which a load balancer routes to another server.
        return {**super().headers(), "connection": "close"}
