"""How many tokens of one prompt a step computes beside others' next ones: so many that these come not much later.

Without a bound a long prompt takes whatever `max_batched_tokens` leaves, and everybody else's next token comes as late
as that takes to compute. The bound is each prompt's, not the step's: one alone cannot hold up the others, and where
many wait the whole budget is used, which is what computes most.
"""

import math
import sys

from service.engine.plan import StepPlan

# A step takes as long as if it had so many rows more than it has: its fixed part.
_FIXED_ROWS = 16
# Fewer of a prompt's tokens take almost as long: each chunk reads the keys of all that came before it.
_LEAST_TOKENS = 8
# How much of what is known stays at each step that says something.
_MEMORY = 0.8
# A step that took so many times as long as expected says something of the machine.
_OUTLIER = 3.0
# At least so much of a step's time is its prompts', whatever is known of the rest.
_LEAST_SHARE = 0.25


class PromptPace:
    """Learns what rows and prompts' tokens take, and bounds the latter.

    Args:
        slowdown: how many times as long as without it one prompt may make a step; infinite for any number.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self.forget()

    def forget(self) -> None:
        """What was learned was no steady state, as a first step is none."""
        self._row_seconds = 0.0  # of a step that only decodes, for each of its rows and the fixed ones; 0: unknown
        self._prompt_seconds = 0.0  # beside such rows, of late, and how many tokens were computed in them
        self._prompt_tokens = 0.0

    def most_tokens(self, num_decodes: int) -> int:
        """Of one prompt, beside so many sequences that get their next token."""
        if not (num_decodes and self._row_seconds) or math.isinf(self._slowdown):
            return sys.maxsize
        decode_seconds = self._row_seconds * (num_decodes + _FIXED_ROWS)
        token_seconds = max(self._token_seconds, sys.float_info.min)
        return max(_LEAST_TOKENS, int(min((self._slowdown - 1.0) * decode_seconds / token_seconds, sys.maxsize)))

    @property
    def _token_seconds(self) -> float:
        """Of a prompt's token beside others' next ones. As a row of these, until it is known."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else self._row_seconds

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A planned step took so long."""
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
            return  # drafts alone; or nobody has decoded, so that nothing says what of it is the prompt's
        beside = self._row_seconds * (sum(rows) + _FIXED_ROWS)
        own = max(seconds - beside, _LEAST_SHARE * seconds)
        own = min(own, _OUTLIER * self._token_seconds * num_tokens)
        self._prompt_seconds = _MEMORY * self._prompt_seconds + own
        self._prompt_tokens = _MEMORY * self._prompt_tokens + num_tokens
