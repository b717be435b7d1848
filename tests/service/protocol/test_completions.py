"""Strict validation of request bodies: every invalid body raises InvalidRequest with the field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.protocol.chat import ChatCompletionRequest, TokenizeRequest
from service.protocol.completions import CompletionRequest, DetokenizeRequest
from service.protocol.errors import Draining, EngineFailed, InvalidRequest, Overloaded


def parse(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse(json.dumps({"prompt": "a", **fields}).encode())


def refusal(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        _ = CompletionRequest.parse(body).prompts
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": "1"}, "temperature", "must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 1.0}, "n", "whole number"),
        ({"n": True}, "n", "whole number"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 10**30}, "max_tokens", "less than"),
        ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"seed": 2**64}, "seed", "less than or equal to"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "whole number"),
        ({"stream": 1}, "stream", "must be true or false"),
        ({"echo": "true"}, "echo", "must be true or false"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stop": ["a", 1]}, "stop", "non-empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids", "whole number"),
        ({"stream_options": {}}, "stream_options", "needs stream: true"),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "unknown field"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.", "true or false"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        ({"return_token_ids": 1}, "return_token_ids", "true or false"),
        ({"return_tokens_as_token_ids": "yes"}, "return_tokens_as_token_ids", "true or false"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "from 1, or -1"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens", "from 1, or -1"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "up"}, "truncation_side", "'left' or 'right'"),
        ({"truncation_side": "left"}, "truncation_side", "needs truncate_prompt_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"repetition_penalty": 101}, "repetition_penalty", "less than or equal to 100"),
        ({"logit_bias": []}, "logit_bias", "must be an object"),
        ({"logit_bias": {"1": "2"}}, "logit_bias", "must be a number"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias", "less than or equal to 100"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids", "whole number"),
        ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids", "at most 4096"),
        ({"bad_words": ["a", ""]}, "bad_words", "must not be empty"),
        ({"bad_words": ["a" * 101]}, "bad_words", "at most 100"),
        ({"bad_words": ["a"] * 129}, "bad_words", "at most 128"),
        ({"bad_words": "a"}, "bad_words", "must be a list"),
        ({"best_of": 0}, "best_of", "greater than or equal to 1"),
        ({"best_of": 129}, "best_of", "less than or equal to 128"),
        ({"best_of": 2, "n": 3}, "best_of", "under n=3"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"priority": 1001}, "priority", "less than or equal to 1000"),
        ({"priority": 0.5}, "priority", "whole number"),
        ({"cache_salt": ""}, "cache_salt", "must not be empty"),
        ({"cache_salt": "a" * 1001}, "cache_salt", "at most 1000"),
        ({"temprature": 1}, "temprature", "unknown field: temprature"),
        ({"messages": []}, "messages", "unknown field"),
        ({"user": 7}, "user", "must be a string"),
        ({"model": 7}, "model", "must be a string"),
    ],
)
def test_an_invalid_value_is_rejected_with_the_field_name(fields: dict[str, Any], param: str, said: str) -> None:
    error = refusal(json.dumps({"prompt": "a", **fields}).encode())
    assert error.status == 400
    assert (error.param or "").startswith(param)
    assert param.rstrip(".") in error.message
    assert said in error.message


@pytest.mark.parametrize(
    "prompt", [1, True, {}, [1, "a"], ["a", 1], [1.5], [True], [[1], "a"], [[1], [1.5]], [[["a"]]], [None]]
)
def test_a_prompt_of_the_wrong_type_is_rejected(prompt: Any) -> None:
    error = refusal(json.dumps({"prompt": prompt}).encode())
    assert error.param == "prompt"
    assert "token-id lists" in error.message


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [[1], []]])
def test_an_empty_prompt_is_rejected(prompt: Any) -> None:
    assert (
        refusal(json.dumps({"prompt": prompt}).encode()).message
        == "prompt must not be empty, nor contain an empty prompt"
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is not valid JSON: EOF"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"a"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"{}", "prompt is required"),
        (b'{"promt": "a"}', "unknown field: promt; prompt is required"),
        (b'{"promt": ' + b"9" * 4300 + b"}", "unknown field: promt; prompt is required"),
        (b'{"promt": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"prompt": null}', "prompt must be"),
        (b'{"prompt": "a", "top_p": NaN}', "finite"),
        (b'{"prompt": "a", "temperature": Infinity}', "finite"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "out of range"),
    ],
)
def test_an_invalid_body_is_rejected(body: bytes, said: str) -> None:
    assert said in refusal(body).message


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_the_prompt_field_becomes_a_list_of_prompts(prompt: Any, prompts: Any) -> None:
    assert list(parse(prompt=prompt).prompts) == prompts


def test_null_means_the_default_for_every_optional_field() -> None:
    fields = [name for name, field in CompletionRequest.model_fields.items() if not field.is_required()]
    given_null, not_given = parse(**dict.fromkeys(fields)), parse()
    assert {name: given_null.value(name) for name in fields} == {name: not_given.value(name) for name in fields}


def test_zero_is_not_replaced_by_the_default() -> None:
    request = parse(temperature=0, max_tokens=0, top_k=0, seed=0, logprobs=0)
    assert [request.value(name) for name in ("temperature", "max_tokens", "top_k", "seed", "logprobs")] == [0] * 5


def parsed_or_refused(body: bytes) -> CompletionRequest | InvalidRequest:
    try:
        request = CompletionRequest.parse(body)
        _ = request.prompts
    except InvalidRequest as error:
        return error
    return request


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(CompletionRequest.model_fields)) | st.text(max_size=8), _json))
def test_any_json_object_is_a_request_or_an_invalid_request(fields: dict[str, Any]) -> None:
    request = parsed_or_refused(json.dumps(fields).encode())
    if isinstance(request, InvalidRequest):
        assert set(request.body()["error"]) == {"message", "type", "param", "code"}
        assert 0 < len(request.message) < 500
    else:
        assert all(request.prompts)
        assert 0 <= request.value("temperature") <= 2


@given(st.binary(max_size=200))
def test_invalid_bytes_raise_invalid_request(body: bytes) -> None:
    for kind in (CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest):
        with pytest.raises(InvalidRequest):
            kind.parse(b"\x00" + body)


def test_a_body_of_many_errors_reports_the_first_error() -> None:
    many = ",".join(f'"a{i}":1' for i in range(20_000))
    assert refusal(f'{{"prompt":"a",{many}}}'.encode()).message == "unknown field: a0; leave it out"
    assert "token-id lists" in refusal(b'{"prompt":[' + b",".join([b"1.5"] * 100_000) + b"]}").message


def test_retryable_errors_have_retry_headers() -> None:
    for error in (Overloaded("x", retry_after_seconds=1.234), Draining("x", retry_after_seconds=1.234)):
        headers = error.headers()
        assert (headers["retry-after"], headers["retry-after-ms"], headers["x-should-retry"]) == ("2", "1234", "true")
    assert Overloaded("x", retry_after_seconds=0.0).headers()["retry-after"] == "1"
    assert EngineFailed("x", retry=False).headers() == {"x-should-retry": "false"}
