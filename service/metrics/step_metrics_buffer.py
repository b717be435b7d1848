"""Metrics of engine steps, buffered and written to prometheus_client's metrics at intervals.

Writing all metrics takes tens of microseconds, and a step of few streams 1,000 µs.
"""

import time
from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from service.ipc.messages import StepStats
from service.metrics.histogram_buffer import Tally

# Maximum age of the metrics while steps are computed.
_SECONDS = 0.1


class StepMetricsBuffer:
    """Buffer of step statistics, flushed to the metrics.

    Args:
        counter, gauge, histogram: return the metric of a name, without labels left to set.
        clock: returns seconds.
    """

    def __init__(
        self,
        *,
        counter: Callable[[str], Counter],
        gauge: Callable[[str], Gauge],
        histogram: Callable[[str], Histogram],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running = gauge("num_requests_running")
        self._max_running = gauge("max_num_requests_running")
        self._waiting = gauge("num_requests_waiting")
        self._kv_usage = gauge("kv_cache_usage_perc")
        self._batch_size = Tally(histogram("batch_size"))
        self._step_tokens = Tally(histogram("iteration_tokens_total"))
        self._step_seconds = Tally(histogram("iteration_duration_seconds"))
        self._busy_seconds = counter("engine_busy_seconds")
        self._generation_tokens = counter("generation_tokens")
        self._prompt_tokens = counter("prompt_tokens")
        self._counters = {
            "num_cached_prompt_tokens": counter("prompt_tokens_cached"),
            "num_prefix_queries": counter("prefix_cache_queries"),
            "num_prefix_hits": counter("prefix_cache_hits"),
            "num_preemptions": counter("num_preemptions"),
            "num_drafts": counter("spec_decode_num_drafts"),
            "num_draft_tokens": counter("spec_decode_num_draft_tokens"),
            "num_accepted_tokens": counter("spec_decode_num_accepted_tokens"),
            "num_non_finite": counter("non_finite_sequences"),
        }
        self._clock = clock
        self._gathered: list[StepStats] = []
        self._due_seconds = 0.0

    def add(self, stats: StepStats) -> None:
        """Buffer the statistics of a step. Flush unless the last flush was under 0.1 s ago."""
        self._gathered.append(stats)
        if self._clock() >= self._due_seconds:
            self.flush()

    def rest(self) -> None:
        """Flush, and set the gauges to 0, because the engine has no work left.

        Cancelled work ends between steps, so no step reports its end.
        """
        self.flush()
        self._due_seconds = 0.0
        self._running.set(0)
        self._waiting.set(0)
        self._kv_usage.set(0)

    def flush(self) -> None:
        """Write all buffered statistics to the metrics."""
        if not self._gathered:
            return
        steps, self._gathered = self._gathered, []
        self._due_seconds = self._clock() + _SECONDS
        self._running.set(steps[-1].num_running)
        self._max_running.set(steps[-1].max_num_running)
        self._waiting.set(steps[-1].num_waiting)
        self._kv_usage.set(steps[-1].kv_usage)
        for step in steps:
            self._batch_size.add(step.batch_size)
            self._step_tokens.add(step.num_prompt_tokens + step.num_completion_tokens)
            self._step_seconds.add(step.step_seconds)
        for tally in (self._batch_size, self._step_tokens, self._step_seconds):
            tally.flush()
        self._busy_seconds.inc(sum(step.step_seconds for step in steps))
        self._generation_tokens.inc(sum(step.num_completion_tokens for step in steps))
        self._prompt_tokens.inc(sum(step.num_prompt_tokens + step.num_cached_prompt_tokens for step in steps))
        for name, counter in self._counters.items():
            counter.inc(sum(getattr(step, name) for step in steps))
