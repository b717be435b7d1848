"""Triton kernels for int8 and fp8 matrices times few rows, and for quantizing and scaling. Needs triton and a GPU.

Each weight is read once, in long contiguous runs, by about `_PROGRAMS` Triton programs. A matrix of few outputs is
split along its inputs too, and a second kernel adds the partial sums. The split depends on the matrix's shape alone.

Legend: T packed tokens, E inputs, F outputs, X parts along the inputs.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.system.dependent_launch import begin, launch_options

# Maximum rows of `multiply_few`. With more rows PyTorch's kernels have enough tiles to fill the GPU.
MAX_ROWS = 64
_PROGRAMS = 256
_OUTPUTS, _INPUTS = 32, 256  # size of a tile of weights
_MIN_ROWS = 16  # minimum rows of a tensor core's tile
_TILE = 1024
_TINY = tl.constexpr(1e-30)  # keeps the scale of a row of zeros from being zero


def quantize_rows(x_TE: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """Quantize rows as `model.nn.linear.quantize_rows` does, but round int8 halves up, and zero-pad rows to `size`."""
    if x_TE.stride(1) != 1:
        x_TE = x_TE.contiguous()
    numbers_TE = torch.empty((len(x_TE), size), dtype=dtype, device=x_TE.device)
    scale_T = torch.empty(len(x_TE), dtype=torch.float32, device=x_TE.device)
    padded = triton.next_power_of_2(size)
    _quantize_rows[(len(x_TE),)](
        x_TE, numbers_TE, scale_T, x_TE.shape[1], size, x_TE.stride(0), PADDED=padded,
        num_warps=min(16, max(1, padded // 256)), **launch_options(x_TE.device),
    )  # fmt: skip
    return numbers_TE, scale_T


def multiply_few(
    numbers_TE: Tensor, scale_T: Tensor, weight_FE: Tensor, scale_F: Tensor, bias_F: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply up to `MAX_ROWS` quantized rows by a quantized matrix, scale, and add the bias; the result has `dtype`.

    All tensors must be contiguous.
    """
    rows, inputs = numbers_TE.shape
    outputs = len(weight_FE)
    parts, each = cut(outputs, inputs)
    out_TF = torch.empty((rows, outputs), dtype=dtype, device=numbers_TE.device)
    is_whole = weight_FE.dtype == torch.int8
    sums_XTF = out_TF
    if parts > 1:
        sum_type = torch.int32 if is_whole else torch.float32
        sums_XTF = torch.empty((parts, rows, outputs), dtype=sum_type, device=numbers_TE.device)
    _multiply_few[(triton.cdiv(outputs, _OUTPUTS), parts)](
        numbers_TE, weight_FE, scale_T, scale_F, scale_F if bias_F is None else bias_F, sums_XTF,
        rows, outputs, inputs, each,
        SUM=tl.int32 if is_whole else tl.float32, IS_PART=parts > 1, HAS_BIAS=bias_F is not None,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(rows)), OUTPUTS=_OUTPUTS, INPUTS=_INPUTS, num_warps=4, num_stages=3,
        **launch_options(out_TF.device),
    )  # fmt: skip
    if parts > 1:
        _scale(sums_XTF, scale_T, scale_F, bias_F, out_TF)
    return out_TF


