"""Validation messages name the field and its expected value."""

import json
from typing import Any

import pytest

from service.protocol.chat import ChatCompletionRequest, TokenizeRequest
from service.protocol.errors import InvalidRequest
from service.protocol.request_model import RequestModel

MESSAGES = [{"role": "user", "content": "a"}]
VARIABLE = "must be true, false, a number, a string or null"


@pytest.mark.parametrize("model", [ChatCompletionRequest, TokenizeRequest])
@pytest.mark.parametrize(
    ("variables", "param", "wanted"),
    [
        ({"a": [1]}, "chat_template_kwargs.a", VARIABLE),
        ({"a": 1, "b": {}}, "chat_template_kwargs.b", VARIABLE),
        ({"a" * 1000: []}, "chat_template_kwargs." + "a" * 100, VARIABLE),
        ([1], "chat_template_kwargs", "must be an object"),
        (dict.fromkeys("abcdefghijklmnopq", 1), "chat_template_kwargs", "must have at most 16 items"),
    ],
)
def test_an_invalid_template_variable_is_named(
    model: type[RequestModel], variables: Any, param: str, wanted: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        model.parse(json.dumps({"messages": MESSAGES, "chat_template_kwargs": variables}).encode())
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param} {wanted}")


@pytest.mark.parametrize("prompt", [["a"], [1], 5, {}])
def test_tokenize_rejects_a_prompt_that_is_not_one_text(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TokenizeRequest.parse(json.dumps({"prompt": prompt}).encode())
    assert (caught.value.param, caught.value.message) == ("prompt", "prompt must be a string")
