"""Several samples of one prompt: prompt and prompt logprobs are computed once, before any sample is reported."""

import random

import pytest

from service.engine.engine import Engine
from service.ipc.messages import Submit
from tests.engine.fakes import CONTEXT, expected_tokens, make_engine, make_submit


def samples(name: str, prompt: list[int], count: int, *, is_scored: bool, **changes: object) -> list[Submit]:
    """Make the submissions of a request with `count` samples. `is_scored`: the first asks for prompt logprobs."""
    return [
        make_submit(
            f"{name}.{number}",
            prompt,
            seed=number,
            ignore_eos=True,
            prompt_logprobs=1 if is_scored and not number else None,
            **changes,  # type: ignore[arg-type]
        )
        for number in range(count)
    ]


def run(engine: Engine, submits: list[Submit]) -> tuple[dict[str, list[int]], int]:
    """Step until no work is left. Return the tokens of each uid, and the number of computed prompt tokens."""
    scored = {submit.uid.split(".")[0]: submit.params.prompt_logprobs is None for submit in submits[::-1]}
    sampled: dict[str, list[int]] = {submit.uid: [] for submit in submits}
    prompts = {submit.uid: list(submit.prompt_token_ids) for submit in submits}
    num_prompt_tokens = 0
    while engine.has_work:
        result = engine.step()
        engine.check_integrity()
        num_prompt_tokens += result.stats.num_prompt_tokens
        for event in result.events:  # one message: its reader handles all of it before any client is notified
            sampled[event.uid] += event.token_ids
            if event.prompt_logprobs is not None:
                assert [entry.token_id for entry in event.prompt_logprobs] == prompts[event.uid]
                scored[event.uid.split(".")[0]] = True
        assert all(scored[event.uid.split(".")[0]] for event in result.events)
    return sampled, num_prompt_tokens


@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize("budget", [60, 7])
def test_several_samples_compute_their_prompt_once(budget: int, is_scored: bool) -> None:
    """Each further sample computes only the two prompt tokens of the block with the last prompt token."""
    engine, _ = make_engine(num_blocks=40, max_num_running=6, max_batched_tokens=budget)
    submits = samples("a", list(range(16)), 6, is_scored=is_scored, max_tokens=3)
    for submit in submits:
        engine.submit(submit)
    sampled, num_prompt_tokens = run(engine, submits)
    assert num_prompt_tokens == 16 + 5 * 2
    assert sampled == {submit.uid: expected_tokens(submit, CONTEXT) for submit in submits}


@pytest.mark.parametrize("seed", range(30))
def test_no_sample_is_reported_before_the_sample_that_scores_its_prompt(seed: int) -> None:
    """Samples could find cached blocks that the first sample must compute again for its prompt logprobs."""
    rng = random.Random(seed)
    engine, _ = make_engine(
        num_blocks=rng.choice([14, 20, 60]), max_num_running=rng.randint(2, 7), max_batched_tokens=rng.randint(7, 20)
    )
    submits: list[Submit] = []
    sampled: dict[str, list[int]] = {}
    for number in range(6):
        prompt = [7] * rng.randint(0, 16) + [rng.randrange(3)]
        priority, max_tokens = rng.choice([0, 0, 1, -1]), rng.randint(0, 4)
        made = samples(str(number), prompt, rng.randint(1, 4), is_scored=True, priority=priority, max_tokens=max_tokens)
        submits += made
        for submit in made:
            engine.submit(submit)
        if not number % 3:
            sampled |= run(engine, submits)[0]
            submits.clear()
    sampled |= run(engine, submits)[0]
    assert all(sampled[submit.uid] == expected_tokens(submit, CONTEXT) for submit in submits)
