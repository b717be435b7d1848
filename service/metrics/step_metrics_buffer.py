"""Metrics of engine steps, buffered until a scrape: writing them after each step would cost more than a token."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from service.ipc.messages import StepStats
from service.metrics.histogram_buffer import Tally

# Gauges of the last step. The last one is a limit, and does not fall to 0 when the engine has no work.
ENGINE_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "max_num_requests_running")
# Buffered steps at which the buffer is flushed without a scrape.
_MAX_STEPS = 1000


class StepMetricsBuffer:
    """Buffer of step statistics, flushed to the metrics.

    Args:
        counter, gauge, histogram: return the metric of a name, without labels left to set.
    """

    def __init__(
        self,
        *,
        counter: Callable[[str], Counter],
        gauge: Callable[[str], Gauge],
        histogram: Callable[[str], Histogram],
    ) -> None:
        self._gauge = gauge  # called anew each time: a gauge may have been dropped
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
        self._gathered: list[StepStats] = []
        self._is_idle = False

    def add(self, stats: StepStats) -> None:
        """Buffer the statistics of a step."""
        self._gathered.append(stats)
        self._is_idle = False
        if len(self._gathered) >= _MAX_STEPS:
            self.flush()

    def rest(self) -> None:
        """Note that the engine has no work left.

        Cancelled work ends between steps, so no step reports its end.
        """
        self._is_idle = True

    def flush(self) -> None:
        """Write all buffered statistics to the metrics."""
        steps, self._gathered = self._gathered, []
        if steps:
            self._write(steps)
        if self._is_idle:
            for name in ENGINE_GAUGES[:3]:
                self._gauge(name).set(0)

    def forget(self) -> None:
        """Note that the engine is gone: its gauges are not written before the next step or rest."""
        self._is_idle = False

    def _write(self, steps: list[StepStats]) -> None:
        last = steps[-1]
        numbers = (last.num_running, last.num_waiting, last.kv_usage, last.max_num_running)
        for name, number in zip(ENGINE_GAUGES, numbers, strict=True):
            self._gauge(name).set(number)
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
