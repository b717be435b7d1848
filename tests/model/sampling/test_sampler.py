"""Sampling against a naive implementation, and against its nominal distribution."""

import bisect
import itertools
import math
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling import sampler
from model.sampling.params import SamplingParams
from model.sampling.sampler import logprob_table, most_likely, read_logprobs, uniform
from model.system.triton_modules import import_with_triton
from tests.model.kernel_libraries import BUILDABLE, library_of

VOCAB = 50


def sample(logits_BV: torch.Tensor, params: Any, positions: Any, **constraints: Any) -> list[int]:
    """Sample by PyTorch, which GPUs use too, and by the kernels of every CPU level. All must agree."""
    ids: list[int] = sampler.sample(logits_BV, params, positions, **constraints).tolist()
    for level in BUILDABLE:
        found = sampler.sample(logits_BV, params, positions, **constraints, kernels=library_of(level))
        assert found.tolist() == ids, level
    return ids


def top_logprobs(logits_RV: torch.Tensor, token_ids: Any, num_top: int) -> list[tuple[float, int, list[Any]]]:
    """Return for each row the logprob and rank of its token, and the (id, logprob) pairs of the most likely tokens."""
    return read_logprobs(logprob_table(logits_RV, torch.tensor(list(token_ids)), num_top))


def naive_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """Return the distribution after the filters, in plain Python, written from the docstring of `sampler`."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / params.temperature) for logit in logits]
    total = sum(weights)
    probs = [weight / total for weight in weights]
    if 0 < params.top_k < len(probs):
        floor = sorted(probs, reverse=True)[params.top_k - 1]
        probs = [p if p >= floor else 0.0 for p in probs]
    if params.top_p < 1.0:
        wanted, held, floor = params.top_p * sum(probs), 0.0, 0.0
        for p in sorted(probs, reverse=True):
            if held >= wanted:
                break
            held, floor = held + p, p
        probs = [p if p >= floor else 0.0 for p in probs]
    floor = params.min_p * max(probs)
    probs = [p if p >= floor else 0.0 for p in probs]
    total = sum(probs)
    return [p / total for p in probs]


def naive_sample(logits: list[float], params: SamplingParams, position: int) -> int:
    if params.greedy:
        return logits.index(max(logits))
    share, held = uniform(params.seed, position), 0.0
    for token, p in enumerate(naive_distribution(logits, params)):
        held += p
        if held > share:
            return token
    raise AssertionError("the distribution does not sum to 1")


sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, VOCAB, 10**6]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(sampling_params, st.integers(0, 10**6)), min_size=1, max_size=6), st.integers(0, 1000))
def test_output_equals_a_naive_implementation_in_any_batch(
    rows: list[tuple[SamplingParams, int]], logits_seed: int
) -> None:
    logits = 3 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(logits_seed))
    drawn = sample(logits, [params for params, _ in rows], [position for _, position in rows])
    expected = [
        naive_sample(row, params, position) for row, (params, position) in zip(logits.tolist(), rows, strict=True)
    ]
    assert drawn == expected
    alone = [sample(logits[i : i + 1], [params], [position])[0] for i, (params, position) in enumerate(rows)]
    assert drawn == alone


FILTERS: list[dict[str, Any]] = [
    {"top_k": 50},
    {"top_k": 3000},
    {"top_p": 0.95},
    {"top_p": 0.5, "min_p": 0.001},
    {"top_p": 0.999999},
    {"min_p": 0.05, "temperature": 0.5},
    {"top_k": 300, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("filters", FILTERS)
def test_filters_of_a_large_vocabulary_equal_a_naive_implementation(filters: dict[str, Any], spread: float) -> None:
    """A spread of 4 makes a narrow nucleus, one of 0.5 a nucleus of most tokens."""
    logits = spread * torch.randn(1, 40_000, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(max_tokens=1, seed=9, **filters)
    cdf = list(itertools.accumulate(naive_distribution(logits[0].tolist(), params)))
    drawn = [sample(logits, [params], [position])[0] for position in range(50)]
    assert drawn == [bisect.bisect_right(cdf, uniform(params.seed, position)) for position in range(50)]


@pytest.mark.parametrize("filters", FILTERS)
def test_kernels_sample_rows_of_any_layout_from_a_large_vocabulary(filters: dict[str, Any]) -> None:
    """Rows of a wider matrix, as the logits of a padded vocabulary are, and rows whose numbers are not adjacent."""
    logits = 2 * torch.randn(3, 262_150, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(max_tokens=1, seed=9, **filters)] * 3
    expected = sample(logits[:, :262_144].contiguous(), params, [1, 2, 3])
    assert sample(logits[:, :262_144], params, [1, 2, 3]) == expected
    assert sample(logits[:, :262_144].T.contiguous().T, params, [1, 2, 3]) == expected


def test_top_logprobs_of_a_large_vocabulary_equal_pytorchs() -> None:
    logits = torch.randn(3, 262_144, generator=torch.Generator().manual_seed(3))
    logits[2, 7] = logits[2].max() + 1
    logits[2, 200_000] = logits[2, 7]  # of equally likely tokens, the first is reported first
    found = top_logprobs(logits, [0, 1, 2], 20)
    best = logits.double().log_softmax(dim=-1).topk(20)
    for row, (_, _, top) in enumerate(found):
        assert [value for _, value in top] == pytest.approx(best.values[row].tolist(), abs=1e-6)
        if row < 2:
            assert [token for token, _ in top] == best.indices[row].tolist()
    assert [token for token, _ in found[2][2]][:2] == [7, 200_000]
    assert found == [top_logprobs(logits[row : row + 1], [row], 20)[0] for row in range(3)]


def test_logprobs_of_a_prompt_copy_no_batch_of_logits() -> None:
    logits = torch.randn(64, 20_000, generator=torch.Generator().manual_seed(3))
    tracemalloc.start()
    top_logprobs(logits, range(64), 5)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < logits.nbytes / 8


FILTERED = [
    SamplingParams(max_tokens=1, temperature=0.0, top_p=0.5),
    SamplingParams(max_tokens=1, temperature=0.7, min_p=0.1),
    SamplingParams(max_tokens=1, temperature=1.0, top_k=300),
    SamplingParams(max_tokens=1, temperature=1.0, top_k=20, top_p=0.8),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9),
    SamplingParams(max_tokens=1, temperature=1.0, top_k=257, top_p=0.9, min_p=0.01),
]


@pytest.mark.triton
def test_sampling_on_a_gpu_reads_no_device_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the meta device hold no values: reading a value raises an error."""
    sampling_kernels = import_with_triton("model.gpu.sampling_kernels")
    monkeypatch.setattr(sampling_kernels, "complete_floors", lambda probs_BV, wanted_B1, floor_B1: floor_B1)
    for some in (FILTERED, *([params] for params in FILTERED)):
        ids = sampler.sample(torch.zeros(len(some), 1000, device="meta"), some, range(len(some)))
        assert (ids.device.type, tuple(ids.shape)) == ("meta", (len(some),))


