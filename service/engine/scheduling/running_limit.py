"""Limit on running sequences that keeps the mean inter-token latency (ITL) at a target.

The model of a step's duration is linear: a fixed part, plus a part for each sequence. The durations of recent steps
determine the line, and the target determines the number of sequences. The limit corrects itself: if the assumed fixed
part is wrong, steps at the limit miss the target, and the limit moves until they meet the target. Steps with prefills
count too, because clients wait for these steps.
"""

import math
import sys

from service.engine.scheduling.step_plan import StepPlan

# Fixed time of a step, as a number of sequences that would take as long.
_FIXED_SEQUENCES = 16
# Decay of the estimates at each step: about the last 100 steps count.
_MEMORY = 0.99
# Cap on an observed duration, as a multiple of the prediction: longer steps are stalls of the machine.
_OUTLIER = 3.0
# Share of the target at which the mean is held, because the mean of a single response varies by chance.
_AIM = 0.9
# Maximum deviation of the estimate, in sequences, without a change of the limit: prevents flapping.
_HYSTERESIS = 0.5


class RunningLimit:
    """Largest number of running sequences whose steps keep the target.

    Args:
        target_seconds: maximum mean time between two tokens of a response; infinite for no target.
        max_num_running: upper bound of the limit, and its value until a step with decodes is observed.
    """

    def __init__(self, target_seconds: float, max_num_running: int) -> None:
        self._aim_seconds = _AIM * target_seconds
        self._max_num_running = max_num_running
        self.forget()

    def forget(self) -> None:
        """Reset the estimate: warm-up steps and failed steps are not representative."""
        self.num_sequences = self._max_num_running
        self._seconds = 0.0  # durations of recent steps, each weighted by its number of decodes
        self._units = 0.0  # sequences and fixed part of the same steps, each weighted by its decoded tokens

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Record the `seconds` between the commits of a step and the previous step. Call after the commit."""
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
