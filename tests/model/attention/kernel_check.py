"""Comparison of paged attention with the reference implementation, on any device."""

import torch
from torch import Tensor

from model.attention.backends import EagerAttention
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.attention.paged import KernelContext, PagedAttention

# Largest error by dtype, as a fraction of the largest absolute output of the reference implementation. Kernels sum in
# another order and round weights to the dtype.
_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-10}
# Sequences: context lengths, and the number of query tokens of each.
_CONTEXTS = (1, 5, 16, 17, 133, 401, 700)
_QUERIES = (1, 1, 7, 17, 1, 120, 3)


@torch.inference_mode()
def check_kernels(
    backend: PagedAttention,
    context: KernelContext,
    queries: tuple[int, ...] = _QUERIES,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Compare a backend with the reference implementation on random data, with a model's head counts and head size.

    Every window that a layer of the model has is checked, on the device.
    """
    config = context.config
    for window in {config.window(layer) for layer in range(config.num_layers)}:
        form = AttentionForm(layer=0, scale=config.effective_score_scale, window=window, bias=None)
        found, expected = _both_outputs(backend, form, context, queries, cache_dtype)
        assert torch.isfinite(found).all()
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        assert error <= _TOLERANCES[context.dtype], f"window {window}"


def _both_outputs(
    backend: PagedAttention,
    form: AttentionForm,
    context: KernelContext,
    queries: tuple[int, ...],
    cache_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the backend and of the reference implementation, float32 on the CPU.

    The blocks of each sequence are scattered over the cache. Slots after the end of the contexts hold NaN, as an
    earlier sequence with non-finite values may leave them.
    """
    size, config = context.block_size, context.config
    generator = torch.Generator().manual_seed(len(queries))
    needs = [-(-length // size) for length in _CONTEXTS]
    blocks = torch.randperm(sum(needs) + 1, generator=generator)
    spare, owned = int(blocks[-1]), blocks[:-1].split(needs)
    tables_BN = torch.full((len(needs), max(needs)), spare)
    for row, sequence_blocks in enumerate(owned):
        tables_BN[row, : len(sequence_blocks)] = sequence_blocks
    pairs = list(zip(queries, _CONTEXTS, strict=True))
    positions_T = torch.cat([torch.arange(length - query, length) for query, length in pairs])
    row_of_T = torch.arange(len(pairs)).repeat_interleave(torch.tensor(queries))
    metadata = AttentionMetadata(
        query_lengths=queries,
        context_lengths=_CONTEXTS,
        positions_T=positions_T,
        slot_mapping_T=tables_BN[row_of_T, positions_T // size] * size + positions_T % size,
        block_tables_BN=tables_BN,
    ).to(context.device)
    pool_shape = (len(blocks), size, config.num_kv_heads, config.head_dim)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    shapes = [(len(positions_T), n, config.head_dim) for n in heads]
    random = [torch.randn(shape, generator=generator) for shape in (pool_shape, pool_shape, *shapes)]
    known = torch.zeros(len(blocks) * size, dtype=torch.bool)
    for row, length in enumerate(_CONTEXTS):
        positions = torch.arange(length)
        known[tables_BN[row, positions // size] * size + positions % size] = True
    for pool_NPKD in random[:2]:
        pool_NPKD.flatten(0, 1)[~known] = torch.nan
    keys, values, q_THD, k_TKD, v_TKD = (x.to(context.device, context.dtype) for x in random)
    outputs = []
    for attention in (backend, EagerAttention()):
        cache = KVCache(
            config,
            num_blocks=len(blocks),
            block_size=size,
            dtype=context.dtype,
            device=context.device,
            cache_dtype=cache_dtype,
        )
        every_slot = torch.arange(len(known), device=context.device)
        cache.write(0, every_slot, keys.flatten(0, 1), values.flatten(0, 1))
        out_THD = attention.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=cache)
        outputs.append(out_THD.float().cpu())
    return outputs[0], outputs[1]