@pytest.mark.parametrize("top_p", [0.3, 0.999])
def test_a_nucleus_keeps_tokens_as_likely_as_the_last_kept_token(top_p: float) -> None:
    """All of the 400 equally likely tokens pass a top_k of 20: more than the 256 candidates tried first."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_k=20, top_p=top_p, seed=1)
    logits_BV = torch.zeros(1, 600)
    logits_BV[0, 400:] = -9.0
    drawn = {sample(logits_BV, [params], [position])[0] for position in range(300)}
    assert drawn <= set(range(400))
    assert max(drawn) > 300


def test_the_chunk_size_changes_no_sampled_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU processes as many rows as fit into its caches; some rows are greedy."""
    logits = 3 * torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(max_tokens=1, temperature=float(row % 3), top_p=0.9, seed=row) for row in range(11)]
    drawn = sample(logits, params, range(11))
    monkeypatch.setattr(sampler, "_AT_ONCE", 3 * VOCAB)
    assert sample(logits, params, range(11)) == drawn
    rows = zip(logits.tolist(), params, strict=True)
    assert drawn == [naive_sample(row, param, position) for position, (row, param) in enumerate(rows)]


def test_a_nucleus_wider_than_the_candidates_is_sorted_whole() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, :4000] += torch.linspace(0.5, 0.0, 4000)
    params = SamplingParams(max_tokens=1, top_p=0.9, seed=5)
    drawn = [sample(logits, [params], [position])[0] for position in range(12)]
    assert drawn == [naive_sample(logits[0].tolist(), params, position) for position in range(12)]


