"""Service level objectives: what was promised, and whether it was kept. The exit code of a load test."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from loadtest.outcome import Ending, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Limits; None for one that is not set. Percentiles are over requests that came to a result.

    `max_failed_share` and `max_shed_share` are shares of the requests sent. A latency limit that no request
    can answer for (nothing streamed, say) is broken: an objective that was not measured was not met.

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
        """Whether one request kept the TTFT, TPOT and E2E limits: what goodput counts, as vLLM's does."""
        if outcome.ending is not Ending.OK:
            return False
        measured = (
            (self.ttft_p95_ms, outcome.ttft_seconds),
            (self.tpot_p95_ms, outcome.tpot_seconds),
            (self.e2e_p95_ms, outcome.e2e_seconds),
        )
        return all(limit is None or value is None or 1e3 * value <= limit for limit, value in measured)

    def breaches(self, outcomes: Sequence[Outcome], duration_seconds: float) -> list[str]:
        """Every limit that was broken, as a line for people. Empty when all were kept."""
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
    """Declare one `--slo-...` option for each limit."""
    helps = {
        "ttft_p95_ms": "95th percentile of time to first token, at most",
        "itl_p95_ms": "95th percentile of inter-token latency, at most",
        "tpot_p95_ms": "95th percentile of time per output token, at most",
        "e2e_p95_ms": "95th percentile of end-to-end latency, at most",
        "max_failed_share": "failed requests / requests sent, at most; shed load (429) is not failure",
        "max_shed_share": "requests refused with 429 / requests sent, at most",
        "min_output_throughput": "completion tokens/s, at least",
    }
    for field in fields(Slo):
        parser.add_argument(
            f"--slo-{field.name.replace('_', '-')}",
            type=float,
            default=getattr(Slo(), field.name),
            metavar="X",
            help=f"{helps[field.name]} (default: {'no limit' if field.default is None else field.default})",
        )
