"""The oracle of the fault suite accepts correct responses and permitted errors, and finds wrong responses."""

import json
from typing import Any

import pytest

from tests.faults.oracle import Answer, Oracle, WrongAnswer
from tests.faults.questions import TEXT, Question
from tests.faults.wire import Reply

QUESTION = Question("greedy", TEXT, {"prompt": "once", "return_token_ids": True})
USAGE = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}


def reply(content: str, status: int = 200, **headers: str) -> Reply:
    reply = Reply()
    reply.status, reply.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
    reply.content += content.encode()
    return reply


def body(text: str = "ab", ids: tuple[int, ...] = (97, 98), end: str | None = "length", **usage: int) -> Reply:
    choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": None, "finish_reason": end, "stop_reason": None}
    return reply(json.dumps({"choices": [choice], "usage": {**USAGE, **usage}}))


def piece(text: str, number: int, end: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": end, "stop_reason": None}
    return {"choices": [{**choice, "token_ids": [number]}]}


def stream(*events: dict[str, Any] | str) -> Reply:
    data = (event if isinstance(event, str) else json.dumps(event) for event in events)
    return reply("".join(f"data: {each}\n\n" for each in data), content_type="text/event-stream")


FIRST, LAST, SUMMARY = piece("a", 97), piece("b", 98, "length"), {"choices": [], "usage": USAGE}


@pytest.fixture
def oracle() -> Oracle:
    oracle = Oracle()
    oracle.learn(0, QUESTION, body())
    return oracle


@pytest.mark.parametrize("right", [body(), stream(FIRST, LAST, SUMMARY, "[DONE]")])
def test_a_correct_response_is_accepted_streamed_or_not(oracle: Oracle, right: Reply) -> None:
    outcome = oracle.judge(0, QUESTION, right)
    assert isinstance(outcome, Answer)
    assert outcome.num_tokens == 2


def test_logprobs_may_differ_by_rounding_unless_compared_bitwise() -> None:
    def scored(logprob: float) -> Reply:
        answer = json.loads(body().text)
        answer["choices"][0]["logprobs"] = {"token_logprobs": [-1.0, logprob]}
        return reply(json.dumps(answer))

    for to_the_bit in (False, True):
        oracle = Oracle(to_the_bit=to_the_bit)
        oracle.learn(0, QUESTION, scored(-2.0))
        assert isinstance(oracle.judge(0, QUESTION, scored(-2.0)), Answer)
        with pytest.raises(WrongAnswer, match="differs from the reference response"):
            oracle.judge(0, QUESTION, scored(-2.1))
        if to_the_bit:
            with pytest.raises(WrongAnswer, match="numbers differ in their last bits"):
                oracle.judge(0, QUESTION, scored(-2.000001))
        else:
            assert isinstance(oracle.judge(0, QUESTION, scored(-2.000001)), Answer)


@pytest.mark.parametrize(
    ("status", "code"), [(429, "queue_full"), (408, "queue_timeout"), (503, "draining"), (500, "engine_failed")]
)
def test_a_permitted_error_is_accepted(oracle: Oracle, status: int, code: str) -> None:
    error = {"message": "later", "type": "server_error", "param": None, "code": code}
    assert oracle.judge(0, QUESTION, reply(json.dumps({"error": error}), status, retry_after="1")) == error
    assert oracle.judge(0, QUESTION, stream(FIRST, {"error": error})) == error


@pytest.mark.parametrize(
    "wrong",
    [
        body(text="ac"),
        body(ids=(97, 99)),
        body(end="stop"),
        body(end=None),
        body(completion_tokens=3),
        body(prompt_tokens=5),
        stream(FIRST, FIRST, LAST, SUMMARY, "[DONE]"),  # a token twice
        stream(LAST, SUMMARY, "[DONE]"),  # one lost
        stream(FIRST, LAST, LAST, SUMMARY, "[DONE]"),  # two ends
        stream(FIRST, LAST, "[DONE]"),
        stream(FIRST, LAST, SUMMARY),
        stream(FIRST, SUMMARY, "[DONE]"),
        reply("{}", 500),
        reply('{"error": {"message": "", "type": "", "param": null, "code": "internal_error"}}', 500),
        reply(
            '{"error": {"message": "", "type": "", "param": null, "code": "queue_full"}}', 429
        ),  # without Retry-After
    ],
)
def test_a_wrong_response_is_found(oracle: Oracle, wrong: Reply) -> None:
    with pytest.raises(WrongAnswer):
        oracle.judge(0, QUESTION, wrong)
