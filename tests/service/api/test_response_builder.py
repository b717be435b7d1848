"""Exact JSON of completions and chat completions from the same deltas."""

import json
import threading
import time
from typing import Any

import pytest

from model.tokenizer.interface import Tokenizer
from service.api.response_builder import ChatBuilder, CompletionBuilder
from service.api.streaming import MAX_INLINE_LOGPROBS, CompletionBody, CompletionStream
from service.ipc.messages import FinishReason, TokenLogprob
from service.metrics.recorder import Metrics
from service.protocol.responses import PromptLogprobs
from service.requests.inflight import Choice, InflightRequest
from tests.service.api.test_streaming import RUNNING_USAGE, USAGE, Exchange, run
from tests.service.sequences import make_choice, make_finish, make_request


@pytest.fixture
def tools(tokenizer: Tokenizer, metrics: Metrics) -> tuple[Tokenizer, Metrics]:
    return tokenizer, metrics


def likely(token_id: int, logprob: float = -0.5) -> TokenLogprob:
    """Return the logprob of a token, with that token and one other token as the most likely ones."""
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=1, top=((token_id, logprob), (120, -1.5)))


def chat_entry(token: str, byte: int) -> dict[str, Any]:
    own = {"token": token, "logprob": -0.5, "bytes": [byte]}
    return {**own, "top_logprobs": [own, {"token": "x", "logprob": -1.5, "bytes": [120]}]}


