"""Operations of the API process that the engine's routes share: admission, closing, response buffers, metrics."""

from collections.abc import Callable
from dataclasses import dataclass

from service.metrics.recorder import Metrics
from service.requests.inflight import InflightRequest
from service.requests.response_store import ResponseStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Intake:
    """Callbacks and shared objects for the routes of one API process.

    reject_when_draining: raises `Draining` if the service accepts no new requests.
    admit: submits a live request; raises `Overloaded` if the queue is full.
    close: drops a live request and cancels its unfinished choices.
    recordings: response buffers, which outlive a connection.
    metrics: the metrics of this process.
    """

    reject_when_draining: Callable[[], None]
    admit: Callable[[InflightRequest], None]
    close: Callable[[InflightRequest], None]
    response_store: ResponseStore
    metrics: Metrics
