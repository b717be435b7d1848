"""Int8 and fp8 layers for a GPU, tested on a CPU with PyTorch's products and fake kernels."""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from model.gpu import quantization
from model.gpu.quantization import FORMATS, Quantization, QuantizationError, QuantizedLinear, choose
from model.nn.linear import Int8Linear, quantize_rows, replace_linears, scale_sums
from tests.model.configs import VARIANTS, build

CPU = torch.device("cpu")
# Outputs, inputs: with and without padding.
SHAPES = ((48, 64), (53, 37))
PRODUCTS = {"int8": "_int_mm", "fp8": "_scaled_mm"}
FEW: list[int] = []  # rows of each call


def multiply_few(
    numbers: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    FEW.append(len(numbers))
    return scale_sums((numbers.double() @ weight.double().t()).round(decimals=3), scales, scale, bias, dtype)


def rounded(x_TE: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    return quantize_rows(torch.nn.functional.pad(x_TE, (0, size - x_TE.shape[1])), dtype)


def fake_kernels(**changed: Any) -> SimpleNamespace:
    ours = {"quantize_rows": rounded, "scale_sums": scale_sums, "multiply_few": multiply_few, "MAX_ROWS": 64}
    return SimpleNamespace(**ours | changed)


@pytest.fixture(autouse=True)
def _a_gpu_with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make PyTorch report that the GPU supports fp8, so that the tests can run on a CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    FEW.clear()


def matrix(shape: tuple[int, int], rows: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    """Return a random weight (outputs, inputs), bias (outputs), and inputs (tokens, inputs)."""
    generator = torch.Generator().manual_seed(shape[1])
    drawn = (torch.randn(size, generator=generator) for size in (shape, shape[:1], (rows, shape[1])))
    weight_FE, bias_F, x_TE = (x.bfloat16() for x in drawn)
    return weight_FE, bias_F, x_TE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "most"), [("int8", 0.02), ("fp8", 0.06)])
def test_results_are_near_the_product_for_any_other_rows(name: str, most: float, shape: tuple[int, int]) -> None:
    weight_FE, bias_F, x_TE = matrix(shape)
    linear = QuantizedLinear(weight_FE, bias_F, FORMATS[name])
    expected = x_TE.double() @ weight_FE.double().t() + bias_F.double()
    found = linear(x_TE)
    assert (found.shape, found.dtype) == (expected.shape, torch.bfloat16)
    assert 0 < (found.double() - expected).norm() / expected.norm() < most
    loud = torch.cat((x_TE[:40], 1000 * x_TE[40:]))
    assert torch.equal(linear(loud)[:40], found[:40])
    assert torch.equal(linear(torch.zeros_like(x_TE)), bias_F.expand(len(x_TE), -1))


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_has_the_bits_of_the_cpu_layer_for_any_number_of_rows(shape: tuple[int, int]) -> None:
    weight_FE, bias_F, x_TE = matrix(shape)
    linear = QuantizedLinear(weight_FE, bias_F, FORMATS["int8"])
    expected = Int8Linear(weight_FE, bias_F)(x_TE)
    for rows in (1, 16, 17, 33, 100):
        assert torch.equal(linear(x_TE[:rows]), expected[:rows])


@pytest.mark.parametrize("name", FORMATS)
def test_quantizing_a_matrix_in_slices_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_FE, bias_F, x_TE = matrix(SHAPES[1])
    whole = QuantizedLinear(weight_FE, bias_F, FORMATS[name])(x_TE)
    monkeypatch.setattr(quantization, "_SLICE", 7)
    assert torch.equal(QuantizedLinear(weight_FE, bias_F, FORMATS[name])(x_TE), whole)


@pytest.mark.parametrize("name", FORMATS)
def test_triton_kernels_multiply_few_rows_and_pytorch_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(dict[str, Any], sys.modules), "model.gpu.quantized_kernels", fake_kernels(MAX_ROWS=20))
    chosen = choose(name, CPU, torch.bfloat16)
    assert str(chosen) == f"{name} matrices by triton for up to 20 rows, beyond them torch.{PRODUCTS[name]}"
    weight_FE, bias_F, x_TE = matrix(SHAPES[0])
    linear = chosen.make(weight_FE, bias_F)
    found = [linear(x_TE[:rows]) for rows in (4, 20, 21)]
    assert FEW == [4, 20]
    torch.testing.assert_close(found[1], found[2][:20], rtol=1e-2, atol=1e-2)


def test_without_triton_pytorch_multiplies_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(dict[str, Any], sys.modules), "model.gpu.quantized_kernels", None)
    chosen = choose("int8", CPU, torch.float32)
    assert chosen.kernels is None
    assert str(chosen) == "int8 matrices by torch._int_mm"


def test_an_unsupported_fp8_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuantizationError, match="fp8 needs --dtype bfloat16; add it, or choose --quantize int8"):
        choose("fp8", CPU, torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(QuantizationError, match=r"capability 8\.9 .* this GPU has 8\.6; choose --quantize int8"):
        choose("fp8", CPU, torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("variant", ["rotary-gqa", "gpt2", "average"])
def test_models_compute_with_quantized_layers(name: str, variant: str) -> None:
    model = build(VARIANTS[variant]).bfloat16()
    ids, metadata = torch.arange(40), AttentionMetadata.uncached((40,))
    expected = model(ids, metadata, None)
    replace_linears(model, Quantization(name).make)
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
    found = model(ids, metadata, None)
    assert 0 < (found - expected).norm() / expected.norm() < 0.2