def test_a_chat_stream_sends_the_role_then_text_with_logprobs_and_ids(tools: Any) -> None:
    async def test() -> None:
        fields: dict[str, Any] = {"logprobs": 2, "return_token_ids": True, "prompt_logprobs": 0}
        choice = make_choice(prompt=(97, 98))
        exchange = Exchange(CompletionStream, make_request(choice), tools, ChatBuilder, **fields)
        first = TokenLogprob(token_id=97, logprob=None, rank=None, top=())
        scores = (first, TokenLogprob(token_id=98, logprob=-2.0, rank=4, top=()))
        exchange.push(ids=(99,), text="c", logprobs=(likely(99),), prompt_logprobs=scores)
        exchange.push(ids=(), text="", finish=make_finish(FinishReason.STOP, stop_reason="d"))
        await exchange.task
        head = {"id": "cmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "tiny"}
        opening, said, end = exchange.client.chunks
        silence = {"index": 0, "logprobs": None, "finish_reason": None, "stop_reason": None}
        assert opening == {
            **head,
            "choices": [{**silence, "delta": {"role": "assistant", "content": ""}}],
            "prompt_token_ids": [97, 98],
            "prompt_logprobs": [None, {"98": {"logprob": -2.0, "rank": 4, "decoded_token": "b"}}],
        }
        logprobs = {"content": [chat_entry("c", 99)], "refusal": None}
        assert said == {
            **head,
            "choices": [{**silence, "delta": {"content": "c"}, "logprobs": logprobs, "token_ids": [99]}],
        }
        assert end["choices"] == [
            {**silence, "delta": {}, "finish_reason": "stop", "stop_reason": "d", "token_ids": []}
        ]

    run(test)


def test_a_chat_completion_without_tokens_has_an_empty_logprobs_list(tools: Any) -> None:
    """Clients iterate over `logprobs.content` without a check for null."""

    async def test() -> None:
        exchange = Exchange(CompletionBody, make_request(make_choice(max_tokens=0)), tools, ChatBuilder, logprobs=0)
        exchange.push(finish=make_finish(num_completion_tokens=0, decode_seconds=0.0))
        await exchange.task
        (choice,) = json.loads(exchange.client.body)["choices"]
        assert choice["logprobs"] == {"content": [], "refusal": None}
        assert choice["message"]["content"] == ""

    run(test)


def test_token_ids_of_an_incomplete_character_are_sent_before_its_text(tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(CompletionStream, make_request(make_choice()), tools, return_token_ids=True)
        exchange.push(ids=(0xC3,))
        exchange.push(ids=(0xA9,), text="é", finish=make_finish())
        await exchange.task
        choices = [chunk["choices"][0] for chunk in exchange.client.chunks]
        assert [(c["text"], c["token_ids"]) for c in choices] == [("", [0xC3]), ("é", [0xA9])]
        assert choices[0]["prompt_token_ids"] == [1, 2, 3]
        assert "prompt_token_ids" not in choices[1]

    run(test)


def test_optional_fields_are_absent_unless_requested(tools: Any) -> None:
    async def test() -> None:
        for kind, builder in (
            (CompletionBody, CompletionBuilder),
            (CompletionBody, ChatBuilder),
            (CompletionStream, CompletionBuilder),
        ):
            exchange = Exchange(kind, make_request(make_choice()), tools, builder)
            exchange.push(ids=(97,), text="a", logprobs=(likely(97),), finish=make_finish())
            await exchange.task
            for name in (b"token_ids", b"prompt_logprobs", b"token_logprobs", b'content":['):
                assert name not in exchange.client.body

    run(test)


def test_running_usage_counts_the_whole_request(tools: Any) -> None:
    async def test() -> None:
        request = make_request(make_choice("a"), make_choice("b", index=1))
        exchange = Exchange(CompletionStream, request, tools, ChatBuilder, **RUNNING_USAGE)
        exchange.push(0, ids=(97, 98), text="ab")
        exchange.push(1, ids=(97,), text="a", finish=make_finish(num_cached_tokens=2))
        exchange.push(0, ids=(97,), text="a", finish=make_finish(num_cached_tokens=2))
        await exchange.task
        told = [chunk["usage"] for chunk in exchange.client.chunks]
        assert [usage["completion_tokens"] for usage in told] == [0, 2, 2, 3, 4]
        assert {usage["prompt_tokens"] for usage in told} == {3}
        assert all("prompt_tokens_details" not in usage for usage in told[:-1])
        assert told[-1]["prompt_tokens_details"] == {"cached_tokens": 2}

    run(test)


@pytest.mark.parametrize("kind", [CompletionBody, CompletionStream])
@pytest.mark.parametrize("builder", [CompletionBuilder, ChatBuilder])
def test_the_time_to_the_first_token_counts_from_arrival(kind: Any, builder: Any, tools: Any) -> None:
    async def test() -> None:
        arrival = time.monotonic() - 100
        request = InflightRequest(choices=[make_choice()], arrival_seconds=arrival)
        exchange = Exchange(kind, request, tools, builder, **USAGE)
        exchange.push(ids=(97,), text="a")
        await exchange.settle()
        exchange.push(ids=(98,), text="b", finish=make_finish(queue_seconds=0.25, prefill_seconds=0.5))
        await exchange.task
        waited = (time.monotonic() - arrival) * 1000
        is_body = kind is CompletionBody
        told = [json.loads(exchange.client.body)] if is_body else exchange.client.chunks[-2:]
        for timings in (event["timings"] for event in told):
            assert 100_000 <= timings["ttft_ms"] <= waited
            assert (timings["queue_ms"], timings["prefill_ms"]) == (250, 500)

    run(test)


@pytest.mark.parametrize("kind", [CompletionBody, CompletionStream])
@pytest.mark.parametrize("num_scores", [MAX_INLINE_LOGPROBS, MAX_INLINE_LOGPROBS + 1])
def test_many_prompt_logprobs_are_encoded_in_a_thread(kind: Any, num_scores: int, tools: Any) -> None:
    threads = set()

    class Watched(CompletionBuilder):
        def _prompt_logprobs(self, choice: Choice) -> PromptLogprobs:
            threads.add(threading.current_thread())
            return super()._prompt_logprobs(choice)

    async def test() -> None:
        exchange = Exchange(kind, make_request(make_choice()), tools, Watched, prompt_logprobs=0)
        first = TokenLogprob(token_id=97, logprob=None, rank=None, top=())
        exchange.push(ids=(97,), text="a", prompt_logprobs=(first, *[likely(98)] * (num_scores - 1)))
        exchange.push(ids=(98,), text="b", finish=make_finish())
        await exchange.task
        told = json.loads(exchange.client.body) if kind is CompletionBody else exchange.client.chunks[0]
        assert len(told["choices"][0]["prompt_logprobs"]) == num_scores
        assert (threads == {threading.main_thread()}) is (num_scores <= MAX_INLINE_LOGPROBS)

    run(test)
