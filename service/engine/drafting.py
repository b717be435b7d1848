"""Whose next tokens a step guesses, and how many: those whose chance to be right is worth their price.

A drafted token is one row more in a step. Of n sequences that draw one token each in t(n) seconds, a row that adds b
seconds and brings a token with the chance p makes more tokens a second if (n + p) / (t + b) > n / t: if p > n b / t.
With few sequences that is little, for most of a step does not depend on its rows; with many it is most of 1. Chances
and seconds are estimates, and sequences that end together all wait for the one that guesses worst: what would just pay
is left alone.
"""

from service.engine.block_pool import BlockPool
from service.engine.config import EngineConfig
from service.engine.plan import StepPlan
from service.engine.sequence import Sequence
from service.engine.step_cost import StepCost

# How many times its price a draft must be worth.
_MARGIN = 1.5
# Of what a step has left beside the tokens of all that run: the rest is for prompts.
_SHARE = 4


class Drafting:
    """Decides the drafts of each step. It alone gives a sequence a block for its draft."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._cost = StepCost()
        self._num_running = 0
        self._budget = 0
        self._price = 0.0

    def begin(self, num_running: int) -> None:
        """A step of so many sequences is going to be planned."""
        if not self._config.max_draft_tokens:
            return
        self._num_running = num_running
        self._budget = (self._config.max_batched_tokens - num_running) // _SHARE
        self._price = _MARGIN * self._cost.of_one_more(num_running)

    def draft(self, sequence: Sequence) -> tuple[int, ...]:
        """What may follow a sequence, within its blocks and one that nobody will miss."""
        if sequence.lookup is None or sequence.num_completion_tokens < sequence.params.min_tokens:
            return ()
        length, size = len(sequence.token_ids), self._config.block_size
        limit = min(self._budget, sequence.max_length - length - 1)
        draft = sequence.lookup.draft(sequence.token_ids, limit, self._price)
        if length + len(draft) > len(sequence.block_table) * size and self._pool.num_free > self._num_running:
            sequence.block_table += self._pool.allocate(1) or []
        draft = draft[: max(0, len(sequence.block_table) * size - length)]
        self._budget -= len(draft)
        return draft

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A planned step took so long. Steps that computed prompts say nothing of drafts."""
        if not self._config.max_draft_tokens:
            return
        if plan.chunks and all(chunk.draws and chunk.num_tokens == 1 + len(chunk.draft) for chunk in plan.chunks):
            self._cost.observe(plan.num_rows, seconds)
