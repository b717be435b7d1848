"""GPU attention over a paged cache: every kernel for a CPU equals the reference implementation."""

import dataclasses

import pytest
import torch
from torch import Tensor

from model.attention import paged
from model.attention.backends import EagerAttention
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata, RaggedView
from model.attention.paged import (
    CHUNK_KERNELS,
    DECODE_KERNELS,
    KernelContext,
    PagedAttention,
    choose,
    fits,
    gathered,
    one_by_one,
)
from model.nn.transformer import Transformer
from tests.model.attention.kernel_check import check_kernels
from tests.model.attention.test_attention import uncached
from tests.model.configs import VARIANTS, attention_layers, build
from tests.model.paging import PagedRun

PLACE = KernelContext(config=VARIANTS["rotary-gqa"], device=torch.device("cpu"), dtype=torch.float32, block_size=16)
WINDOWS = KernelContext(
    config=VARIANTS["window-one-layer"], device=torch.device("cpu"), dtype=torch.float32, block_size=4
)


def with_backend(variant: str, backend: PagedAttention) -> Transformer:
    model = build(VARIANTS[variant])
    for attention in attention_layers(model):
        attention.backend = backend
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_a_prompt_in_cached_chunks_equals_the_uncached_pass(variant: str, chunk: int) -> None:
    """With chunks of 7, some steps compute one token of a sequence and several tokens of another sequence."""
    model = with_backend(variant, PagedAttention(gathered, one_by_one))
    sequences, expected = uncached(variant, (1, 4, 8, 17, 33))
    for actual, wanted in zip(PagedRun(model, sequences).forward_in_chunks(chunk), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("most", "groups"), [(1, [16, 17, 401, 700]), (33, [33, 401, 700]), (434, [434, 700]), (1134, [1134])]
)
def test_keys_and_values_of_long_contexts_are_copied_in_groups(
    monkeypatch: pytest.MonkeyPatch, most: int, groups: list[int]
) -> None:
    copied: list[int] = []

    def noted(q_XHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, form: AttentionForm, view: RaggedView) -> Tensor:
        assert (view.query_starts[-1], view.context_starts[-1]) == (len(q_XHD), len(k_SKD))
        copied.append(len(k_SKD))
        return one_by_one(q_XHD, k_SKD, v_SKD, form, view)

    monkeypatch.setattr(paged, "GATHERED_POSITIONS", most)
    check_kernels(PagedAttention(gathered, noted), PLACE)
    assert copied == groups


def test_decoding_takes_lengths_from_positions_alone() -> None:
    """A captured CUDA graph has no lengths: wrong lengths in the metadata change nothing."""
    config = VARIANTS["rotary-gqa"]
    cache = KVCache(config, num_blocks=4, block_size=4, dtype=torch.float32, device="cpu")
    for pool in (*cache.keys, *cache.values):
        pool.normal_()
    q, k, v = (torch.randn(2, heads, 8) for heads in (4, 2, 2))
    tables = torch.tensor([[0, 1, 3], [2, 3, 3]])
    form = AttentionForm(layer=1, scale=0.3, window=None, bias=None)
    outputs = []
    for lengths, backend in (((6, 3), EagerAttention()), ((1, 1), PagedAttention(gathered, one_by_one))):
        metadata = AttentionMetadata(
            query_lengths=(1, 1),
            context_lengths=lengths,
            positions_T=torch.tensor([5, 2]),
            slot_mapping_T=torch.tensor([5, 10]),
            block_tables_BN=tables,
        )
        outputs.append(backend.attend(q, k, v, form=form, metadata=metadata, kv_cache=cache))
    torch.testing.assert_close(outputs[1], outputs[0])


def test_a_ragged_view_locates_chunks_and_contexts() -> None:
    tables = torch.tensor([[3, 9], [1, 9], [4, 2]])
    slots = torch.zeros(6, dtype=torch.int64)
    batch = AttentionMetadata(
        query_lengths=(2, 1, 3),
        context_lengths=(3, 2, 6),
        positions_T=torch.tensor([1, 2, 1, 3, 4, 5]),
        slot_mapping_T=slots,
        block_tables_BN=tables,
    )
    view = batch.ragged_view
    assert view.decodes is not None
    tokens, positions, decode_tables = view.decodes
    assert (tokens, positions.tolist(), decode_tables.tolist()) == (slice(2, 3), [1], [[1, 9]])
    assert isinstance(view.tokens_X, Tensor)
    assert view.tokens_X.tolist() == [0, 1, 3, 4, 5]
    assert batch.chunk_slots(4).tolist() == [12, 13, 14, 16, 17, 18, 19, 8, 9]
    assert (view.query_starts.tolist(), view.context_starts.tolist()) == ([0, 2, 5], [0, 3, 9])
    assert view.query_starts.dtype == view.context_starts.dtype == torch.int32
    chunk = dataclasses.replace(batch, query_lengths=(6,), context_lengths=(6,))
    assert (chunk.ragged_view.decodes, chunk.ragged_view.tokens_X) == (None, slice(0, 6))


