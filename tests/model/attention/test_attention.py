"""Backends `sdpa` and `eager` agree, with and without KV-cache, for all head counts, lengths and chunk sizes."""

import functools
import itertools

import pytest
import torch
from torch import Tensor

from model.attention.backends import EagerAttention
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata
from tests.model.configs import VARIANTS, attention_layers, build
from tests.model.kernel_libraries import BACKENDS
from tests.model.paging import BLOCK_SIZE, PagedRun

HEADS = [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]
PLAIN = AttentionForm(layer=0, scale=0.25, window=None, bias=None)  # heads of 16
# 1, around block boundaries (4 slots), and the full context of the variants (64)
LENGTHS = [1, 3, 4, 5, 8, 63, 64]


@functools.cache
def uncached(variant: str, lengths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return random sequences, and their logits by the reference implementation without a cache."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(300, (length,), generator=generator) for length in lengths]
    oracle = build(VARIANTS[variant], "eager")
    return sequences, [oracle(ids, AttentionMetadata.uncached((len(ids),)), None) for ids in sequences]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("lengths", [*((length,) for length in LENGTHS), (5, 5), (1, 64, 7), (1, 1, 1)])
def test_uncached_backends_agree(num_heads: int, num_kv_heads: int, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(sum(lengths))
    q_THD = torch.randn(sum(lengths), num_heads, 16)
    k_TKD, v_TKD = torch.randn(2, sum(lengths), num_kv_heads, 16)
    metadata = AttentionMetadata.uncached(lengths)
    eager, sdpa = (
        BACKENDS[name].attend(q_THD, k_TKD, v_TKD, form=PLAIN, metadata=metadata, kv_cache=None)
        for name in ("eager", "sdpa")
    )
    torch.testing.assert_close(sdpa, eager, atol=1e-5, rtol=1e-5)


def test_eager_attention_equals_the_formula_for_one_head() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 4).unbind(0)
    rows = []
    for token in range(3):
        scores = torch.tensor([float(q[token] @ k[past]) / 2.0 for past in range(token + 1)])
        weights = scores.exp() / scores.exp().sum()
        rows.append(sum(weight * v[past] for past, weight in enumerate(weights)))
    form = AttentionForm(layer=0, scale=0.5, window=None, bias=None)
    out = EagerAttention().attend(
        q[:, None], k[:, None], v[:, None], form=form, metadata=AttentionMetadata.uncached((3,)), kv_cache=None
    )
    torch.testing.assert_close(out[:, 0], torch.stack(rows))


def test_multi_head_equals_pytorchs_own_module() -> None:
    """Compare with an independent implementation: torch.nn.MultiheadAttention with the same weights."""
    model = build(VARIANTS["gpt2"], "eager")
    ours = attention_layers(model)[0]
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    theirs.in_proj_weight, theirs.in_proj_bias = (torch.nn.Parameter(t) for t in (ours.qkv.weight, ours.qkv.bias))
    theirs.out_proj.weight, theirs.out_proj.bias = ours.out.weight, ours.out.bias
    x_TE = torch.randn(9, 32)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    with torch.no_grad():
        expected, _ = theirs(x_TE[None], x_TE[None], x_TE[None], attn_mask=future, need_weights=False)
    actual = ours(x_TE, None, metadata=AttentionMetadata.uncached((9,)), kv_cache=None, kv_of={})
    torch.testing.assert_close(actual, expected[0], atol=1e-5, rtol=1e-5)


CHUNKS = ((4, 33), (7, 64), (64, 64))
# Every variant with every backend, token by token and in chunks of one of three sizes.
CACHED = [
    (variant, backend, *chunks)
    for place, variant in enumerate(VARIANTS)
    for number, backend in enumerate(BACKENDS)
    for chunks in ((1, 33), CHUNKS[(place + number) % len(CHUNKS)])
]


@pytest.mark.parametrize(("variant", "backend", "chunk", "longest"), CACHED)
def test_a_prompt_in_cached_chunks_equals_the_uncached_pass(
    variant: str, backend: str, chunk: int, longest: int
) -> None:
    """Ragged sequences in chunks, through the paged cache, give the logits of one uncached pass."""
    sequences, expected = uncached(variant, (1, 4, 5, 17, longest))
    run = PagedRun(build(VARIANTS[variant], backend), sequences)
    for actual, wanted in zip(run.forward_in_chunks(chunk), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=1e-5)


def test_padding_blocks_do_not_change_the_output() -> None:
    """Garbage in blocks behind the context of a sequence does not affect its output."""
    config = VARIANTS["rotary-gqa"]
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(300, (length,), generator=generator) for length in (2, 30)]
    clean, dirty = PagedRun(build(config), sequences), PagedRun(build(config), sequences)
    for pool in (*dirty.cache.keys, *dirty.cache.values):
        pool.normal_(0, 100)
    for expected, actual in zip(clean.forward_in_chunks(1), dirty.forward_in_chunks(1), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_blocks_before_the_window_are_not_read(num_queries: int) -> None:
    """The blocks hold NaN, which even a weight of 0 would propagate."""
    context_length, window = 30, 5
    config = VARIANTS["rotary-gqa"]
    cache = KVCache(config, num_blocks=8, block_size=BLOCK_SIZE, dtype=torch.float32, device="cpu")
    first_seen = (context_length - num_queries - window + 1) // BLOCK_SIZE
    for pool in (*cache.keys, *cache.values):
        pool.normal_()
        pool[:first_seen] = torch.nan
    positions = torch.arange(context_length - num_queries, context_length)
    metadata = AttentionMetadata(
        query_lengths=(num_queries, 1),
        context_lengths=(context_length, 2),
        positions_T=torch.cat((positions, torch.tensor([1]))),
        slot_mapping_T=torch.cat((positions, torch.tensor([7 * BLOCK_SIZE + 3]))),
        block_tables_BN=torch.tensor([list(range(8)), [6] * 8]),
    )
    q, k, v = (torch.randn(num_queries + 1, heads, 8) for heads in (4, 2, 2))
    form = AttentionForm(layer=0, scale=1.0, window=window, bias=None)
    out = BACKENDS["sdpa"].attend(q, k, v, form=form, metadata=metadata, kv_cache=cache)
    assert first_seen == 5 + (num_queries == 1)
    assert out.isfinite().all()


def test_bfloat16_stays_close_to_the_float32_reference() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, heads, 16).bfloat16() for heads in (4, 2, 2))
    metadata = AttentionMetadata.uncached((33, 7))
    eager, *others = (
        backend.attend(q, k, v, form=PLAIN, metadata=metadata, kv_cache=None) for backend in BACKENDS.values()
    )
    assert len(others) == len(BACKENDS) - 1
    for other in others:
        assert other.dtype == eager.dtype == torch.bfloat16
        torch.testing.assert_close(other.float(), eager.float(), atol=2e-2, rtol=2e-2)


