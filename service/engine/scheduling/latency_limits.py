"""Latency limits of the scheduler: prefill tokens of one prompt in a step with decodes, and running sequences."""

import math
import sys

from service.engine.scheduling.step_plan import StepPlan

# Fixed time of a step, as a number of rows or sequences that would take as long.
_FIXED_ROWS = 16
# Minimum number of prefill tokens in a chunk. Smaller chunks take almost as long: each reads all previous keys.
_LEAST_TOKENS = 8
# Decay, at each observed step, of the prefill estimates (about the last 5 steps count) and of the inter-token latency
# estimates (about the last 100 steps count).
_PREFILL_MEMORY, _ITL_MEMORY = 0.8, 0.99
# Cap on an observed duration, as a multiple of the estimate: longer steps are stalls of the machine.
_OUTLIER = 3.0
# Minimum share of a step's time that is attributed to its prefills.
_LEAST_SHARE = 0.25
# Share of the target latency at which the mean is held, because the mean of a single response varies by chance.
_AIM = 0.9
# Maximum deviation of the estimate, in sequences, without a change of the limit: prevents oscillation.
_HYSTERESIS = 0.5


class PrefillBudget:
    """Limit on the prefill tokens of one prompt in a step, to bound the slowdown of the step's decodes.

    The limit applies to each prompt. So one prompt cannot delay the decodes much, but many waiting prompts together
    still fill the step's token budget, which gives the highest throughput.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self.reset()

    def reset(self) -> None:
        """Reset the estimates of step durations: warm-up steps and failed steps are not representative."""
        self._row_seconds = 0.0  # per row of a decode step, fixed rows included; 0: unknown
        self._prompt_seconds = 0.0  # recent time of prefill tokens, beside decodes
        self._prompt_tokens = 0.0  # number of tokens computed in that time, with the same decay

    def max_allowed_tokens(self, num_decodes: int) -> int:
        """Return the maximum number of prefill tokens of one prompt in a step with `num_decodes` decodes.

        The number is `sys.maxsize` without a limit, without decodes, and until the first decode step is observed.
        """
        if not (num_decodes and self._row_seconds) or math.isinf(self._slowdown):
            return sys.maxsize
        decode_seconds = self._row_seconds * (num_decodes + _FIXED_ROWS)
        token_seconds = max(self._token_seconds, sys.float_info.min)
        return max(_LEAST_TOKENS, int(min((self._slowdown - 1.0) * decode_seconds / token_seconds, sys.maxsize)))

    @property
    def _token_seconds(self) -> float:
        """Estimated seconds per prefill token. Until a prefill is observed: seconds per row of a decode step."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else self._row_seconds

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step, to estimate the seconds per decode and per prefill token."""
        if not plan.chunks or math.isinf(self._slowdown):
            return
        if plan.is_decode:
            row_seconds = seconds / (len(plan.chunks) + _FIXED_ROWS)
            known = self._row_seconds or row_seconds
            self._row_seconds = _PREFILL_MEMORY * known + (1.0 - _PREFILL_MEMORY) * min(row_seconds, _OUTLIER * known)
            return
        num_rows = sum(chunk.num_tokens for chunk in plan.chunks if chunk.is_decode)
        num_tokens = plan.num_tokens - num_rows
        if not (num_tokens and self._row_seconds):
            return  # no prefill; or no decode step seen yet, so the prefill's share of the time is unknown
        beside = self._row_seconds * (num_rows + _FIXED_ROWS)
        own = max(seconds - beside, _LEAST_SHARE * seconds)
        own = min(own, _OUTLIER * self._token_seconds * num_tokens)
        self._prompt_seconds = _PREFILL_MEMORY * self._prompt_seconds + own
        self._prompt_tokens = _PREFILL_MEMORY * self._prompt_tokens + num_tokens


class RunningLimit:
    """Limit on running sequences that keeps the mean inter-token latency at `target_seconds`.

    The model of a step's duration is linear: a fixed part, plus a part for each sequence. If the assumed fixed part is
    wrong, steps at the limit miss the target, and the limit moves until the steps meet the target. Steps with prefills
    count too, because clients wait for these steps.
    """

    def __init__(self, target_seconds: float, max_num_running: int) -> None:
        self._aim_seconds = _AIM * target_seconds
        self._max_num_running = max_num_running
        self.reset()

    def reset(self) -> None:
        """Reset the limit on running sequences: warm-up steps and failed steps are not representative."""
        self.num_sequences = self._max_num_running
        self._seconds = 0.0  # durations of recent steps, each weighted by its number of decodes
        self._units = 0.0  # sequences plus `_FIXED_ROWS` of the same steps, each weighted by its decoded tokens

    def observe(self, seconds: float, *, num_sequences: int, num_decodes: int, num_tokens: int) -> None:
        """Record a step, to adjust the limit on running sequences.

        seconds: time since the commit of the previous step. num_sequences: sequences in the step, prefills included.
        num_tokens: tokens that the step's `num_decodes` decodes sampled: with speculative decoding also several each.
        """
        if math.isinf(self._aim_seconds) or not num_tokens:
            return
        units = num_sequences + _FIXED_ROWS
        if self._units:
            seconds = min(seconds, _OUTLIER * units * self._seconds / self._units)
        self._seconds = _ITL_MEMORY * self._seconds + num_decodes * seconds
        self._units = _ITL_MEMORY * self._units + num_tokens * units
        estimate = self._aim_seconds * self._units / max(self._seconds, sys.float_info.min) - _FIXED_ROWS
        if not -_HYSTERESIS <= estimate - self.num_sequences < 1.0 + _HYSTERESIS:
            self.num_sequences = max(1, int(min(estimate, self._max_num_running)))
