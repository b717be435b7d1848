"""Matrices in eight bits on a GPU: int8 or fp8 (e4m3), a scale for each output, and one for each token's inputs.

A product goes one of two ways, by its rows. Few cost what reading the weights costs, and take kernels of our own
(`model.eight_bit_kernels`); many take PyTorch's, `torch._int_mm` and `torch._scaled_mm`. Where ours do not hold,
PyTorch's take few rows too. `choose` finds out on the device, before a model is made of them.

Sums of int8 products are exact and each row is rounded by itself: a row's bits are the same by either way, in any
company. fp8's sums are rounded, and the two ways round in another order.

On a CPU `model.linear.Int8Linear` is another order of the same arithmetic.

Legend: T packed tokens, E inputs, F outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

try:
    from model import eight_bit_kernels
except ImportError:  # no triton: it comes with PyTorch for CUDA
    eight_bit_kernels = None  # type: ignore[assignment]

# PyTorch's products want sizes that are multiples of it, and more than 16 rows.
_MULTIPLE, _MIN_ROWS = 16, 32
_SLICE = 4096  # rows of a weight that are float32 at a time
_TINY = 1e-30  # a row of zeros has to be divided by something
_FP8_CAPABILITY = (8, 9)
# Matrices (F, E) that are tried, and rows. Of the largest number: inputs may round to the neighbour, outputs are
# rounded to bfloat16.
_TRIED, _TRIED_ROWS, _TOLERANCE = ((48, 64), (40, 2090)), (1, 5, 20, 64, 100), 2e-2


class EightBitsError(ValueError):
    """Eight bits cannot be had here; says why, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A kind of eight-bit numbers, the largest of them, and PyTorch's product of many rows of such."""

    name: str
    dtype: torch.dtype
    largest: float
    product: str


FORMATS = {
    "int8": Format(name="int8", dtype=torch.int8, largest=127.0, product="torch._int_mm"),
    "fp8": Format(name="fp8", dtype=torch.float8_e4m3fn, largest=448.0, product="torch._scaled_mm"),
}


