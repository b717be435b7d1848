"""What of a GPU's memory the KV-cache may take: what is left after weights, the largest step, tried, and recordings.

Legend: T packed tokens, V vocabulary.
"""

import gc
from dataclasses import dataclass

import torch

from model.attention.metadata import AttentionMetadata
from model.kv_cache import KVCache
from model.sampling import sample, top_logprobs
from model.sampling_params import SamplingParams
from model.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes of a device after a step was tried.

    total: of the device. free: that nobody holds. reserved: that our allocator holds. peak: what of it was in use at
    the step's most, weights included. recordings: what recorded steps will take besides.
    """

    total: int
    free: int
    reserved: int
    peak: int
    recordings: int = 0

    def for_cache(self, share: float) -> int:
        """What the cache may take, if all that we use is to stay under `share` of the device; 0 if nothing is left.

        What the allocator holds beyond `peak` is ours to take again. Other processes, and what the driver keeps for
        us, are not asked to leave.
        """
        others = self.total - self.free - self.reserved
        return max(0, int(self.total * share) - others - self.peak - self.recordings)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestStep:
    """How large a step may be: tokens in all, draws, tokens of one sequence; and the slots of a block."""

    block_size: int
    num_tokens: int
    num_draws: int
    max_context_length: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Prompts of so many tokens in all, each as long as one may be."""
        whole, rest = divmod(self.num_tokens, self.max_context_length)
        return (self.max_context_length,) * whole + ((rest,) if rest else ())


def free_device_bytes() -> int:
    """What of the CUDA device nobody holds, when all is done and our allocator has given back what it does not need."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@torch.inference_mode()
def measure(model: Transformer, largest: LargestStep) -> DeviceMemory:
    """Try a step on a CUDA device: whole prompts, each token of them scored, and draws from a nucleus.

    The cache of the trial is no part of what is measured.

    Raises:
        torch.OutOfMemoryError: the device does not hold such a step.
    """
    device = model.token_embedding.weight.device
    torch.cuda.synchronize()
    lengths = largest.lengths
    blocks_each = -(-max(lengths) // largest.block_size)
    cache = KVCache(
        model.config,
        num_blocks=blocks_each,
        block_size=largest.block_size,
        dtype=model.token_embedding.weight.dtype,
        device=device,
    )
    torch.cuda.reset_peak_memory_stats()
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    # All sequences in the same blocks: what they hold is of no interest.
    metadata = AttentionMetadata(
        query_lengths=lengths,
        context_lengths=lengths,
        positions_T=positions_T,
        slot_mapping_T=positions_T,
        block_tables_BN=torch.arange(blocks_each).repeat(len(lengths), 1),
    ).to(device)
    x_TE = model.hidden(torch.zeros(len(positions_T), dtype=torch.int64, device=device), metadata, cache)
    top_logprobs(model.logits(x_TE), [0] * len(x_TE), num_top=1)
    rows = x_TE[:1].expand(largest.num_draws, -1)
    params = [SamplingParams(max_tokens=1, top_p=0.9)] * largest.num_draws
    sample(model.logits(rows), params, range(largest.num_draws))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - cache.num_bytes
    del cache, x_TE, rows
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(total=total, free=free, reserved=torch.cuda.memory_reserved(), peak=peak)
