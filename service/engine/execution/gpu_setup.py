"""Choice of the attention backend, and of GPU features: CUDA graphs, fused kernels, int8 and fp8 quantization."""

import logging
from dataclasses import dataclass

import torch

from model.attention.backends import ATTENTION_BACKENDS, AttentionBackend
from model.attention.native import NativeAttention
from model.attention.paged import KernelContext, choose, fits
from model.gpu.fused_modules import fuse
from model.gpu.quantization import Quantization
from model.gpu.quantization import choose as select_quantization
from model.kernels.kernel_library import KernelLibrary
from model.nn.transformer import Transformer
from service.engine.execution.cuda_graphs import Capture, CudaCapture

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
    chosen = choose(place)
    for reason in chosen.left_out:
        level = logging.WARNING if place.device.type == "cuda" else logging.INFO
        logger.log(level, "attention kernel disabled: %s", reason)
    return Attending(backend=chosen.backend, name=str(chosen), recordable=True)


def choose_quantization(quantize: str, device: torch.device, dtype: torch.dtype) -> Quantization | None:
    """Return the GPU quantization of a --quantize setting; None on a CPU, and for `none`.

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
    logger.info("%s", chosen)
    return chosen


def fuse_for_gpu(model: Transformer) -> None:
    """Fuse the kernels between a model's matrix products on a GPU; do nothing on other devices."""
    if model.token_embedding.weight.device.type == "cuda":
        fuse(model)


def capture_for(device: torch.device) -> Capture | None:
    """Return the capture of decode steps for this device; None for a device without CUDA graphs."""
    return CudaCapture() if device.type == "cuda" else None
