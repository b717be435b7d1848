"""Server's part of a request's time, from its `/metrics`: where the time of the requests of a level went.

Kvasir, vLLM and SGLang have histograms of queue, first token and whole request; llama.cpp has counters of prefill and
decode time. Only durations are compared, so the clocks of client and server need not agree.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loadtest.client.outcome import Outcome
from loadtest.client.report import timed
from loadtest.client.sse_client import Target

_PREFIXES = ("llm_", "vllm:", "sglang:")
_HISTOGRAMS = {
    "queue": ("request_queue_time_seconds", "queue_time_seconds"),
    "first_token": ("time_to_first_token_seconds",),
    "whole": ("e2e_request_latency_seconds",),
}
_COUNTERS = {"prefill": "llamacpp:prompt_seconds_total", "decode": "llamacpp:tokens_predicted_seconds_total"}
PHASES = ("queue", "prefill", "decode", "network")
_IN_WORDS = {
    "prefill": "reading prompts (prefill)",
    "decode": "generating tokens (decode)",
    "network": "HTTP, the network and what the server does not count",
}


def read_samples(target: Target) -> list[Sample]:
    """Return the samples of the server's `/metrics`; none if there is no such page."""
    try:
        families = list(text_string_to_metric_families(target.fetch("/metrics").decode()))
    except (OSError, ValueError):
        return []
    return [sample for family in families for sample in family.samples]


def scrape(target: Target) -> dict[str, float]:
    """Return the values of the samples of the server's `/metrics`, summed over their labels."""
    sums: dict[str, float] = {}
    for sample in read_samples(target):
        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def phases_ms(
    before: Mapping[str, float], after: Mapping[str, float], outcomes: Sequence[Outcome]
) -> dict[str, float | None]:
    """Return the mean milliseconds of a request in each phase, between two scrapes; None: the server does not say.

    network: the rest of the client's mean E2E latency, which includes HTTP, and the queue of a server without a
    histogram of its queue.
    """
    done = [outcome.end_seconds - outcome.sent_seconds for outcome in timed(outcomes)]
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def mean(phase: str) -> float | None:
        names = (prefix + name for prefix in _PREFIXES for name in _HISTOGRAMS[phase])
        pairs = ((grown.get(f"{name}_sum"), grown.get(f"{name}_count")) for name in names)
        return next((1e3 * total / count for total, count in pairs if total is not None and count), None)

    queue, first, whole = map(mean, _HISTOGRAMS)
    phases: dict[str, float | None] = dict.fromkeys(PHASES)
    if queue is not None and first is not None and whole is not None:
        phases |= {"queue": queue, "prefill": max(0.0, first - queue), "decode": max(0.0, whole - first)}
    elif done:
        totals = {phase: grown.get(name) for phase, name in _COUNTERS.items()}
        phases |= {phase: None if total is None else 1e3 * total / len(done) for phase, total in totals.items()}
    known = [value for value in phases.values() if value is not None]
    if known and done:
        phases["network"] = max(0.0, 1e3 * float(np.mean(done)) - sum(known))
    return phases


def limiting_factor(level: Mapping[str, Any]) -> str | None:
    """Return a clause on the phase that takes most of a request's time outside the queue; None without metrics."""
    phases = {name: value for name, value in level["server_ms"].items() if value and name != "queue"}
    if not phases:
        return None
    most = max(phases, key=phases.__getitem__)
    return f"{_IN_WORDS[most]}, {phases[most] / sum(phases.values()):.0%} of a request's time outside the queue"
