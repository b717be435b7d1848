"""How much the engine holds and how much it does in a step: one frozen value."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes and budgets.

    block_size: KV slots a block (tokens).
    num_blocks: blocks in the pool; with `block_size` it bounds the tokens all sequences hold together.
    max_num_running: sequences that compute in one step.
    max_batched_tokens: tokens computed in one step, decodes first, the rest on prompt chunks.
    enable_prefix_cache: share the blocks of equal prefixes.
    kv_cache_dtype: of the keys and values in the pool; auto for the model's.
    max_context_length: tokens at which every sequence ends; None for as many as the model has positions.
    max_draft_tokens: of a sequence in a step, see `prompt_lookup`; 0 for no drafts.
    prompt_slowdown: see `prompt_pace`; infinite for prompts as long as the budget allows.
    target_itl_seconds: see `running_limit`; infinite for as many sequences as `max_num_running` allows.

    Raises:
        ValueError: a size is not positive, or the budget cannot serve every running sequence.
    """

    block_size: int = 16
    num_blocks: int
    max_num_running: int = 64
    max_batched_tokens: int = 512
    enable_prefix_cache: bool = True
    kv_cache_dtype: Literal["auto", "float16"] = "auto"
    max_context_length: int | None = None
    max_draft_tokens: int = 0
    prompt_slowdown: float = math.inf
    target_itl_seconds: float = math.inf

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_running", "max_batched_tokens", "max_context_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.max_batched_tokens < self.max_num_running:
            raise ValueError(
                f"max_batched_tokens={self.max_batched_tokens} must be at least "
                f"max_num_running={self.max_num_running}: a running sequence needs one token a step"
            )
