"""Memory profiling on a GPU: the KV-cache gets what weights, the largest step and CUDA graphs leave.

Legend: T packed tokens, V vocabulary.
"""

import gc
from dataclasses import dataclass

import torch

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.sampling.sampler import sample, top_logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of a device after the profiled step, in bytes.

    total: memory of the device.
    free: memory that no process has allocated.
    reserved: memory reserved by PyTorch's allocator.
    peak: peak memory in use within `reserved` during the step, weights included, the trial's KV-cache excluded.
    recordings: additional memory for CUDA graphs.
    """

    total: int
    free: int
    reserved: int
    peak: int
    recordings: int = 0

    def for_cache(self, share: float) -> int:
        """Return the bytes for the KV-cache if at most `share` of the device is used in all; 0 if nothing is left.

        Memory reserved beyond `peak` is reusable. Memory of other processes and of the CUDA context counts as used.
        """
        others = self.total - self.free - self.reserved
        return max(0, int(self.total * share) - others - self.peak - self.recordings)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestStep:
    """Limits of one step, for memory profiling.

    block_size: tokens per KV block.
    num_tokens: maximum number of tokens in the step.
    num_sampled: maximum number of sampled tokens in the step.
    max_context_length: maximum number of tokens of one sequence.
    """

    block_size: int
    num_tokens: int
    num_sampled: int
    max_context_length: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of prompts that sum to `num_tokens`, each as long as possible."""
        whole, rest = divmod(self.num_tokens, self.max_context_length)
        return (self.max_context_length,) * whole + ((rest,) if rest else ())


def free_device_bytes() -> int:
    """Return the free bytes of the CUDA device, once pending work is done and unused memory is released."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@torch.inference_mode()
def measure(model: Transformer, largest: LargestStep) -> DeviceMemory:
    """Measure the memory of the largest step on a CUDA device: full prompts, prompt logprobs and top-p sampling.

    The KV-cache of the trial is not counted.

    Raises:
        torch.OutOfMemoryError: the step does not fit the device.
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
    # All sequences share the same blocks, because the content of the cache does not matter.
    metadata = AttentionMetadata(
        query_lengths=lengths,
        context_lengths=lengths,
        positions_T=positions_T,
        slot_mapping_T=positions_T,
        block_tables_BN=torch.arange(blocks_each).repeat(len(lengths), 1),
    ).to(device)
    x_TE = model.hidden(torch.zeros(len(positions_T), dtype=torch.int64, device=device), metadata, cache)
    top_logprobs(model.logits(x_TE), [0] * len(x_TE), num_top=1)
    rows = x_TE[:1].expand(largest.num_sampled, -1)
    params = [SamplingParams(max_tokens=1, top_p=0.9)] * largest.num_sampled
    sample(model.logits(rows), params, range(largest.num_sampled))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - cache.num_bytes
    del cache, x_TE, rows
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(total=total, free=free, reserved=torch.cuda.memory_reserved(), peak=peak)
