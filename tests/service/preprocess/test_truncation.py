"""Truncation of prompts."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer.byte_level import ByteLevelTokenizer
from service.preprocess.chat_renderer import ChatPlan
from service.preprocess.request_processor import RequestProcessor, truncate
from service.preprocess.served_model import RequestDefaults
from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest
from service.protocol.errors import ContextLengthExceeded, InvalidRequest

CONTEXT = 64


@pytest.fixture
def processor(tokenizer: ByteLevelTokenizer) -> RequestProcessor:
    return RequestProcessor(tokenizer=tokenizer, model_name="tiny", max_context_length=CONTEXT, max_num_choices=4)


def kept(processor: RequestProcessor, **fields: Any) -> list[int]:
    """Return the token ids of the only prompt that the engine gets."""
    request = CompletionRequest.parse(json.dumps({"prompt": "abcdef", "max_tokens": 4, **fields}).encode())
    (choice,) = processor.plan(request, arrival_seconds=0.0)
    return list(choice.submit.prompt_token_ids)


def test_truncation_keeps_the_last_or_the_first_tokens(processor: RequestProcessor) -> None:
    assert kept(processor, truncate_prompt_tokens=2) == [*b"ef"]
    assert kept(processor, truncate_prompt_tokens=2, truncation_side="left") == [*b"ef"]
    assert kept(processor, truncate_prompt_tokens=2, truncation_side="right") == [*b"ab"]
    assert kept(processor, prompt=[1, 2, 3], truncate_prompt_tokens=1, truncation_side="right") == [1]
    assert kept(processor, truncate_prompt_tokens=None) == kept(processor, truncate_prompt_tokens=6) == [*b"abcdef"]


def test_truncation_to_minus_one_keeps_as_many_tokens_as_fit(processor: RequestProcessor) -> None:
    ids = [number % 250 for number in range(300)]
    assert kept(processor, prompt=ids, truncate_prompt_tokens=-1) == ids[-60:]
    assert kept(processor, prompt=ids, truncate_prompt_tokens=-1, truncation_side="right") == ids[:60]
    assert kept(processor, prompt=ids, truncate_prompt_tokens=-1, max_tokens=0) == ids[-64:]
    assert kept(processor, prompt=ids, truncate_prompt_tokens=-1, max_tokens=None) == ids[-48:]
    assert kept(processor, prompt="x" * 5000, truncate_prompt_tokens=-1) == [*b"x"] * 60


def test_a_default_length_fits_the_context_after_truncation(tokenizer: ByteLevelTokenizer) -> None:
    """Without `max_tokens`, truncation to -1 leaves room for one completion token."""
    processor = RequestProcessor(
        tokenizer=tokenizer,
        model_name="tiny",
        max_context_length=CONTEXT,
        max_num_choices=4,
        defaults=RequestDefaults(max_new_tokens=50),
    )
    for request in (
        CompletionRequest.parse(json.dumps({"prompt": [1] * 99, "truncate_prompt_tokens": -1}).encode()),
        ChatCompletionRequest.parse(b'{"messages": [{"role": "user", "content": "a"}], "truncate_prompt_tokens": -1}'),
    ):
        if isinstance(request, CompletionRequest):
            (choice,) = processor.plan(request, arrival_seconds=0.0)
        else:
            (choice,) = processor.plan(request, ChatPlan(token_ids=[1] * 99), arrival_seconds=0.0)
        assert (choice.num_prompt_tokens, choice.submit.params.max_tokens) == (CONTEXT - 1, 1)


def test_truncation_to_more_tokens_than_fit_is_rejected(processor: RequestProcessor) -> None:
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens=61 is over the 60 tokens") as caught:
        kept(processor, truncate_prompt_tokens=61)
    assert caught.value.param == "truncate_prompt_tokens"
    with pytest.raises(ContextLengthExceeded, match="the prompt has 6 tokens and max_tokens is 64"):
        kept(processor, truncate_prompt_tokens=-1, max_tokens=64)


def test_truncated_token_ids_are_still_checked(processor: RequestProcessor) -> None:
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        kept(processor, prompt=[9999, 1, 2], truncate_prompt_tokens=1)


def test_echo_returns_the_truncated_prompt(processor: RequestProcessor) -> None:
    fields: dict[str, Any] = {"prompt": ["abcdef", "é"], "echo": True, "truncate_prompt_tokens": 2, "max_tokens": 1}
    request = CompletionRequest.parse(json.dumps(fields).encode())
    assert [choice.prompt_text for choice in processor.plan(request, arrival_seconds=0.0)] == ["ef", "é"]


def test_truncation_keeps_the_begin_of_text_token(tokenizer: ByteLevelTokenizer) -> None:
    marked = ByteLevelTokenizer(
        pattern=tokenizer.pattern,
        ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<begin>": 256},
        eos_token_ids=(),
        bos_token_id=256,
    )
    processor = RequestProcessor(tokenizer=marked, model_name="m", max_context_length=CONTEXT, max_num_choices=4)
    assert kept(processor, truncate_prompt_tokens=3) == [256, *b"ef"]
    assert kept(processor, truncate_prompt_tokens=3, truncation_side="right") == [256, *b"ab"]
    assert kept(processor, truncate_prompt_tokens=1) == [256]
    assert kept(processor, prompt=[256, 97, 98], truncate_prompt_tokens=2) == [97, 98], (
        "token ids of the client get no begin-of-text token"
    )


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 1),
    st.integers(20, 30),
)
def test_truncation_keeps_special_tokens_and_one_end_of_the_prompt(
    ids: list[int], num_kept: int, keeps_end: bool, num_special_tokens: int, room: int
) -> None:
    cut = truncate(ids, num_kept, room=room, keeps_end=keeps_end, num_special_tokens=num_special_tokens)
    assert len(cut) == min(num_kept, len(ids))
    assert cut[:num_special_tokens] == ids[:num_special_tokens]
    assert cut[num_special_tokens:] == (
        ids[len(ids) - len(cut) + num_special_tokens :] if keeps_end else ids[num_special_tokens : len(cut)]
    )
