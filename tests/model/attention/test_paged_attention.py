"""GPU attention over a paged cache: every kernel for a CPU equals the reference implementation."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.backends import EagerAttention
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.attention.paged import (
    CHUNK_KERNELS,
    DECODE_KERNELS,
    KernelContext,
    PagedAttention,
    VarlenChunks,
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
        positions_T=slots,
        slot_mapping_T=slots,
        block_tables_BN=tables,
    )
    view = batch.ragged_view(4)
    assert view.decodes is not None
    tokens, positions, decode_tables = view.decodes
    assert (tokens.tolist(), positions.tolist(), decode_tables.tolist()) == ([2], [1], [[1, 9]])
    assert view.tokens_X.tolist() == [0, 1, 3, 4, 5]
    assert view.slots_S.tolist() == [12, 13, 14, 16, 17, 18, 19, 8, 9]
    assert (view.query_starts.tolist(), view.context_starts.tolist()) == ([0, 2, 5], [0, 3, 9])
    assert view.query_starts.dtype == view.context_starts.dtype == torch.int32
    chunk = dataclasses.replace(batch, query_lengths=(6,), context_lengths=(6,))
    assert chunk.ragged_view(4).decodes is None


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
def test_varlen_chunks_equal_the_reference(place: KernelContext) -> None:
    given: list[dict[str, Any]] = []

    def function(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float, window_size: tuple[int, int], enable_gqa: bool, num_splits: int,
    ) -> Tensor:  # fmt: skip
        given.append({"max_q": max_q, "max_k": max_k, "gqa": enable_gqa, "splits": num_splits})
        assert window_size[1] == 0
        return varlen_oracle(query, key, value, cu_seq_q, cu_seq_k, scale, window_size[0])

    check_kernels(PagedAttention(gathered, VarlenChunks(function)), place)
    assert given[0] == {"max_q": 120, "max_k": 700, "gqa": True, "splits": 1}


def test_varlen_chunks_pass_only_the_options_that_this_pytorch_has() -> None:
    """PyTorch 2.11 has neither `enable_gqa` nor `num_splits`."""

    def function(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float, window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        return varlen_oracle(query, key, value, cu_seq_q, cu_seq_k, scale, window_size[0])

    check_kernels(PagedAttention(gathered, VarlenChunks(function)), PLACE)


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