def test_cache_gathers_what_was_written() -> None:
    config = VARIANTS["rotary-gqa"]
    cache = KVCache(config, num_blocks=6, block_size=BLOCK_SIZE, dtype=torch.float32, device="cpu")
    k_TKD, v_TKD = torch.randn(2, 6, 2, 8)
    table = [4, 1]
    slots = [table[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(6)]
    cache.write(1, torch.tensor(slots), k_TKD, v_TKD)
    k_SKD, v_SKD = cache.gather(1, cache.slots_of(torch.tensor(table))[:6])
    torch.testing.assert_close(k_SKD, k_TKD)
    torch.testing.assert_close(v_SKD, v_TKD)
    assert not cache.keys[0].any()
    assert cache.num_bytes == 6 * BLOCK_SIZE * config.kv_bytes_per_token(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_layer_that_shares_keys_and_values_has_no_memory_of_its_own(dtype: torch.dtype) -> None:
    config, slots = VARIANTS["gemma4"], torch.tensor([5, 2])
    cache = KVCache(config, num_blocks=3, block_size=4, dtype=torch.float32, device="cpu", cache_dtype=dtype)
    assert cache.num_bytes == 3 * 4 * config.kv_bytes_per_token(dtype.itemsize)
    assert [cache.is_owner(layer) for layer in range(4)] == [True, True, False, False]
    for owner, reader, size in ((0, 2, 8), (1, 3, 16)):
        k_TKD, v_TKD = torch.randn(2, 2, 2, size)
        cache.write(owner, slots, k_TKD, v_TKD)
        written = cache.gather(owner, slots)
        cache.write(reader, slots, v_TKD, k_TKD)
        for mine, other in zip(written, cache.gather(reader, slots), strict=True):
            assert torch.equal(mine, other)
            assert mine.any()


@pytest.mark.parametrize("sizes", list(itertools.product([0, -1, 3], [0, -2, 4]))[:-1])
def test_cache_rejects_sizes_of_zero(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="needs num_blocks and block_size over 0"):
        KVCache(VARIANTS["gpt2"], num_blocks=sizes[0], block_size=sizes[1], dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("queries", "contexts", "tokens"), [((1,), (1, 2), 1), ((0,), (1,), 0), ((3,), (2,), 3), ((2,), (2,), 3)]
)
def test_metadata_rejects_inconsistent_lengths(
    queries: tuple[int, ...], contexts: tuple[int, ...], tokens: int
) -> None:
    with pytest.raises(ValueError, match=r"lengths|length must|positions"):
        AttentionMetadata(query_lengths=queries, context_lengths=contexts, positions_T=torch.zeros(tokens))
