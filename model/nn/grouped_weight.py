"""Weights in groups of inputs with codes of 4, 6 or 8 bits, a scale and an optional offset for each group.

Legend: F outputs, I inputs of a matrix, G groups of inputs, S inputs of a group, B blocks, C chunks of outputs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

GROUP_SIZE = 32
SMALL_GROUP_SIZE, BLOCK_SIZE = 16, 256  # with 6 bits: inputs with a scale, and inputs with factors
_CHUNK = 2**18  # weights that `quantize_weight` searches scales for at a time: they stay in the CPU's cache
# Scales that the search starts from, as shares of the min-max scale, and fits of each to its codes. Normal weights of
# deviation 1 get a root mean square error of 0.0716, by min-max 0.0782.
_SHARES, _NUM_FITS = (1.0, 0.9), 3
_TINY = 1e-30  # prevents a division by zero where all weights are zero
_LEAST_CODE, _MOST_CODE, _LARGEST_INT8, _LARGEST_INT16 = -8, 7, 127, 32767
_LARGEST_SUM = 0.97 * 2**31  # of products, without the rounding of multipliers and offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """Weight matrix w[f, i] = scale[f, i // 32] * code[f, i] + offset[f, i // 32].

    codes_FI: int8, -8 to 7 if `bits` is 4, -32 to 31 if 6, -127 to 127 if 8. scale_FG and offset_FG are float32;
    without offsets the weights are symmetric. A format with larger groups repeats its scales.
    factor_FB, offset_factor_FB: only with 6 bits, float16 factors of the scales and offsets of 256 inputs. Scales and
    offsets are then int8, a scale is of 16 inputs, and the number of inputs is a multiple of 256.
    """

    codes_FI: Tensor
    scale_FG: Tensor
    offset_FG: Tensor | None
    bits: int
    factor_FB: Tensor | None = None
    offset_factor_FB: Tensor | None = None

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale in the result of `multiplied`."""
        return GROUP_SIZE if self.factor_FB is None else SMALL_GROUP_SIZE

    def multiplied(self) -> tuple[Tensor, Tensor | None]:
        """Return the scale and the offset of each group, multiplied by its factors: float32."""
        if self.factor_FB is None:
            return self.scale_FG, self.offset_FG
        scale_FG = self.scale_FG * self.factor_FB.float().repeat_interleave(BLOCK_SIZE // SMALL_GROUP_SIZE, dim=1)
        if self.offset_FG is None or self.offset_factor_FB is None:
            return scale_FG, None
        offset_FG = self.offset_FG * self.offset_factor_FB.float().repeat_interleave(BLOCK_SIZE // GROUP_SIZE, dim=1)
        return scale_FG, offset_FG.repeat_interleave(GROUP_SIZE // SMALL_GROUP_SIZE, dim=1)

    def select(self, rows_F: Tensor) -> "GroupedWeight":
        """Return the weights of some outputs (rows) of the matrix."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {name: x[rows_F] for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    def dense(self) -> Tensor:
        """Return the dequantized weights, float32 (F, I)."""
        inputs, (scale_FG, offset_FG) = self.codes_FI.shape[1], self.multiplied()
        scaled_FI = self.codes_FI * _widen(scale_FG, inputs, self.group_size)
        return scaled_FI if offset_FG is None else scaled_FI + _widen(offset_FG, inputs, self.group_size)

    def to_int4(self) -> "Int4Weight":
        """Return these weights, which must have 4 bits, with an integer multiplier and offset for each group.

        An output's scale is the smallest with which no multiplier, no offset and no sum of products with int8 inputs
        overflows, whatever the codes and the inputs are.
        """
        codes_FI, scale_FG = self.codes_FI, self.scale_FG
        offset_FG = torch.zeros_like(scale_FG) if self.offset_FG is None else self.offset_FG
        largest_FG = scale_FG.abs().mul_(-_LEAST_CODE).add_(offset_FG.abs())
        sums_F = largest_FG.amax(dim=1).mul_(_LARGEST_INT8 * codes_FI.shape[1] / _LARGEST_SUM)
        scale_F = torch.maximum(
            scale_FG.abs().amax(dim=1) / _LARGEST_INT8, offset_FG.abs().amax(dim=1) / _LARGEST_INT16
        )
        scale_F = torch.maximum(scale_F, sums_F).clamp_(min=_TINY)
        return Int4Weight(
            codes_FI=codes_FI,
            multiplier_FG=(scale_FG / scale_F[:, None]).nan_to_num_().round_().to(torch.int8),
            offset_FG=None if self.offset_FG is None else (offset_FG / scale_F[:, None]).nan_to_num_().round_().short(),
            scale_F=scale_F,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """Weights in groups as they are stored in mapped files. The native kernels pack them without unpacking them first.

    address_F, type_F: address of each output's weights, and the number of their type, as in blocks.h.
    read: function that reads and unpacks the weights.
    files: mapped files behind the addresses.
    """

    address_F: Tensor
    type_F: Tensor
    inputs: int
    bits: int
    has_offsets: bool
    read: Callable[[], GroupedWeight]
    files: Sequence[object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredWeight:
    """Weights in groups that `read` decodes when they are packed, or at their first use. They take no memory before."""

    bits: int
    read: Callable[[], GroupedWeight]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """Weight matrix w[f, i] = scale[f] * (multiplier[f, i // 32] * code[f, i] + offset[f, i // 32]).

    codes_FI: -8 to 7. multiplier_FG: int8. offset_FG: int16, or None. A product with int8 inputs is one integer
    sum: two levels of scales, as in QServe (Lin et al. 2024, arXiv 2405.04532).
    """

    codes_FI: Tensor
    multiplier_FG: Tensor
    offset_FG: Tensor | None
    scale_F: Tensor

    def dense(self) -> Tensor:
        """Return the dequantized weights, float32 (F, I)."""
        inputs = self.codes_FI.shape[1]
        integers_FI = self.codes_FI * _widen(self.multiplier_FG.int(), inputs)
        if self.offset_FG is not None:
            integers_FI += _widen(self.offset_FG, inputs)
        return integers_FI * self.scale_F[:, None]


def _widen(numbers_FG: Tensor, inputs: int, size: int = GROUP_SIZE) -> Tensor:
    return numbers_FG.repeat_interleave(size, dim=1)[:, :inputs]


def quantize_weight(weight_FI: Tensor, *, searches: bool = True) -> GroupedWeight:
    """Quantize a matrix to 4 bits, with a scale and an offset for each group of 32 inputs of an output.

    By min-max, a group's smallest weight becomes the code -8 and its largest the code 7. With `searches`, scales and
    offsets are fitted to the codes by least squares from several starting points, and the best fit is kept. Until the
    call returns, PyTorch has one thread, with which a million weights take 15 ms of CPU time. Two threads would wait
    for each other after every small operation.
    """
    outputs, inputs = weight_FI.shape
    padding_FI = weight_FI[:, -1:].expand(-1, -inputs % GROUP_SIZE)
    padded_FI = torch.cat([weight_FI, padding_FI], dim=1).detach() if padding_FI.numel() else weight_FI.detach()
    codes_FI = torch.empty(outputs, inputs, dtype=torch.int8)
    scale_FG = torch.empty(outputs, padded_FI.shape[1] // GROUP_SIZE)
    offset_FG = torch.empty_like(scale_FG)
    size, num_threads = max(1, _CHUNK // padded_FI.shape[1]), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for at in range(0, outputs, size):
            groups_CGS = padded_FI[at : at + size].float().unflatten(1, (-1, GROUP_SIZE))
            scale_CG1, offset_CG1 = _choose_scales(groups_CGS, _SHARES if searches else ())
            scale_FG[at : at + size], offset_FG[at : at + size] = scale_CG1[..., 0], offset_CG1[..., 0]
            codes_FI[at : at + size] = _encode(groups_CGS, scale_CG1, offset_CG1).flatten(1)[:, :inputs]
    finally:
        torch.set_num_threads(num_threads)
    return GroupedWeight(codes_FI=codes_FI, scale_FG=scale_FG, offset_FG=offset_FG, bits=4)


def _choose_scales(groups_CGS: Tensor, shares: Iterable[float]) -> tuple[Tensor, Tensor]:
    """Return a scale and an offset for each group, rounded to bfloat16.

    shares: scales that the search starts from, as shares of the min-max scale; empty: return the min-max scale.
    """
    least_CG1, most_CG1 = torch.aminmax(groups_CGS, dim=-1, keepdim=True)
    first_CG1 = ((most_CG1 - least_CG1) / (_MOST_CODE - _LEAST_CODE)).clamp_(min=_TINY)
    middle_CG1, mean_CG1 = (least_CG1 + most_CG1) / 2, groups_CGS.mean(-1, keepdim=True)
    best_CG1, best_offset_CG1 = first_CG1, middle_CG1 + first_CG1 / 2  # the middle of the codes is -1/2
    largest_gain_CG1 = torch.full_like(first_CG1, -1.0)
    for share in shares:
        scale_CG1 = share * first_CG1
        offset_CG1 = middle_CG1 + scale_CG1 / 2
        for _ in range(_NUM_FITS):
            codes_CGS = _encode(groups_CGS, scale_CG1, offset_CG1)
            mean_code_CG1 = codes_CGS.mean(-1, keepdim=True)
            codes_CGS -= mean_code_CG1
            along_CG1 = (groups_CGS * codes_CGS).sum(-1, keepdim=True)
            scale_CG1 = (along_CG1 / codes_CGS.square().sum(-1, keepdim=True).clamp_(min=1.0)).clamp_(min=_TINY)
            offset_CG1 = mean_CG1 - scale_CG1 * mean_code_CG1
        gain_CG1 = along_CG1 * scale_CG1  # squared error of the mean minus that of the fitted scale and offset
        is_better_CG1 = gain_CG1 > largest_gain_CG1
        best_CG1 = torch.where(is_better_CG1, scale_CG1, best_CG1)
        best_offset_CG1 = torch.where(is_better_CG1, offset_CG1, best_offset_CG1)
        largest_gain_CG1 = torch.maximum(gain_CG1, largest_gain_CG1)
    return best_CG1.bfloat16().float(), best_offset_CG1.bfloat16().float()


def _encode(groups_CGS: Tensor, scale_CG1: Tensor, offset_CG1: Tensor) -> Tensor:
    return ((groups_CGS - offset_CG1) / scale_CG1).round_().clamp_(_LEAST_CODE, _MOST_CODE)
