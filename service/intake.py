"""What a route of the engine's needs of its process: to take requests in, to let them go, to count."""

from collections.abc import Callable
from dataclasses import dataclass

from service.live_request import LiveRequest
from service.metrics import Metrics
from service.recordings import Recordings


@dataclass(frozen=True, kw_only=True, slots=True)
class Intake:
    """Shared by the routes of one API process.

    refuse_when_draining: raises where nothing new is taken.
    admit: submits a live request; raises `Overloaded` where there is no room.
    close: forgets one, and cancels what of it is unfinished.
    recordings: answers that outlive their connection.
    metrics: what is observed.
    """

    refuse_when_draining: Callable[[], None]
    admit: Callable[[LiveRequest], None]
    close: Callable[[LiveRequest], None]
    recordings: Recordings
    metrics: Metrics
