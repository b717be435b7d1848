"""Native kernel with a float16 or int8 cache: equal to the reference at every level, batch-invariant."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.attention.backends import EagerAttention
from model.attention.kv_cache import KVCache, quantized, rounded
from model.attention.metadata import AttentionForm, AttentionMetadata
from tests.model.attention.test_native_attention import (
    BEST,
    FORM,
    LENGTHS,
    SHAPES,
    TOLERANCES,
    Scene,
    assert_close,
    biases_of,
    native,
)
from tests.model.configs import VARIANTS
from tests.model.kernel_libraries import BUILDABLE

HALF = torch.float16
# Dtypes of the model and of its cache.
DTYPES = [(torch.float32, HALF), (torch.float32, torch.int8), (torch.bfloat16, torch.int8)]
# Four or more query heads per key are computed as products while keys are read, and with packed keys.
SHARED = [(4, 1, 32, 16), (8, 1, 64, 16)]
CASES = [(level, shape) for level in BUILDABLE for shape in ([*SHAPES, *SHARED] if level in BEST else SHAPES[:3])]


@functools.cache
@torch.no_grad()
def references(
    shape: tuple[int, int, int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Scene, list[tuple[AttentionForm, list[Tensor], list[Tensor]]]]:
    """Return a scene, and per form the reference's outputs over rounded and unrounded keys, the same for all levels."""
    scene, biases = Scene(shape, LENGTHS, dtypes[0], cache_dtype=dtypes[1]), biases_of(shape)
    # PyTorch would round the numbers of an int8 cache to the model's dtype once more.
    floats = [(q.float(), k.float(), v.float()) for q, k, v in scene.texts]
    oracle = dataclasses.replace(scene, dtype=torch.float32, texts=floats)
    exact = dataclasses.replace(oracle, cache_dtype=None)
    expected = []
    for window, name in ((None, "none"), (100, "none"), (5, "relative"), (None, "alibi")):
        form = AttentionForm(layer=1, scale=0.2, window=window, bias=biases[name])
        rounded_outputs = [out.to(dtypes[0]) for out in oracle.attend(EagerAttention(), form)]
        expected.append((form, rounded_outputs, exact.attend(EagerAttention(), form)))
    return scene, expected


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("level", "shape"), CASES)
@torch.no_grad()
def test_attention_over_rounded_keys_and_values_equals_the_reference(
    level: str, shape: tuple[int, int, int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    scene, expected = references(shape, dtypes)
    for form, outputs, unrounded in expected:
        found = scene.attend(native(level), form)
        assert_close(found, outputs, dtypes[0])
        assert max(float((a - b).abs().max()) for a, b in zip(found, unrounded, strict=True)) > 1e-4


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHARED[0]])
@pytest.mark.parametrize("level", BUILDABLE)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(
    level: str,
    shape: tuple[int, int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    set_threads: Callable[[int], None],
) -> None:
    scene = Scene(shape, (*LENGTHS, (1, 1600)), dtypes[0], cache_dtype=dtypes[1])
    form = AttentionForm(layer=1, scale=0.2, window=None, bias=biases_of(shape)["alibi"])
    set_threads(1)
    together = scene.attend(native(level), form)
    for threads, row in ((1, 0), (1, 5), (2, 6), (5, 8), (2, 9), (5, 9)):
        set_threads(threads)
        (alone,) = scene.attend(native(level), form, [row])
        assert torch.equal(alone, together[row]), (threads, scene.lengths[row])


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("shape", "window"), [(SHAPES[0], 70), (SHAPES[1], None), (SHAPES[2], None)])
@pytest.mark.parametrize("level", BUILDABLE)
def test_decoded_tokens_and_prompt_chunks_have_the_same_bits(
    level: str, shape: tuple[int, int, int, int], window: int | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """A token attends to its own rounded key and value, whether they were written earlier or in this step."""
    form = AttentionForm(layer=1, scale=0.2, window=window, bias=None)
    length = 600
    (whole,) = Scene(shape, ((length, length),), dtypes[0], cache_dtype=dtypes[1]).attend(native(level), form)
    for queries, context in ((1, 1), (2, 64), (1, 65), (13, 130), (1, 513), (1, length)):
        scene = Scene(shape, ((queries, length),), dtypes[0], cache_dtype=dtypes[1])
        cut = [(q[:context], k[:context], v[:context]) for q, k, v in scene.texts]
        (part,) = dataclasses.replace(scene, lengths=((queries, context),), texts=cut).attend(native(level), form)
        assert torch.equal(part, whole[context - queries : context]), (queries, context)


@pytest.mark.parametrize("size", [64, 37])
@pytest.mark.parametrize("level", BUILDABLE)
def test_every_float16_number_is_written_and_read_as_pytorch_does(level: str, size: int) -> None:
    """Each number is in the value of a sequence of one token. Its attention weight is 1, so the output is the value.

    The numbers are all float16 values, midpoints between two of them, and values out of range.
    """
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(HALF).float()
    every = every[every.isfinite()]
    between = (every[1:] + every[:-1]) / 2
    near = torch.cat([between * (1 + 1e-7), between * (1 - 1e-7)])
    far = torch.tensor([65_519.9, 65_520.0, -70_000.0, 3e38, torch.inf, -torch.inf, 1e-30, -1e-45])
    numbers = torch.cat([every, between, near, far])
    v_TKD = torch.nn.functional.pad(numbers, (0, -len(numbers) % size)).view(-1, 1, size)
    count = len(v_TKD)
    config = dataclasses.replace(VARIANTS["none"], num_heads=1, num_kv_heads=1, head_dim=size)
    cache = KVCache(config, num_blocks=count, block_size=1, dtype=torch.float32, device="cpu", cache_dtype=HALF)
    places_T = torch.arange(count)
    metadata = AttentionMetadata(
        query_lengths=(1,) * count,
        context_lengths=(1,) * count,
        positions_T=torch.zeros_like(places_T),
        slot_mapping_T=places_T,
        block_tables_BN=places_T[:, None],
    )
    q_THD = torch.zeros(count, 1, size)
    out_THD = native(level).attend(q_THD, v_TKD.flip(2), v_TKD, form=FORM, metadata=metadata, kv_cache=cache)
    held = rounded(v_TKD, HALF)
    assert torch.equal(cache.values[1][:, 0].view(torch.int16), held.view(torch.int16))
    assert torch.equal(cache.keys[1][:, 0].view(torch.int16), held.flip(2).view(torch.int16))
    assert torch.equal(out_THD, held.float())


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Return keys or values of a few tokens and heads, TKD, with some numbers that are hard to round."""
    size = draw(st.integers(1, 40) | st.just(256))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x_TKD = torch.randn(draw(st.integers(1, 3)), draw(st.integers(1, 3)), size, generator=generator)
    x_TKD *= 10.0 ** draw(st.integers(-37, 37))
    hard = st.floats(width=32, allow_subnormal=False) | st.sampled_from([0.0, 1.0, 63.5, 64.5, 127.0])
    for number in draw(st.lists(hard, max_size=4)):
        x_TKD.view(-1)[draw(st.integers(0, x_TKD.numel() - 1))] = number
    return x_TKD


@pytest.mark.parametrize("level", BUILDABLE)
@given(v_TKD=vectors(), dtype=st.sampled_from(list(TOLERANCES)))
def test_int8_codes_and_scales_are_those_of_pytorch(level: str, v_TKD: Tensor, dtype: torch.dtype) -> None:
    v_TKD = v_TKD.to(dtype)
    count, heads, size = v_TKD.shape
    config = dataclasses.replace(VARIANTS["none"], num_heads=heads, num_kv_heads=heads, head_dim=size)
    cache = KVCache(config, num_blocks=2, block_size=2, dtype=dtype, device="cpu", cache_dtype=torch.int8)
    places_T = torch.arange(count)
    metadata = AttentionMetadata(
        query_lengths=(1,) * count,
        context_lengths=(1,) * count,
        positions_T=torch.zeros_like(places_T),
        slot_mapping_T=places_T,
        block_tables_BN=torch.zeros(count, 1, dtype=torch.int64),
    )
    q_TKD, k_TKD = torch.zeros_like(v_TKD), v_TKD.flip(2).contiguous()
    native(level).attend(q_TKD, k_TKD, v_TKD, form=FORM, metadata=metadata, kv_cache=cache)
    pools = (cache.keys[1], cache.key_scales[1]), (cache.values[1], cache.value_scales[1])
    for (pool_NPKD, scales_NPK), given_TKD in zip(pools, (k_TKD, v_TKD), strict=True):
        codes_TKD, scales_TK = quantized(given_TKD)
        is_finite_TK = given_TKD.isfinite().all(2)
        assert torch.equal(scales_TK.isfinite(), is_finite_TK)
        held_TK = scales_NPK.flatten(0, 1)[:count]
        torch.testing.assert_close(held_TK, scales_TK, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(pool_NPKD.flatten(0, 1)[:count][is_finite_TK], codes_TKD[is_finite_TK])


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("level", BUILDABLE)
def test_a_nan_in_a_key_or_value_gives_nan(level: str, which: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for size, token in ((16, 8), (7, 8), (16, 3)):  # token 8 is written by this step
        scene = Scene((2, 2, size, 4), ((1, 9), (1, 9)), dtypes[0], cache_dtype=dtypes[1])
        scene.texts[0][which][token, 0, 2] = torch.nan
        damaged, whole = scene.attend(native(level))
        assert damaged[0, 0, 2].isnan()
        assert damaged[0, 1].isfinite().all(), "the other head"
        assert whole.isfinite().all()


@pytest.mark.parametrize("level", BUILDABLE)
def test_a_nan_over_int8_changes_no_earlier_token(level: str) -> None:
    scene = Scene((2, 2, 16, 4), ((9, 9),), cache_dtype=torch.int8)
    (whole,) = scene.attend(native(level))
    for which in (1, 2):
        scene.texts[0][which][5] = torch.nan
        (found,) = scene.attend(native(level))
        assert torch.equal(found[:5], whole[:5])
        assert found[5:].isnan().all()
