"""Memory profiling on a GPU: the KV-cache gets what weights, the largest step and CUDA graphs leave.

Legend: T packed tokens, V vocabulary.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.sampling.sampler import sample, top_logprobs
from service.engine.execution.cuda_graphs import Capture, DecodeGraphs, buckets

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of a device after the profiled step, in bytes.

    total: memory of the device.
    free: memory that no process has allocated.
    reserved: memory reserved by PyTorch's allocator.
    peak: peak memory in use within `reserved` during the step, weights included, the trial's KV-cache excluded.
    graphs: additional memory for CUDA graphs.
    """

    total: int
    free: int
    reserved: int
    peak: int
    graphs: int = 0

    def for_cache(self, share: float) -> int:
        """Return the bytes for the KV-cache if at most `share` of the device is used in all; 0 if nothing is left.

        Memory reserved beyond `peak` is reusable. Memory of other processes and of the CUDA context counts as used.
        """
        others = self.total - self.free - self.reserved
        return max(0, int(self.total * share) - others - self.peak - self.graphs)


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


def cache_bytes(model: Transformer, largest: LargestStep, share: float, capture: Capture | None) -> int | None:
    """Return the bytes of GPU memory available to the KV-cache; None on a CPU, whose memory is not profiled here.

    Args:
        model: the model, on its device.
        largest: the largest step, which is profiled.
        share: fraction of the GPU's memory that this process may use in all.
        capture: captures decode steps; None if the engine uses no CUDA graphs.

    Raises:
        torch.OutOfMemoryError: the largest step does not fit the device.
        RuntimeError: the device cannot capture a decode step.
    """
    if model.token_embedding.weight.device.type != "cuda":
        return None
    memory = measure(model, largest)
    if capture is not None:
        memory = replace(memory, graphs=graph_bytes(model, largest, capture, free_device_bytes))
    logger.info("memory profile of the largest step: %s", memory)
    return memory.for_cache(share)


@torch.inference_mode()
def graph_bytes(model: Transformer, largest: LargestStep, capture: Capture, free_bytes: Callable[[], int]) -> int:
    """Return the bytes that the CUDA graphs of all decode shapes will take, from a trial capture of two graphs.

    The first and largest graph allocates the memory pool that all graphs share, and library workspaces. The second
    graph takes only driver memory for its kernels, as every further graph does.

    Raises:
        RuntimeError: the device cannot capture a decode step.
    """
    weight = model.token_embedding.weight
    cache = KVCache(model.config, num_blocks=1, block_size=largest.block_size, dtype=weight.dtype, device=weight.device)
    shapes = buckets(largest.num_sampled, -(-largest.max_context_length // largest.block_size))
    free = [free_bytes()]

    def measured(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay = capture(compute)
        free.append(free_bytes())
        return replay

    graphs = DecodeGraphs(
        lambda token_ids_T, metadata: model.hidden(token_ids_T, metadata, cache),
        capture=measured,
        shapes=shapes[:2],
        scratch_block=0,
        block_size=largest.block_size,
        device=weight.device,
    )
    taken = free[0] - free_bytes()
    del graphs
    return max(0, taken) + max(0, free[-2] - free[-1]) * max(0, len(shapes) - 2)


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
