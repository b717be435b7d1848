"""Steps of the engine, gathered: what each alone would write to a file that processes share is written now and then.

Between two steps the caches hold weights, and to write it all takes 80 µs, where a step of few streams takes 1,000.
"""

import time
from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from service.messages import StepStats
from service.tally import Tally

# How old may be what others see of steps.
_SECONDS = 0.1


class StepTally:
    """What metrics are told of steps.

    Args:
        counter, gauge, histogram: give the instrument of a name, which has no labels of its own.
        clock: seconds.
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
        """A step was computed. It is seen at once, or not much later if another was told just before."""
        self._gathered.append(stats)
        if self._clock() >= self._due_seconds:
            self.flush()

    def rest(self) -> None:
        """There is no work left. Cancelled work ends between steps, where no step can tell of it."""
        self.flush()
        self._due_seconds = 0.0
        self._running.set(0)
        self._waiting.set(0)
        self._kv_usage.set(0)

    def flush(self) -> None:
        """Have all that was gathered be seen."""
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
