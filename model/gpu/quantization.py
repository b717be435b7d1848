"""Int8 and fp8 (e4m3) quantization on a GPU, with one scale per output and one per token's inputs.

Products of few rows use the Triton kernels of `model.gpu.quantized_kernels`. Products of many rows, and all products
without triton, use PyTorch. Int8 sums are exact, so int8 results are batch-invariant: few and many rows give the same
bits. Fp8 sums are rounded, in an order that depends on the kernel.

Legend: T packed tokens, E inputs, F outputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from model.nn.linear import quantize_rows, scale_sums
from model.system.triton_modules import import_with_triton

# PyTorch's products need sizes that are multiples of 16, and more than 16 rows.
_MULTIPLE, _MIN_ROWS = 16, 32
_SLICE = 4096  # rows of a weight that are converted to float32 at a time
_FP8_CAPABILITY = (8, 9)


class QuantizationError(ValueError):
    """Error if int8 or fp8 quantization is not possible on this GPU. The message has the reason and the remedy."""


FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class QuantizedLinear(nn.Module):
    """Linear layer with int8 or fp8 weights: x W^T + b, in the dtype of x.

    Int8: Dettmers et al. 2022 (arXiv 2208.07339), section 2.1; e4m3: Micikevicius et al. 2022 (arXiv 2209.05433).
    kernels: `model.gpu.quantized_kernels`; None: PyTorch alone.
    """

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None, dtype: torch.dtype, kernels: Any = None) -> None:
        super().__init__()
        self.num_outputs, inputs = weight_FE.shape
        self.num_inputs = _padded(inputs)
        missing = _padded(self.num_outputs) - self.num_outputs
        slices = pad(weight_FE.detach(), (0, self.num_inputs - inputs, 0, missing)).split(_SLICE)
        numbers, scales = zip(*(quantize_rows(part, dtype) for part in slices), strict=True)
        self.weight_FE, self.scale_F = torch.cat(numbers), torch.cat(scales)
        self.bias_F = None if bias_F is None else pad(bias_F.detach(), (0, missing))
        self.kernels = kernels

    def forward(self, x_TE: Tensor) -> Tensor:
        """Apply the layer to each token's inputs: (tokens, inputs) to (tokens, outputs)."""
        if self.kernels is None:
            padded_TE = pad(x_TE, (0, self.num_inputs - x_TE.shape[1]))
            numbers_TE, scale_T = quantize_rows(padded_TE, self.weight_FE.dtype)
        elif (known := getattr(x_TE, "quantized", None)) is not None:  # by `model.gpu.fused_kernels`
            numbers_TE, scale_T = known
        else:
            numbers_TE, scale_T = self.kernels.quantize_rows(x_TE, self.weight_FE.dtype, self.num_inputs)
        if self.kernels is not None and len(x_TE) <= self.kernels.MAX_ROWS:
            given = self.weight_FE, self.scale_F, self.bias_F, x_TE.dtype
            out_TF: Tensor = self.kernels.multiply_few(numbers_TE, scale_T, *given)
        else:
            out_TF = self._multiply_many(numbers_TE, scale_T, x_TE.dtype)
        return out_TF if out_TF.shape[1] == self.num_outputs else out_TF[:, : self.num_outputs]

    def _multiply_many(self, numbers_TE: Tensor, scale_T: Tensor, dtype: torch.dtype) -> Tensor:
        rows = len(numbers_TE)
        if rows < _MIN_ROWS:
            numbers_TE = pad(numbers_TE, (0, 0, 0, _MIN_ROWS - rows))
            scale_T = pad(scale_T, (0, _MIN_ROWS - rows))
        if self.weight_FE.dtype == torch.int8:
            sums_TF = torch._int_mm(numbers_TE, self.weight_FE.t())[:rows]
            scale = scale_sums if self.kernels is None else self.kernels.scale_sums
            out_TF: Tensor = scale(sums_TF, scale_T[:rows], self.scale_F, self.bias_F, dtype)
            return out_TF
        row_scale_T1, scale_1F = scale_T[:, None], self.scale_F[None]
        out_TF = torch._scaled_mm(numbers_TE, self.weight_FE.t(), row_scale_T1, scale_1F, out_dtype=dtype)[:rows]
        return out_TF if self.bias_F is None else out_TF + self.bias_F


def _padded(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


@dataclass(frozen=True, slots=True)
class Quantization:
    """Format for a model's matrices on a GPU (a name in `FORMATS`), and the kernels of `QuantizedLinear`."""

    name: str
    kernels: Any = None

    def make(self, weight_FE: Tensor, bias_F: Tensor | None) -> QuantizedLinear:
        """Return a linear layer that quantizes these weights to this format."""
        return QuantizedLinear(weight_FE, bias_F, FORMATS[self.name], self.kernels)

    def __str__(self) -> str:
        few = "" if self.kernels is None else f"triton for up to {self.kernels.MAX_ROWS} rows, beyond them "
        return f"{self.name} matrices by {few}torch.{'_int_mm' if self.name == 'int8' else '_scaled_mm'}"


def choose(name: str, device: torch.device, dtype: torch.dtype) -> Quantization:
    """Return the quantization of matrices to the format `name` in `FORMATS`; by Triton kernels if triton is installed.

    Raises:
        QuantizationError: this GPU or this dtype does not support the format.
    """
    if name == "fp8" and dtype != torch.bfloat16:
        raise QuantizationError("--quantize fp8 needs --dtype bfloat16; add it, or choose --quantize int8")
    if name == "fp8" and (found := torch.cuda.get_device_capability(device)) < _FP8_CAPABILITY:
        needed, has = (".".join(map(str, pair)) for pair in (_FP8_CAPABILITY, found))
        raise QuantizationError(
            f"--quantize fp8 needs a GPU with compute capability {needed} (Ada, Hopper) or higher, this GPU has "
            f"{has}; choose --quantize int8, or omit --quantize"
        )
    return Quantization(name, import_with_triton("model.gpu.quantized_kernels"))
