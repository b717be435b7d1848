"""Readiness: can a request be served now, and if not, why and how long."""

import time

from service.lifecycle import Lifecycle, Phase
from service.messages import Hello
from service.responses import Readiness
from service.serving_path import path_of

# A worker without a sign of life for so long hangs: it gives one after each step, and while idle each second. The
# alert fires within 60 s of a hang: after this time, a scrape (5 s) and an evaluation of the rules (15 s).
STALL_SECONDS = 20.0


def readiness_of(
    lifecycle: Lifecycle, hello: Hello | None, *, silent_seconds: float, drain_seconds: float
) -> Readiness:
    """Return what `GET /ready` answers.

    Args:
        hello: the last worker's; None before the first worker is up.
        silent_seconds: since the worker's last sign of life.
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
        return Readiness(state="stalled", phase="the worker hangs", elapsed_s=silence, eta_s=None, path=path)
    return Readiness(state="ready", phase="serving", elapsed_s=round(elapsed, 3), eta_s=0.0, path=path)
