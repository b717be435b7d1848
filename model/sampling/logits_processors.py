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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.sampling.token_constraints import TokenRules


def obey(
    logits_BV: Tensor, rules: Sequence[TokenRules | None], forbidden: Sequence[Sequence[int]]
) -> tuple[Tensor, bool]:
    """Apply each row's token rules and forbidden token ids to the logits of a batch.

    Returns the new logits, which are the given tensor if no row has a rule, and whether any logit was set to -inf.
    Tokens that would complete a forbidden word (`TokenRules.forbidden`) are masked only if they are in `forbidden`.
    """
    asked = [(row, its) for row, its in enumerate(rules) if its is not None]
    impossible = [(row, np.array(ids, dtype=np.int64)) for row, ids in enumerate(forbidden) if ids]
    if not asked and not impossible:
        return logits_BV, False
    logits_BV = logits_BV.clone()
    if biased := [(row, its) for row, its in asked if len(its.bias_ids)]:
        # Each token occurs once in a row, so no sum depends on an order.
        places = _places(logits_BV, [(row, its.bias_ids) for row, its in biased])
        logits_BV[places] += _column(logits_BV, [its.bias for _, its in biased])
    _penalise(logits_BV, [(row, its) for row, its in asked if its.params.has_penalties])
    allowed = [(row, its.allowed_ids) for row, its in asked if its.allowed_ids is not None]
    if allowed:
        places = _places(logits_BV, allowed)
        kept_N = logits_BV[places]
        logits_BV[[row for row, _ in allowed]] = -torch.inf
        logits_BV[places] = kept_N
    if impossible:
        logits_BV[_places(logits_BV, impossible)] = -torch.inf
    return logits_BV, bool(allowed or impossible)


def _penalise(logits_BV: Tensor, rows: Sequence[tuple[int, TokenRules]]) -> None:
    counted = [its.counted for _, its in rows]
    lengths = [len(ids) for ids, _ in counted]
    if not sum(lengths):
        return
    places = _places(logits_BV, [(row, ids) for (row, _), (ids, _) in zip(rows, counted, strict=True)])
    counts_N = _column(logits_BV, [counts for _, counts in counted])
    repetition_N, frequency_N, presence_N = (
        _column(logits_BV, [np.repeat(np.array([getattr(its.params, name) for _, its in rows], np.float32), lengths)])
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    logits_N = logits_BV[places]
    logits_N = torch.where(logits_N > 0, logits_N / repetition_N, logits_N * repetition_N)
    logits_BV[places] = logits_N - counts_N * frequency_N - (counts_N > 0) * presence_N


def _places(logits_BV: Tensor, rows: Sequence[tuple[int, NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
    """Return two tensors of row and column indices: the logits named by `rows`, pairs of a row and its token ids."""
    rows_N = np.repeat(np.array([row for row, _ in rows], dtype=np.int64), [len(ids) for _, ids in rows])
    columns_N = np.concatenate([ids for _, ids in rows])
    return torch.from_numpy(rows_N).to(logits_BV.device), torch.from_numpy(columns_N).to(logits_BV.device)


def _column(logits_BV: Tensor, parts: Sequence[NDArray[np.float32]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(logits_BV.device)


def mask_logits(logits_BV: Tensor, rows: Sequence[int], allowed_RV: Tensor) -> Tensor:
    """Return a copy of the logits with -inf for the tokens that `allowed_RV` (bool) forbids in these rows.

    rows: distinct and ascending. Raises ValueError unless `allowed_RV` has a row of vocabulary size for each of them.
    """
    if allowed_RV.shape != (len(rows), logits_BV.shape[1]):
        wanted = (len(rows), logits_BV.shape[1])
        raise ValueError(f"allowed_RV must have the shape {wanted} (rows, vocabulary), not {tuple(allowed_RV.shape)}")
    allowed_RV = allowed_RV.to(logits_BV.device, non_blocking=True)
    if len(rows) == len(logits_BV):  # rows are distinct and in order, so these are all rows
        return logits_BV.masked_fill(~allowed_RV, -torch.inf)
    rows_R = torch.tensor(rows, device=logits_BV.device)
    return logits_BV.index_copy(0, rows_R, logits_BV[rows_R].masked_fill(~allowed_RV, -torch.inf))
