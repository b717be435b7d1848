"""Token rules equal a naive implementation that reads all earlier tokens of the sequence at each step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling.logits_processors import obey, rule_arrays
from model.sampling.params import SamplingParams
from model.sampling.sampler import NO_TOKEN, sample
from model.sampling.token_constraints import TokenRules
from tests.model.sampling.test_sampler import top_logprobs

VOCAB = 12

_ids = st.integers(0, VOCAB - 1)
_params = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 1.0]),
    presence_penalty=st.sampled_from([0.0, 2.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(_ids, st.floats(-100, 100, width=32), max_size=3).map(lambda bias: tuple(bias.items())),
    allowed_token_ids=st.lists(_ids, max_size=4).map(tuple),
    bad_word_ids=st.lists(st.lists(_ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
)
_rows = st.tuples(_params, st.lists(_ids, min_size=1, max_size=6), st.lists(_ids, max_size=20))
Row = tuple[SamplingParams, list[int], list[int]]


def naive(logits: list[float], params: SamplingParams, prompt: list[int], completion: list[int]) -> list[float]:
    """Apply the rules to one row in plain Python, from the description in `model.sampling.logits_processors`."""
    left = [logit + dict(params.logit_bias).get(token, 0.0) for token, logit in enumerate(logits)]
    for token in {*prompt, *completion}:
        penalty = params.repetition_penalty
        left[token] = left[token] / penalty if left[token] > 0 else left[token] * penalty
    for token in set(completion):
        left[token] -= completion.count(token) * params.frequency_penalty + params.presence_penalty
    for token in range(VOCAB):
        would_be = [*completion, token]
        is_bad = any(would_be[-len(word) :] == list(word) for word in params.bad_word_ids)
        if is_bad or (params.allowed_token_ids and token not in params.allowed_token_ids):
            left[token] = float("-inf")
    return left


def rules_of(params: SamplingParams, prompt: list[int], completion: list[int]) -> TokenRules | None:
    return TokenRules(params, prompt, completion) if params.has_token_rules else None


def apply(logits_BV: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, list[TokenRules | None]]:
    rules = [rules_of(*row) for row in rows]
    arrays = rule_arrays(VOCAB, rules, [() if its is None else its.forbidden for its in rules])
    return obey(logits_BV, list(map(torch.from_numpy, arrays)))[0], rules


@settings(max_examples=300, deadline=None)
@given(st.lists(_rows, min_size=1, max_size=5), st.integers(0, 1000))
def test_output_equals_a_naive_implementation_in_any_batch(rows: list[Row], seed: int) -> None:
    logits = 3 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    left, _ = apply(logits, rows)
    assert torch.equal(logits, before), "the model's own logits stay"
    expected = torch.tensor([naive(row, *its) for row, its in zip(logits.tolist(), rows, strict=True)])
    torch.testing.assert_close(left, expected, atol=1e-4, rtol=1e-5)
    for row, its in enumerate(rows):
        assert torch.equal(apply(logits[row : row + 1], [its])[0][0], left[row]), "to the bit, whoever is beside it"


@settings(max_examples=100, deadline=None)
@given(_rows, st.integers(0, 20))
def test_appended_and_rebuilt_rules_are_equal(row: Row, cut: int) -> None:
    """After a crash, the rules are rebuilt from the tokens that were sampled before the crash."""
    params, prompt, completion = row
    kept, rebuilt = rules_of(params, prompt, completion[:cut]), rules_of(params, prompt, completion)
    if kept is None or rebuilt is None:
        assert not params.has_token_rules
        return
    for token_id in completion[cut:]:
        kept.append(token_id)
    assert kept.forbidden == rebuilt.forbidden
    assert np.array_equal(kept.counted[0], rebuilt.counted[0])
    assert np.array_equal(kept.counted[1], rebuilt.counted[1])


def test_rows_without_rules_are_not_copied() -> None:
    logits = torch.randn(3, VOCAB)
    assert not SamplingParams(max_tokens=1, top_k=3, min_tokens=1).has_token_rules
    assert rule_arrays(VOCAB, (), ()) == rule_arrays(VOCAB, (None,) * 3, ((),) * 3) == []
    left, may_leave_none = obey(logits, [])
    assert left is logits
    assert not may_leave_none


def test_token_counts_grow_without_limit() -> None:
    rules = TokenRules(SamplingParams(max_tokens=1, frequency_penalty=1.0), [5], list(range(1000)) * 2)
    assert rules is not None
    ids, counts = rules.counted
    assert ids.tolist() == list(range(1000))
    assert set(counts.tolist()) == {2.0}


@pytest.mark.parametrize(
    ("change", "sampled"),
    [
        ({}, 0),
        ({"presence_penalty": 2.0}, 1),
        ({"frequency_penalty": 0.6}, 1),  # token 0 occurs twice in the completion
        ({"frequency_penalty": 0.4}, 0),
        ({"repetition_penalty": 1.3}, 2),  # token 1 is in the prompt
        ({"presence_penalty": -2.0}, 0),
        ({"logit_bias": ((4, 100.0),)}, 4),
        ({"logit_bias": ((0, -100.0),)}, 1),
        ({"allowed_token_ids": (3, 2)}, 2),
        ({"bad_word_ids": ((0,),)}, 1),
        ({"bad_word_ids": ((0, 0),)}, 1),
        ({"bad_word_ids": ((0, 0, 0),)}, 1),
        ({"bad_word_ids": ((1, 0, 0, 0), (5, 0, 0), (1, 0))}, 0),  # none of these would be a word of the completion
    ],
)
def test_each_rule_changes_the_sampled_token(change: dict[str, Any], sampled: int) -> None:
    logits = torch.tensor([[10.0, 9.0, 8.0, 1.0, 0.0, 0.0]])
    for temperature in (0.0, 0.01):
        params = SamplingParams(max_tokens=1, temperature=temperature, **change)
        rules = TokenRules(params, [1], [0, 0])
        forbidden = [() if rules is None else rules.forbidden]
        assert sample(logits, [params], [3], forbidden=forbidden, rules=[rules]).tolist() == [sampled]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_gets_no_token(temperature: float) -> None:
    logits = torch.randn(4, VOCAB)
    logits[3] = torch.nan  # the request did not cause damaged weights
    free = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.9)
    walled = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.9, allowed_token_ids=(1, 2))
    rules = [TokenRules(params, [0]) for params in (free, walled, walled, walled)]
    forbidden = [tuple(range(VOCAB)), (2, 1), (1,), (1,)]
    ids = sample(logits, [free, walled, walled, walled], [0] * 4, forbidden=forbidden, rules=rules).tolist()
    assert ids[:3] == [NO_TOKEN, NO_TOKEN, 2]
    assert 0 <= ids[3] < VOCAB


def test_token_rules_do_not_change_logprobs() -> None:
    logits = torch.randn(1, VOCAB)
    own = top_logprobs(logits, [3], 2)
    params = SamplingParams(max_tokens=1, logit_bias=((3, 50.0),), presence_penalty=2.0)
    assert sample(logits, [params], [0], rules=[TokenRules(params, [0], [1])]).tolist() == [3]
    assert top_logprobs(logits, [3], 2) == own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty must be between -2 and 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be between -2 and 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be between 0.01 and 100"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias of token 1 must be between -100 and 100"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "must not name a token id twice"),
        ({"bad_word_ids": ((),)}, "must not contain an empty word"),
    ],
)
def test_unusable_rules_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(max_tokens=1, **change)
