"""Prompt-lookup drafts change the number of steps of a completion, and never its text."""

import itertools
import random
from typing import Any

import pytest

from service.engine.scheduling.speculation import PromptLookup
from service.engine.scheduling.step_plan import MIN_ROWS
from service.ipc.messages import FinishReason, Submit
from tests.engine.fakes import CONTEXT, expected_tokens, make_engine, make_submit
from tests.engine.test_parity import EOS, SCHEDULED, TOKENIZER, Run

POEM = TOKENIZER.encode("The fox and the crow. The fox and the grapes. The fox and the")


def test_the_latest_continuation_of_an_ngram_is_drafted() -> None:
    lookup = PromptLookup(3)
    assert lookup.draft([1, 2, 3, 9, 1, 2, 4, 8, 7, 1, 2], 3) == (4, 8, 7)
    assert PromptLookup(2).draft([1, 2, 3, 9, 1, 2], 8) == (3, 9)
    assert PromptLookup(8).draft([1, 2, 3, 9, 1, 2], 1) == (3,)
    assert PromptLookup(8).draft([1, 2, 3, 9, 1, 2], 0) == ()
    assert PromptLookup(8).draft([1, 2, 3, 4], 8) == ()
    assert PromptLookup(8).draft([1], 8) == ()


def test_longer_ngrams_take_precedence() -> None:
    assert PromptLookup(2).draft([5, 6, 1, 2, 30, 40, 9, 1, 2, 50, 60, 5, 6, 1, 2], 2) == (30, 40)


def test_repetitions_are_drafted() -> None:
    assert PromptLookup(4).draft([7, 7, 7], 4) == (7, 7, 7, 7)
    assert PromptLookup(4).draft([1, 2, 1, 2], 4) == (1, 2, 1, 2)


def test_prompt_lookup_indexes_tokens_appended_later() -> None:
    lookup = PromptLookup(4)
    ids = [1, 2, 3]
    assert lookup.draft(ids, 4) == ()
    ids += [9, 1, 2]
    assert lookup.draft(ids, 4) == (3, 9, 1, 2)


def drafted_after(lookup: PromptLookup, ids: list[int], *sampled: int, min_probability: float) -> int:
    """Append the sampled tokens to `ids` one by one, with a draft after each. Return the length of the last draft."""
    length = len(lookup.draft(ids, 99, min_probability))
    for token_id in sampled:
        ids.append(token_id)
        length = len(lookup.draft(ids, 99, min_probability))
    return length


def test_drafts_grow_with_right_predictions_and_shrink_with_wrong_predictions() -> None:
    """The estimated accuracy counts all predictions of the lookup, whether tokens were drafted or not."""
    lookup, ids = PromptLookup(16), [1, 2] * 4
    assert drafted_after(lookup, ids, min_probability=0.6) == 0  # no data yet: 1 in 2
    assert drafted_after(lookup, ids, min_probability=0.3) == 1
    assert drafted_after(lookup, ids, 1, min_probability=0.6) == 1  # (0.5 * 0.9 + 1) / (0.9 + 1) = 0.76
    assert drafted_after(lookup, ids, *[2, 1] * 10, min_probability=0.6) == 16
    wrong = [3, 1, 2, 1, 2, 1, 4, 1, 2, 1, 2, 1, 5, 1, 2, 1, 2, 1]
    assert 0 < drafted_after(lookup, ids, *wrong, min_probability=0.6) < 16


def test_a_higher_minimum_probability_shortens_a_draft() -> None:
    """A draft token is accepted only if all draft tokens before it are right."""
    lengths = [
        drafted_after(PromptLookup(16), [1, 2] * 4, 1, min_probability=min_probability)
        for min_probability in (0.0, 0.1, 0.3, 0.6, 0.8)
    ]
    assert lengths == [16, 8, 4, 1, 0]


def test_repetitions_in_a_prompt_do_not_count_as_right_predictions() -> None:
    for num_repeats in (2, 20):
        assert drafted_after(PromptLookup(16), [1, 2] * num_repeats, min_probability=0.3) == 1


def test_few_tokens_are_drafted_if_each_row_costs_time() -> None:
    """If a step's duration is proportional to its rows, few draft tokens are probable enough for another row."""
    # Seed 3 samples from two tokens: any pair of them has often occurred before.
    submits = [make_submit(str(number), [number], max_tokens=18, seed=3, ignore_eos=True) for number in range(60)]
    num_drafted = []
    for row_seconds in (0.0, 1.0):
        engine, runner = make_engine(num_blocks=200, max_batched_tokens=99, max_draft_tokens=4, fakes_time=True)
        runner.step_seconds, runner.row_seconds = 1.0 - row_seconds, row_seconds
        for submit in submits:
            engine.submit(submit)
        sampled: dict[str, list[int]] = {submit.uid: [] for submit in submits}
        num_drafted.append(0)
        while engine.has_work:
            result = engine.step()
            num_drafted[-1] += result.stats.num_draft_tokens
            for event in result.events:
                sampled[event.uid] += event.token_ids
        assert sampled == {submit.uid: expected_tokens(submit, CONTEXT) for submit in submits}
    assert 10 * num_drafted[1] < num_drafted[0]


