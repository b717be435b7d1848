"""A model with fused kernels computes and caches the same: in Triton's interpreter, on the CPU."""

import sys
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.attention.paged import PagedAttention, gathered, one_by_one
from model.gpu.fused_modules import fuse
from model.nn.layers import Norm, RMSNorm
from model.nn.transformer import Transformer
from model.system.triton_modules import import_with_triton
from tests.model.configs import VARIANTS, attention_layers, build

BLOCK = 4
# Sequences of 6 and of 3 tokens in blocks 2, 0 and 1: a step of prompts, then a step of one token each.
STEPS = (((5, 2), (5, 2)), ((1, 1), (6, 3)))
TABLES = torch.tensor([[2, 0], [1, 1]])


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Triton kernels in Triton's interpreter, as the environment variable TRITON_INTERPRET does at an import."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        InterpretedFunction(kernel.fn).run(*args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(
        JITFunction, "__call__", lambda kernel, *args, **its: InterpretedFunction(kernel.fn)(*args, **its)
    )


def run(model: Transformer, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> tuple[list[Tensor], KVCache]:
    """Return the hidden states of both steps, and the KV-cache."""
    cache = KVCache(model.config, num_blocks=3, block_size=BLOCK, dtype=dtype, device="cpu", cache_dtype=cache_dtype)
    outputs = []
    for queries, contexts in STEPS:
        parts = [torch.arange(end - count, end) for count, end in zip(queries, contexts, strict=True)]
        rows = torch.tensor([0, 1]).repeat_interleave(torch.tensor(queries))
        positions = torch.cat(parts)
        metadata = AttentionMetadata(
            query_lengths=queries,
            context_lengths=contexts,
            positions_T=positions,
            slot_mapping_T=TABLES[rows, positions // BLOCK] * BLOCK + positions % BLOCK,
            block_tables_BN=TABLES,
        )
        outputs.append(model.hidden(7 * rows + positions, metadata, cache).float())
    return outputs, cache


@pytest.mark.triton
@pytest.mark.parametrize(
    ("variant", "dtype", "cache_dtype"),
    [
        ("rotary-gqa", torch.float32, None),
        ("hunyuan", torch.bfloat16, torch.float16),
        ("gpt2", torch.float32, torch.int8),
    ],
)
@torch.inference_mode()
def test_a_fused_model_computes_and_caches_the_same(
    variant: str, dtype: torch.dtype, cache_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret(monkeypatch)
    plain, fused = (build(VARIANTS[variant]).to(dtype) for _ in range(2))
    triton_decode: Any = import_with_triton("model.attention.triton_decode")
    # The interpreter's matrix products know no bfloat16.
    decode = gathered if dtype is torch.bfloat16 else triton_decode.attend
    for attention in attention_layers(fused):
        attention.backend = PagedAttention(decode, one_by_one)
    fuse(fused)
    assert all(module.fused is not None for module in fused.modules() if isinstance(module, Norm))
    assert list(fused.state_dict()) == list(plain.state_dict())
    (expected, expected_cache), (found, cache) = (run(model, dtype, cache_dtype) for model in (plain, fused))
    tolerance = 1e-4 if dtype is torch.float32 and cache_dtype is None else 3e-2
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 4, 5, 6])  # the slots of all tokens
    for layer in range(plain.config.num_layers):
        for ours, theirs in zip(cache.gather(layer, slots), expected_cache.gather(layer, slots), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


@pytest.mark.triton
@torch.inference_mode()
def test_norm_and_activation_quantize_as_a_linear_layer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    fused_kernels: Any = import_with_triton("model.gpu.fused_kernels")
    quantized_kernels: Any = import_with_triton("model.gpu.quantized_kernels")
    x, added = torch.randn((2, 3, 48), generator=torch.Generator().manual_seed(1))
    _, normed = fused_kernels.add_norm(RMSNorm(48, 1e-6), x, added, torch.int8)
    for out in (normed, fused_kernels.silu_product(torch.cat((x, added), 1), torch.int8)):
        expected = quantized_kernels.quantize_rows(out, torch.int8, 48)
        assert all(map(torch.equal, out.quantized, expected))
    assert not hasattr(fused_kernels.silu_product(x[:, :36], torch.int8), "quantized")  # 18 numbers are padded


def test_without_triton_or_in_float64_the_model_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse(double := build(VARIANTS["rotary-gqa"]).double())
    monkeypatch.setitem(cast(dict[str, Any], sys.modules), "model.gpu.fused_kernels", None)
    fuse(single := build(VARIANTS["rotary-gqa"]))
    for model in (double, single):
        assert all(module.fused is None for module in model.modules() if isinstance(module, Norm))
