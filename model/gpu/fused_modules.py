"""Replacement of norms, rotary rotation and gated activations by fused GPU kernels."""

from model.config_enums import MlpKind
from model.nn.layers import GatedMlp, RMSNorm
from model.nn.transformer import Attention, Transformer
from model.system.triton_modules import import_with_triton


def fuse(model: Transformer) -> None:
    """Make a GPU model use fused kernels for RMS norm, rotation and SwiGLU; do nothing without triton or in float64."""
    if model.token_embedding.weight.dtype.itemsize > 4:
        return
    if (fused_kernels := import_with_triton("model.gpu.fused_kernels")) is None:
        return
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.normalize = fused_kernels.rms_norm
        elif isinstance(module, GatedMlp) and model.config.mlp is MlpKind.SWIGLU:
            module.activate = fused_kernels.silu_product
        elif isinstance(module, Attention):
            module.rotate_pair = fused_kernels.rotate_pair
