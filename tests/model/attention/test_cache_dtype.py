"""Float16 and int8 caches: keys and values are rounded once, and attention uses the rounded values."""

import functools
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from model.attention.backends import AttentionBackend, EagerAttention, RoundedAttention, attention_weights
from model.attention.kv_cache import KVCache, quantized, rounded
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.attention.paged import PagedAttention, gathered, one_by_one
from model.inspect.attention_weights import weights_of_layer
from model.nn.transformer import Block, Transformer
from tests.model import kernel_libraries
from tests.model.configs import VARIANTS, build
from tests.model.paging import PagedRun

HALF = torch.float16
BACKENDS: dict[str, AttentionBackend] = {**kernel_libraries.BACKENDS, "paged": PagedAttention(gathered, one_by_one)}
IDS = torch.randint(300, (24,), generator=torch.Generator().manual_seed(2))
TEXTS = [IDS[:1], IDS[:6], IDS]
# A number, and its float16 value: ties go to even, and numbers beyond float16 become its largest number.
HELD = [
    (1 + 2**-11, 1.0),
    (1 + 3 * 2**-11, 1 + 2**-9),
    (-0.1, -0.0999755859375),
    (2**-25, 0.0),
    (1.01 * 2**-25, 2**-24),
    (65_519.0, 65_504.0),
    (65_520.0, 65_504.0),
    (-1e30, -65_504.0),
    (torch.inf, 65_504.0),
]


def model_of(variant: str, *backends: AttentionBackend) -> Transformer:
    """Return the same model each time, with one backend for all layers or one per layer."""
    model = build(VARIANTS[variant])
    for block, backend in zip(model.layers, backends * (1 if len(backends) > 1 else len(model.layers)), strict=True):
        cast(Block, block).attention.backend = backend
    return model


@functools.cache
def uncached_logits(variant: str, cache_dtype: torch.dtype | None) -> Tensor:
    """Return the logits of `TEXTS` without a cache, with keys and values rounded to the dtype; None: not rounded."""
    reference = EagerAttention() if cache_dtype is None else RoundedAttention(EagerAttention(), cache_dtype)
    model = model_of(variant, reference)
    return torch.cat([model(ids, AttentionMetadata.uncached((len(ids),)), None) for ids in TEXTS])


def test_a_float16_cache_holds_rounded_keys_and_values() -> None:
    numbers, expected = torch.tensor(HELD).unbind(1)
    assert torch.equal(rounded(numbers, HALF).float(), expected)
    assert rounded(torch.tensor([torch.nan]), HALF).isnan().all()
    assert rounded(torch.tensor([1e30]), torch.bfloat16) == torch.tensor(1e30).bfloat16()


def test_a_float16_cache_returns_the_models_dtype_and_takes_half_the_memory() -> None:
    config = VARIANTS["rotary-gqa"]
    sizes = {"num_blocks": 3, "block_size": 4}
    whole, half = (
        KVCache(config, **sizes, dtype=torch.float32, device="cpu", cache_dtype=cache_dtype)
        for cache_dtype in (None, HALF)
    )
    assert half.num_bytes * 2 == whole.num_bytes
    assert half.num_bytes == 12 * config.kv_bytes_per_token(HALF.itemsize)
    k_TKD, v_TKD = torch.randn(2, 5, 2, 8)
    slots_T = torch.tensor([7, 1, 0, 11, 4])
    half.write(1, slots_T, k_TKD, v_TKD)
    for written, found in zip((k_TKD, v_TKD), half.gather(1, slots_T), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, written.half().float())


def test_int8_rounds_each_vector_by_its_own_scale() -> None:
    x_TKD = torch.tensor([[[127.0, -2.5, 1.5, 0.4]], [[-1e-3, 5e-4, 0.0, 1e-6]], [[0.0, 0.0, 0.0, 0.0]]])
    codes_TKD, scales_TK = quantized(x_TKD)
    assert codes_TKD.tolist() == [[[127, -2, 2, 0]], [[-127, 64, 0, 0]], [[0, 0, 0, 0]]]
    assert torch.equal(scales_TK[:2, 0], torch.tensor([1.0, 1e-3 / 127]))
    assert torch.equal(rounded(x_TKD, torch.int8), codes_TKD * scales_TK[..., None])
    for bad in (torch.nan, torch.inf, -torch.inf):
        x_TKD[0, 0, 2] = bad
        assert rounded(x_TKD, torch.int8).isnan().all(2)[:, 0].tolist() == [True, False, False]


