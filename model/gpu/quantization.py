"""Int8 and fp8 (e4m3) quantization on a GPU, with one scale per output and one per token's inputs.

Products of few rows cost what reading the weights costs, and use the Triton kernels of `model.gpu.quantized_kernels`.
Products of many rows, and all products without triton, use PyTorch's `torch._int_mm` and `torch._scaled_mm`.
`tests/gpu/test_quantization.py` checks both kinds of kernel on a GPU.

Sums of int8 products are exact, and each row is quantized by itself. Int8 results are therefore batch-invariant and
bitwise identical with either kind of kernel. Sums of fp8 products are rounded, in an order that depends on the kernel.

On a CPU `model.nn.linear.Int8Linear` does the same arithmetic in another order.

Legend: T packed tokens, E inputs, F outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

try:
    from model.gpu import quantized_kernels
except ImportError:  # no triton: it comes with PyTorch for CUDA
    quantized_kernels = None  # type: ignore[assignment]

# PyTorch's products need sizes that are multiples of 16, and more than 16 rows.
_MULTIPLE, _MIN_ROWS = 16, 32
_SLICE = 4096  # rows of a weight that are converted to float32 at a time
_TINY = 1e-30  # keeps the scale of a row of zeros from being zero
_FP8_CAPABILITY = (8, 9)


class QuantizationError(ValueError):
    """Error if int8 or fp8 quantization is not possible here. The message has the reason and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Quantized number format: dtype, largest number, and the PyTorch function that multiplies many rows."""

    name: str
    dtype: torch.dtype
    largest: float
    product: str


FORMATS = {
    "int8": Format(name="int8", dtype=torch.int8, largest=127.0, product="torch._int_mm"),
    "fp8": Format(name="fp8", dtype=torch.float8_e4m3fn, largest=448.0, product="torch._scaled_mm"),
}


def quantize_rows(x_TE: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """Quantize each row to `size` numbers, padded with zeros, and return its float32 scale, T.

    A row's largest absolute value becomes the format's largest number.
    """
    largest = next(form.largest for form in FORMATS.values() if form.dtype == dtype)
    x_TE = pad(x_TE, (0, size - x_TE.shape[1])).float()
    scale_T = x_TE.abs().amax(dim=1).clamp(min=_TINY) / largest
    scaled_TE = x_TE / scale_T[:, None]
    return (scaled_TE.round() if dtype == torch.int8 else scaled_TE).to(dtype), scale_T


def scale_sums(sums_TF: Tensor, scale_T: Tensor, scale_F: Tensor, bias_F: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scale sums of quantized products back to numbers of `dtype`, TF, and add the bias."""
    out_TF = sums_TF.float() * scale_T[:, None] * scale_F
    return (out_TF if bias_F is None else out_TF + bias_F.float()).to(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Functions around PyTorch's products; `multiply_few` replaces the product itself for up to `max_rows` rows."""

    quantize_rows: Callable[[Tensor, torch.dtype, int], tuple[Tensor, Tensor]]
    scale_sums: Callable[[Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
    multiply_few: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor] | None = None
    max_rows: int = 0


PLAIN = Kernels(quantize_rows=quantize_rows, scale_sums=scale_sums)


class QuantizedLinear(nn.Module):
    """Linear layer with int8 or fp8 weights: x W^T + b, in the dtype of x.

    Dettmers et al. 2022 (arXiv 2208.07339), section 2.1; Micikevicius et al. 2022 (arXiv 2209.05433) for e4m3.
    """

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None, form: Format, kernels: Kernels) -> None:
        super().__init__()
        self.num_outputs, inputs = weight_FE.shape
        self.num_inputs = _padded(inputs)
        missing = _padded(self.num_outputs) - self.num_outputs
        slices = pad(weight_FE.detach(), (0, 0, 0, missing)).split(_SLICE)
        numbers, scales = zip(*(quantize_rows(part, form.dtype, self.num_inputs) for part in slices), strict=True)
        self.weight_FE, self.scale_F = torch.cat(numbers), torch.cat(scales)
        self.bias_F = None if bias_F is None else pad(bias_F.detach(), (0, missing))
        self.kernels = kernels

    def forward(self, x_TE: Tensor) -> Tensor:
        """Multiply TE -> TF."""
        kernels = self.kernels
        numbers_TE, scale_T = kernels.quantize_rows(x_TE, self.weight_FE.dtype, self.num_inputs)
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
class Quantization:
    """Chosen quantization of a model's matrices on its device."""

    form: Format
    kernels: Kernels

    def make(self, weight_FE: Tensor, bias_F: Tensor | None) -> QuantizedLinear:
        """Quantize one matrix."""
        return QuantizedLinear(weight_FE, bias_F, self.form, self.kernels)

    def __str__(self) -> str:
        rows = self.kernels.max_rows
        few = f"triton for up to {rows} rows, beyond them " if rows else ""
        return f"{self.form.name} matrices by {few}{self.form.product}"


def choose(name: str, device: torch.device, dtype: torch.dtype) -> Quantization:
    """Choose the kernels of a quantization format on a GPU.

    Raises:
        QuantizationError: this GPU or this dtype does not support the format.
    """
    form = FORMATS[name]
    if form.dtype != torch.int8:
        _check_fp8(device, dtype)
    if quantized_kernels is None:
        return Quantization(form=form, kernels=PLAIN)
    kernels = Kernels(
        quantize_rows=quantized_kernels.quantize_rows,
        scale_sums=quantized_kernels.scale_sums,
        multiply_few=quantized_kernels.multiply_few,
        max_rows=quantized_kernels.MAX_ROWS,
    )
    return Quantization(form=form, kernels=kernels)


def _check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        raise QuantizationError("--quantize fp8 needs --dtype bfloat16; add it, or choose --quantize int8")
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        found, needed = (".".join(map(str, pair)) for pair in (capability, _FP8_CAPABILITY))
        raise QuantizationError(
            f"--quantize fp8 needs a GPU with compute capability {needed} (Ada, Hopper) or higher, this GPU has "
            f"{found}; choose --quantize int8, or omit --quantize"
        )