def varlen_oracle(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, past_starts: Tensor, scale: float, left: int
) -> Tensor:
    """Causal attention of concatenated sequences as documented by flash attention, token by token."""
    out = torch.empty_like(q)
    groups = q.shape[1] // k.shape[1]
    bounds = zip(*(x.tolist() for x in (starts[:-1], starts[1:], past_starts[:-1], past_starts[1:])), strict=True)
    for first, end, past_first, past_end in bounds:
        for token in range(first, end):
            last = past_end - (end - token)
            begin = past_first if left < 0 else max(past_first, last - left)
            for head in range(q.shape[1]):
                keys, values = (x[begin : last + 1, head // groups] for x in (k, v))
                out[token, head] = ((keys @ q[token, head]) * scale).softmax(0) @ values
    return out


@pytest.mark.parametrize("place", [PLACE, WINDOWS], ids=["plain", "windows"])
def test_flash_attention_gets_the_chunks_and_their_contexts(
    place: KernelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest: list[tuple[int, int]] = []

    def forward(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, context_starts: Tensor, max_q: int, max_k: int,
        dropout: float, is_causal: bool, returns_mask: bool,
        *, scale: float, window_size_left: int, window_size_right: int, **options: int,
    ) -> tuple[Tensor]:  # fmt: skip
        longest.append((max_q, max_k))
        assert (dropout, is_causal, returns_mask) == (0.0, window_size_left < 0, False)
        assert (window_size_right, options) == (0, paged._FLASH_OPTIONS)
        return (varlen_oracle(q, k, v, starts, context_starts, scale, window_size_left),)

    monkeypatch.setattr(paged, "_flash_forward", forward)
    check_kernels(PagedAttention(gathered, paged.flash_varlen), place)
    assert set(longest) == {(120, 700)}


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_whole_prompts_are_read_from_the_cache_only_if_it_rounds(cache_dtype: torch.dtype | None) -> None:
    are_copies: list[bool] = []

    def noted(q_XHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, form: AttentionForm, view: RaggedView) -> Tensor:
        are_copies.append(k_SKD.storage_offset() == 0)  # the keys of the first sequence, which decodes, are before
        return one_by_one(q_XHD, k_SKD, v_SKD, form, view)

    check_kernels(PagedAttention(gathered, noted), PLACE, (1, 5, 16, 17, 133, 401, 700), cache_dtype)
    assert are_copies == [cache_dtype is not None]


def test_without_a_gpu_pytorch_kernels_are_chosen_and_reasons_are_reported() -> None:
    chosen = choose(PLACE)
    assert (chosen.decode, chosen.chunks) == ("gathered", "one by one")
    assert str(chosen) == "paged (decode: gathered, prompts: one by one)"
    assert [reason.partition(": ")[0] for reason in chosen.left_out] == ["triton", "varlen"]
    assert chosen.left_out[1] == "varlen: the kernel needs a CUDA device"


def shifted(q_BHD: Tensor, form: AttentionForm, positions_B: Tensor, tables_BN: Tensor, kv_cache: KVCache) -> Tensor:
    return gathered(q_BHD, form, positions_B, tables_BN, kv_cache) + 0.01


@pytest.mark.parametrize("block_size", [1, 16, 1024])
def test_the_kernel_check_supports_any_block_size_and_finds_errors(block_size: int) -> None:
    place = KernelContext(config=PLACE.config, device=PLACE.device, dtype=torch.bfloat16, block_size=block_size)
    check_kernels(PagedAttention(gathered, one_by_one), place)
    with pytest.raises(AssertionError, match="window None"):
        check_kernels(PagedAttention(shifted, one_by_one), PLACE)


def test_paged_attention_does_not_support_biases_or_average_attention() -> None:
    assert fits(VARIANTS["rotary-gqa"])
    assert fits(VARIANTS["gpt2"])
    for variant in ("average", "alibi", "relative-bias", "disentangled"):
        assert not fits(VARIANTS[variant])


def test_the_last_kernel_of_each_table_supports_every_device() -> None:
    assert DECODE_KERNELS["gathered"](PLACE) is gathered
    assert CHUNK_KERNELS["one by one"](PLACE) is one_by_one
    assert list(DECODE_KERNELS)[-1] == "gathered"
    assert list(CHUNK_KERNELS)[-1] == "one by one"
