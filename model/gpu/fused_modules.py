"""Replacement of norms, rotation with writes to the KV-cache, and gated activations by fused GPU kernels.

In a model with int8 or fp8 matrices, norms and activations before a matrix product quantize its inputs as well.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import cast

from torch import nn

from model.config_enums import MlpKind
from model.gpu.quantization import QuantizedLinear
from model.nn.layers import GatedMlp, Norm
from model.nn.transformer import Attention, Block, Transformer
from model.system.triton_modules import import_with_triton


def fuse(model: Transformer) -> None:
    """Make a GPU model use fused kernels between its matrix products; do nothing without triton or in float64."""
    if model.token_embedding.weight.dtype.itemsize > 4:
        return
    if (fused_kernels := import_with_triton("model.gpu.fused_kernels")) is None:
        return
    dtype = next((each.weight_FE.dtype for each in model.modules() if isinstance(each, QuantizedLinear)), None)
    before: set[nn.Module | None] = {model.final_norm}  # norms whose results are inputs of matrix products
    for block in cast(Iterable[Block], model.layers):
        if not block.norms_outputs:
            before |= {block.attention_norm, block.mlp_norm}
    for module in model.modules():
        if isinstance(module, Norm):
            module.fused = partial(fused_kernels.add_norm, dtype=dtype if module in before else None)
        elif isinstance(module, GatedMlp) and model.config.mlp is MlpKind.SWIGLU:
            module.activate = partial(fused_kernels.silu_product, dtype=dtype)
        elif isinstance(module, Attention) and not module.averages and (module.norms_heads or not module.norms_rotated):
            module.fused = fused_kernels.rotate_and_write
            module.form = dataclasses.replace(module.form, is_written=True)
