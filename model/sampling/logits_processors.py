"""Token rules of requests, applied to the logits before temperature and filters. The order is vLLM's:

1. `logit_bias` is added.
2. `repetition_penalty` p, for each token of prompt or completion: logit / p (Keskar et al. 2019, CTRL, arXiv
   1909.05858, section 4.1). A negative logit is multiplied instead, because dividing would raise it.
3. `frequency_penalty` f and `presence_penalty` q, for each token that occurs c > 0 times in the completion:
   logit - c * f - q (OpenAI, https://developers.openai.com/api/docs/guides/advanced-usage).
4. Logits become -inf for tokens outside `allowed_token_ids`, and for tokens that would complete a forbidden word or
   end a text too early.

Legend: B sequences, R rows with a mask, V vocabulary, N single logits, anywhere in the batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.sampling.token_constraints import TokenRules
from model.system.device_copy import copy_to_device
from model.system.triton_modules import import_with_triton


def rule_arrays(
    vocab_size: int, rules: Sequence[TokenRules | None], forbidden: Sequence[Sequence[int]]
) -> list[NDArray[Any]]:
    """Return the arrays that `obey` needs on the logits' device; none if no row has a rule or a forbidden token id.

    Tokens that would complete a forbidden word (`TokenRules.forbidden`) are masked only if they are in `forbidden`.
    """
    asked = [(row, its) for row, its in enumerate(rules) if its is not None]
    impossible = [(row, np.array(ids, dtype=np.int64)) for row, ids in enumerate(forbidden) if ids]
    if not asked and not impossible:
        return []
    biased = [(row, its) for row, its in asked if len(its.bias_ids)]
    counted = [(row, its.params, *its.counted) for row, its in asked if its.params.has_penalties]
    allowed = [(row, its.allowed_ids) for row, its in asked if its.allowed_ids is not None]
    penalties = [
        np.array(
            [counts, *np.repeat([[p.repetition_penalty], [p.frequency_penalty], [p.presence_penalty]], len(ids), 1)]
        )
        for _, p, ids, counts in counted
    ]
    return [
        _places(vocab_size, [(row, its.bias_ids) for row, its in biased]),
        np.concatenate([np.empty(0, np.float32), *(its.bias for _, its in biased)]),
        _places(vocab_size, [(row, ids) for row, _, ids, _ in counted]),
        np.concatenate([np.empty((4, 0)), *penalties], axis=1).astype(np.float32),
        np.array([row for row, _ in allowed], dtype=np.int64),
        _places(vocab_size, allowed),
        _places(vocab_size, impossible),
    ]


def obey(logits_BV: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Apply token rules and forbidden token ids to the logits of a batch. tensors: `rule_arrays`, on their device.

    Returns the new logits, which are the given tensor if no row has a rule or forbidden id, and whether any logit
    was set to -inf.
    """
    if not tensors:
        return logits_BV, False
    places_N, bias_N, counted_N, penalties_4N, rows_R, allowed_N, impossible_N = tensors
    logits_BV = logits_BV.clone(memory_format=torch.contiguous_format)
    flat_N = logits_BV.view(-1)
    if len(places_N):  # each token occurs once in a row, so no sum depends on an order
        flat_N[places_N] += bias_N
    if len(counted_N):
        flat_N[counted_N] = _penalized(flat_N[counted_N], *penalties_4N)
    if len(rows_R):
        kept_N = flat_N[allowed_N]
        logits_BV.index_fill_(0, rows_R, -torch.inf)
        flat_N[allowed_N] = kept_N
    if len(impossible_N):
        flat_N.index_fill_(0, impossible_N, -torch.inf)
    return logits_BV, bool(len(rows_R) or len(impossible_N))


def _penalized(
    logits_N: Tensor, counts_N: Tensor, repetition_N: Tensor, frequency_N: Tensor, presence_N: Tensor
) -> Tensor:
    logits_N = torch.where(logits_N > 0, logits_N / repetition_N, logits_N * repetition_N)
    return logits_N - counts_N * frequency_N - (counts_N > 0) * presence_N


def _places(vocab_size: int, rows: Sequence[tuple[int, NDArray[np.int64]]]) -> NDArray[np.int64]:
    """Return the indices in the flattened logits of given token ids. rows: pairs of a row and its token ids."""
    return np.concatenate([np.empty(0, np.int64), *(row * vocab_size + ids for row, ids in rows)])


def mask_logits(logits_BV: Tensor, rows: Sequence[int], words_RW: Tensor, mask_of_B: Tensor | None = None) -> Tensor:
    """Return a copy of the logits with -inf for the tokens of these rows whose bit in `words_RW` is 0.

    rows: distinct and ascending.
    words_RW: int32 on the CPU, a row for each of `rows`, and a bit for each token, the lowest bit first.
    mask_of_B: row of `words_RW` for each sequence, or -1, on the logits' GPU. There, a Triton kernel reads `words_RW`,
        which is `readable_by` the GPU, in place. None: on a CPU.
    """
    kernels = None if mask_of_B is None else import_with_triton("model.gpu.sampling_kernels")
    if kernels is not None:
        masked_BV: Tensor = kernels.masked(logits_BV, mask_of_B, words_RW)
        return masked_BV
    bits_RV = np.unpackbits(~words_RW.numpy().view(np.uint8), axis=1, count=logits_BV.shape[1], bitorder="little")
    arrays = [bits_RV.view(np.bool_), np.array(rows, dtype=np.int64)]
    forbidden_RV, rows_R = copy_to_device(logits_BV.device, arrays)
    if len(rows) == len(logits_BV):  # rows are distinct and in order, so these are all rows
        return logits_BV.masked_fill(forbidden_RV, -torch.inf)
    return logits_BV.index_copy(0, rows_R, logits_BV[rows_R].masked_fill(forbidden_RV, -torch.inf))
