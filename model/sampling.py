"""Drawing the next tokens of a batch, each draw a function of (seed, position) alone.

No generator state exists, so batching, chunking, preemption, prefix hits and replay after a crash cannot change a draw.
One uniform number comes from a counter-based hash, and the token is the inverse of the cumulative distribution there,
with tokens in the order of their ids.

What a request says of single tokens comes first (`model.ruled_logits`), and the most likely token is that of what it
leaves. Filters apply to the distribution after temperature, in this order: `top_k` keeps the k most likely tokens;
`top_p` the smallest set of the most likely ones that holds that share of what is left (Holtzman et al. 2019, arXiv
1904.09751); `min_p` those at least that share as likely as the most likely one (Nguyen et al. 2024, arXiv 2407.01082).
Tokens exactly as likely as the last one kept are kept too: which of equals comes first must not depend on a sort.

Legend: B sequences, R rows, V vocabulary, C candidates.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.ruled_logits import obey
from model.sampling_params import SamplingParams
from model.token_rules import TokenRules

# What is "drawn" where every token is impossible.
NO_TOKEN = -1

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NUCLEUS_CANDIDATES = 256
# Probabilities that are worked on at once on a CPU: what stays in its caches takes a third of the time.
_AT_ONCE = 2**17


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), multiple of 2^-52: SplitMix64 (Steele et al. 2014) of the seed, then of the position."""
    mixed = _mix(_mix(seed) ^ (position * _GOLDEN & _MASK))
    return (mixed >> 12) / 2**52


def _mix(value: int) -> int:
    """SplitMix64's output function of `value` plus one golden-ratio step."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(
    logits_BV: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    forbidden: Sequence[Sequence[int]] = (),
    rules: Sequence[TokenRules | None] = (),
) -> list[int]:
    """Draw one token a row: the ids, which come to the host in one copy; `NO_TOKEN` where the rules leave none.

    See `sample_on_device`.
    """
    ids: list[int] = sample_on_device(logits_BV, params, positions, forbidden=forbidden, rules=rules).tolist()
    return ids


def sample_on_device(
    logits_BV: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    forbidden: Sequence[Sequence[int]] = (),
    rules: Sequence[TokenRules | None] = (),
) -> Tensor:
    """Draw one token a row: int64 ids_B where the logits are; `NO_TOKEN` where the rules leave none.

    The host waits for no result of a GPU, unless some row has rules or not `draws_alone`.

    Args:
        logits_BV: float32, unscaled.
        params: each row's sampling parameters.
        positions: each row's position of the token being drawn, prompt included.
        forbidden: token ids each row may not draw; empty for none at all.
        rules: what else each row's request says of single tokens; empty for nothing at all.

    Raises:
        ValueError: the lengths disagree.
    """
    if not logits_BV.shape[0] == len(params) == len(positions):
        raise ValueError(f"{logits_BV.shape[0]} rows, {len(params)} params, {len(positions)} positions")
    logits_BV, may_leave_none = obey(logits_BV, rules, forbidden)
    drawn = [row for row, param in enumerate(params) if not param.greedy]
    if not drawn and not may_leave_none:
        return torch.as_tensor(_most_likely(logits_BV))
    ids_B = _draw(logits_BV, params, positions, drawn)
    if may_leave_none:
        ids_B = ids_B.masked_fill(logits_BV.amax(dim=-1) == -torch.inf, NO_TOKEN)
    return ids_B


def draws_alone(params: SamplingParams) -> bool:
    """Whether a GPU can draw such a row without telling the host anything before the token.

    How many tokens a nucleus takes is known to nobody; but if only few are left, it is among these.
    """
    return params.greedy or params.top_p >= 1.0 or 0 < params.top_k <= _NUCLEUS_CANDIDATES


def most_likely(logits_BV: Tensor) -> list[int]:
    """The first of each row's highest logits, or of its NaNs."""
    ids: list[int] = _most_likely(logits_BV).tolist()
    return ids


def _most_likely(logits_BV: Tensor) -> NDArray[np.int64] | Tensor:
    """On CPUs NumPy is ten times as fast at it as PyTorch."""
    if logits_BV.is_cpu and not logits_BV.requires_grad:
        highest_B: NDArray[np.int64] = logits_BV.numpy().argmax(axis=-1)
        return highest_B
    return logits_BV.argmax(dim=-1)


