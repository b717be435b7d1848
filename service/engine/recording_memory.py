"""What recorded steps take of a GPU's memory, found out before the cache is sized: two of each kind are recorded.

The biggest comes first and brings the pool of memory that all of its kind share, and the libraries' workspaces. What
each one more takes is the driver's, for as many kernels as any other has, and is told by the second.
"""

from collections.abc import Callable
from typing import Any

import torch

from model.kv_cache import KVCache
from model.transformer import Transformer
from service.engine.graphs import Capture, DecodeGraphs, buckets
from service.engine.memory import LargestStep
from service.engine.prompt_graphs import Pieces, PromptGraphs, prompt_rows

_TRIED = 2


class _Metered:
    """Records as `record` does, and notes what is free before and after each recording."""

    def __init__(self, record: Callable[[Any], Any], free_bytes: Callable[[], int]) -> None:
        self._record = record
        self._free_bytes = free_bytes
        self.taken: list[int] = []

    def __call__(self, compute: Any) -> Any:
        before = self._free_bytes()
        replay = self._record(compute)
        self.taken.append(before - self._free_bytes())
        return replay

    def all_of(self, count: int, whole: int) -> int:
        """What `count` of them take, by those that were made, which took the `whole` with what they share."""
        return max(0, whole) + max(0, self.taken[-1]) * (count - len(self.taken))


@torch.inference_mode()
def recorded_bytes(
    model: Transformer, largest: LargestStep, *, capture: Capture, pieces: Pieces, free_bytes: Callable[[], int]
) -> int:
    """What all recordings of `model` will take, decode steps and those with prompts. None of those tried is kept.

    Args:
        free_bytes: of the device, that nobody holds.

    Raises:
        RuntimeError, ValueError: the device does not record them.
    """
    return _decodes(model, largest, capture, free_bytes) + _prompts(model, largest, pieces, free_bytes)


def _decodes(model: Transformer, largest: LargestStep, capture: Capture, free_bytes: Callable[[], int]) -> int:
    weight = model.token_embedding.weight
    cache = KVCache(model.config, num_blocks=1, block_size=largest.block_size, dtype=weight.dtype, device=weight.device)
    shapes = buckets(largest.num_draws, -(-largest.max_context_length // largest.block_size))
    metered, before = _Metered(capture, free_bytes), free_bytes()
    graphs = DecodeGraphs(
        lambda token_ids_T, metadata: model.hidden(token_ids_T, metadata, cache),
        capture=metered,
        shapes=shapes[:_TRIED],
        scratch_block=0,
        block_size=largest.block_size,
        device=weight.device,
    )
    whole = before - free_bytes()
    del graphs
    return metered.all_of(len(shapes), whole)


def _prompts(model: Transformer, largest: LargestStep, pieces: Pieces, free_bytes: Callable[[], int]) -> int:
    rows = prompt_rows(largest.num_tokens)
    metered, before = _Metered(pieces, free_bytes), free_bytes()
    graphs = PromptGraphs(model, metered, rows[:_TRIED])
    whole = before - free_bytes()
    del graphs
    return metered.all_of(len(rows), whole)
