"""Penalties, biases and forbidden tokens in the engine: batched, in chunks, preempted and resumed."""

import random
from typing import Any

import msgspec
import pytest

from model.nn.reference_generate import generate
from model.sampling.params import SamplingParams
from service.ipc.messages import FinishReason, Submit
from tests.engine.fakes import make_submit
from tests.engine.test_parity import EOS, Run

_RULES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.0, "temperature": 0.0},
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.3},
    {"logit_bias": ((5, 4.0), (6, -50.0), (EOS, -100.0))},
    {"allowed_token_ids": tuple(range(40, 60)), "repetition_penalty": 1.2},
    {"bad_word_ids": ((40,), (41, 42), (43, 44, 45)), "allowed_token_ids": tuple(range(40, 50)), "temperature": 0.0},
    {},
]


def submissions(count: int, seed: int) -> list[Submit]:
    rng = random.Random(seed)
    return [
        make_submit(
            f"s{number}",
            [rng.randrange(EOS) for _ in range(rng.randint(1, 20))],
            max_tokens=rng.randint(8, 40),
            seed=rng.randrange(2**64),
            ignore_eos=True,
            **_RULES[number % len(_RULES)],
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("config", "every"),
    [
        ({"max_batched_tokens": 17}, 1),  # prompts in chunks, arriving one by one
        ({"num_blocks": 24, "enable_prefix_cache": False}, 0),  # preempted
    ],
)
def test_completions_with_token_rules_equal_the_reference_in_any_batch(config: dict[str, Any], every: int) -> None:
    submits = submissions(16, seed=3)
    run = Run("rotary-gqa", **config)
    run.drive(submits, every)
    run.check(submits)
    assert (sum(stats.num_preemptions for stats in run.stats) > 3) == ("num_blocks" in config)
    for submit in submits:
        if submit.params.has_token_rules:
            free = {name: getattr(submit.params, name) for name in ("max_tokens", "temperature", "seed", "ignore_eos")}
            unruled = generate(run.model, submit.prompt_token_ids, SamplingParams(**free), eos_token_ids=(EOS,))
            assert unruled != run.token_ids(submit.uid), "the rules acted"


def test_token_rules_apply_to_the_tokens_of_an_earlier_attempt() -> None:
    submits = submissions(8, seed=4)
    whole, second = Run("rotary-gqa"), Run("rotary-gqa")
    whole.drive(submits)
    again = [
        msgspec.structs.replace(submit, attempt=1, prior_token_ids=tuple(whole.token_ids(submit.uid)[:5]))
        for submit in submits
    ]
    second.drive(again)
    for submit in again:
        assert [*submit.prior_token_ids, *second.token_ids(submit.uid)] == whole.token_ids(submit.uid)


def test_a_request_that_forbids_every_token_ends_with_the_reason_and_other_requests_continue() -> None:
    """The request allows only token 5, but not twice in a row, so no token may follow the first token 5."""
    walled = make_submit(
        "walled", [1, 2], max_tokens=9, allowed_token_ids=(5,), bad_word_ids=((5, 5),), logprobs=1, ignore_eos=True
    )
    other = make_submit("other", [1, 2], max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=1)
    run = Run("rotary-gqa")
    run.drive([walled, other])
    run.check([other])
    assert run.token_ids("walled") == [5]
    finish = run.deltas["walled"][-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.REFUSED
    assert "no token may follow the 1 tokens of this completion" in (finish.error or "")
    assert finish.num_completion_tokens == 1
    assert sum(stats.num_completion_tokens for stats in run.stats) == 1 + 9


@pytest.mark.parametrize(
    "rules", [{"allowed_token_ids": (300,)}, {"logit_bias": ((-1, 1.0),)}, {"bad_word_ids": ((1, 10**6),)}]
)
def test_token_ids_outside_the_vocabulary_end_only_their_request(rules: dict[str, Any]) -> None:
    run = Run("gpt2")
    run.drive([make_submit("wrong", [1], **rules), make_submit("right", [1], max_tokens=2, ignore_eos=True)])
    finish = run.deltas["wrong"][-1].finish
    assert finish is not None
    assert "beyond this model's vocabulary; use ids from 0 to 299" in (finish.error or "")
    assert len(run.token_ids("right")) == 2
