"""Linear layers of serving: products are correct and batch-invariant, and weights are in memory once."""

import gc

import pytest
import torch
from torch import nn

from model.attention.metadata import AttentionMetadata
from model.nn.linear import (
    LINEAR_KINDS,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    can_pack,
    int8_sums,
    quantize_rows,
    replace_linears,
)
from service.engine.scheduling.step_plan import MIN_ROWS
from tests.model.configs import VARIANTS, build

ROWS = 96
# Inputs, outputs: wide, deep, and sizes that are no multiple of the vector width.
SHAPES = ((64, 192), (192, 64), (1408, 96), (37, 53))
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack("cpu", dtype)]


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random weight (outputs, inputs) and random inputs (tokens, inputs)."""
    inputs, outputs = shape
    generator = torch.Generator().manual_seed(inputs)
    weight_FE = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    return weight_FE.to(dtype), torch.randn(ROWS, inputs, generator=generator).to(dtype)


@pytest.mark.parametrize("kind", LINEAR_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_a_row_do_not_depend_on_the_batch(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight_FE, x_TE = matrix(shape, dtype)
    linear = LINEAR_KINDS[kind](weight_FE, None)
    whole = linear(x_TE)
    assert whole.dtype == dtype
    for rows in (MIN_ROWS, 5, 16, 33, 64, 95):
        assert torch.equal(linear(x_TE[:rows]), whole[:rows])
        assert torch.equal(linear(x_TE[-rows:]), whole[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_layer_equals_the_plain_layer_within_rounding(dtype: torch.dtype) -> None:
    weight_FE, x_TE = matrix(SHAPES[0], dtype)
    bias_F = torch.randn(len(weight_FE)).to(dtype)
    expected = nn.functional.linear(x_TE, weight_FE, bias_F)
    torch.testing.assert_close(PackedLinear(weight_FE, bias_F)(x_TE), expected)


def test_int8_sums_are_exact_and_scaled_by_row_and_output() -> None:
    weight_FE, x_TE = matrix(SHAPES[0])
    bias_F = torch.randn(len(weight_FE))
    weights, scale_F = quantize_rows(weight_FE)
    rounded, scale_T = quantize_rows(x_TE)
    assert rounded.abs().amax(dim=1).eq(127).all()
    assert (rounded * scale_T[:, None] - x_TE).abs().le(scale_T[:, None] * 0.5001).all()
    exact = (rounded.double() @ weights.double().t()) * (scale_T[:, None].double() * scale_F.double()) + bias_F
    torch.testing.assert_close(Int8Linear(weight_FE, bias_F)(x_TE), exact.float())


@pytest.mark.parametrize("has_instructions", [False, True])
def test_sums_of_the_largest_products_are_exact(monkeypatch: pytest.MonkeyPatch, has_instructions: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_instructions)
    inputs = 2500
    numbers = torch.full((3, inputs), -128, dtype=torch.int8)
    numbers[1] = torch.arange(inputs) % 256 - 128
    assert torch.equal(int8_sums(numbers, numbers).long(), numbers.long() @ numbers.long().t())


def test_int8_is_near_the_product_for_any_other_rows() -> None:
    weight_FE, x_TE = matrix(SHAPES[0])
    linear = Int8Linear(weight_FE, None)
    alone = linear(x_TE[:4])
    error = (alone - x_TE[:4] @ weight_FE.t()).norm() / alone.norm()
    assert error < 0.02
    loud = torch.cat((x_TE[:4], 1000 * x_TE[4:]))
    assert torch.equal(linear(loud)[:4], alone)


def test_a_row_of_zeros_gives_the_bias() -> None:
    weight_FE, _ = matrix(SHAPES[0])
    bias_F = torch.randn(len(weight_FE))
    assert torch.equal(Int8Linear(weight_FE, bias_F)(torch.zeros(2, weight_FE.shape[1])), bias_F.expand(2, -1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_computes_with_packed_matrices(variant: str) -> None:
    ids, metadata = torch.arange(9), AttentionMetadata.uncached((9,))
    plain, packed = build(VARIANTS[variant]), build(VARIANTS[variant])
    replace_linears(packed, "packed")
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids, metadata, None), plain(ids, metadata, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LINEAR_KINDS)
def test_replace_linears_replaces_every_plain_matrix(kind: str) -> None:
    model = build(VARIANTS["gpt2"])
    plain = sum(tensor.nbytes for name, tensor in model.state_dict().items() if name.startswith("layers"))
    replace_linears(model, kind)
    gc.collect()
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    kinds = {type(m) for m in model.modules()} & {PackedLinear, Int8Linear, Int4Linear}
    assert kinds == {"packed": {PackedLinear}, "int8": {Int8Linear}, "int4": {Int8Linear, Int4Linear}}[kind]
    left = sum(tensor.nbytes for name, tensor in model.state_dict().items() if name.startswith("layers"))
    assert left < plain / 4


@pytest.mark.parametrize("variant", ["gpt2", "rotary-gqa"])
def test_int4_is_int8_in_the_head_and_first_layer(variant: str) -> None:
    model = build(VARIANTS[variant])
    replace_linears(model, "int4")
    kinds = {name: type(m) for name, m in model.named_modules() if isinstance(m, Int8Linear | Int4Linear)}
    int4 = {name for name, kind in kinds.items() if kind is Int4Linear}
    assert type(model.lm_head) is Int8Linear
    assert int4 == {name for name in kinds if name.startswith("layers.1.")} != set()


def test_float64_and_other_devices_cannot_be_packed() -> None:
    assert not can_pack("cpu", torch.float64)
    assert not can_pack("meta", torch.float32)
