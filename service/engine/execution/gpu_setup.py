"""Setup of an engine for a GPU: attention backend, CUDA graphs, fused kernels, quantization, KV-cache memory."""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.attention.backends import ATTENTION_BACKENDS, AttentionBackend
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.attention.native import NativeAttention
from model.attention.paged import GATHERED_POSITIONS, KernelContext, choose, fits
from model.gpu.quantization import Quantization
from model.gpu.quantization import choose as select_quantization
from model.kernels.kernel_library import KernelLibrary
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.sampling.sampler import logprob_table, sample
from service.engine.execution.cuda_graphs import Capture, CudaCapture, DecodeGraphs, buckets

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """Attention backend of a model, with its name for logs.

    can_capture: CUDA graphs can capture the backend's kernels.
    left_out: better kernels or backends that are not supported, as "name: reason".
    """

    backend: AttentionBackend
    name: str
    can_capture: bool
    left_out: tuple[str, ...] = ()


def choose_attention(wanted: str, context: KernelContext, library: KernelLibrary | None) -> AttentionChoice:
    """Return the attention backend for a value of --attention. Raise ValueError if device or model cannot use it.

    auto is native on a CPU. On a GPU, auto is paged if the model's layers support paged attention, else sdpa. If no
    native kernels can compute the model (`library` is None), sdpa replaces native.
    """
    on_cpu, is_paged_possible = context.device.type == "cpu", fits(context.config)
    left_out: tuple[str, ...] = ()
    if wanted == "auto":
        if not (on_cpu or is_paged_possible):
            left_out = ("paged: the model's attention layers are not supported",)
        on_gpu = "paged" if is_paged_possible else "sdpa"
        wanted = "native" if on_cpu else on_gpu
    if wanted == "native":
        if not on_cpu:
            raise ValueError("--attention native works only on a CPU; omit it, or choose --device cpu")
        if library is not None:
            return AttentionChoice(backend=NativeAttention(library), name=wanted, can_capture=False)
        wanted = "sdpa"
    if wanted != "paged":
        return AttentionChoice(backend=ATTENTION_BACKENDS[wanted], name=wanted, can_capture=False, left_out=left_out)
    if not is_paged_possible:
        raise ValueError("--attention paged does not support this model's attention layers; choose --attention sdpa")
    chosen = choose(context)
    # A graph has fixed shapes, but a token's experts are known only when the step runs.
    can_capture = context.config.experts is None
    return AttentionChoice(backend=chosen.backend, name=str(chosen), can_capture=can_capture, left_out=chosen.left_out)


def choose_quantization(quantize: str, device: torch.device, dtype: torch.dtype) -> Quantization | None:
    """Return the GPU quantization for a value of --quantize; None for `none`, and for int8 and int4 on a CPU.

    Raises ValueError if the device cannot use this value.
    """
    if quantize == "none":
        return None
    if device.type == "cpu":
        if quantize == "fp8":
            raise ValueError("--quantize fp8 works only on a GPU; choose --quantize int8, or omit it")
        return None
    if quantize == "int4":
        raise ValueError("--quantize int4 works only on a CPU; choose --quantize int8, or omit it")
    chosen = select_quantization(quantize, device, dtype)
    logger.info("%s", chosen)
    return chosen


def capture_for(device: torch.device) -> Capture | None:
    """Return a new `CudaCapture`, which captures CUDA graphs, if the device is a GPU; None on a CPU."""
    return CudaCapture() if device.type == "cuda" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of a GPU in bytes, measured after a trial run of the engine's largest step."""

    total: int
    free: int  # allocated by no process
    reserved: int  # by PyTorch's allocator
    peak: int  # in use within `reserved` during the step, weights included
    graphs: int = 0  # additional memory for CUDA graphs

    def for_cache(self, share: float) -> int:
        """Return the bytes left for the KV-cache if all processes together use at most `share` (0 to 1) of the GPU."""
        others = self.total - self.free - self.reserved  # other processes and the CUDA context
        return max(0, int(self.total * share) - others - self.peak - self.graphs)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestStep:
    """Sizes of the largest step that an engine may run, in tokens, and block size and dtype of its KV-cache."""

    block_size: int
    num_tokens: int
    num_sampled: int
    max_context_length: int  # of one sequence
    cache_dtype: torch.dtype | None = None  # None: the model's

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the step's prompts in tokens: as few prompts as possible, with `num_tokens` tokens in total."""
        whole, rest = divmod(self.num_tokens, self.max_context_length)
        return (self.max_context_length,) * whole + ((rest,) if rest else ())


