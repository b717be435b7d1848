"""Draft lengths for speculative decoding: draft a token if its acceptance probability exceeds its cost.

A draft token adds one row to a step. Let n sequences sample one token each in t seconds, and let the row add b seconds
and one token with probability p. Throughput rises if (n + p) / (t + b) > n / t, that is, if p > n * b / t. With few
sequences this threshold is low, because most of a step's time does not depend on its rows. With many sequences it
approaches 1. Probabilities and seconds are estimates, and all sequences of a batch wait for rejected drafts: a safety
margin skips drafts that would barely pay.
"""

from service.engine.scheduling.block_pool import BlockPool
from service.engine.scheduling.config import EngineConfig
from service.engine.scheduling.sequence import SequenceState
from service.engine.scheduling.step_cost import StepCost
from service.engine.scheduling.step_plan import StepPlan

# Safety margin: minimum ratio of the acceptance probability to the cost.
_MARGIN = 1.5
# Divisor: drafts get a quarter of the token budget that decodes leave, prefills the rest.
_SHARE = 4


class DraftPolicy:
    """Chooses the draft of each sequence in a step, and allocates KV blocks for drafts."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._cost = StepCost()
        self._num_running = 0
        self._budget = 0
        self._price = 0.0

    def begin(self, num_running: int) -> None:
        """Set the draft budget and the cost threshold for a step of `num_running` sequences."""
        if not self._config.max_draft_tokens:
            return
        self._num_running = num_running
        self._budget = (self._config.max_batched_tokens - num_running) // _SHARE
        self._price = _MARGIN * self._cost.of_one_more(num_running)

    def draft(self, sequence: SequenceState) -> tuple[int, ...]:
        """Return the draft of a sequence. At most one KV block is added, and only if the pool has blocks to spare."""
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
        """Record the duration of a step. Steps with prefills are ignored: they would distort the cost of a row."""
        if not self._config.max_draft_tokens:
            return
        if plan.chunks and all(chunk.draws and chunk.num_tokens == 1 + len(chunk.draft) for chunk in plan.chunks):
            self._cost.observe(plan.num_rows, seconds)
