"""Readiness state of the service: ready, or the reason why not and the expected time."""

import time

from service.ipc.messages import WorkerReady
from service.ipc.serving_path import get_serving_path
from service.ipc.shared_state import Lifecycle, Phase
from service.protocol.responses import Readiness

# A worker without a heartbeat for this long is stalled. Heartbeats come after each step, and each second while idle.
# The alert fires within 60 s of a hang: this time, plus a scrape (5 s), plus an evaluation of the rules (15 s).
STALL_SECONDS = 20.0


def get_readiness(
    lifecycle: Lifecycle, hello: WorkerReady | None, *, silent_seconds: float, drain_seconds: float
) -> Readiness:
    """Return the response body of `GET /ready`.

    Args:
        hello: start-up message of the latest worker; None before the first worker is up.
        silent_seconds: time since the worker's last heartbeat.
        drain_seconds: time limit for running requests to finish after SIGTERM.
    """
    now = time.monotonic()
    is_up = hello is not None and hello.epoch >= lifecycle.epoch.value
    path = get_serving_path(hello) if hello and is_up else None
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
