"""Native kernel with a float16 cache of a float32 model: equal to the reference at every level, batch-invariant."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

from model.attention.backends import EagerAttention
from model.attention.kv_cache import KVCache, rounded
from model.attention.metadata import AttentionForm, AttentionMetadata
from tests.model.attention.test_native_attention import (
    BEST,
    FORM,
    LENGTHS,
    SHAPES,
    Scene,
    assert_close,
    biases_of,
    native,
)
from tests.model.configs import VARIANTS
from tests.model.kernel_libraries import BUILDABLE

HALF = torch.float16
# Four or more query heads per key are computed as products while keys are read, and with packed keys.
SHARED = [(4, 1, 32, 16), (8, 1, 64, 16)]
CASES = [(level, shape) for level in BUILDABLE for shape in ([*SHAPES, *SHARED] if level in BEST else SHAPES[:3])]


@pytest.mark.parametrize(("level", "shape"), CASES)
@torch.no_grad()
def test_attention_over_float16_equals_the_reference(level: str, shape: tuple[int, int, int, int]) -> None:
    scene, biases = Scene(shape, LENGTHS, cache_dtype=HALF), biases_of(shape)
    exact = Scene(shape, LENGTHS)
    for window, name in ((None, "none"), (100, "none"), (5, "relative"), (None, "alibi")):
        form = AttentionForm(layer=1, scale=0.2, window=window, bias=biases[name])
        found = scene.attend(native(level), form)
        assert_close(found, scene.attend(EagerAttention(), form), torch.float32)
        unrounded = exact.attend(EagerAttention(), form)
        assert max(float((a - b).abs().max()) for a, b in zip(found, unrounded, strict=True)) > 1e-4


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHARED[0]])
@pytest.mark.parametrize("level", BUILDABLE)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(
    level: str, shape: tuple[int, int, int, int], set_threads: Callable[[int], None]
) -> None:
    scene = Scene(shape, (*LENGTHS, (1, 1600)), cache_dtype=HALF)
    form = AttentionForm(layer=1, scale=0.2, window=None, bias=biases_of(shape)["alibi"])
    set_threads(1)
    together = scene.attend(native(level), form)
    for threads, row in ((1, 0), (1, 5), (2, 6), (5, 8), (2, 9), (5, 9)):
        set_threads(threads)
        (alone,) = scene.attend(native(level), form, [row])
        assert torch.equal(alone, together[row]), (threads, scene.lengths[row])


@pytest.mark.parametrize(("shape", "window"), [(SHAPES[0], 70), (SHAPES[1], None), (SHAPES[2], None)])
@pytest.mark.parametrize("level", BUILDABLE)
def test_decoded_tokens_and_prompt_chunks_have_the_same_bits(
    level: str, shape: tuple[int, int, int, int], window: int | None
) -> None:
    """A token attends to its own rounded key and value, whether they were written earlier or in this step."""
    form = AttentionForm(layer=1, scale=0.2, window=window, bias=None)
    length = 600
    (whole,) = Scene(shape, ((length, length),), cache_dtype=HALF).attend(native(level), form)
    for queries, context in ((1, 1), (2, 64), (1, 65), (13, 130), (1, 513), (1, length)):
        scene = Scene(shape, ((queries, length),), cache_dtype=HALF)
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
    assert torch.equal(cache.values_LNPKD[1, :, 0].view(torch.int16), held.view(torch.int16))
    assert torch.equal(cache.keys_LNPKD[1, :, 0].view(torch.int16), held.flip(2).view(torch.int16))
    assert torch.equal(out_THD, held.float())


@pytest.mark.parametrize("level", BUILDABLE)
def test_a_nan_in_a_key_or_value_gives_nan(level: str) -> None:
    for size in (16, 7):
        scene = Scene((2, 2, size, 4), ((1, 9), (1, 9)), cache_dtype=HALF)
        scene.texts[0][1][8, 0, 2] = torch.nan  # written by this step
        damaged, whole = scene.attend(native(level))
        assert damaged[0, 0].isnan().all()
        assert damaged[0, 1].isfinite().all(), "the other head"
        assert whole.isfinite().all()
