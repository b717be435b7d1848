"""Token rules, priority and cache salt of requests."""

import json
from typing import Any

import pytest

from model.sampling.params import SamplingParams
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.interface import TokenizerError
from service.ipc.messages import Submit
from service.preprocess.chat_renderer import ChatPlan
from service.preprocess.request_processor import RequestProcessor
from service.preprocess.served_model import RequestDefaults
from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest
from service.protocol.errors import InvalidRequest
from tests.tiny_model import tiny_tokenizer

A, B, E = b"abe"
(SPACE_A,), (SPACE_THE,), (TH,) = map(tiny_tokenizer().encode, (" a", " the", "th"))


@pytest.fixture
def processor(tokenizer: ByteLevelTokenizer) -> RequestProcessor:
    return RequestProcessor(tokenizer=tokenizer, model_name="tiny", max_context_length=64, max_num_choices=12)


def submits(processor: RequestProcessor, **fields: Any) -> list[Submit]:
    """Return the sequences that both completion routes submit, which must be equal."""
    text = CompletionRequest.parse(json.dumps({"prompt": "abc", "max_tokens": 8, "seed": 1, **fields}).encode())
    processor.check(text)
    of_text = [choice.submit for choice in processor.plan(text, arrival_seconds=3.0)]
    messages = [{"role": "user", "content": "abc"}]
    body = json.dumps({"messages": messages, "max_tokens": 8, "seed": 1, **fields}).encode()
    chat = ChatCompletionRequest.parse(body)
    processor.check(chat)
    of_chat = [choice.submit for choice in processor.plan(chat, ChatPlan(token_ids=list(b"abc")), arrival_seconds=3.0)]
    for one, other in zip(of_text, of_chat, strict=True):
        assert (one.params, one.priority, one.cache_salt) == (other.params, other.priority, other.cache_salt)
    return of_text


def params(processor: RequestProcessor, **fields: Any) -> SamplingParams:
    return submits(processor, **fields)[0].params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"logit_bias": {"0": -100, "273": 0.5}}, {"logit_bias": ((0, -100.0), (273, 0.5))}),
        ({"allowed_token_ids": [5, 4, 5]}, {"allowed_token_ids": (5, 4)}),
    ],
)
def test_each_token_rule_changes_only_its_sampling_parameter(
    processor: RequestProcessor, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    plain = params(processor)
    assert not plain.has_token_rules
    ruled = params(processor, **fields)
    assert ruled.has_token_rules
    for name in SamplingParams.__dataclass_fields__:
        wanted = expected.get(name, getattr(plain, name))
        assert getattr(ruled, name) == wanted


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["ab"], ((A, B), (SPACE_A, B))),
        (["  ab", "ab"], ((A, B), (SPACE_A, B))),
        (["the"], ((TH, E), (SPACE_THE,))),
        (["\n"], ((10,),)),
        ([" "], ((32,),)),
    ],
)
def test_a_bad_word_is_tokenized_with_and_without_a_leading_space(
    processor: RequestProcessor, words: list[str], ids: tuple[tuple[int, ...], ...]
) -> None:
    assert params(processor, bad_words=words).bad_word_ids == ids


@pytest.mark.parametrize("fields", [{"logit_bias": {}}, {"bad_words": []}, {"priority": 0}, {"repetition_penalty": 1}])
def test_empty_token_rules_change_nothing(processor: RequestProcessor, fields: dict[str, Any]) -> None:
    assert submits(processor, **fields)[0].params == params(processor)


def test_priority_and_cache_salt_reach_every_sample(processor: RequestProcessor) -> None:
    for submit in submits(processor, priority=-7, cache_salt="mine", n=3):
        assert (submit.priority, submit.cache_salt) == (-7, "mine")
    assert [(submit.priority, submit.cache_salt) for submit in submits(processor)] == [(0, "")]


@pytest.mark.parametrize("key", ["-1", "+1", "01", "1.0", " 1", "a", "", "٣", "9" * 5000])
def test_a_logit_bias_key_that_is_not_a_token_id_is_rejected(processor: RequestProcessor, key: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a token id") as caught:
        submits(processor, logit_bias={key: 1})
    assert caught.value.param == "logit_bias"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"logit_bias": {"274": 1}}, "logit_bias", "token id 274 is out of vocabulary"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids", "token id -1 is out of vocabulary"),
        (
            {"allowed_token_ids": [A, B], "bad_words": ["a", "b"]},
            "allowed_token_ids",
            "all of these tokens are forbidden",
        ),
        ({"allowed_token_ids": [273], "min_tokens": 1}, "allowed_token_ids", "all of these tokens are forbidden"),
        (
            {"allowed_token_ids": [A], "stop_token_ids": [A], "min_tokens": 2, "ignore_eos": True},
            "allowed_token_ids",
            "all of these tokens are forbidden",
        ),
    ],
)
def test_token_rules_that_forbid_every_token_are_rejected(
    processor: RequestProcessor, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        submits(processor, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [A, B], "bad_words": ["a"]},
        {"allowed_token_ids": [273], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [273]},
        {"allowed_token_ids": [A], "bad_words": ["aa"]},  # one "a" is allowed, "aa" is not
    ],
)
def test_token_rules_that_leave_a_token_are_accepted(processor: RequestProcessor, fields: dict[str, Any]) -> None:
    assert params(processor, **fields).allowed_token_ids


def test_a_bad_word_that_cannot_be_tokenized_is_rejected(
    processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ByteLevelTokenizer.encode

    def refuse(self: ByteLevelTokenizer, text: str, *, parse_special: bool = False) -> list[int]:
        if "xyz" in text:
            raise TokenizerError("no token stands for it")
        return [] if "empty" in text else whole(self, text, parse_special=parse_special)

    monkeypatch.setattr(ByteLevelTokenizer, "encode", refuse)
    for word, said in (
        ("xyz", "'xyz' cannot be tokenized: no token stands for it"),
        ("empty", "'empty' has no tokens"),
    ):
        with pytest.raises(InvalidRequest, match=said) as caught:
            submits(processor, bad_words=["fine", word])
        assert caught.value.param == "bad_words"


def test_bad_words_are_tokenized_once_per_request(processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    whole = ByteLevelTokenizer.encode

    def count(self: ByteLevelTokenizer, text: str, *, parse_special: bool = False) -> list[int]:
        encoded.append(text)
        return whole(self, text, parse_special=parse_special)

    monkeypatch.setattr(ByteLevelTokenizer, "encode", count)
    request = CompletionRequest.parse(json.dumps({"prompt": ["a", "b"], "n": 3, "bad_words": ["word"]}).encode())
    assert len(processor.plan(request, arrival_seconds=0.0)) == 6
    assert sorted(encoded) == [" word", "a", "b", "word"]


def test_a_request_gets_the_checkpoints_repetition_penalty(tokenizer: ByteLevelTokenizer) -> None:
    processor = RequestProcessor(
        tokenizer=tokenizer,
        model_name="tiny",
        max_context_length=64,
        max_num_choices=12,
        defaults=RequestDefaults(sampling={"repetition_penalty": 1.25}),
    )
    assert params(processor).repetition_penalty == 1.25
    assert params(processor, repetition_penalty=1.0).repetition_penalty == 1.0
