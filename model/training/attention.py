"""Attention for training: whole documents of any length side by side, each seeing only itself.

The kernels are PyTorch's flash attention (Dao et al. 2022, arXiv 2205.14135): on a GPU its form for sequences of
different lengths, on a CPU, which has none, document by document. Both stand behind one operator with a shape that
does not depend on where documents end, so that a compiled training step is compiled once.

Legend: T packed tokens, N + 1 starts of documents, H query heads, K key/value heads, G = H / K, D head dimension.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.attention.form import AttentionForm
from model.attention.interface import AttentionBackend
from model.attention.metadata import AttentionMetadata
from model.kv_cache import KVCache
from model.training.packing import PackedDocuments


class DocumentAttention:
    """See `model.attention.interface.AttentionBackend`. Forms of nothing but a scale; `others` attends whatever is not
    `PackedDocuments`, such as texts that are measured."""

    def __init__(self, others: AttentionBackend) -> None:
        self._others = others

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
        """Equal to causal attention of each document on its own, within float rounding."""
        if not isinstance(metadata, PackedDocuments):
            return self._others.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)
        assert form.bias is None
        assert form.window is None
        factor = form.scale * q_THD.shape[-1] ** 0.5  # the kernels divide by the root of D themselves
        scaled_THD = q_THD if math.isclose(factor, 1.0) else q_THD * factor
        out_THD: Tensor = attend_documents(scaled_THD, k_TKD, v_TKD, metadata.starts_N, metadata.max_length)[0]
        return out_THD


@torch.library.custom_op("kvasir::attend_documents", mutates_args=())
def attend_documents(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts_N: Tensor, max_length: int
) -> tuple[Tensor, Tensor]:
    """Causal attention by softmax(q·k / sqrt(D)), in each document.

    Returns the attended values, THD, and the log of each query's sum of exponentials, HT float32.

    starts_N: int32, where each document starts, and where the last one ends, which is T.
    """
    if _has_varlen_kernel(q_THD):
        out_THD, logsumexp_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD, k_TKD, v_TKD, starts_N, starts_N, max_length, max_length, 0.0, True, False
        )
        return out_THD, logsumexp_HT
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    logsumexp_HT = q_THD.new_empty((q_THD.shape[1], q_THD.shape[0]), dtype=torch.float32)
    for span in _documents(starts_N):
        if q_THD.device.type == "cpu":
            q_KGSD, k_KGSD, v_KGSD = _grouped(q_THD[span], k_TKD[span], v_TKD[span])
            out_KGSD, sums_KGS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_KGSD, k_KGSD, v_KGSD, 0.0, True
            )
            out_THD[span] = out_KGSD.flatten(0, 1).transpose(0, 1)
            logsumexp_HT[:, span] = sums_KGS.flatten(0, 1)
        else:
            out_THD[span] = _attend(q_THD[span], k_TKD[span], v_TKD[span])
    return out_THD, logsumexp_HT


@torch.library.custom_op("kvasir::attend_documents_backward", mutates_args=())
def attend_documents_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    out_THD: Tensor,
    logsumexp_HT: Tensor,
    starts_N: Tensor,
    max_length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    if _has_varlen_kernel(q_THD):
        nothing = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)  # the state of a dropout that is not there
        grads = torch.ops.aten._flash_attention_backward(
            grad_THD.contiguous(), q_THD, k_TKD, v_TKD, out_THD, logsumexp_HT, starts_N, starts_N,
            max_length, max_length, 0.0, True, nothing, nothing,
        )  # fmt: skip
        return grads[0], grads[1], grads[2]
    grad_q_THD, grad_k_TKD, grad_v_TKD = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_TKD, v_TKD)
    )
    for span in _documents(starts_N):
        q, k, v, grad = q_THD[span], k_TKD[span], v_TKD[span], grad_THD[span]
        if q_THD.device.type == "cpu":
            q_KGSD, k_KGSD, v_KGSD = _grouped(q, k, v)
            groups = tuple(q_KGSD.shape[:2])
            grad_KGSD, out_KGSD = (torch.unflatten(x.transpose(0, 1), 0, groups) for x in (grad, out_THD[span]))
            sums_KGS = torch.unflatten(logsumexp_HT[:, span], 0, groups).contiguous()
            of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_KGSD, q_KGSD, k_KGSD, v_KGSD, out_KGSD, sums_KGS, 0.0, True
            )
            grad_q_THD[span] = of_q.flatten(0, 1).transpose(0, 1)
            grad_k_TKD[span], grad_v_TKD[span] = (x.sum(1).transpose(0, 1) for x in (of_k, of_v))
        else:
            with torch.enable_grad():
                q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
                grads = torch.autograd.grad(_attend(q, k, v), (q, k, v), grad)
            grad_q_THD[span], grad_k_TKD[span], grad_v_TKD[span] = grads
    return grad_q_THD, grad_k_TKD, grad_v_TKD


def _has_varlen_kernel(q_THD: Tensor) -> bool:
    return q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16)


def _documents(starts_N: Tensor) -> Iterator[slice]:
    starts = starts_N.tolist()
    for start, end in itertools.pairwise(starts):
        if end > start:
            yield slice(start, end)


def _grouped(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One document as KGSD, where the query heads of a group see the same keys through a stride of 0."""
    num_kv_heads, groups = k_SKD.shape[1], q_SHD.shape[1] // k_SKD.shape[1]
    q_KGSD = torch.unflatten(q_SHD.transpose(0, 1), 0, (num_kv_heads, groups))
    k_KGSD, v_KGSD = (x.transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for x in (k_SKD, v_SKD))
    return q_KGSD, k_KGSD, v_KGSD


def _attend(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> Tensor:
    q_1HSD, k_1KSD, v_1KSD = (x.transpose(0, 1)[None] for x in (q_SHD, k_SKD, v_SKD))
    gqa = q_SHD.shape[1] != k_SKD.shape[1]
    out_1HSD = scaled_dot_product_attention(q_1HSD, k_1KSD, v_1KSD, is_causal=True, enable_gqa=gqa)
    return out_1HSD[0].transpose(0, 1)


@attend_documents.register_fake
def _(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts_N: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    shape_HT = (q_THD.shape[1], q_THD.shape[0])
    return q_THD.new_empty(q_THD.shape), q_THD.new_empty(shape_HT, dtype=torch.float32)


@attend_documents_backward.register_fake
def _(grad_THD: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q_THD.new_empty(q_THD.shape), k_TKD.new_empty(k_TKD.shape), v_TKD.new_empty(v_TKD.shape)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q_THD, k_TKD, v_TKD, starts_N, ctx.max_length = inputs
    ctx.save_for_backward(q_THD, k_TKD, v_TKD, *output, starts_N)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_THD, _):  # type: ignore[no-untyped-def]
    *tensors, starts_N = ctx.saved_tensors
    grads = attend_documents_backward(grad_THD, *tensors, starts_N, ctx.max_length)
    return *grads, None, None


attend_documents.register_autograd(_backward, setup_context=_keep)