def test_each_draft_token_is_a_row_of_the_step() -> None:
    engine, runner = make_engine(num_blocks=20, max_batched_tokens=99, max_draft_tokens=4, fakes_time=True)
    engine.submit(make_submit("a", [5], max_tokens=18, seed=3, ignore_eos=True))
    num_drafted = 0
    while engine.has_work:
        drafted = engine.step().stats.num_draft_tokens
        num_drafted += drafted
        if drafted:
            assert runner.batches[-1] == (1,) * max(MIN_ROWS, 1 + drafted)
    assert num_drafted > 0


def repetitive(count: int, seed: int) -> list[Submit]:
    """Make submissions of prompts with repetitions, whose completions mostly repeat."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        run = [rng.randrange(EOS) for _ in range(rng.randint(1, 4))]
        prompt = (run * 20)[: rng.randint(2, 30)]
        changes: dict[str, Any] = {"temperature": 0.0} if number % 3 else {"temperature": 0.7, "top_k": 3}
        made.append(
            make_submit(
                f"s{number}",
                prompt,
                max_tokens=rng.randint(1, 64 - len(prompt)),
                seed=rng.randrange(2**64),
                ignore_eos=number % 2 == 0,
                min_tokens=0,
                stop_token_ids=tuple(rng.sample(range(EOS), 3)) if number % 5 == 0 else (),
                logprobs=number % 2,
                **changes,
            )
        )
    return made


LIMITS: tuple[dict[str, int], ...] = ({}, {"num_blocks": 24, "enable_prefix_cache": False}, {"max_batched_tokens": 18})


@pytest.mark.parametrize(("name", "limits"), list(zip(SCHEDULED, itertools.cycle(LIMITS), strict=False)))
def test_drafts_do_not_change_the_text(name: str, limits: dict[str, int]) -> None:
    submits = repetitive(14, seed=len(name))
    plain, drafting = Run(name, **limits), Run(name, **limits, max_draft_tokens=6)
    for run in (plain, drafting):
        run.drive(submits)
        run.check(submits)
    for submit in submits:
        scored = [
            [entry for delta in run.deltas[submit.uid] for entry in delta.logprobs or ()] for run in (plain, drafting)
        ]
        assert [entry.token_id for entry in scored[1]] == [entry.token_id for entry in scored[0]]
        for ours, theirs in zip(*scored, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert not any(stats.num_draft_tokens for stats in plain.stats)
    accepted = sum(stats.num_accepted_tokens for stats in drafting.stats)
    assert 0 < accepted <= sum(stats.num_draft_tokens for stats in drafting.stats)
    for run in (plain, drafting):
        sampled = sum(len(delta.token_ids) for deltas in run.deltas.values() for delta in deltas)
        assert sum(stats.num_completion_tokens for stats in run.stats) == sampled


def test_drafts_reduce_the_steps_of_a_completion_that_repeats_itself() -> None:
    submit = make_submit("a", [5, 6] * 4, max_tokens=40, temperature=0.0, logit_bias=(), ignore_eos=True)
    steps = []
    for max_draft_tokens in (0, 8):
        run = Run("gpt2", max_draft_tokens=max_draft_tokens)
        run.drive([submit])
        run.check([submit])
        steps.append(len(run.stats))
    assert steps[1] < steps[0] == 40


def test_a_stop_string_within_a_draft_ends_the_completion() -> None:
    """A stop string within accepted draft tokens ends the token ids and the text, and is the stop reason."""
    plain = Run("gpt2")
    free = make_submit("a", POEM, max_tokens=24, temperature=0.0, ignore_eos=True)
    plain.drive([free])
    text = plain.text("a")
    for length in range(2, 12):
        stop = text[length : length + 2]
        runs = [Run("gpt2"), Run("gpt2", max_draft_tokens=8)]
        for run in runs:
            run.drive([make_submit("a", POEM, max_tokens=24, temperature=0.0, ignore_eos=True, stop=(stop,))])
        expected, found = runs
        assert found.text("a") == expected.text("a")
        assert found.token_ids("a") == expected.token_ids("a")
        finishes = [run.deltas["a"][-1].finish for run in runs]
        assert all(finish is not None for finish in finishes)
        assert {(f.reason, f.stop_reason, f.num_completion_tokens) for f in finishes if f} == {
            (FinishReason.STOP, stop, len(expected.token_ids("a")))
        }


@pytest.mark.parametrize(
    "changes", [{"frequency_penalty": 0.5}, {"bad_word_ids": ((1, 2),)}, {"repetition_penalty": 1.1}]
)
def test_sequences_with_token_rules_get_no_drafts(changes: dict[str, Any]) -> None:
    run = Run("gpt2", max_draft_tokens=8)
    run.drive([make_submit("a", [5, 6] * 4, max_tokens=30, temperature=0.0, ignore_eos=True, **changes)])
    assert not any(stats.num_drafts for stats in run.stats)


def test_no_tokens_are_drafted_before_min_tokens() -> None:
    submit = make_submit("a", [5, 6] * 4, max_tokens=30, min_tokens=20, temperature=0.0)
    run = Run("gpt2", max_draft_tokens=8)
    run.drive([submit])
    run.check([submit])
    assert not any(stats.num_drafts for stats in run.stats[:20])