@given(st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16]))
def test_int8_changes_a_number_by_half_a_step_at_most(size: int, seed: int, dtype: torch.dtype) -> None:
    x_TKD = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    codes_TKD, scales_TK = quantized(x_TKD)
    assert torch.equal(codes_TKD.abs().amax(2), torch.full((3, 2), 127, dtype=torch.int8))
    error_TKD = (codes_TKD * scales_TK[..., None] - x_TKD.float()).abs()
    assert bool((error_TKD <= 0.5001 * scales_TK[..., None]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_cache_holds_a_scale_for_each_key_and_value(dtype: torch.dtype) -> None:
    config = VARIANTS["rotary-gqa"]
    cache = KVCache(config, num_blocks=3, block_size=4, dtype=dtype, device="cpu", cache_dtype=torch.int8)
    assert cache.num_bytes == 12 * config.kv_bytes_per_token(1) == 12 * 2 * 2 * 2 * (8 + 4)
    k_TKD, v_TKD = torch.randn(2, 5, 2, 8).to(dtype)
    slots_T = torch.tensor([7, 1, 0, 11, 4])
    cache.write(1, slots_T, k_TKD, v_TKD)
    for given_TKD, found in zip((k_TKD, v_TKD), cache.gather(1, slots_T), strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, rounded(given_TKD, torch.int8))
    assert not cache.gather(0, slots_T)[0].any(), "another layer"


# Every variant with every backend, and half of both with either dtype.
COMBINATIONS = [
    (variant, name, (HALF, torch.int8)[(place + number) % 2])
    for place, variant in enumerate(VARIANTS)
    for number, name in enumerate(BACKENDS)
]


@pytest.mark.parametrize(("variant", "name", "cache_dtype"), COMBINATIONS)
@torch.no_grad()
def test_chunks_of_any_size_attend_to_rounded_keys_and_values(
    variant: str, name: str, cache_dtype: torch.dtype
) -> None:
    """A chunk also attends to its own rounded keys and values.

    Differences in the last bits of a layer's input rarely change how its keys and values are rounded. So the mean
    difference is compared with the mean effect of the rounding itself.
    """
    wanted = uncached_logits(variant, cache_dtype)
    effect = (uncached_logits(variant, None) - wanted).abs().mean()
    assert effect > 0
    model = model_of(variant, BACKENDS[name])
    for chunk in (1, 7, 24):
        found = torch.cat(PagedRun(model, TEXTS, cache_dtype).forward_in_chunks(chunk))
        assert found.dtype == torch.float32
        assert (found - wanted).abs().mean() < 0.1 * effect, chunk


class Spy:
    """Reference implementation of attention that records the attention weights of each layer."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        form: AttentionForm,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
    ) -> Tensor:
        self.weights.append(attention_weights(q_THD, k_TKD, form))
        return EagerAttention().attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)


@torch.inference_mode()
def test_inspected_attention_weights_are_those_of_serving() -> None:
    spy = Spy()
    model_of("rotary-gqa", RoundedAttention(spy, HALF))(IDS, AttentionMetadata.uncached((len(IDS),)), None)
    model = model_of("rotary-gqa", EagerAttention())
    backends = [cast(Block, block).attention.backend for block in model.layers]
    ids: Sequence[int] = IDS.tolist()
    for layer, wanted in enumerate(spy.weights):
        assert torch.equal(weights_of_layer(model, ids, layer=layer, cache_dtype=HALF), wanted)
        exact = weights_of_layer(model, ids, layer=layer)
        assert not torch.equal(exact, wanted)
        assert_close(exact, wanted, atol=5e-3, rtol=5e-3)
    assert [cast(Block, block).attention.backend for block in model.layers] == backends
