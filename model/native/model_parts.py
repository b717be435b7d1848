"""A model's shape and packed matrices, in the format of the native kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, NormPlacement, PositionKind, QkNormScope
from model.kernels.ctypes_structs import Shape
from model.native.weight_packing import Packed, interleaved, pack_floats, pack_int8
from model.nn.linear import Int8Linear, PackedLinear

NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_ACTIVATIONS = {MlpKind.GELU: 0, MlpKind.GELU_EXACT: 1, MlpKind.RELU: 2, MlpKind.SWIGLU: 3, MlpKind.GEGLU: 0}


def shape_of(config: ModelConfig, dtype: torch.dtype) -> Shape:
    """Return a model's shape for the kernels, with the model's dtype."""
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.mlp_size,
        rotated=config.rotary_size if config.position is PositionKind.ROTARY else 0,
        norm_scope=int(config.qk_norm_scope is QkNormScope.PROJECTION),
        numbers=NUMBERS[dtype],
        norm=int(config.norm is NormKind.LAYER_NORM),
        activation=_ACTIVATIONS[config.mlp],
        gated=config.mlp.gated,
        norms_outputs=config.norm_placement is NormPlacement.POST,
        is_parallel=config.parallel_residual,
        eps=config.norm_eps,
    )


def pack(module: nn.Module, side_by_side: Callable[[int], int], *, gated: bool = False) -> Packed:
    """Pack the matrix of a linear layer of any kind, or of an embedding.

    Args:
        side_by_side: returns how many inputs the kernels expect side by side, for a dtype's number in `NUMBERS`.
        gated: the outputs are those of a gate, followed by those that it gates.
    """
    scale_F: Tensor | None = None
    if isinstance(module, Int8Linear):
        weight_FI, scale_F, bias_F = module.weight_FE, module.scale_F, module.bias_F
    elif isinstance(module, PackedLinear):
        weight_FI, bias_F = module.packed.to_dense(), module.bias_F
    else:
        named: dict[str, Any] = dict(module.named_parameters())
        weight_FI, bias_F = named["weight"].detach(), named.get("bias")
    if gated:
        weight_FI = interleaved(weight_FI)
        bias_F = None if bias_F is None else interleaved(bias_F)
        scale_F = None if scale_F is None else interleaved(scale_F)
    if scale_F is not None:
        return pack_int8(weight_FI, scale_F, bias_F, side_by_side(NUMBERS[torch.int8]))
    return pack_floats(weight_FI, bias_F, side_by_side(NUMBERS[weight_FI.dtype]))