def _draw(
    logits_BV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], drawn: Sequence[int]
) -> Tensor:
    """Some token a row, whatever the logits are: int64 ids_B. `drawn` are the rows that are not greedy."""
    everyone = len(drawn) == len(params)
    ids_B = (
        logits_BV.new_empty(len(params), dtype=torch.int64) if everyone else torch.as_tensor(_most_likely(logits_BV))
    )
    count = max(1, _AT_ONCE // logits_BV.shape[1]) if logits_BV.is_cpu else max(1, len(drawn))
    for first in range(0, len(drawn), count):
        rows = drawn[first : first + count]
        rows_B = _on(logits_BV.device, rows)
        some_BV = logits_BV if len(rows) == len(params) else logits_BV[rows_B]
        drawn_B = _draw_at_once(some_BV, [params[row] for row in rows], [positions[row] for row in rows])
        ids_B.index_copy_(0, rows_B, drawn_B)
    return ids_B


def _draw_at_once(logits_BV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    if any(param.temperature != 1.0 for param in params):
        logits_BV = logits_BV / _column([param.temperature for param in params], logits_BV)
    probs_BV = logits_BV.softmax(dim=-1)
    _filter(probs_BV, params)
    return _inverse_cdf(probs_BV, [uniform(p.seed, position) for p, position in zip(params, positions, strict=True)])


def _on(device: torch.device, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers of the host on the device, without waiting for what it computes."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return _on(like.device, values, torch.float32)[:, None]


def _filter(probs_BV: Tensor, params: Sequence[SamplingParams]) -> None:
    """Zero what the filters exclude; the rest is not rescaled, for the inverse CDF scales its target instead."""
    vocab_size = probs_BV.shape[1]
    limits = [min(param.top_k, vocab_size) if param.top_k else vocab_size for param in params]
    if min(limits) < vocab_size:
        candidates_BC = _descending(probs_BV)(max(limit for limit in limits if limit < vocab_size))
        last = [min(limit, candidates_BC.shape[1]) - 1 for limit in limits]
        kth_B1 = candidates_BC.gather(1, _on(probs_BV.device, last)[:, None])
        limited_B1 = _on(probs_BV.device, [limit < vocab_size for limit in limits], torch.bool)[:, None]
        _drop_below(torch.where(limited_B1, kth_B1, torch.zeros_like(kth_B1)), probs_BV)
    if any(param.top_p < 1.0 for param in params):
        top_p_B1, few_hold_it = _column([param.top_p for param in params], probs_BV), all(map(draws_alone, params))
        _drop_below(_nucleus_floor(probs_BV, top_p_B1, few_hold_it=few_hold_it), probs_BV)
    if any(param.min_p > 0.0 for param in params):
        floor_B1 = probs_BV.amax(dim=-1, keepdim=True) * _column([param.min_p for param in params], probs_BV)
        _drop_below(floor_B1, probs_BV)


def _drop_below(floor_B1: Tensor, probs_BV: Tensor) -> None:
    """Zero what is less likely. On CPUs by a product: what depends on each number takes twenty times as long."""
    if probs_BV.is_cpu:
        values_BV = probs_BV.numpy()
        np.multiply(values_BV, values_BV >= floor_B1.numpy(), out=values_BV)
    else:
        probs_BV.masked_fill_(probs_BV < floor_B1, 0.0)


def _descending(probs_BV: Tensor) -> Callable[[int], Tensor]:
    """What gives the C highest of each row, highest first. On CPUs NumPy sorts all faster than PyTorch finds few."""
    if not probs_BV.is_cpu:
        return lambda count: probs_BV.topk(count, dim=-1).values
    sorted_BV = np.sort(probs_BV.numpy(), axis=-1)[:, ::-1]
    return lambda count: torch.from_numpy(sorted_BV[:, :count].copy())


def _nucleus_floor(probs_BV: Tensor, top_p_B1: Tensor, *, few_hold_it: bool) -> Tensor:
    """The probability of the last token each row's nucleus needs: B1. Rows with top_p 1 get 0.

    A nucleus is nearly always small: the most likely tokens are tried first, all only where they do not hold enough.

    Args:
        few_hold_it: no need to look, top_k has left each row no more tokens than are tried, but for some as likely as
            the last of these.
    """
    wanted_B1 = top_p_B1 * probs_BV.sum(dim=-1, keepdim=True)
    whole_B1 = top_p_B1 >= 1.0
    highest = _descending(probs_BV)
    sorted_BC = highest(min(_NUCLEUS_CANDIDATES, probs_BV.shape[1]))
    if not few_hold_it and bool((~whole_B1 & (sorted_BC.sum(dim=-1, keepdim=True) < wanted_B1)).any()):
        sorted_BC = highest(probs_BV.shape[1])
    # Kept: every token before which less than the wanted mass lies.
    needed_BC = sorted_BC.cumsum(dim=-1) - sorted_BC < wanted_B1
    last_B1 = needed_BC.sum(dim=-1, keepdim=True) - 1
    return torch.where(whole_B1, 0.0, sorted_BC.gather(1, last_B1.clamp_(min=0)))


def _inverse_cdf(probs_BV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """The first token whose cumulative probability exceeds the row's share of the total."""
    # float64: a float32 sum over a vocabulary loses the tail, and with it the tokens there.
    cdf_BV = probs_BV.cumsum(dim=-1, dtype=torch.float64)
    shares_B1 = _on(probs_BV.device, uniforms, torch.float64)[:, None]
    ids_B = torch.searchsorted(cdf_BV, shares_B1 * cdf_BV[:, -1:], right=True).squeeze(1)
    # Only of a row that is not a distribution, as NaN weights give: it must not name a token that does not exist.
    return ids_B.clamp_(max=probs_BV.shape[1] - 1)


def top_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: int
) -> list[tuple[float, int, list[tuple[int, float]]]]:
    """Each row's log-probability of its token, that token's rank, and its `num_top` most likely (id, log-probability).

    Of the model's own distribution: before temperature and filters, so that it scores text whatever was sampled. The
    rank is one more than the number of tokens that are more likely: equals share it.
    """
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    ids_R1 = torch.tensor(token_ids, device=logits_RV.device)[:, None]
    chosen_R1 = logprobs_RV.gather(1, ids_R1)
    ranks = ((logprobs_RV > chosen_R1).sum(dim=-1) + 1).tolist()
    chosen = zip(chosen_R1.squeeze(1).tolist(), ranks, strict=True)
    if not num_top:
        return [(logprob, rank, []) for logprob, rank in chosen]
    top = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=-1)
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        (logprob, rank, list(zip(ids, values, strict=True)))
        for (logprob, rank), (ids, values) in zip(chosen, alternatives, strict=True)
    ]
