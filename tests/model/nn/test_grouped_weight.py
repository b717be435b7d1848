"""Weights in groups: codes and scales reproduce a matrix, the search beats min-max, layers equal the dense product."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from model.nn import grouped_weight
from model.nn.grouped_weight import GroupedWeight, quantize_weight
from model.nn.linear import make_grouped_linear, quantize_rows


def normal(*shape: int) -> Tensor:
    """Return normal random numbers that depend on the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _float16(numbers: Tensor) -> Tensor:
    """Round to float16, as the native kernels do, but return float32."""
    return torch.where(numbers.abs() < 1e-4, 1e-4, numbers).half().float()


def grouped(outputs: int, inputs: int, *, bits: int, has_offset: bool) -> GroupedWeight:
    """Return random grouped weights that use the whole range of the codes."""
    least, most = {4: (-8, 7), 6: (-32, 31), 8: (-127, 127)}[bits]
    generator = torch.Generator().manual_seed(inputs)
    groups = -(-inputs // 32)
    if bits == 6:
        blocks, integers = inputs // 256, torch.randint(-128, 128, (outputs, inputs // 16), generator=generator)
        return GroupedWeight(
            codes_FI=torch.randint(least, most + 1, (outputs, inputs), generator=generator, dtype=torch.int8),
            scale_FG=integers.to(torch.int8),
            offset_FG=integers[:, ::2].to(torch.int8) if has_offset else None,
            bits=6,
            factor_FB=(normal(outputs, blocks) / 2**13).half(),
            offset_factor_FB=(normal(outputs, blocks) / 2**10).half() if has_offset else None,
        )
    return GroupedWeight(
        codes_FI=torch.randint(least, most + 1, (outputs, inputs), generator=generator, dtype=torch.int8),
        scale_FG=_float16(normal(outputs, groups).abs() / (most * inputs**0.5)),
        offset_FG=_float16(normal(outputs, groups) / inputs**0.5) if has_offset else None,
        bits=bits,
    )


@pytest.mark.parametrize("inputs", [32, 50, 7, 96])
def test_min_max_uses_the_extreme_codes_for_the_extreme_weights(inputs: int) -> None:
    weight_FI = normal(9, inputs)
    found = quantize_weight(weight_FI, searches=False)
    assert found.codes_FI.shape == weight_FI.shape
    for group, part_FS in enumerate(weight_FI.split(32, dim=1)):
        codes_FS, dense_FS = (each[:, 32 * group : 32 * group + 32] for each in (found.codes_FI, found.dense()))
        for code, extreme_F1 in ((-8, part_FS.argmin(1, keepdim=True)), (7, part_FS.argmax(1, keepdim=True))):
            assert codes_FS.gather(1, extreme_F1).eq(code).all()
            torch.testing.assert_close(dense_FS.gather(1, extreme_F1), part_FS.gather(1, extreme_F1), rtol=0, atol=0.01)
        assert (dense_FS - part_FS).abs().le(found.scale_FG[:, group, None] * 0.55).all()


def test_the_search_lowers_the_error_of_every_group() -> None:
    weight_FI = normal(64, 256)
    errors = [
        (quantize_weight(weight_FI, searches=searches).dense() - weight_FI).unflatten(1, (-1, 32)).square().sum(-1)
        for searches in (False, True)
    ]
    assert (errors[1] <= errors[0] * 1.01).all()  # scales and offsets are rounded to bfloat16
    assert errors[1].mean() < 0.86 * errors[0].mean()


def test_quantizing_in_chunks_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_FI = normal(50, 70)
    whole = quantize_weight(weight_FI)
    monkeypatch.setattr(grouped_weight, "_CHUNK", 200)
    parts = quantize_weight(weight_FI)
    assert torch.equal(parts.codes_FI, whole.codes_FI)
    assert torch.equal(parts.scale_FG, whole.scale_FG)
    assert torch.equal(parts.dense(), whole.dense())


def test_zeros_stay_zeros() -> None:
    assert quantize_weight(torch.zeros(3, 40)).dense().eq(0).all()


@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize(("bits", "inputs"), [(4, 64), (4, 70), (8, 70), (6, 512)])
def test_a_layer_equals_the_product_with_its_weights(bits: int, has_offset: bool, inputs: int) -> None:
    weight, bias_F, x_TE = grouped(53, inputs, bits=bits, has_offset=has_offset), normal(53), normal(5, inputs)
    layer = make_grouped_linear(weight, bias_F)
    rounded_TE, scale_T = quantize_rows(x_TE)
    expected = nn.functional.linear(rounded_TE * scale_T[:, None], layer.rows(torch.arange(53)), bias_F)
    torch.testing.assert_close(layer(x_TE), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.rows(torch.arange(3, 9)), layer.rows(torch.arange(53))[3:9])
    if bits != 4:
        assert torch.equal(layer.rows(torch.arange(53)), weight.dense())
    if has_offset:
        plain = replace(weight, offset_FG=None)
        assert not torch.allclose(make_grouped_linear(plain, bias_F)(x_TE), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("has_offset", [False, True])
def test_int4_rounds_multipliers_and_offsets_to_integers(has_offset: bool) -> None:
    weight = grouped(53, 70, bits=4, has_offset=has_offset)
    int4 = weight.to_int4()
    error_FI = (int4.dense() - weight.dense()).abs() / int4.scale_F[:, None]
    assert (error_FI <= 0.5 * weight.codes_FI.abs() + 0.5 * has_offset + 1e-2).all()
    assert error_FI.mean() > 0.2
    assert (int4.multiplier_FG.short().abs().amax(dim=1) == 127).all()


@pytest.mark.parametrize(("inputs", "offset"), [(64, 0.0), (64, 1e4), (2**15, 0.0), (2**15, -8.0)])
def test_sums_of_int4_products_fit_in_32_bits(inputs: int, offset: float) -> None:
    """Every weight and every quantized input has its largest absolute value."""
    codes_FI, scale_FG = torch.full((1, inputs), -8, dtype=torch.int8), torch.ones(1, inputs // 32)
    weight = GroupedWeight(codes_FI=codes_FI, scale_FG=scale_FG, offset_FG=offset * scale_FG, bits=4)
    result = make_grouped_linear(weight, None)(torch.ones(1, inputs))
    torch.testing.assert_close(result, torch.full((1, 1), (offset - 8) * inputs), rtol=0.02, atol=0.0)


def test_a_scale_that_is_not_a_number_makes_an_output_nan() -> None:
    weight = grouped(2, 64, bits=4, has_offset=False)
    weight.scale_FG[1, 0] = torch.nan
    assert make_grouped_linear(weight, None)(normal(3, 64)).isnan().tolist() == [[False, True]] * 3
