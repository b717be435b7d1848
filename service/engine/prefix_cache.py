"""Which blocks of a sequence have been computed before: chained hashes over full blocks.

The scheduler asks when it admits a sequence, and tells when a step is going to fill blocks: a pass writes all its keys
and values before any is read, so that sequences admitted to the same step can share them already. It alone lets this
change a sequence. What is findable, and for how long, is the block pool's.
"""

from collections.abc import Iterable

from service.engine.block_pool import BlockPool, block_hash
from service.engine.config import EngineConfig
from service.engine.sequence import Sequence
from service.messages import Pooling


class PrefixCache:
    """Looks up and registers the full blocks of sequences."""

    def __init__(self, pool: BlockPool, config: EngineConfig) -> None:
        self._pool = pool
        self._block_size = config.block_size
        self._enabled = config.enable_prefix_cache

    def find(self, sequence: Sequence) -> tuple[list[int], int]:
        """The known leading blocks of a sequence, not yet owned, and the number of tokens that were looked up."""
        if not self._enabled:
            return [], 0
        # The last token is always computed: the next one is drawn from its logits.
        num_skippable = len(sequence.token_ids) - 1
        if sequence.params.prompt_logprobs is not None and sequence.num_scored_tokens < sequence.num_prompt_tokens - 1:
            num_skippable = sequence.num_scored_tokens  # scoring the rest needs its logits
        if sequence.pooling is Pooling.MEAN:
            num_skippable = 0  # each token's hidden state is wanted
        num_full = num_skippable // self._block_size
        self._extend_hashes(sequence, num_full)
        return self._pool.find(sequence.block_hashes[:num_full]), len(sequence.token_ids)

    def register(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the blocks findable that are full once the first `num_tokens` are computed."""
        num_full = num_tokens // self._block_size
        if num_full <= sequence.num_registered_blocks or not self._enabled:
            return
        self._extend_hashes(sequence, num_full)
        for index in range(sequence.num_registered_blocks, num_full):
            self._pool.register(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_registered_blocks = num_full

    def discard(self, blocks: Iterable[int]) -> None:
        """No longer find these blocks: a step has filled them with NaN or infinity."""
        self._pool.discard(blocks)

    def forget(self) -> None:
        """Find nothing any more: a step that failed has not filled what was registered for it."""
        self._pool.forget()

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Know the chained hashes of the first `num_blocks` blocks; tokens only ever grow, so they stay right."""
        size, hashes = self._block_size, sequence.block_hashes
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else sequence.root_hash
            hashes.append(block_hash(parent, sequence.token_ids[index * size : (index + 1) * size]))
