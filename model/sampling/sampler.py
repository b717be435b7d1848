"""Sampling of a batch's next tokens: each sampled token is a function of its row's logits, seed and position alone.

There is no generator state, so batching, preemption and replay after a crash cannot change a sampled token. A hash of
(seed, position) gives one uniform number. The token is the inverse of the cumulative distribution at that number.

Token rules apply first (`model.sampling.logits_processors`). Then filters apply to the distribution after temperature:

1. `top_k` keeps the k most likely tokens.
2. `top_p` keeps the smallest set of most likely tokens that holds that share of the remaining probability (Holtzman
   et al. 2019, arXiv 1904.09751).
3. `min_p` keeps tokens with at least that share of the most likely token's probability (Nguyen et al. 2024, arXiv
   2407.01082).

Tokens exactly as likely as the last kept token are kept too, so the result does not depend on a sort's order of equals.

Legend: B sequences, R rows, V vocabulary, C candidates.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.kernels.kernel_library import KernelLibrary
from model.sampling.logits_processors import obey, rule_arrays
from model.sampling.params import SamplingParams
from model.sampling.token_constraints import TokenRules
from model.system.device_copy import copy_to_device
from model.system.triton_modules import import_with_triton

NO_TOKEN = -1  # in place of a sampled id if no token is possible
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NUCLEUS_CANDIDATES = 256
_STRIDES = 16  # slices of a row of logits whose maxima bound the highest logits from below
# The structure SampledRow of model/kernels/src/sampling.cpp.
_SAMPLED_ROW = np.dtype(
    [
        ("logits", np.uintp),
        *((name, np.float64) for name in ("temperature", "top_p", "min_p", "uniform")),
        *((name, np.int64) for name in ("top_k", "id")),
    ]
)
# Probabilities filtered and sampled at a time on a CPU. A chunk in the CPU's caches takes a third of the time.
_AT_ONCE = 2**17


def uniform(seed: int, position: int) -> float:
    """Hash a seed and a token's position to a multiple of 2^-52 in [0, 1), by SplitMix64 (Steele et al. 2014)."""
    mixed = _mix(_mix(seed) ^ (position * _GOLDEN & _MASK))
    return (mixed >> 12) / 2**52


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sampling_arrays(
    vocab_size: int,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    forbidden: Sequence[Sequence[int]] = (),
    rules: Sequence[TokenRules | None] = (),
) -> list[NDArray[Any]]:
    """Return the arrays that `sample` needs on the logits' device: the numbers of the random rows, and `rule_arrays`.

    The numbers of a row are its index, temperature, uniform number, `_limit`, top_p and min_p.
    """
    numbers = [
        (row, param.temperature, uniform(param.seed, position), _limit(param, vocab_size), param.top_p, param.min_p)
        for row, (param, position) in enumerate(zip(params, positions, strict=True))
        if not param.greedy
    ]
    return [np.array(numbers, dtype=np.float64).reshape(-1, 6), *rule_arrays(vocab_size, rules, forbidden)]


def sample(
    logits_BV: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    forbidden: Sequence[Sequence[int]] = (),
    rules: Sequence[TokenRules | None] = (),
    kernels: KernelLibrary | None = None,
    tensors: Sequence[Tensor] = (),
) -> Tensor:
    """Sample a token for each row of logits. Return int64 token ids on the logits' device.

    The id is `NO_TOKEN` (-1) for a row whose rules and forbidden ids leave no token. Raises ValueError if the numbers
    of rows, params and positions differ.

    positions: position of each row's next token in its sequence, prompt included.
    forbidden: token ids that must not be sampled, for each row; empty if no row forbids a token. The caller includes
        the tokens that would complete a forbidden word (`TokenRules.forbidden`).
    rules: each row's other token rules; empty if no row has rules.
    kernels: library that samples float32 logits on a CPU; None: PyTorch samples, as on a GPU.
    tensors: `sampling_arrays` of the same arguments, on the logits' device; empty: `sample` copies them there.
    """
    if not logits_BV.shape[0] == len(params) == len(positions):
        lengths = f"{logits_BV.shape[0]} rows, {len(params)} params, {len(positions)} positions"
        raise ValueError(f"sampling needs params and a position for each row of logits; it got {lengths}")
    if not tensors:
        arrays = sampling_arrays(logits_BV.shape[1], params, positions, forbidden=forbidden, rules=rules)
        tensors = copy_to_device(logits_BV.device, arrays)
    logits_BV, may_leave_none = obey(logits_BV, tensors[1:])
    random_rows = [row for row, param in enumerate(params) if not param.greedy]
    if not random_rows and not may_leave_none:
        return torch.as_tensor(most_likely(logits_BV))
    ids_B = _sample_rows(logits_BV, params, random_rows, kernels, tensors[0])
    if may_leave_none:
        ids_B = ids_B.masked_fill(logits_BV.amax(dim=-1) == -torch.inf, NO_TOKEN)
    return ids_B


