"""How many tokens of one prompt a step computes beside others' next ones: so many that these come not much later.

Without a bound a long prompt takes whatever `max_batched_tokens` leaves, and everybody else's next token comes as late
as that takes to compute. Each prompt has its part: one alone cannot hold up the others, and where many wait the whole
budget is used, which is what computes most. Of these parts together whoever came first takes all it needs, so that it
has its first token before those that came later are begun; but a prompt that they do not suffice for keeps to its own,
so that short ones do not wait for long ones.
"""

import math
import sys
from dataclasses import dataclass

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


@dataclass(slots=True)
class Allowance:
    """Tokens of prompts in one step.

    left: of all prompts together.
    part: of one that would not be done with what is left.
    """

    left: int
    part: int

    def of(self, num_remaining: int) -> int:
        """How many of the next prompt, which lacks so many."""
        return num_remaining if num_remaining <= self.left else min(self.left, self.part)


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

    def allowance(self, *, num_decodes: int, num_prompts: int, budget: int) -> Allowance:
        """Of so many prompts, beside so many sequences that get their next token."""
        part = self._part(num_decodes)
        return Allowance(left=min(budget, part * num_prompts), part=part)

    def _part(self, num_decodes: int) -> int:
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
