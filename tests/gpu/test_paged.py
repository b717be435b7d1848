"""Paged attention kernels on a CUDA device: equal to the reference, batch-invariant, also in captured graphs."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm
from model.attention.paged import (
    CHUNK_KERNELS,
    DECODE_KERNELS,
    KernelContext,
    PagedAttention,
    choose,
    gathered,
    one_by_one,
)
from model.config import ModelConfig
from service.engine.execution.cuda_graphs import CudaCapture
from tests.model.attention.kernel_check import check_kernels
from tests.model.configs import ROTARY

pytestmark = pytest.mark.gpu

HEADS = [(12, 2, 128), (32, 8, 128), (8, 8, 64), (6, 6, 64), (5, 5, 48), (4, 1, 256), (7, 1, 80), (4, 2, 8)]
WINDOWS: list[dict[str, Any]] = [{}, {"sliding_window": 90, "global_layers": [1]}]
CONTEXTS = [1, 2, 16, 17, 127, 128, 129, 1000, 5000]


def config(heads: tuple[int, int, int], **changes: Any) -> ModelConfig:
    num_heads, kv_heads, size = heads
    sizes = {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": size, "hidden_size": num_heads * size}
    return ModelConfig.from_dict({**ROTARY, "max_context_length": 8192, **sizes, **changes})


def place(heads: tuple[int, int, int], dtype: torch.dtype, block_size: int = 16, **changes: Any) -> KernelContext:
    return KernelContext(
        config=config(heads, **changes), device=torch.device("cuda"), dtype=dtype, block_size=block_size
    )


@pytest.mark.parametrize("way", DECODE_KERNELS)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_kernels_equal_the_reference(
    way: str, dtype: torch.dtype, cache_dtype: torch.dtype | None, heads: tuple[int, int, int]
) -> None:
    for changes in WINDOWS:
        where = place(heads, dtype, **changes)
        check_kernels(PagedAttention(DECODE_KERNELS[way](where), one_by_one), where, (1,) * 7, cache_dtype)


@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_kernels_support_blocks_of_any_size(block_size: int) -> None:
    where = place((12, 2, 128), torch.bfloat16, block_size)
    check_kernels(PagedAttention(DECODE_KERNELS["triton"](where), CHUNK_KERNELS["varlen"](where)), where)


@pytest.mark.parametrize("heads", [heads for heads in HEADS if heads[2] % 8 == 0])
def test_prompts_by_flash_attention_equal_the_reference(heads: tuple[int, int, int]) -> None:
    for changes, cache_dtype in itertools.product(WINDOWS, (None, torch.int8)):
        where = place(heads, torch.bfloat16, **changes)
        check_kernels(PagedAttention(gathered, CHUNK_KERNELS["varlen"](where)), where, cache_dtype=cache_dtype)


def test_the_fast_kernels_are_chosen() -> None:
    """The GPU that runs these tests supports the fastest kernels, so a fallback to slower kernels is an error."""
    chosen = choose(place((12, 2, 128), torch.bfloat16))
    assert (chosen.decode, chosen.chunks, chosen.left_out) == ("triton", "varlen", ())
    assert choose(place((12, 2, 128), torch.float32)).decode == "triton"


def decoding(where: KernelContext, cache_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor, KVCache]:
    """Return queries, positions, block tables and a KV-cache for sequences of the lengths `CONTEXTS`."""
    shape = where.config
    needs = [-(-context // where.block_size) for context in CONTEXTS]
    cache = KVCache(
        shape,
        num_blocks=sum(needs),
        block_size=where.block_size,
        dtype=where.dtype,
        device=where.device,
        cache_dtype=cache_dtype,
    )
    slots = torch.arange(sum(needs) * where.block_size, device=where.device)
    for layer in range(shape.num_layers):
        new = torch.randn((2, len(slots), shape.num_kv_heads, shape.head_dim), device=where.device).to(where.dtype)
        cache.write(layer, slots, *new)
    blocks = torch.randperm(sum(needs), device=where.device).split(needs)
    tables = torch.zeros((len(needs), max(needs)), dtype=torch.int64, device=where.device)
    for row, sequence_blocks in enumerate(blocks):
        tables[row, : len(sequence_blocks)] = sequence_blocks
    queries = torch.randn((len(needs), shape.num_heads, shape.head_dim), device=where.device).to(where.dtype)
    return queries, torch.tensor(CONTEXTS, device=where.device) - 1, tables, cache


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("heads", HEADS[:4])
def test_other_sequences_in_the_batch_change_no_bit(
    heads: tuple[int, int, int], cache_dtype: torch.dtype | None, window: int | None
) -> None:
    where = place(heads, torch.bfloat16)
    way = DECODE_KERNELS["triton"](where)
    q, positions, tables, cache = decoding(where, cache_dtype)
    form = AttentionForm(layer=1, scale=0.1, window=window, bias=None)
    whole = way(q, form, positions, tables, cache)
    for row, context in enumerate(CONTEXTS):
        width = -(-context // where.block_size)
        rows = slice(row, row + 1)
        alone = way(q[rows], form, positions[rows], tables[rows, :width].contiguous(), cache)
        assert torch.equal(alone, whole[rows]), context


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_a_cuda_graph_replay_reads_its_current_inputs(name: str) -> None:
    where = place((12, 2, 128), torch.bfloat16)
    way = DECODE_KERNELS[name](where)
    q, positions, tables, cache = decoding(where)
    form = AttentionForm(layer=0, scale=0.1, window=None, bias=None)
    still_q, still_positions, still_tables = torch.zeros_like(q), torch.zeros_like(positions), torch.zeros_like(tables)
    replay = CudaCapture()(lambda: way(still_q, form, still_positions, still_tables, cache))
    for shift in range(3):
        still_q.copy_(q.roll(shift, 0))
        still_positions.copy_(positions.roll(shift, 0))
        still_tables.copy_(tables.roll(shift, 0))
        expected = way(q.roll(shift, 0), form, positions.roll(shift, 0), tables.roll(shift, 0), cache)
        assert torch.equal(replay(), expected)


def test_decoding_a_long_context_equals_the_reference() -> None:
    where = dataclasses.replace(place((4, 2, 64), torch.float32))
    context, size = 100_000, where.block_size
    blocks = context // size
    cache = KVCache(where.config, num_blocks=blocks, block_size=size, dtype=where.dtype, device=where.device)
    for pool in (*cache.keys, *cache.values):
        pool.normal_()
    q = torch.randn((1, 4, 64), device="cuda")
    inputs = (torch.tensor([context - 1], device="cuda"), torch.randperm(blocks, device="cuda")[None], cache)
    form = AttentionForm(layer=0, scale=0.3, window=None, bias=None)
    expected = gathered(q, form, *inputs)
    torch.testing.assert_close(DECODE_KERNELS["triton"](where)(q, form, *inputs), expected, atol=2e-5, rtol=1e-4)
