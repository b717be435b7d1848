"""Field `best_of`: number of computed completions, ranking and usage."""

import asyncio
import json
from typing import Any

import pytest

from model.tokenizer.byte_level import ByteLevelTokenizer
from service.api.streaming import CompletionBody
from service.ipc.messages import TokenLogprob
from service.metrics.recorder import Metrics
from service.preprocess.request_processor import RequestProcessor, sample_seed
from service.protocol.completions import CompletionRequest
from service.protocol.errors import InvalidRequest
from service.requests.inflight import Choice
from tests.service.api.test_streaming import Exchange
from tests.service.sequences import make_choice, make_finish, make_request


def plan(tokenizer: ByteLevelTokenizer, **fields: Any) -> list[Choice]:
    processor = RequestProcessor(tokenizer=tokenizer, model_name="tiny", max_context_length=64, max_num_choices=12)
    request = CompletionRequest.parse(json.dumps({"prompt": "abc", **fields}).encode())
    processor.check(request)
    return processor.plan(request, arrival_seconds=0.0)


def test_best_of_completions_are_computed_with_logprobs(tokenizer: ByteLevelTokenizer) -> None:
    choices = plan(tokenizer, prompt=["a", "b"], n=2, best_of=5, seed=3)
    assert [(choice.index, choice.prompt_index) for choice in choices] == [(i, i // 5) for i in range(10)]
    assert [choice.submit.params.seed for choice in choices[:5]] == [sample_seed(3, sample) for sample in range(5)]
    assert {choice.submit.params.logprobs for choice in choices} == {0}
    assert {choice.submit.params.logprobs for choice in plan(tokenizer, n=3, best_of=3)} == {0}, "told best first"
    assert {choice.submit.params.logprobs for choice in plan(tokenizer, best_of=2, logprobs=4)} == {4}


def test_without_ranking_no_logprobs_are_computed(tokenizer: ByteLevelTokenizer) -> None:
    for fields in ({"best_of": 1}, {"n": 3}, {"n": 2, "best_of": 2, "stream": True}):
        choices = plan(tokenizer, **fields)
        assert len(choices) == fields.get("n", 1)
        assert {choice.submit.params.logprobs for choice in choices} == {None}


def test_the_limit_of_choices_counts_best_of(tokenizer: ByteLevelTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="2 prompts times best_of=7 are 14 completions") as caught:
        plan(tokenizer, prompt=["a", "b"], best_of=7)
    assert caught.value.param == "best_of"


def _logprobs(*values: float) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=97, logprob=value, rank=1, top=()) for value in values)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_best_of_returns_the_highest_mean_logprobs_first_and_counts_all_tokens(
    tokenizer: ByteLevelTokenizer, metrics: Metrics, logprobs: int | None
) -> None:
    """Two prompts of three samples. Ranking by the sum of logprobs would prefer short completions."""
    samples = [[(-2.0,), (-1.0, -1.0, -1.0), (-0.5, -2.5)], [(-3.0, -3.0), (-3.0, -1.0), (-0.1,)]]

    async def test() -> None:
        choices = [
            make_choice(f"c{p}{s}", index=3 * p + s, prompt_index=p, logprobs=0) for p in range(2) for s in range(3)
        ]
        exchange = Exchange(
            CompletionBody, make_request(*choices), (tokenizer, metrics), n=2, best_of=4, logprobs=logprobs
        )
        for choice in choices:
            values = samples[choice.prompt_index][choice.index % 3]
            for value in values[:-1]:
                exchange.push(choice.index, ids=(97,), logprobs=_logprobs(value))  # a delta without text
            text = f"{choice.prompt_index}{choice.index % 3}"
            exchange.push(choice.index, ids=(97,), text=text, logprobs=_logprobs(values[-1]), finish=make_finish())
        await asyncio.wait_for(exchange.task, 60)
        body = json.loads(exchange.client.body)
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "01"), (1, "02"), (2, "12"), (3, "11")]
        assert [c["logprobs"] is None for c in body["choices"]] == [logprobs is None] * 4
        if logprobs is not None:
            assert body["choices"][0]["logprobs"]["token_logprobs"] == [-1.0] * 3
        assert body["usage"]["completion_tokens"] == 6 + 5
        assert body["usage"]["prompt_tokens"] == 2 * 3

    asyncio.run(test())
