"""Operations of the API process that the engine's routes share: admission, closing, response buffers, metrics."""

from collections.abc import Callable
from dataclasses import dataclass

from service.live_request import LiveRequest
from service.metrics import Metrics
from service.recordings import Recordings


@dataclass(frozen=True, kw_only=True, slots=True)
class Intake:
    """Callbacks and shared objects for the routes of one API process.

    refuse_when_draining: raises `Draining` if the service accepts no new requests.
    admit: submits a live request; raises `Overloaded` if the queue is full.
    close: drops a live request and cancels its unfinished choices.
    recordings: response buffers, which outlive a connection.
    metrics: the metrics of this process.
    """

    refuse_when_draining: Callable[[], None]
    admit: Callable[[LiveRequest], None]
    close: Callable[[LiveRequest], None]
    recordings: Recordings
    metrics: Metrics
