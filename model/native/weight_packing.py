"""Shape and packed matrices of a model, in the format of the native kernels: `Shape` and `Matrix` of kernel.h.

Legend: F outputs, I inputs of a matrix, N panels of 64 outputs, G groups of inputs, S inputs of a group, side by side.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, QkNormScope
from model.kernels.kernel_library import KernelLibrary, Shape
from model.nn.grouped_weight import BLOCK_SIZE, GROUP_SIZE, GroupedWeight
from model.nn.linear import GroupedLinear, Int8Linear, PackedLinear, StackedLinear
from model.system.memory_pages import HugePages

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
BLOCK = 16
_PANEL = 64  # outputs of one task; matrices are padded to whole panels
_STRIP = 32  # outputs that lie together in a matrix of groups
_CODE_BYTES = 1024  # of a step of a strip: 32 outputs with a group of 8 bits, or with two groups of 4 bits
# Codes of dtypes in kernel.h, and of grouped weights by bits and has_offset.
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_GROUPED_NUMBERS = {(4, False): 3, (4, True): 4, (8, False): 5, (8, True): 6, (6, False): 7, (6, True): 8}
_SCALE_EXPONENT = 12  # float16 scales and offsets of an output are below 2^12, and the largest is 2^11 or more
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
        return _pack_groups(module.weight, module.bias_F, kernels, pages, gated=gated)
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
    weight: GroupedWeight, bias_F: Tensor | None, kernels: KernelLibrary, pages: HugePages, *, gated: bool
) -> Packed:
    """Pack grouped weights for the kernels, in the layout of int4.h, int6.h or grouped.h."""
    order = interleaved if gated else pad_outputs
    if weight.bits == 6:
        scale_F, packed = torch.ones(len(weight.codes_FI)), _int6_strips(weight, order, pages)
    else:
        scale_F, packed = _strips_of_groups(weight, order, pages)
    if weight.bits < 8:
        rows_F, inputs = order(_row_addresses(weight.codes_FI)), weight.codes_FI.shape[1]
        copy = kernels.function(f"kvasir_pack_int{weight.bits}", _POINTER, _INT, _INT, _POINTER, _INT, _INT)
        copy(rows_F.data_ptr(), len(packed), inputs, packed.data_ptr(), packed.shape[2], torch.get_num_threads())
    return Packed(
        weight=packed,
        bias=None if bias_F is None else order(bias_F),
        scale=order(scale_F),
        shift=None,
        inputs=weight.codes_FI.shape[1],
        outputs=len(packed) * _STRIP,
        numbers=_GROUPED_NUMBERS[weight.bits, weight.offset_FG is not None],
    )


def _int6_strips(weight: GroupedWeight, order: Callable[[Tensor], Tensor], pages: HugePages) -> Tensor:
    """Return the strips of int6.h without codes."""
    columns = weight.factor_FB, weight.scale_FG, weight.offset_FG, weight.offset_factor_FB
    steps = weight.codes_FI.shape[1] // BLOCK_SIZE
    parts = [_strips(order(x), x.shape[1] // steps).transpose(2, 3) for x in columns if x is not None]
    factors, multipliers, *offsets = (_bytes_of(part) for part in parts)
    start, end = factors.shape[2], factors.shape[2] + multipliers.shape[2] + 6 * _CODE_BYTES
    packed = pages.empty((*factors.shape[:2], end + sum(part.shape[2] for part in offsets)), torch.uint8)
    packed[:, :, :start] = factors
    multipliers = multipliers.unflatten(2, (-1, 2 * _STRIP))  # of a pair of groups: before the pair's codes
    packed[:, :, start:end].unflatten(2, (multipliers.shape[2], -1))[..., : 2 * _STRIP] = multipliers
    if offsets:
        torch.cat(offsets, dim=2, out=packed[:, :, end:])
    return packed


def _strips_of_groups(
    weight: GroupedWeight, order: Callable[[Tensor], Tensor], pages: HugePages
) -> tuple[Tensor, Tensor]:
    """Return the scale of each output, and the strips of grouped.h, or those of int4.h without codes."""
    if weight.bits == 4:
        int4 = weight.to_int4()
        scale_F, step = int4.scale_F, 2
        spreads = [x for x in (int4.multiplier_FG, int4.offset_FG) if x is not None]
    else:
        spreads = [x for x in (weight.scale_FG, weight.offset_FG) if x is not None]
        largest_F = torch.stack([x.abs().amax(dim=1) for x in spreads]).amax(dim=0)
        exponent_F = (torch.frexp(largest_F).exponent - _SCALE_EXPONENT).clamp_(min=-120)  # 2^120 and 2^-120 are normal
        scale_F = torch.ldexp(torch.ones_like(largest_F), exponent_F)
        spreads, step = [torch.ldexp(x, -exponent_F[:, None]).half() for x in spreads], 1
    # Of a pair of groups, the second group's multiplier and offset come first.
    parts = [_bytes_of(_strips(order(x), step).flip(3)) for x in spreads]
    packed = pages.empty((*parts[0].shape[:2], _CODE_BYTES + sum(part.shape[2] for part in parts)), torch.uint8)
    torch.cat(parts, dim=2, out=packed[:, :, _CODE_BYTES:])
    if weight.bits == 8:
        codes = _strips(order(weight.codes_FI), GROUP_SIZE).contiguous().view(torch.uint8)
        codes += 128  # wraps around
        packed[:, :, :_CODE_BYTES] = codes.unflatten(3, (-1, 4)).transpose(2, 3).flatten(2)
    return scale_F, packed


def _strips(rows: Tensor, step: int) -> Tensor:
    """Return a matrix of padded outputs in strips, padded with zeros: (strips, steps, outputs, columns of a step)."""
    rows = functional.pad(rows, (0, -rows.shape[1] % step))
    return rows.view(len(rows) // _STRIP, _STRIP, -1, step).transpose(1, 2)


def _bytes_of(strips: Tensor) -> Tensor:
    """Return the bytes of each step of each strip: (strips, steps, bytes)."""
    return strips.contiguous().view(torch.uint8).flatten(2)


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
