"""Slower computation paths that an engine takes because a faster path is not available on this machine."""

from collections.abc import Iterator

import torch

from model.config import ModelConfig
from model.gpu.quantization import Quantization
from model.native.native_transformer import computes
from model.system.limits import has_nvidia_driver
from model.system.triton_modules import import_with_triton
from service.config.settings import ModelSettings, SettingsError
from service.engine.execution.gpu_setup import AttentionChoice


def find_fallbacks(
    settings: ModelSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    attending: AttentionChoice,
    quantization: Quantization | None,
    *,
    device: str,
    missing_kernels: str,
) -> tuple[str, ...]:
    """Return name and reason of each faster path that is not available, except those that settings switch off.

    missing_kernels: reason why a CPU has no native kernels; empty if the kernels are loaded or not wanted.
    Raises `SettingsError` if a faster path is not available, and the setting `require_fast_path` is on.
    """
    found = tuple(
        _on_gpu(settings, attending, quantization)
        if device.startswith("cuda")
        else _on_cpu(settings, config, dtype, missing_kernels)
    )
    if found and settings.require_fast_path:
        raise SettingsError(f"--require-fast-path: not available: {'; '.join(found)}; omit the flag")
    return found


def _on_cpu(settings: ModelSettings, config: ModelConfig, dtype: torch.dtype, missing_kernels: str) -> Iterator[str]:
    if settings.device == "auto" and has_nvidia_driver():  # PyTorch does not say why it finds no device
        yield "CUDA: PyTorch finds no CUDA device, but this machine has NVIDIA's driver"
    if settings.attention not in ("auto", "native"):
        return
    if missing_kernels:
        yield f"native kernels: {missing_kernels}"
    elif not computes(config, dtype):
        name = str(dtype).removeprefix("torch.")
        yield f"native kernels: they do not compute this model in {name}"


def _on_gpu(settings: ModelSettings, attending: AttentionChoice, quantization: Quantization | None) -> Iterator[str]:
    for reason in attending.left_out:
        yield f"attention kernel {reason}"
    if settings.cuda_graphs and settings.attention in ("auto", "paged") and not attending.can_capture:
        yield "CUDA graphs: they cannot capture this model's layers"
    if import_with_triton("model.gpu.fused_kernels") is None:
        yield "fused kernels: triton is not installed"
    if quantization is not None and quantization.kernels is None:
        yield f"{quantization.name} kernel for few rows: triton is not installed"
