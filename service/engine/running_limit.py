"""Limit on running sequences that keeps the mean time between an answer's tokens at a target.

A step takes about as long as a line over its sequences says: a fixed part and a part of each. The seconds of recent
steps give the line, the target gives the number of sequences. The limit corrects itself: where the fixed part is
another than assumed here, steps at the limit are too long or too short, and the limit moves on until they are right.
Prompts count with the steps that compute them, because clients wait for these steps, too.
"""

import math
import sys

from service.engine.plan import StepPlan

# Fixed part of a step, in sequences that would take as long.
_FIXED_SEQUENCES = 16
# Weight that earlier steps keep at each step: about the last 100 count.
_MEMORY = 0.99
# Longest step that counts in full, in predicted steps: a longer one says something of the machine.
_OUTLIER = 3.0
# Share of the target that the mean is held at: the mean of a single answer differs from it by chance.
_AIM = 0.9
# The limit stays while the estimate is at most this far outside of it, in sequences: it must not flap.
_HYSTERESIS = 0.5


class RunningLimit:
    """Largest number of running sequences whose steps keep the target.

    Args:
        target_seconds: longest mean time between two tokens of an answer; infinite for no target.
        max_num_running: upper bound of the limit, and the limit until a step with decodes was observed.
    """

    def __init__(self, target_seconds: float, max_num_running: int) -> None:
        self._aim_seconds = _AIM * target_seconds
        self._max_num_running = max_num_running
        self.forget()

    def forget(self) -> None:
        """Reset the estimate: warm-up steps and failed steps are not representative."""
        self.num_sequences = self._max_num_running
        self._seconds = 0.0  # of recent steps, each weighted by its decodes
        self._units = 0.0  # of the same steps: sequences and fixed part, each weighted by the tokens decoded

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Record that the tokens of a step came `seconds` after those of the step before. Follows their commit."""
        if math.isinf(self._aim_seconds):
            return
        decodes = [
            chunk
            for chunk in plan.chunks
            if chunk.start >= chunk.sequence.num_prompt_tokens and chunk.num_tokens == 1 + len(chunk.draft)
        ]
        num_tokens = sum(len(chunk.sequence.token_ids) - chunk.num_known_tokens for chunk in decodes)
        if not num_tokens:
            return
        units = len(plan.chunks) + _FIXED_SEQUENCES
        if self._units:
            seconds = min(seconds, _OUTLIER * units * self._seconds / self._units)
        self._seconds = _MEMORY * self._seconds + len(decodes) * seconds
        self._units = _MEMORY * self._units + num_tokens * units
        estimate = self._aim_seconds * self._units / max(self._seconds, sys.float_info.min) - _FIXED_SEQUENCES
        if not -_HYSTERESIS <= estimate - self.num_sequences < 1.0 + _HYSTERESIS:
            self.num_sequences = max(1, int(min(estimate, self._max_num_running)))
