"""Service level objectives of a load test, and the exit code that follows from them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from loadtest.client.outcome import Ending, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Limits; None for a limit that is not set. Percentiles are over completed requests.

    `max_failed_share` and `max_shed_share` are shares of the requests sent. A latency limit without a measured
    value (nothing was streamed, for example) counts as broken.

    Raises:
        ValueError: a limit is negative.
    """

    ttft_p95_ms: float | None = None
    itl_p95_ms: float | None = None
    tpot_p95_ms: float | None = None
    e2e_p95_ms: float | None = None
    max_failed_share: float | None = 0.0
    max_shed_share: float | None = None
    min_output_throughput: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 0:
                raise ValueError(f"{field.name} must not be negative, not {value}")

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """Read the arguments that `add_arguments` declared."""
        return cls(**{field.name: getattr(arguments, f"slo_{field.name}") for field in fields(cls)})

    def is_good(self, outcome: Outcome) -> bool:
        """Return True if one request kept the TTFT, TPOT and E2E limits (goodput, as in vLLM)."""
        if outcome.ending is not Ending.OK:
            return False
        measured = (
            (self.ttft_p95_ms, outcome.ttft_seconds),
            (self.tpot_p95_ms, outcome.tpot_seconds),
            (self.e2e_p95_ms, outcome.e2e_seconds),
        )
        return all(limit is None or value is None or 1e3 * value <= limit for limit, value in measured)

    def breaches(self, outcomes: Sequence[Outcome], duration_seconds: float) -> list[str]:
        """Return a readable line for every broken limit."""
        if not outcomes:
            return ["no request was sent"]
        done = [outcome for outcome in outcomes if outcome.ending is Ending.OK]
        latencies = (
            ("TTFT", self.ttft_p95_ms, [outcome.ttft_seconds for outcome in done]),
            ("ITL", self.itl_p95_ms, [gap for outcome in done for gap in outcome.itl_seconds]),
            ("TPOT", self.tpot_p95_ms, [outcome.tpot_seconds for outcome in done]),
            ("E2E", self.e2e_p95_ms, [outcome.e2e_seconds for outcome in done]),
        )
        broken = []
        for name, limit, seconds in latencies:
            if limit is None:
                continue
            known = [1e3 * value for value in seconds if value is not None]
            if not known:
                broken.append(f"{name} p95: nothing measured, limit {limit:g} ms")
            elif (value := float(np.percentile(known, 95))) > limit:
                broken.append(f"{name} p95: {value:.1f} ms, limit {limit:g} ms")
        tokens = sum(outcome.completion_tokens for outcome in done)
        return broken + self._share_breaches(outcomes) + self._throughput_breach(tokens, duration_seconds)

    def _share_breaches(self, outcomes: Sequence[Outcome]) -> list[str]:
        failed = sum(outcome.ending.is_failure for outcome in outcomes) / len(outcomes)
        shed = sum(outcome.ending is Ending.SHED for outcome in outcomes) / len(outcomes)
        shares = (("failed", failed, self.max_failed_share), ("shed", shed, self.max_shed_share))
        return [
            f"{name}: {share:.2%} of the requests sent, limit {limit:.2%}"
            for name, share, limit in shares
            if limit is not None and share > limit
        ]

    def _throughput_breach(self, tokens: int, duration_seconds: float) -> list[str]:
        limit, reached = self.min_output_throughput, tokens / max(duration_seconds, 1e-9)
        if limit is None or reached >= limit:
            return []
        return [f"output throughput: {reached:.1f} tokens/s, limit {limit:g}"]


def add_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare a `--slo-...` option for each limit."""
    helps = {
        "ttft_p95_ms": "maximum 95th percentile of time to first token, ms",
        "itl_p95_ms": "maximum 95th percentile of inter-token latency, ms",
        "tpot_p95_ms": "maximum 95th percentile of time per output token, ms",
        "e2e_p95_ms": "maximum 95th percentile of end-to-end latency, ms",
        "max_failed_share": "maximum share of requests that fail; a rejection with 429 is not a failure",
        "max_shed_share": "maximum share of requests rejected with 429",
        "min_output_throughput": "minimum completion tokens/s",
    }
    for field in fields(Slo):
        parser.add_argument(
            f"--slo-{field.name.replace('_', '-')}",
            type=float,
            default=getattr(Slo(), field.name),
            metavar="X",
            help=f"{helps[field.name]} (default: {'no limit' if field.default is None else field.default})",
        )
