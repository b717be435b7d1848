"""Reference responses of a server without faults, and comparison of other responses with them."""

import json
from dataclasses import dataclass
from typing import Any

from tests.faults.questions import EMBEDDINGS, Question
from tests.faults.wire import Reply
from tests.service.streams import assert_close, events, joined

# Error codes of rejections and timeouts, and of failures. A failure is permitted only if a worker died meanwhile.
REFUSALS = {"queue_full", "queue_time", "queue_timeout", "too_many_connections", "draining", "request_timeout"}
CASUALTIES = {"engine_failed"}


@dataclass(frozen=True, slots=True)
class Answer:
    """Parts of a response that are equal in every run: not ids, times and cached tokens."""

    content: Any
    usage: dict[str, int]

    @property
    def num_tokens(self) -> int:
        return self.usage.get("completion_tokens", 0)


class WrongAnswer(Exception):
    """Response that is neither the reference response nor a permitted error. The message says why."""


def error_of(reply: Reply) -> dict[str, Any] | None:
    """Return the error body or error event of a response; None if the response is complete.

    Raises:
        WrongAnswer: the response is incomplete and has no well-formed error.
    """
    if reply.status != 200:
        return _error(reply.text, reply.status)
    if not reply.is_stream:
        return None
    last = reply.text.rstrip("\n").rpartition("\n\n")[2]
    data = last.rpartition("data: ")[2]
    if data == "[DONE]":
        return None
    return _error(data, reply.status)


def _error(text: str, status: int | None) -> dict[str, Any]:
    try:
        error = json.loads(text)["error"]
        return {name: error[name] for name in ("message", "type", "param", "code")}
    except (ValueError, TypeError, KeyError):
        raise WrongAnswer(f"status {status}: the response has neither an end nor an error: {text[-200:]!r}") from None


def answer_of(question: Question, reply: Reply) -> Answer:
    """Parse a complete response. Check that each choice has one finish reason, and that the usage counts its tokens.

    Raises:
        WrongAnswer: the response is malformed or contradicts itself.
    """
    try:
        if question.path == EMBEDDINGS:
            body = json.loads(reply.text)
            return Answer(body["data"], {"prompt_tokens": body["usage"]["prompt_tokens"]})
        usage, whole = _streamed(reply.text) if reply.is_stream else _body(reply.text)
        choices = whole["choices"]
        assert [choice["index"] for choice in choices] == list(range(question.body.get("n", 1))), "choices are missing"
        assert all(choice["finish_reason"] in ("stop", "length") for choice in choices), "a choice has no end"
        counted = sum(len(choice["token_ids"]) for choice in choices)
        if "best_of" not in question.body:  # usage counts the tokens of dropped candidates, too
            assert counted == usage["completion_tokens"], f"{counted} tokens, {usage['completion_tokens']} in the usage"
        return Answer(choices, usage)
    except (AssertionError, KeyError, ValueError, IndexError) as error:
        raise WrongAnswer(f"{type(error).__name__}: {error}") from None


def _streamed(text: str) -> tuple[dict[str, int], dict[str, Any]]:
    *chunks, summary = events(_without_ids(text))
    assert summary["choices"] == [], "the usage comes last"
    return _usage(summary["usage"]), joined(chunks)


def _body(text: str) -> tuple[dict[str, int], dict[str, Any]]:
    body = json.loads(text)
    return _usage(body["usage"]), body


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _without_ids(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.startswith("id: "))


class Oracle:
    """Reference responses: the first response to a request. Later responses to the request must equal the first.

    Args:
        to_the_bit: logprobs and embeddings must be bitwise identical; else they may differ by 1e-5.
    """

    def __init__(self, *, to_the_bit: bool = False) -> None:
        self._answers: dict[int, Answer] = {}
        self._to_the_bit = to_the_bit

    def learn(self, number: int, question: Question, reply: Reply) -> None:
        """Store the reference response to a request. Raises `WrongAnswer` if the response is an error or malformed."""
        if (error := error_of(reply)) is not None:
            raise WrongAnswer(f"request {number} failed without a fault: {error}")
        self._answers[number] = answer_of(question, reply)

    def judge(self, number: int, question: Question, reply: Reply) -> Answer | dict[str, Any]:
        """Compare a response with the reference. Return the parsed response, or its error if the error is permitted.

        Raises:
            WrongAnswer: the response differs from the reference, or its error is not permitted.
        """
        if (error := error_of(reply)) is not None:
            if error["code"] not in REFUSALS | CASUALTIES:
                raise WrongAnswer(f"error that is not permitted, status {reply.status}: {error}")
            if reply.status in (429, 503) and not reply.headers.get("retry-after", "").isdecimal():
                raise WrongAnswer(f"status {reply.status} without Retry-After: {reply.headers}")
            return error
        answer, right = answer_of(question, reply), self._answers[number]
        try:
            assert_close(answer.content, right.content)
            if self._to_the_bit:
                assert answer.content == right.content, "numbers differ in their last bits"
            assert answer.usage == right.usage, f"{answer.usage} instead of {right.usage}"
        except AssertionError as error:
            raise WrongAnswer(f"differs from the reference response: {str(error)[:300]}") from None
        return answer