def to_eight_bits(x_TE: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """Each row as `size` numbers, zeros behind its own, times a scale T, float32: its largest becomes the format's."""
    largest = next(form.largest for form in FORMATS.values() if form.dtype == dtype)
    x_TE = pad(x_TE, (0, size - x_TE.shape[1])).float()
    scale_T = x_TE.abs().amax(dim=1).clamp(min=_TINY) / largest
    scaled_TE = x_TE / scale_T[:, None]
    return (scaled_TE.round() if dtype == torch.int8 else scaled_TE).to(dtype), scale_T


def scale_sums(sums_TF: Tensor, scale_T: Tensor, scale_F: Tensor, bias_F: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What sums of products mean, with the bias, TF in `dtype`."""
    out_TF = sums_TF.float() * scale_T[:, None] * scale_F
    return (out_TF if bias_F is None else out_TF + bias_F.float()).to(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What is computed around PyTorch's products, and in place of them for up to `max_rows` rows."""

    to_eight_bits: Callable[[Tensor, torch.dtype, int], tuple[Tensor, Tensor]]
    scale_sums: Callable[[Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
    multiply_few: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor] | None = None
    max_rows: int = 0


PLAIN = Kernels(to_eight_bits=to_eight_bits, scale_sums=scale_sums)


class EightBitLinear(nn.Module):
    """x W^T + b, in the dtype of x. Dettmers et al. 2022 (arXiv 2208.07339), section 2.1; Micikevicius et al. 2022
    (arXiv 2209.05433) for e4m3.
    """

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None, form: Format, kernels: Kernels) -> None:
        super().__init__()
        self.num_outputs, inputs = weight_FE.shape
        self.num_inputs = _padded(inputs)
        missing = _padded(self.num_outputs) - self.num_outputs
        slices = pad(weight_FE.detach(), (0, 0, 0, missing)).split(_SLICE)
        numbers, scales = zip(*(to_eight_bits(part, form.dtype, self.num_inputs) for part in slices), strict=True)
        self.weight_FE, self.scale_F = torch.cat(numbers), torch.cat(scales)
        self.bias_F = None if bias_F is None else pad(bias_F.detach(), (0, missing))
        self.kernels = kernels

    def forward(self, x_TE: Tensor) -> Tensor:
        """TE -> TF."""
        kernels = self.kernels
        numbers_TE, scale_T = kernels.to_eight_bits(x_TE, self.weight_FE.dtype, self.num_inputs)
        if kernels.multiply_few is not None and len(x_TE) <= kernels.max_rows:
            given = self.weight_FE, self.scale_F, self.bias_F, x_TE.dtype
            out_TF = kernels.multiply_few(numbers_TE, scale_T, *given)
        else:
            out_TF = self._multiply_many(numbers_TE, scale_T, x_TE.dtype)
        return out_TF if out_TF.shape[1] == self.num_outputs else out_TF[:, : self.num_outputs]

    def _multiply_many(self, numbers_TE: Tensor, scale_T: Tensor, dtype: torch.dtype) -> Tensor:
        rows = len(numbers_TE)
        if rows < _MIN_ROWS:
            numbers_TE = pad(numbers_TE, (0, 0, 0, _MIN_ROWS - rows))
            scale_T = pad(scale_T, (0, _MIN_ROWS - rows))
        if self.weight_FE.dtype == torch.int8:
            sums_TF = torch._int_mm(numbers_TE, self.weight_FE.t())
            return self.kernels.scale_sums(sums_TF[:rows], scale_T[:rows], self.scale_F, self.bias_F, dtype)
        row_scale_T1, scale_1F = scale_T[:, None], self.scale_F[None]
        out_TF = torch._scaled_mm(numbers_TE, self.weight_FE.t(), row_scale_T1, scale_1F, out_dtype=dtype)[:rows]
        return out_TF if self.bias_F is None else out_TF + self.bias_F


def _padded(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class EightBits:
    """How a model's matrices become eight-bit ones on its device. `left_out`: why our own kernels do not serve."""

    form: Format
    kernels: Kernels
    left_out: str | None

    def make(self, weight_FE: Tensor, bias_F: Tensor | None) -> EightBitLinear:
        """A matrix in eight bits."""
        return EightBitLinear(weight_FE, bias_F, self.form, self.kernels)

    def __str__(self) -> str:
        rows = self.kernels.max_rows
        few = f"triton for up to {rows} rows, beyond them " if rows else ""
        return f"{self.form.name} matrices by {few}{self.form.product}"


def choose(name: str, device: torch.device, dtype: torch.dtype) -> EightBits:
    """How matrices of a format are multiplied on a GPU, tried there.

    Raises:
        EightBitsError: this card, or this PyTorch, has no such product.
    """
    form = FORMATS[name]
    if form.dtype != torch.int8:
        _check_fp8(device, dtype)
    reason = _try(EightBits(form=form, kernels=PLAIN, left_out=None), device, dtype)
    if reason is not None:
        raise EightBitsError(f"--quantize {name}: {form.product} does not hold on this GPU ({reason}); leave it out")
    if eight_bit_kernels is None:
        return EightBits(form=form, kernels=PLAIN, left_out="triton is not installed")
    ours = Kernels(
        to_eight_bits=eight_bit_kernels.to_eight_bits,
        scale_sums=eight_bit_kernels.scale_sums,
        multiply_few=eight_bit_kernels.multiply_few,
        max_rows=eight_bit_kernels.MAX_ROWS,
    )
    reason = _try(EightBits(form=form, kernels=ours, left_out=None), device, dtype)
    return EightBits(form=form, kernels=ours if reason is None else PLAIN, left_out=reason)


def _check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        raise EightBitsError("--quantize fp8: its products are bfloat16; give --dtype bfloat16, or --quantize int8")
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        found, needed = (".".join(map(str, pair)) for pair in (capability, _FP8_CAPABILITY))
        raise EightBitsError(
            f"--quantize fp8: needs a GPU of compute capability {needed} (Ada, Hopper) or more, and this one has "
            f"{found}; give --quantize int8, or leave it out"
        )


@torch.inference_mode()
def _try(eight: EightBits, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with products of random matrices, some rows at a time; None where nothing is."""
    generator = torch.Generator().manual_seed(len(_TRIED))
    try:
        for outputs, inputs in _TRIED:
            shapes = (outputs, inputs), (outputs,), (max(_TRIED_ROWS), inputs)
            weight_FE, bias_F, x_TE = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
            linear = eight.make(weight_FE, bias_F)
            expected_TF = _meant(x_TE, eight.form) @ _meant(weight_FE, eight.form).t() + bias_F.double()
            for rows in _TRIED_ROWS:
                error = (linear(x_TE[:rows]).double() - expected_TF[:rows]).abs().max() / expected_TF.abs().max()
                if not error.item() <= _TOLERANCE:  # nor is NaN
                    return f"{rows} rows differ by {error.item():.1e} of the largest number"
    except Exception as error:  # a compiler, a driver or a kernel of somebody else's may raise anything
        text = str(error).strip()
        return text.splitlines()[0] if text else type(error).__name__
    return None


def _meant(x_TE: Tensor, form: Format) -> Tensor:
    """The numbers that a matrix's eight bits stand for, float64."""
    numbers_TE, scale_T = to_eight_bits(x_TE, form.dtype, x_TE.shape[1])
    return numbers_TE.double() * scale_T[:, None].double()