def free_device_bytes() -> int:
    """Return the free bytes of the CUDA device, after pending work has ended and PyTorch has released unused memory."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def wait_for_device_memory(
    needed: int, free_bytes: Callable[[], int], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until a GPU has the free bytes that a replacement worker needs. Raises ValueError after 10 s.

    A dead process's memory is freed by the driver, some time after the process has ended.
    """
    for _ in range(100):
        if (free := free_bytes()) >= needed:
            return
        sleep(0.1)
    raise ValueError(
        f"the GPU has {free >> 20} MiB free, and the model and its KV-cache need {needed >> 20} MiB; end the other "
        "processes on this GPU"
    )


def cache_bytes(model: Transformer, largest: LargestStep, share: float, capture: Capture | None) -> int | None:
    """Run the largest step. Return the bytes left for the KV-cache in `share` (0 to 1) of the GPU; None on a CPU."""
    if model.token_embedding.weight.device.type != "cuda":
        return None
    memory = measure(model, largest)
    if capture is not None:
        memory = replace(memory, graphs=graph_bytes(model, largest, capture, free_device_bytes))
    logger.info("GPU memory in bytes, after a trial run of the engine's largest step: %s", memory)
    return memory.for_cache(share)


@torch.inference_mode()
def graph_bytes(model: Transformer, largest: LargestStep, capture: Capture, free_bytes: Callable[[], int]) -> int:
    """Estimate the bytes that the CUDA graphs of all decode shapes will take, from a trial capture of the two largest.

    The first and largest graph allocates the memory pool that all graphs share, and library workspaces. The second
    graph takes only driver memory for its kernels, as every further graph does.
    """
    cache = _trial_cache(model, largest, num_blocks=1)
    shapes = buckets(largest.num_sampled, -(-largest.max_context_length // largest.block_size))
    free = [free_bytes()]

    def measured(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay = capture(compute)
        replay()  # the driver uploads a graph to the GPU at its first replay
        free.append(free_bytes())
        return replay

    graphs = DecodeGraphs(model.hidden, cache, capture=measured, shapes=shapes[:2])
    taken = free[0] - free_bytes()
    del graphs
    return max(0, taken) + max(0, free[-2] - free[-1]) * max(0, len(shapes) - 2)


def _trial_cache(model: Transformer, largest: LargestStep, *, num_blocks: int) -> KVCache:
    weight = model.token_embedding.weight
    return KVCache(
        model.config,
        num_blocks=num_blocks,
        block_size=largest.block_size,
        dtype=weight.dtype,
        device=weight.device,
        cache_dtype=largest.cache_dtype,
    )


@torch.inference_mode()
def measure(model: Transformer, largest: LargestStep) -> DeviceMemory:
    """Run the largest step on the GPU: full prompts, prompt logprobs, top-p sampling. Return the GPU's memory.

    The peak does not include the KV-cache of this trial run. It includes the copies of keys and values that chunks of
    long prompts need, and whole prompts do not.
    """
    device, lengths = model.token_embedding.weight.device, largest.lengths
    torch.cuda.synchronize()
    count = -(-max(lengths) // largest.block_size)
    cache = _trial_cache(model, largest, num_blocks=count)
    torch.cuda.reset_peak_memory_stats()
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    # All sequences share the same blocks, because the content of the cache does not matter.
    metadata = AttentionMetadata(
        query_lengths=lengths,
        context_lengths=lengths,
        positions_T=positions_T,
        slot_mapping_T=positions_T,
        block_tables_BN=torch.arange(count).repeat(len(lengths), 1),
    ).to(device)
    x_TE = model.hidden(torch.zeros(len(positions_T), dtype=torch.int64, device=device), metadata, cache)
    logprob_table(model.logits(x_TE), torch.zeros(len(x_TE), dtype=torch.int64, device=device), num_top=1)
    rows = x_TE[:1].expand(largest.num_sampled, -1)
    params = [SamplingParams(max_tokens=1, top_p=0.9)] * largest.num_sampled
    sample(model.logits(rows), params, range(largest.num_sampled))
    torch.cuda.synchronize()
    config, value_bytes = model.config, x_TE.element_size()
    largest_layer = max(config.kv_bytes_of(layer, value_bytes) for layer in range(config.num_layers))
    copies = largest_layer * max(GATHERED_POSITIONS, largest.max_context_length)
    peak = torch.cuda.max_memory_allocated() - cache.num_bytes + copies
    del cache, x_TE, rows
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(total=total, free=free, reserved=torch.cuda.memory_reserved(), peak=peak)
