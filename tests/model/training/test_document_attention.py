"""Packed document attention equals attention of each document alone, in values and in gradients."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, library
from torch.nn import functional

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.config import ModelConfig
from model.nn.transformer import Transformer
from model.training.attention import DocumentAttention, attend_documents
from model.training.data.batches import Batch, PackedDocuments
from tests.model.configs import ROTARY


def alone(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts: list[int], scale: float) -> Tensor:
    """Return the attention output by the textbook formula, one document at a time, in float32."""
    groups = q_THD.shape[1] // k_TKD.shape[1]
    out = []
    for start, end in itertools.pairwise(starts):
        q_SHD, k_SKD, v_SKD = (x[start:end].float() for x in (q_THD, k_TKD, v_TKD))
        scores_HSS = torch.einsum("qhd,khd->hqk", q_SHD, k_SKD.repeat_interleave(groups, 1)) * scale
        future = torch.ones(end - start, end - start).triu(1).bool()
        weights_HSS = scores_HSS.masked_fill(future, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights_HSS, v_SKD.repeat_interleave(groups, 1)))
    return torch.cat(out)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(5, 1, 64), (4, 2, 32), (3, 3, 16)])
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_values_and_gradients_equal_those_of_each_document_alone(
    dtype: torch.dtype, tolerance: float, heads: int, kv_heads: int, size: int, lengths: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts = [0, *itertools.accumulate(lengths)]
    q_THD, k_TKD, v_TKD = inputs = [
        torch.randn(starts[-1], n, size, generator=generator).to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    grad = torch.randn(starts[-1], heads, size, generator=generator).to(dtype)
    out = attend_documents(*inputs, torch.tensor(starts, dtype=torch.int32), size**-0.5)
    expected = alone(q_THD, k_TKD, v_TKD, starts, size**-0.5)
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad(out, inputs, grad)
    theirs = torch.autograd.grad(expected, inputs, grad.float())
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=2 * tolerance)


def test_the_operator_passes_opcheck_of_pytorch() -> None:
    """PyTorch's opcheck covers shapes, the gradient, and that inputs are neither changed nor returned."""
    inputs = [torch.randn(9, n, 16, requires_grad=True) for n in (4, 2, 2)]
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    library.opcheck(attend_documents, (*inputs, starts, 0.25))


@pytest.mark.parametrize("score_scale", [None, 0.3])
def test_gradients_of_packed_documents_equal_those_of_separate_documents(score_scale: float | None) -> None:
    config = ModelConfig.from_dict({**ROTARY, "vocab_size": 50, "score_scale": score_scale})
    model = Transformer(config, DocumentAttention(ATTENTION_BACKENDS["sdpa"]))
    model.initialize(1)
    lengths = (7, 1, 12)
    starts = [0, *itertools.accumulate(lengths)]
    ids_T, targets_T = torch.randint(50, (2, starts[-1]), generator=torch.Generator().manual_seed(1))
    uncached = AttentionMetadata.uncached(lengths)
    batch = Batch(
        inputs_T=ids_T,
        targets_T=targets_T,
        positions_T=uncached.positions_T,
        starts_N=torch.tensor(starts, dtype=torch.int32),
    )
    gradients = []
    for metadata in (PackedDocuments.of(batch, 12), uncached):
        functional.cross_entropy(model(ids_T, metadata, None), targets_T).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})  # type: ignore[union-attr]
        model.zero_grad()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)
