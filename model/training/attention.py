"""Training attention over packed documents: causal attention within each document.

A GPU runs PyTorch's varlen flash attention (Dao et al. 2022, arXiv 2205.14135). A CPU runs matrix products over blocks
of 256 queries, which take half the time of PyTorch's flash attention on CPUs (docs/training-log.md). The shapes of the
operator's tensors do not depend on the document boundaries, so a training step is compiled only once.

Legend: T packed tokens, N + 1 document boundaries, H query heads, K key/value heads, G = H / K query heads per
key/value head, D head dimension, Q queries and S keys of a `_Part`, X = G * Q.
"""

import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, library

from model.attention.backends import AttentionBackend
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.training.data.batches import PackedDocuments

_QUERIES = 256  # the fastest of 128, 256 and 512 for long documents
_MASK_SIZES = 512


class DocumentAttention:
    """Attention backend of a training step with `PackedDocuments` metadata, without attention bias and sliding window.

    others: backend that computes the attention of batches with any other metadata.
    """

    def __init__(self, others: AttentionBackend) -> None:
        self._others = others
        # Imports PyTorch's compiler, which takes seconds and needs the extra packages of training on a GPU.
        has_cuda = torch.cuda.is_available()
        self._varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn if has_cuda else None

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
        if not isinstance(metadata, PackedDocuments):
            return self._others.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)
        assert form.bias is None
        assert form.window is None
        starts_N, longest = metadata.starts_N, metadata.max_length
        if not q_THD.is_cuda or q_THD.dtype not in (torch.bfloat16, torch.float16):
            out_THD: Tensor = attend_documents(q_THD, k_TKD, v_TKD, starts_N, form.scale)
            return out_THD
        assert self._varlen_attn is not None
        attended = self._varlen_attn(
            q_THD, k_TKD, v_TKD, starts_N, starts_N, longest, longest,
            scale=form.scale, window_size=(-1, 0), enable_gqa=True,
        )  # fmt: skip
        assert isinstance(attended, Tensor)  # the logsumexp is not requested
        return attended


@library.custom_op("kvasir::attend_documents", mutates_args=())
def attend_documents(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts_N: Tensor, scale: float) -> Tensor:
    """Return the causal attention output, softmax(q·k * scale)·v, of packed tokens, each within its own document.

    starts_N: index of the first token of each document, and as last entry T, the number of tokens.
    """
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    for part in _parts(q_THD, k_TKD, v_TKD, starts_N, scale):
        mixed_XD = part.weights_GQS.flatten(0, 1) @ part.v_SD
        out_THD[part.queries, part.heads] = mixed_XD.unflatten(0, part.weights_GQS.shape[:2]).transpose(0, 1)
    return out_THD


@library.custom_op("kvasir::attend_documents_backward", mutates_args=())
def attend_documents_backward(
    grad_THD: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts_N: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attend_documents` for its queries, keys and values. grad_THD: gradient of its output."""
    grad_q_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    grad_k_TKD, grad_v_TKD = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k_TKD, v_TKD))
    for part in _parts(q_THD, k_TKD, v_TKD, starts_N, scale):
        weights_GQS = part.weights_GQS
        grad_XD = grad_THD[part.queries, part.heads].transpose(0, 1).flatten(0, 1)
        of_weights_GQS = (grad_XD @ part.v_SD.T).unflatten(0, weights_GQS.shape[:2])
        of_scores_GQS = torch._softmax_backward_data(of_weights_GQS, weights_GQS, -1, weights_GQS.dtype)
        of_scores_XS = of_scores_GQS.flatten(0, 1)
        of_queries_GQD = (of_scores_XS @ part.k_SD * scale).unflatten(0, weights_GQS.shape[:2])
        grad_q_THD[part.queries, part.heads] = of_queries_GQD.transpose(0, 1)
        grad_k_TKD[part.keys, part.kv_head] += of_scores_XS.T @ part.scaled_XD
        grad_v_TKD[part.keys, part.kv_head] += weights_GQS.flatten(0, 1).T @ grad_XD
    return grad_q_THD, grad_k_TKD.to(k_TKD.dtype), grad_v_TKD.to(v_TKD.dtype)


class _Part(NamedTuple):
    """Attention weights of a block of queries of one document, for the query heads that share one key/value head.

    queries, keys: indices of the tokens. scaled_XD: the queries times the attention scale.
    """

    queries: slice
    keys: slice
    heads: slice
    kv_head: int
    scaled_XD: Tensor
    k_SD: Tensor
    v_SD: Tensor
    weights_GQS: Tensor


def _parts(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts_N: Tensor, scale: float) -> Iterator[_Part]:
    """Yield the attention weights of all queries in blocks. The scores of one block fit into the CPU cache."""
    num_kv_heads = k_TKD.shape[1]
    groups = q_THD.shape[1] // num_kv_heads
    for start, end in itertools.pairwise(starts_N.tolist()):
        for first in range(start, end, _QUERIES):
            stop = min(end, first + _QUERIES)
            queries, keys, num_keys = slice(first, stop), slice(start, stop), stop - start
            for kv_head in range(num_kv_heads):
                heads = slice(kv_head * groups, (kv_head + 1) * groups)
                scaled_XD = (q_THD[queries, heads] * scale).transpose(0, 1).flatten(0, 1)
                k_SD, v_SD = k_TKD[keys, kv_head], v_TKD[keys, kv_head]
                scores_GQS = (scaled_XD @ k_SD.T).view(groups, stop - first, num_keys)
                mask = _causal_mask(-(-num_keys // _MASK_SIZES) * _MASK_SIZES, scores_GQS.dtype, scores_GQS.device)
                scores_GQS += mask[first - start : num_keys, :num_keys]
                weights_GQS = torch.softmax(scores_GQS, -1)
                yield _Part(queries, keys, heads, kv_head, scaled_XD, k_SD, v_SD, weights_GQS)


@functools.lru_cache(maxsize=4)
def _causal_mask(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a causal mask of shape [size, size] to add to attention scores: -inf above the diagonal, else 0."""
    return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu(1)


@attend_documents.register_fake
def _(q_THD: Tensor, *_: object) -> Tensor:
    return q_THD.new_empty(q_THD.shape)


@attend_documents_backward.register_fake
def _(grad_THD: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q_THD.new_empty(q_THD.shape), k_TKD.new_empty(k_TKD.shape), v_TKD.new_empty(v_TKD.shape)


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_THD):  # type: ignore[no-untyped-def]
    return *attend_documents_backward(grad_THD, *ctx.saved_tensors, ctx.scale), None, None


attend_documents.register_autograd(_backward, setup_context=_save_for_backward)