@pytest.mark.parametrize(
    "change", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 1.7, "top_k": 9}]
)
def test_samples_follow_the_distribution(change: dict[str, Any]) -> None:
    """Apply Pearson's chi-squared test to the tokens sampled at 20,000 positions.

    The seed is fixed, so the outcome is fixed. A new seed would raise a false alarm with probability 1e-6.
    """
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(7))
    params = SamplingParams(max_tokens=1, seed=11, **change)
    count = 20_000
    drawn = sample(logits.expand(count, -1), [params] * count, list(range(count)))
    observed = torch.bincount(torch.tensor(drawn), minlength=VOCAB).tolist()
    expected = [count * p for p in naive_distribution(logits.tolist(), params)]
    assert all(seen == 0 for seen, wanted in zip(observed, expected, strict=True) if wanted == 0)
    cells = [(seen, wanted) for seen, wanted in zip(observed, expected, strict=True) if wanted >= 5]
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    # Wilson & Hilferty 1931: the cube root of chi-squared / degrees of freedom is nearly normal; 4.75 sigma is
    # 1e-6.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_uniform_is_a_function_of_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.015  # 5 standard errors
    # Samples of adjacent seeds and adjacent positions must be independent.
    assert uniform(1, 2) != uniform(2, 1)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-20, 1e-9, 1e-5, 1e-4])
def test_tiny_temperatures_sample_the_most_likely_token(temperature: float) -> None:
    logits = 10 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.9, seed=3)
    assert sample(logits, [params] * 3, [0, 1, 2]) == logits.argmax(-1).tolist()


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]), min_size=1, max_size=40))
def test_most_likely_equals_pytorchs_argmax(row: list[float]) -> None:
    """Covers equal maxima, infinities and NaN, and rows that are not contiguous."""
    logits = torch.tensor([row, row[::-1], row])
    expected = logits.argmax(dim=-1).tolist()
    assert most_likely(logits).tolist() == expected
    assert most_likely(logits.T.contiguous().T).tolist() == expected
    assert most_likely(logits.clone().requires_grad_()).tolist() == expected


def test_rows_of_nan_sample_an_existing_token() -> None:
    """NaN logits come from damaged weights, and must not make the step fail for the other sequences."""
    logits = torch.full((2, VOCAB), torch.nan)
    logits[1, 3:] = 1.0
    for change in ({"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}):
        params = SamplingParams(max_tokens=1, **change)
        for kernels in (None, *map(library_of, BUILDABLE)):
            drawn = sampler.sample(logits, [params] * 2, [0, 1], kernels=kernels)
            assert all(0 <= token < VOCAB for token in drawn.tolist())
    assert all(math.isnan(logprob) for logprob, _, _ in top_logprobs(logits, [0, 1], 3))


def test_forbidden_tokens_are_never_sampled() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0], [5.0, 1.0, 0.0]])
    greedy, random = SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1, seed=1)
    before = logits.clone()
    for position in range(200):
        ids = sample(logits, [greedy, random], [position] * 2, forbidden=[[0], [0, 1]])
        assert ids == [1, 2]
    assert torch.equal(logits, before)


def test_top_logprobs_do_not_depend_on_sampling_parameters() -> None:
    logits = torch.randn(3, VOCAB)
    expected = torch.log_softmax(logits.double(), dim=-1)
    for row, (logprob, rank, top) in enumerate(top_logprobs(logits, [4, 5, 6], 3)):
        assert logprob == pytest.approx(float(expected[row, 4 + row]), abs=1e-5)
        assert rank == 1 + logits[row].argsort(descending=True).tolist().index(4 + row)
        best = expected[row].topk(3)
        assert [token for token, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert [top for _, _, top in top_logprobs(logits, [0, 0, 0], 0)] == [[], [], []]


def test_equally_likely_tokens_share_a_rank() -> None:
    logits = torch.tensor([[2.0, 3.0, 2.0, 1.0, -torch.inf, -torch.inf]] * 6)
    assert [rank for _, rank, _ in top_logprobs(logits, range(6), 0)] == [2, 1, 2, 4, 5, 5]


def test_arguments_of_different_lengths_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 rows, 1 params, 2 positions"):
        sample(torch.zeros(2, 5), [SamplingParams(max_tokens=1)], [0, 0])
