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
from model.config_enums import MlpKind, NormKind, QkNormScope
from model.kernels.kernel_library import KernelLibrary, Shape
from model.nn.grouped_weight import DeferredWeight, GroupedWeight, StoredWeight
from model.nn.linear import GroupedLinear, Int8Linear, PackedLinear, StackedLinear
from model.system.memory_pages import HugePages

_POINTER, _INT, _BOOL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool
BLOCK = 16
_PANEL = 64  # outputs of one task; matrices are padded to whole panels
_STRIP = 32  # outputs that lie together in a matrix of groups
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # codes of dtypes in kernel.h
# Codes in kernel.h of grouped weights by bits and has_offset, and inputs and bytes of a step of a strip.
_GROUPED = {
    **{(4, False): (3, 64, 1088), (4, True): (4, 64, 1216)},
    **{(8, False): (5, 32, 1088), (8, True): (6, 32, 1152)},
    **{(6, False): (7, 256, 6720), (6, True): (8, 256, 7040)},
}
_CODES = 0  # `Blocks` of blocks.h: the weights are int8 codes
_ACTIVATIONS = {MlpKind.GELU: 0, MlpKind.GELU_EXACT: 1, MlpKind.RELU: 2, MlpKind.SWIGLU: 3, MlpKind.GEGLU: 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Weight matrix in the memory layout of the kernels, zero-padded to `outputs`, a multiple of 64.

    bias, scale, shift: a number for each padded output, or None. shift is for int8: 128 times the sum of the output's
    weights, which the kernels subtract because they add 128 to each quantized input.
    numbers: type of the stored weights, as `Numbers` in kernel.h.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    inputs: int
    outputs: int
    numbers: int


def padded(size: int) -> int:
    """Round a number of matrix rows or columns up to a multiple of 64."""
    return -(-size // _PANEL) * _PANEL


def shape_of(config: ModelConfig, dtype: torch.dtype, num_angles: int) -> Shape:
    """Return the sizes and settings that all layers share, as the C structure of the native kernels.

    num_angles: number of rotation angles of a position, of all rotary embeddings together.
    """
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        num_angles=num_angles,
        norm_scope=int(config.qk_norm_scope is QkNormScope.PROJECTION),
        norms_rotated=config.qk_norm_after_rotation,
        numbers=NUMBERS[dtype],
        norm=int(config.norm is NormKind.LAYER_NORM),
        activation=_ACTIVATIONS[config.mlp],
        gated=config.mlp.gated,
        is_parallel=config.parallel_residual,
        num_experts=0 if config.experts is None else config.experts.num,
        experts_per_row=0 if config.experts is None else config.experts.num_per_token,
        normalizes_experts=config.experts is not None and config.experts.normalizes,
        eps=config.norm_eps,
        logit_soft_cap=config.logit_soft_cap or 0,
    )


def pack(module: nn.Module, kernels: KernelLibrary, pages: HugePages, *, gated: bool = False) -> Packed:
    """Pack the matrix of a linear layer of any kind, or of an embedding, for the native kernels.

    pages: memory of the packed matrix.
    gated: the first half of the outputs is a gate for the second half, as in a gated MLP; see `interleaved`.
    """
    if isinstance(module, GroupedLinear):
        stored = module.stored.read() if isinstance(module.stored, DeferredWeight) else module.stored
        return _pack_groups(stored, module.bias_F, kernels, pages, gated=gated)
    scale_F: Tensor | None = None
    if isinstance(module, Int8Linear):
        parts, scale_F, bias_F = [module.weight_FE], module.scale_F, module.bias_F
    elif isinstance(module, PackedLinear):
        parts, bias_F = [module.packed.to_dense()], module.bias_F
    elif isinstance(module, StackedLinear):
        parts, bias_F = [*module.parts], module.bias
    else:
        named: dict[str, Any] = dict(module.named_parameters())
        parts, bias_F = [named["weight"].detach()], named.get("bias")
    order = interleaved if gated else pad_outputs
    shift_F = None if scale_F is None else 128 * parts[0].sum(dim=1, dtype=torch.int32)
    return Packed(
        weight=_pack_panels(parts, kernels, pages, gated=gated),
        bias=None if bias_F is None else order(bias_F.float()),
        scale=None if scale_F is None else order(scale_F),
        shift=None if shift_F is None else order(shift_F),
        inputs=parts[0].shape[1],
        outputs=padded(sum(map(len, parts))),
        numbers=NUMBERS[parts[0].dtype],
    )


def _pack_groups(
    weight: GroupedWeight | StoredWeight,
    bias_F: Tensor | None,
    kernels: KernelLibrary,
    pages: HugePages,
    *,
    gated: bool,
) -> Packed:
    """Pack weights that are quantized in groups, in the kernel layout of their bits: int4.h, int6.h or grouped.h."""
    order = interleaved if gated else pad_outputs
    if isinstance(weight, StoredWeight):
        inputs, has_offsets = weight.inputs, weight.has_offsets
        fields = [weight.address_F, weight.type_F, *[torch.zeros_like(weight.address_F)] * 4]
    else:
        inputs, has_offsets = weight.codes_FI.shape[1], weight.offset_FG is not None
        arrays = weight.codes_FI, weight.scale_FG, weight.offset_FG, weight.factor_FB, weight.offset_factor_FB
        held = [None if x is None else x.contiguous() for x in arrays]
        none_F = torch.zeros(len(weight.codes_FI), dtype=torch.int64)
        fields = [none_F if x is None else _row_addresses(x) for x in held]
        fields.insert(1, torch.full_like(none_F, _CODES))
    rows_FA = order(torch.stack(fields, dim=1)).contiguous()  # `StoredRow` of blocks.h
    number, step_inputs, step_bytes = _GROUPED[weight.bits, has_offsets]
    num_strips = len(rows_FA) // _STRIP
    packed = pages.empty((num_strips, -(-inputs // step_inputs), step_bytes), torch.uint8)
    scale_F = torch.empty(len(rows_FA))
    copy = kernels.function(
        "kvasir_pack_groups", *(_POINTER, _INT, _INT, _INT, _BOOL, _POINTER, _POINTER, _INT), result=_BOOL
    )
    pointers, threads = (packed.data_ptr(), scale_F.data_ptr()), torch.get_num_threads()
    is_finite = copy(rows_FA.data_ptr(), num_strips, inputs, weight.bits, has_offsets, *pointers, threads)
    if not is_finite and isinstance(weight, StoredWeight):
        weight.read()  # raises the error with the tensor's name
    return Packed(
        weight=packed,
        bias=None if bias_F is None else order(bias_F),
        scale=scale_F,
        shift=None,
        inputs=inputs,
        outputs=num_strips * _STRIP,
        numbers=number,
    )


def interleaved(rows: Tensor) -> Tensor:
    """Alternate blocks of 16 gate rows (first half) with 16 up rows (second half), so that one task computes both.

    Both halves get equally many rows of zeros, so that the result has a multiple of 64 rows.
    """
    half = len(rows) // 2
    room = padded(2 * half) // 2  # zeros fill the panels
    halves = rows.new_zeros(2, room, *rows.shape[1:])
    halves[:, :half] = torch.unflatten(rows, 0, (2, half))
    return torch.unflatten(halves, 1, (-1, BLOCK)).transpose(0, 1).flatten(0, 2)


def _pack_panels(parts: list[Tensor], kernels: KernelLibrary, pages: HugePages, *, gated: bool) -> Tensor:
    """Copy a matrix (F, I) to the kernels' layout (N, G, 64, S), padded with zero inputs and outputs.

    parts: matrices that are one below the other in the packed matrix.
    """
    dtype, inputs = parts[0].dtype, parts[0].shape[1]
    side_by_side = kernels.function("kvasir_inputs_side_by_side", _INT, result=_INT)(NUMBERS[dtype])
    if missing := -inputs % side_by_side:
        parts = [functional.pad(part, (0, missing)) for part in parts]
    parts = [part.contiguous() for part in parts]
    rows_F = torch.cat([_row_addresses(part) for part in parts])
    rows_F = interleaved(rows_F) if gated else pad_outputs(rows_F)
    panels = pages.empty((len(rows_F) // _PANEL, (inputs + missing) // side_by_side, _PANEL, side_by_side), dtype)
    copy = kernels.function("kvasir_pack", _POINTER, _INT, _INT, _POINTER, _INT)
    copy(rows_F.data_ptr(), *panels.shape[:2], panels.data_ptr(), torch.get_num_threads())
    return panels


def _row_addresses(matrix: Tensor) -> Tensor:
    return matrix.data_ptr() + torch.arange(len(matrix)) * matrix.stride(0) * matrix.itemsize


def pad_outputs(rows: Tensor) -> Tensor:
    """Add rows of zeros up to a multiple of 64 rows."""
    return functional.pad(rows, (*[0] * (2 * rows.ndim - 1), padded(len(rows)) - len(rows)))
