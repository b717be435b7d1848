"""Memory estimate of CUDA graphs, made before the KV-cache is sized: two graphs of each kind are captured on trial.

The first and largest graph allocates the memory pool that all graphs of its kind share, and library workspaces. Each
further graph takes driver memory for its kernels, whose number is the same in each graph. The second capture measures
this memory.
"""

from collections.abc import Callable
from typing import Any

import torch

from model.attention.kv_cache import KVCache
from model.nn.transformer import Transformer
from service.engine.execution.cuda_graphs import Capture, DecodeGraphs, buckets
from service.engine.execution.gpu_memory import LargestStep
from service.engine.execution.prefill_graphs import Pieces, PromptGraphs, prompt_rows

_TRIED = 2


class _Metered:
    """Wrapper of a capture that measures the memory taken by each capture."""

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
        """Return the bytes of `count` graphs. `whole`: bytes of the graphs captured so far, shared memory included."""
        return max(0, whole) + max(0, self.taken[-1]) * (count - len(self.taken))


@torch.inference_mode()
def graph_bytes(
    model: Transformer, largest: LargestStep, *, capture: Capture, pieces: Pieces, free_bytes: Callable[[], int]
) -> int:
    """Return the bytes that all CUDA graphs of a model will take. The graphs captured on trial are discarded.

    Args:
        model: the model.
        largest: limits of a step, which determine the shapes to capture.
        capture: captures decode steps.
        pieces: captures steps with prefills.
        free_bytes: returns the free bytes of the device.

    Raises:
        RuntimeError: the device cannot capture a step, or a replay of a decode step differs from it.
        ValueError: a replay of a prefill step differs from the model.
    """
    return _decodes(model, largest, capture, free_bytes) + _prompts(model, largest, pieces, free_bytes)


def _decodes(model: Transformer, largest: LargestStep, capture: Capture, free_bytes: Callable[[], int]) -> int:
    weight = model.token_embedding.weight
    cache = KVCache(model.config, num_blocks=1, block_size=largest.block_size, dtype=weight.dtype, device=weight.device)
    shapes = buckets(largest.num_sampled, -(-largest.max_context_length // largest.block_size))
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
