"""Replacement of norms, rotation with writes to the KV-cache, and gated activations by fused GPU kernels."""

import dataclasses

from model.config_enums import MlpKind
from model.nn.layers import GatedMlp, Norm
from model.nn.transformer import Attention, Transformer
from model.system.triton_modules import import_with_triton


def fuse(model: Transformer) -> None:
    """Make a GPU model use fused kernels between its matrix products; do nothing without triton or in float64."""
    if model.token_embedding.weight.dtype.itemsize > 4:
        return
    if (fused_kernels := import_with_triton("model.gpu.fused_kernels")) is None:
        return
    for module in model.modules():
        if isinstance(module, Norm):
            module.fused = fused_kernels.add_norm
        elif isinstance(module, GatedMlp) and model.config.mlp is MlpKind.SWIGLU:
            module.activate = fused_kernels.silu_product
        elif isinstance(module, Attention) and not module.averages and (module.norms_heads or not module.norms_rotated):
            module.fused = fused_kernels.rotate_and_write
            module.form = dataclasses.replace(module.form, is_written=True)