def scale_sums(sums_TF: Tensor, scale_T: Tensor, scale_F: Tensor, bias_F: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantize sums, a contiguous tensor, as `model.nn.linear.scale_sums` does."""
    out_TF = torch.empty(sums_TF.shape, dtype=dtype, device=sums_TF.device)
    _scale(sums_TF[None], scale_T, scale_F, bias_F, out_TF)
    return out_TF


def cut(outputs: int, inputs: int) -> tuple[int, int]:
    """Return the number of parts into which a matrix is split along its inputs, and the number of inputs per part.

    There are enough parts for about `_PROGRAMS` programs. A part has at least two tiles, except possibly the last part.
    """
    blocks = triton.cdiv(outputs, _OUTPUTS)
    most = max(1, inputs // (2 * _INPUTS))
    tiles = triton.cdiv(inputs, _INPUTS)
    each = triton.cdiv(tiles, min(most, triton.cdiv(_PROGRAMS, blocks)))
    return triton.cdiv(tiles, each), each * _INPUTS


def _scale(sums_XTF: Tensor, scale_T: Tensor, scale_F: Tensor, bias_F: Tensor | None, out_TF: Tensor) -> None:
    parts, rows, outputs = sums_XTF.shape
    _scale_sums[(rows, triton.cdiv(outputs, _TILE))](
        sums_XTF, scale_T, scale_F, scale_F if bias_F is None else bias_F, out_TF, rows, outputs,
        PARTS=parts, HAS_BIAS=bias_F is not None, TILE=_TILE, num_warps=4, **launch_options(out_TF.device),
    )  # fmt: skip


@triton.jit
def _quantize_rows(x, numbers, scales, x_size, size, stride, PADDED: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    given = tl.load(x + row * stride + columns, mask=columns < x_size, other=0.0).to(tl.float32)
    store_quantized(given, numbers, scales, row, columns, size)


@triton.jit
def store_quantized(given, numbers, scales, row, columns, size):
    """Quantize a row of float32 numbers, and store it and its scale. `given` is 0 in columns of padding."""
    dtype: tl.constexpr = numbers.dtype.element_ty
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(given), 0), _TINY), 127.0 if dtype == tl.int8 else 448.0)
    scaled = tl.div_rn(given, tl.zeros_like(given) + scale)
    if dtype == tl.int8:
        scaled = tl.floor(scaled + 0.5)
    tl.store(numbers + row * size + columns, scaled.to(dtype), mask=columns < size)
    tl.store(scales + row, scale)


@triton.jit
def _scaled(sums, row_scale, scale, bias, HAS_BIAS: tl.constexpr):
    out = sums.to(tl.float32) * row_scale * scale
    if HAS_BIAS:
        out = out + bias.to(tl.float32)
    return out


@triton.jit(do_not_specialize=["rows"])
def _multiply_few(
    x, weight, x_scale, scale, bias, out, rows, outputs, inputs, each,
    SUM: tl.constexpr, IS_PART: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiply all rows by a tile of a matrix's outputs, over a part of its inputs. IS_PART: store unscaled sums."""
    begin(IS_DEPENDENT)
    part = tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real_rows, real_columns = row < rows, column < outputs
    start = part * each
    stop = tl.minimum(start + each, inputs)
    sums = tl.zeros([ROWS, OUTPUTS], SUM)
    for tile in range(start, stop, INPUTS):
        places = tile + tl.arange(0, INPUTS)
        real = places < stop
        numbers = tl.load(
            x + row[:, None] * inputs + places[None, :], mask=real_rows[:, None] & real[None, :], other=0.0
        )
        weights = tl.load(
            weight + column[None, :].to(tl.int64) * inputs + places[:, None],
            mask=real_columns[None, :] & real[:, None],
            other=0.0,
        )
        sums = tl.dot(numbers, weights, sums, out_dtype=SUM)
    target = out + (part * rows + row[:, None]).to(tl.int64) * outputs + column[None, :]
    inside = real_rows[:, None] & real_columns[None, :]
    if IS_PART:
        tl.store(target, sums, mask=inside)
    else:
        row_scales = tl.load(x_scale + row, mask=real_rows, other=0.0)[:, None]
        scales = tl.load(scale + column, mask=real_columns, other=0.0)[None, :]
        biases = tl.load(bias + column, mask=real_columns, other=0.0)[None, :]
        tl.store(target, _scaled(sums, row_scales, scales, biases, HAS_BIAS).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _scale_sums(
    sums, x_scale, scale, bias, out, rows, outputs,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = columns < outputs
    total = tl.load(sums + row * outputs + columns, mask=real, other=0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + (part * rows + row) * outputs + columns, mask=real, other=0)
    row_scale = tl.load(x_scale + row)
    scales = tl.load(scale + columns, mask=real, other=0.0)
    biases = tl.load(bias + columns, mask=real, other=0.0)
    out_numbers = _scaled(total, row_scale, scales, biases, HAS_BIAS)
    tl.store(out + row * outputs + columns, out_numbers.to(out.dtype.element_ty), mask=real)
