"""Whether a request would be served now, and if not, why and how long."""

import time

from service.lifecycle import Lifecycle, Phase
from service.messages import Hello
from service.responses import Readiness
from service.serving_path import path_of

# An engine that has work and says nothing for so long makes no progress.
STALL_SECONDS = 60.0


def readiness_of(
    lifecycle: Lifecycle, hello: Hello | None, *, silent_seconds: float, drain_seconds: float
) -> Readiness:
    """What `GET /ready` answers.

    Args:
        hello: the last worker's, None before the first.
        silent_seconds: for how long those who wait have heard nothing; 0 where nobody waits.
        drain_seconds: how long running requests may take to finish.
    """
    now = time.monotonic()
    is_up = hello is not None and hello.epoch >= lifecycle.epoch.value
    path = path_of(hello) if hello and is_up else None
    if lifecycle.phase.value >= Phase.DRAINING:
        elapsed = now - lifecycle.phase_seconds.value
        return Readiness(
            state="draining",
            phase="finishing running requests",
            elapsed_s=round(elapsed, 3),
            eta_s=round(max(0.0, drain_seconds - elapsed), 3),
            path=path,
        )
    elapsed = now - lifecycle.epoch_seconds.value
    if path is None:
        usual = None if hello is None else round(max(0.0, hello.startup_seconds - elapsed), 3)
        return Readiness(state="loading", phase="starting a worker", elapsed_s=round(elapsed, 3), eta_s=usual)
    if silent_seconds > STALL_SECONDS:
        silence = round(silent_seconds, 3)
        return Readiness(state="stalled", phase="no progress", elapsed_s=silence, eta_s=None, path=path)
    return Readiness(state="ready", phase="serving", elapsed_s=round(elapsed, 3), eta_s=0.0, path=path)
