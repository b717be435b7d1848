"""Limit on the prefill tokens of one prompt in a step with decodes, to bound the slowdown of the decodes.

Without a limit, a long prompt takes all that decodes leave of `max_batched_tokens`, and delays the next token of every
running sequence. The limit applies to each prompt, not to the step. So a single prompt cannot delay the decodes much,
but many waiting prompts still use the whole budget, which gives the highest throughput.
"""

import math
import sys

from service.engine.scheduling.step_plan import StepPlan

# Fixed time of a step, as a number of rows that would take as long.
_FIXED_ROWS = 16
# Minimum number of prefill tokens in a chunk. Smaller chunks take almost as long: each reads all previous keys.
_LEAST_TOKENS = 8
# Decay of the estimates at each observed step.
_MEMORY = 0.8
# Cap on an observed duration, as a multiple of the estimate: longer steps are stalls of the machine.
_OUTLIER = 3.0
# Minimum share of a step's time that is attributed to its prefills.
_LEAST_SHARE = 0.25


class PrefillBudget:
    """Estimates the durations of decode rows and prefill tokens, and limits the prefill tokens of a prompt.

    Args:
        slowdown: maximum slowdown of a decode step by one prompt, as a factor; infinite: no limit.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self.forget()

    def forget(self) -> None:
        """Reset the estimates: warm-up steps and failed steps are not representative."""
        self._row_seconds = 0.0  # per row of a decode step, fixed rows included; 0: unknown
        self._prompt_seconds = 0.0  # recent time of prefill tokens, beside decodes
        self._prompt_tokens = 0.0  # number of tokens computed in that time, with the same decay

    def max_allowed_tokens(self, num_decodes: int) -> int:
        """Return the maximum number of prefill tokens of one prompt in a step with `num_decodes` decodes."""
        if not (num_decodes and self._row_seconds) or math.isinf(self._slowdown):
            return sys.maxsize
        decode_seconds = self._row_seconds * (num_decodes + _FIXED_ROWS)
        token_seconds = max(self._token_seconds, sys.float_info.min)
        return max(_LEAST_TOKENS, int(min((self._slowdown - 1.0) * decode_seconds / token_seconds, sys.maxsize)))

    @property
    def _token_seconds(self) -> float:
        """Estimated seconds per prefill token; until one is observed, the seconds of a decode row."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else self._row_seconds

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step."""
        if not plan.chunks or math.isinf(self._slowdown):
            return
        if plan.is_decode:
            row_seconds = seconds / (len(plan.chunks) + _FIXED_ROWS)
            known = self._row_seconds or row_seconds
            self._row_seconds = _MEMORY * known + (1.0 - _MEMORY) * min(row_seconds, _OUTLIER * known)
            return
        rows = [chunk.num_tokens for chunk in plan.chunks if chunk.draws and chunk.num_tokens == 1 + len(chunk.draft)]
        num_tokens = plan.num_tokens - sum(rows)
        if not (num_tokens and self._row_seconds):
            return  # no prefill; or no decode step seen yet, so the prefill's share of the time is unknown
        beside = self._row_seconds * (sum(rows) + _FIXED_ROWS)
        own = max(seconds - beside, _LEAST_SHARE * seconds)
        own = min(own, _OUTLIER * self._token_seconds * num_tokens)
        self._prompt_seconds = _MEMORY * self._prompt_seconds + own
        self._prompt_tokens = _MEMORY * self._prompt_tokens + num_tokens
