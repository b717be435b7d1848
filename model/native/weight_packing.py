"""Shape and packed matrices of a model, in the format of the native kernels: `Shape` and `Matrix` of kernel.h.

Legend: F outputs, I inputs of a matrix, N panels of 64 outputs, G groups of inputs, S inputs of a group, side by side.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, NormPlacement, PositionKind, QkNormScope
from model.kernels.kernel_library import KernelLibrary, Shape
from model.nn.linear import Int8Linear, PackedLinear
from model.system.memory_pages import HugePages

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
BLOCK = 16
_PANEL = 64  # outputs of one task; matrices are padded to whole panels
# Codes of dtypes in kernel.h.
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_ACTIVATIONS = {MlpKind.GELU: 0, MlpKind.GELU_EXACT: 1, MlpKind.RELU: 2, MlpKind.SWIGLU: 3, MlpKind.GEGLU: 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Weight matrix in the order in which the kernels read it, zero-padded to `outputs`, a multiple of 64.

    bias, scale, shift: a number for each padded output, or None. shift is for int8: 128 times the sum of the output's
    weights, which the kernels subtract because they add 128 to each quantized input.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    inputs: int
    outputs: int


def padded(size: int) -> int:
    """Round a number of matrix rows or columns up to a multiple of 64."""
    return -(-size // _PANEL) * _PANEL


def shape_of(config: ModelConfig, dtype: torch.dtype) -> Shape:
    """Return a model's layer sizes and kinds of layers, as the structure that the native kernels read."""
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


def pack(module: nn.Module, kernels: KernelLibrary, pages: HugePages, *, gated: bool = False) -> Packed:
    """Pack the matrix of a linear layer of any kind, or of an embedding, for the native kernels.

    pages: memory of the packed matrix.
    gated: the first half of the outputs is a gate for the second half, as in a gated MLP.
    """
    scale_F: Tensor | None = None
    if isinstance(module, Int8Linear):
        weight_FI, scale_F, bias_F = module.weight_FE, module.scale_F, module.bias_F
    elif isinstance(module, PackedLinear):
        weight_FI, bias_F = module.packed.to_dense(), module.bias_F
    else:
        named: dict[str, Any] = dict(module.named_parameters())
        weight_FI, bias_F = named["weight"].detach(), named.get("bias")
    order = interleaved if gated else _pad_outputs
    shift_F = None if scale_F is None else 128 * weight_FI.sum(dim=1, dtype=torch.int32)
    return Packed(
        weight=_pack_panels(weight_FI, kernels, pages, gated=gated),
        bias=None if bias_F is None else order(bias_F.float()),
        scale=None if scale_F is None else order(scale_F),
        shift=None if shift_F is None else order(shift_F),
        inputs=weight_FI.shape[1],
        outputs=padded(len(weight_FI)),
    )


def interleaved(rows: Tensor) -> Tensor:
    """Alternate blocks of 16 gate rows (first half) with 16 up rows (second half), so that one task computes both."""
    half = len(rows) // 2
    room = padded(2 * half) // 2  # zeros fill the panels
    halves = rows.new_zeros(2, room, *rows.shape[1:])
    halves[:, :half] = torch.unflatten(rows, 0, (2, half))
    return torch.unflatten(halves, 1, (-1, BLOCK)).transpose(0, 1).flatten(0, 2)


def _pack_panels(weight_FI: Tensor, kernels: KernelLibrary, pages: HugePages, *, gated: bool) -> Tensor:
    """Copy a matrix (F, I) to the kernels' order (N, G, 64, S), with zeros for missing inputs and outputs."""
    side_by_side = kernels.function("kvasir_inputs_side_by_side", _INT, result=_INT)(NUMBERS[weight_FI.dtype])
    if missing := -weight_FI.shape[1] % side_by_side:
        weight_FI = functional.pad(weight_FI, (0, missing))
    weight_FI = weight_FI.contiguous()
    outputs, inputs = weight_FI.shape
    rows_F = weight_FI.data_ptr() + weight_FI.stride(0) * weight_FI.itemsize * torch.arange(outputs)
    rows_F = interleaved(rows_F) if gated else _pad_outputs(rows_F)
    panels = pages.empty((len(rows_F) // _PANEL, inputs // side_by_side, _PANEL, side_by_side), weight_FI.dtype)
    copy = kernels.function("kvasir_pack", _POINTER, _INT, _INT, _POINTER, _INT)
    copy(rows_F.data_ptr(), *panels.shape[:2], panels.data_ptr(), torch.get_num_threads())
    return panels


class PackedEmbedding(nn.Embedding):
    """Embedding whose rows are those of a packed matrix, the tied LM head. Its `weight` is empty."""

    def __init__(self, panels_NG64S: Tensor, hidden_size: int) -> None:
        super().__init__(0, 1, dtype=panels_NG64S.dtype)
        self.panels_NG64S, self.hidden_size = panels_NG64S, hidden_size

    def forward(self, input: Tensor) -> Tensor:
        """Return each token's embedding: (tokens, hidden size)."""
        return self.panels_NG64S[input // _PANEL, :, input % _PANEL].flatten(1)[:, : self.hidden_size]


def _pad_outputs(vector_F: Tensor) -> Tensor:
    return functional.pad(vector_F, (0, padded(len(vector_F)) - len(vector_F)))
