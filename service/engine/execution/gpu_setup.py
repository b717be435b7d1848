"""GPU features of the engine: paged attention, KV-cache size, CUDA graphs, fused kernels, int8 and fp8 quantization.

Each feature is tried when the engine is built. A feature that fails or computes wrong numbers on this GPU is disabled
with a warning: the engine then computes the same, slower.
"""

import logging
from dataclasses import dataclass, replace

import torch

from model.attention.backends import ATTENTION_BACKENDS, AttentionBackend
from model.attention.kernel_selection import KernelContext, SelectedKernels, choose, fits
from model.attention.native import NativeAttention
from model.gpu.fused_modules import fuse
from model.gpu.quantization import Quantization
from model.gpu.quantization import choose as select_quantization
from model.kernels.kernel_library import KernelLibrary
from model.nn.transformer import Transformer
from service.engine.execution.cuda_graphs import Capture, CudaCapture
from service.engine.execution.gpu_memory import LargestStep, free_device_bytes, measure
from service.engine.execution.graph_memory import graph_bytes
from service.engine.execution.model_runner import ModelRunner
from service.engine.execution.prefill_graphs import CudaPieces, Pieces, capture_prompts
from service.engine.scheduling.config import EngineConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attending:
    """Attention backend of a model, its name for logs, and `recordable`: CUDA graphs can capture its decode steps."""

    backend: AttentionBackend
    name: str
    recordable: bool


def choose_attention(wanted: str, place: KernelContext, library: KernelLibrary | None) -> Attending:
    """Return the attention backend of an --attention setting.

    auto is native with a kernel library, else sdpa on a CPU. auto is paged on a GPU if the model's layers support paged
    attention, else sdpa.

    Args:
        library: native kernels that compute this model; None: sdpa replaces native.

    Raises:
        ValueError: paged with a model that does not support it, or native on a device other than a CPU.
        RuntimeError: no implementation of paged attention works on this device.
    """
    fitting = fits(place.config)
    if wanted == "auto":
        on_gpu = "paged" if fitting else "sdpa"
        wanted = "native" if place.device.type == "cpu" else on_gpu
    if wanted == "native" and place.device.type != "cpu":
        raise ValueError("--attention native works only on a CPU; omit it, or choose --device cpu")
    if wanted == "native" and library is not None:
        return Attending(backend=NativeAttention(library), name=wanted, recordable=False)
    if wanted == "native":
        wanted = "sdpa"
    if wanted != "paged":
        return Attending(backend=ATTENTION_BACKENDS[wanted], name=wanted, recordable=False)
    if not fitting:
        raise ValueError("--attention paged does not support this model's attention layers; choose --attention sdpa")
    chosen: SelectedKernels = choose(place)
    for reason in chosen.left_out:
        level = logging.WARNING if place.device.type == "cuda" else logging.INFO
        logger.log(level, "attention kernel disabled: %s", reason)
    return Attending(backend=chosen.backend, name=str(chosen), recordable=True)


def choose_quantization(quantize: str, device: torch.device, dtype: torch.dtype) -> Quantization | None:
    """Return the GPU quantization of a --quantize setting; None on a CPU, and for `none`.

    The kernels are first tried on the device. A kernel that fails is left out, with a warning.

    Raises:
        ValueError: the device does not support such matrix products.
    """
    if quantize == "none":
        return None
    if device.type == "cpu":
        if quantize == "fp8":
            raise ValueError("--quantize fp8 works only on a GPU; choose --quantize int8, or omit it")
        return None
    chosen = select_quantization(quantize, device, dtype)
    if chosen.left_out is not None:
        logger.warning("Triton kernels for quantized matrices disabled: %s", chosen.left_out)
    logger.info("%s", chosen)
    return chosen


def fuse_for_gpu(model: Transformer) -> None:
    """Fuse the kernels between a model's matrix products on a GPU. A fusion that fails its trial is skipped."""
    if model.token_embedding.weight.device.type == "cuda":
        for reason in fuse(model):
            logger.warning("kernel fusion disabled: %s", reason)


def capture_for(device: torch.device) -> Capture | None:
    """Return the capture of decode steps for this device; None for a device without CUDA graphs."""
    return CudaCapture() if device.type == "cuda" else None


def pieces_for(device: torch.device) -> Pieces | None:
    """Return the piecewise capture of prefill steps for this device; None for a device without CUDA graphs."""
    return CudaPieces() if device.type == "cuda" else None


def cache_bytes(model: Transformer, largest: LargestStep, share: float, *, records: bool) -> int | None:
    """Return the bytes of GPU memory available to the KV-cache; None on a CPU, whose memory is not profiled here.

    Args:
        largest: the largest step, which is profiled.
        share: fraction of the GPU's memory that this process may use in all.
        records: CUDA graphs of steps will be captured and need memory too.

    Raises:
        torch.OutOfMemoryError: the largest step does not fit the device.
    """
    device = model.token_embedding.weight.device
    if device.type != "cuda":
        return None
    memory = measure(model, largest)
    capture, pieces = capture_for(device), pieces_for(device)
    if records and capture is not None and pieces is not None:
        try:
            taken = graph_bytes(model, largest, capture=capture, pieces=pieces, free_bytes=free_device_bytes)
        except Exception as error:  # the driver, the allocator or a third-party kernel may raise anything
            logger.warning("memory of CUDA graphs is unknown and not reserved: %s", error)
        else:
            memory = replace(memory, recordings=taken)
    logger.info("memory profile of the largest step: %s", memory)
    return memory.for_cache(share)


def create_graphed_runner(
    model: Transformer, config: EngineConfig, vocab_size: int, capture: Capture, pieces: Pieces | None = None
) -> ModelRunner:
    """Return a runner with CUDA graphs: whole for decode steps, piecewise for steps with prefills.

    A capture that fails is skipped with a warning; such steps then run without CUDA graphs.

    Args:
        capture: captures decode steps.
        pieces: captures steps with prefills; None for the default of the device.
    """
    runner = ModelRunner(model, num_blocks=config.num_blocks, block_size=config.block_size, vocab_size=vocab_size)
    most = model.config.max_context_length
    length = most if config.max_context_length is None else min(most, config.max_context_length)
    try:
        shapes = runner.record(capture, max_rows=config.max_num_running, max_context_length=length)
    except Exception as error:  # the driver, the allocator or a third-party kernel may raise anything
        logger.warning("CUDA graphs of decode steps disabled: %s", error)
    else:
        logger.info(
            "CUDA graphs captured for decode steps of up to %d sequences (%d shapes)", shapes[0].rows, len(shapes)
        )
    pieces = pieces or pieces_for(model.token_embedding.weight.device)
    if pieces is not None:
        _record_prompts(model, pieces, config.max_batched_tokens)
    return runner


def _record_prompts(model: Transformer, pieces: Pieces, max_rows: int) -> None:
    try:
        rows = capture_prompts(model, pieces, max_rows)
    except Exception as error:  # the driver, the allocator or a third-party kernel may raise anything
        logger.warning("CUDA graphs of prefill steps disabled: %s", error)
    else:
        logger.info("CUDA graphs captured for prefill steps of up to %d tokens (%d sizes)", rows[0], len(rows))