def most_likely(logits_BV: Tensor) -> NDArray[np.int64] | Tensor:
    """Return the id of each row's highest logit: the first of equal ones, or the first NaN of a row with NaN.

    The ids are a NumPy array if the logits are on a CPU and need no gradient, else a tensor.
    """
    # On CPUs NumPy's argmax is ten times as fast as PyTorch's.
    if logits_BV.is_cpu and not logits_BV.requires_grad:
        highest_B: NDArray[np.int64] = logits_BV.numpy().argmax(axis=-1)
        return highest_B
    return logits_BV.argmax(dim=-1)


def _sample_rows(
    logits_BV: Tensor,
    params: Sequence[SamplingParams],
    random_rows: Sequence[int],
    kernels: KernelLibrary | None,
    numbers_R6: Tensor,
) -> Tensor:
    """Return a sampled token id, int64, for each row of logits.

    random_rows: the rows that are not greedy. numbers_R6: their numbers, by `sampling_arrays`.
    """
    is_whole_batch = len(random_rows) == len(params)
    empty_B = logits_BV.new_empty(len(params), dtype=torch.int64)
    ids_B = empty_B if is_whole_batch else torch.as_tensor(most_likely(logits_BV))
    if kernels is not None:
        ids_B[random_rows] = torch.from_numpy(_sample_natively(logits_BV, numbers_R6.numpy(), random_rows, kernels))
        return ids_B
    # At least a row for each thread: PyTorch's threads share rows.
    at_least = torch.get_num_threads() if logits_BV.is_cpu else max(1, len(random_rows))
    count = max(at_least, _AT_ONCE // logits_BV.shape[1])
    for first in range(0, len(random_rows), count):
        chosen = [params[row] for row in random_rows[first : first + count]]
        numbers_B6 = numbers_R6[first : first + count]
        rows_B = numbers_B6[:, 0].long()
        some_BV = logits_BV if len(chosen) == len(params) else logits_BV[rows_B]
        ids_B.index_copy_(0, rows_B, _sample_chunk(some_BV, chosen, numbers_B6[:, 1:]))
    return ids_B


def _sample_natively(
    logits_BV: Tensor, numbers_R6: NDArray[np.float64], random_rows: Sequence[int], kernels: KernelLibrary
) -> NDArray[np.int64]:
    """Return the sampled ids of the rows `random_rows`, in this order, computed by the native kernel on a CPU."""
    logits_BV = logits_BV.detach()
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    rows_R = np.empty(len(random_rows), dtype=_SAMPLED_ROW)
    start, stride = logits_BV.data_ptr(), logits_BV.stride(0) * logits_BV.element_size()
    rows_R["logits"] = [start + row * stride for row in random_rows]
    for column, name in enumerate(("temperature", "uniform", "top_k", "top_p", "min_p"), start=1):
        rows_R[name] = numbers_R6[:, column]
    function = kernels.function("kvasir_sample", ctypes.c_void_p, *[ctypes.c_int64] * 3)
    function(rows_R.ctypes.data, len(rows_R), logits_BV.shape[1], torch.get_num_threads())
    ids_R: NDArray[np.int64] = rows_R["id"]
    return ids_R


def _limit(param: SamplingParams, vocab_size: int) -> int:
    """Return the number of tokens that `top_k` keeps."""
    return min(param.top_k, vocab_size) if param.top_k else vocab_size


def _sample_chunk(logits_BV: Tensor, params: Sequence[SamplingParams], numbers_B5: Tensor) -> Tensor:
    """Return a sampled token id for each row. numbers_B5: temperature, uniform number, `_limit`, top_p and min_p."""
    temperature_B1, uniform_B1, limit_B1, top_p_B1, min_p_B1 = numbers_B5.split(1, dim=1)
    if any(param.temperature != 1.0 for param in params):
        logits_BV = logits_BV / temperature_B1.float()
    probs_BV = logits_BV.softmax(dim=-1)
    _filter(probs_BV, params, limit_B1.long(), top_p_B1.float(), min_p_B1.float())
    return _inverse_cdf(probs_BV, uniform_B1)


def _filter(
    probs_BV: Tensor, params: Sequence[SamplingParams], limit_B1: Tensor, top_p_B1: Tensor, min_p_B1: Tensor
) -> None:
    """Set to 0, in place, the probabilities that top_k, top_p and min_p exclude. The rest is not rescaled."""
    vocab_size = probs_BV.shape[1]
    limits = [limit for param in params if (limit := _limit(param, vocab_size)) < vocab_size]
    if limits:
        candidates_BC = probs_BV.topk(max(limits), dim=-1).values
        kth_B1 = candidates_BC.gather(1, limit_B1.clamp(max=max(limits)) - 1)
        _drop_below(kth_B1.masked_fill(limit_B1 == vocab_size, 0.0), probs_BV)
    if any(param.top_p < 1.0 for param in params):
        _drop_below(_nucleus_floor(probs_BV, top_p_B1), probs_BV)
    if any(param.min_p > 0.0 for param in params):
        _drop_below(probs_BV.amax(dim=-1, keepdim=True) * min_p_B1, probs_BV)


def _drop_below(floor_B1: Tensor, probs_BV: Tensor) -> None:
    """Set to 0, in place, the probabilities under each row's floor."""
    probs_BV.masked_fill_(probs_BV < floor_B1, 0.0)


def _nucleus_floor(probs_BV: Tensor, top_p_B1: Tensor) -> Tensor:
    """Return the probability of the least likely token in each row's `top_p` nucleus; 0 for rows with top_p 1.

    The `_NUCLEUS_CANDIDATES` most likely tokens are tried first, then the whole vocabulary: by a Triton kernel, so that
    the host of a GPU need not wait, else by a sort.
    """
    wanted_B1 = top_p_B1 * probs_BV.sum(dim=-1, keepdim=True)
    sorted_BC = probs_BV.topk(min(_NUCLEUS_CANDIDATES, probs_BV.shape[1]), dim=-1).values
    is_whole_B1 = top_p_B1 >= 1.0
    is_short_B1 = ~is_whole_B1 & (sorted_BC.sum(dim=-1, keepdim=True) < wanted_B1)
    kernel = None if probs_BV.device.type == "cpu" else import_with_triton("model.gpu.sampling_kernels")
    if kernel is None and bool(is_short_B1.any()):
        sorted_BC = probs_BV.sort(dim=-1, descending=True).values
    # Keep a token if the tokens before it hold less than the wanted mass.
    needed_BC = _running_sums(sorted_BC) - sorted_BC < wanted_B1
    last_B1 = needed_BC.sum(dim=-1, keepdim=True) - 1
    floor_B1 = sorted_BC.gather(1, last_B1.clamp_(min=0)).masked_fill(is_whole_B1, 0.0)
    if kernel is None:
        return floor_B1
    completed_B1: Tensor = kernel.complete_floors(probs_BV, wanted_B1, floor_B1.masked_fill(is_short_B1, -1.0))
    return completed_B1


def _inverse_cdf(probs_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """Return for each row the first token id whose cumulative probability exceeds the row's uniform number * total."""
    # float64: a float32 sum over a vocabulary loses the tail of the distribution.
    cdf_BV = _running_sums(probs_BV.double())
    ids_B = torch.searchsorted(cdf_BV, uniform_B1 * cdf_BV[:, -1:], right=True).squeeze(1)
    # Only NaN rows exceed the vocabulary (from NaN weights, for example): return an id that exists.
    return ids_B.clamp_(max=probs_BV.shape[1] - 1)


def _running_sums(x_BN: Tensor) -> Tensor:
    """Return the sum of each row's first numbers. On a GPU, two equal rows replace a single one.

    PyTorch sums a single row by CUB's scan, whose order of additions, and so the last bits, may vary from run to run.
    """
    return x_BN.cumsum(dim=-1) if x_BN.is_cpu or len(x_BN) > 1 else x_BN.expand(2, -1).cumsum(dim=-1)[:1]


def logprob_table(logits_RV: Tensor, ids_R: Tensor, num_top: int) -> Tensor:
    """Return numbers of each row, float64 R(2 + 2C), on the logits' device: what `read_logprobs` reads.

    They are the logprob and the rank of the row's token id, and the ids and the logprobs of the C = `num_top` most
    likely tokens. Logprobs are the log-softmax of the given logits, without temperature and filters. The rank is one
    more than the number of more likely tokens, so equally likely tokens share a rank.
    """
    if logits_RV.is_cpu:
        with np.errstate(invalid="ignore"):  # NaN and infinity come from damaged weights
            rows = zip(logits_RV.detach().numpy(), ids_R.tolist(), strict=True)
            return torch.from_numpy(
                np.array([_row_logprobs(logits_V, token_id, num_top) for logits_V, token_id in rows])
            )
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    chosen_R1 = logprobs_RV.gather(1, ids_R[:, None])
    ranks_R1 = (logprobs_RV > chosen_R1).sum(dim=-1, keepdim=True) + 1
    top = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=-1)
    return torch.cat([x.double() for x in (chosen_R1, ranks_R1, top.indices, top.values)], dim=1)


def read_logprobs(table: Tensor) -> list[tuple[float, int, list[tuple[int, float]]]]:
    """Return the logprob, the rank, and the (id, logprob) pairs of the most likely tokens of each row of a table."""
    count = table.shape[1] // 2 - 1
    return [
        (logprob, int(rank), list(zip(map(int, rest[:count]), rest[count:], strict=True)))
        for logprob, rank, *rest in table.tolist()
    ]


def _top_ids(values_V: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the ascending ids of all values that reach the `count`-th highest: more than `count` if values are equal.

    NaN counts as highest.
    """
    ids_C, size = np.arange(len(values_V)), len(values_V) // _STRIDES
    if count <= size:
        # At least `count` values reach the `count`-th highest of these maxima.
        maxima = values_V[: size * _STRIDES].reshape(_STRIDES, size).max(axis=0)
        ids_C = np.flatnonzero(~(values_V < np.partition(maxima, size - count)[size - count]))
    values_C = values_V[ids_C]
    reached_C: NDArray[np.int64] = ids_C[~(values_C < np.partition(values_C, -count)[-count])]
    return reached_C


def _row_logprobs(logits_V: NDArray[np.float32], token_id: int, num_top: int) -> list[float]:
    """Return a row of `logprob_table` on a CPU."""
    highest, chosen = float(logits_V.max()), logits_V[token_id]
    log_total = highest + math.log(np.exp(logits_V - highest).sum(dtype=np.float64))
    rank = int(np.count_nonzero(logits_V > chosen)) + 1
    ids_C = _top_ids(logits_V, min(num_top, len(logits_V))) if num_top else np.arange(0)
    ids_C = ids_C[np.argsort(-logits_V[ids_C], kind="stable")[:num_top]]
    return [
        float(chosen) - log_total,
        rank,
        *ids_C.tolist(),
        *(logits_V[ids_C].astype(np.float64) - log_total).tolist(),
    ]
