"""Configuration of the engine: sizes and budgets."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes and budgets of an engine.

    block_size: tokens per KV block.
    num_blocks: KV blocks in the pool. All running sequences together hold at most num_blocks * block_size tokens.
    max_num_running: maximum number of running sequences.
    max_batched_tokens: maximum number of tokens computed in one step. Decodes come first, then prefill chunks.
    enable_prefix_cache: share the KV blocks of equal prefixes.
    kv_cache_dtype: dtype of keys and values in the pool; auto: the dtype of the model.
    max_context_length: maximum length of a sequence, prompt included; None: the number of the model's positions.
    max_draft_tokens: maximum draft tokens of a sequence in one step, see `PromptLookup`; 0: no speculative decoding.
    prompt_slowdown: maximum slowdown of a decode step by one prompt, see `PrefillBudget`; infinite: no limit.
    target_itl_seconds: target inter-token latency, see `RunningLimit`; infinite: no target.

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
