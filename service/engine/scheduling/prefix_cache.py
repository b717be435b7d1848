"""Prefix cache: lookup and registration of computed blocks by chained hashes over full blocks.

The scheduler looks up blocks when it admits a sequence. It registers blocks when it plans the step that fills them: a
forward pass writes all keys and values before it reads any, so sequences admitted to the same step can share them. The
block pool stores the hashes and evicts blocks.
"""

from collections.abc import Iterable

from service.engine.scheduling.block_pool import BlockPool, block_hash
from service.engine.scheduling.config import EngineConfig
from service.engine.scheduling.sequence import SequenceState
from service.ipc.messages import Pooling


class PrefixCache:
    """Lookup and registration of the full blocks of sequences."""

    def __init__(self, pool: BlockPool, config: EngineConfig) -> None:
        self._pool = pool
        self._block_size = config.block_size
        self._enabled = config.enable_prefix_cache

    def find(self, sequence: SequenceState) -> tuple[list[int], int]:
        """Return the cached leading blocks of a sequence, not yet acquired, and the number of tokens looked up."""
        if not self._enabled:
            return [], 0
        # The last token is always computed: the next token is sampled from its logits.
        num_skippable = len(sequence.token_ids) - 1
        if sequence.params.prompt_logprobs is not None and sequence.num_scored_tokens < sequence.num_prompt_tokens - 1:
            num_skippable = sequence.num_scored_tokens  # prompt logprobs need the logits of the other tokens
        if sequence.pooling is Pooling.MEAN:
            num_skippable = 0  # mean pooling needs every hidden state
        num_full = num_skippable // self._block_size
        self._extend_hashes(sequence, num_full)
        return self._pool.find(sequence.block_hashes[:num_full]), len(sequence.token_ids)

    def register(self, sequence: SequenceState, num_tokens: int) -> None:
        """Register the blocks that are full once the first `num_tokens` tokens are computed."""
        num_full = num_tokens // self._block_size
        if num_full <= sequence.num_registered_blocks or not self._enabled:
            return
        self._extend_hashes(sequence, num_full)
        for index in range(sequence.num_registered_blocks, num_full):
            self._pool.register(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_registered_blocks = num_full

    def discard(self, blocks: Iterable[int]) -> None:
        """Remove these blocks from the cache, because a step has filled them with NaN or infinity."""
        self._pool.discard(blocks)

    def forget(self) -> None:
        """Clear the cache, because a failed step has not filled the blocks registered for it."""
        self._pool.forget()

    def _extend_hashes(self, sequence: SequenceState, num_blocks: int) -> None:
        """Compute missing hashes of the first `num_blocks` blocks. Hashes stay valid: token ids are append-only."""
        size, hashes = self._block_size, sequence.block_hashes
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else sequence.root_hash
            hashes.append(block_hash(parent, sequence.token_ids[index * size : (index + 1) * size]))
