"""OpenAI's four lists: names, floats, alternatives, offsets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer.interface import Tokenizer
from model.tokenizer.stream import StreamDecoder
from service.logprobs import LogprobWriter, prompt_text, token_name
from service.messages import TokenLogprob
from tests.tiny_model import EOS, tiny_tokenizer


def entry(token_id: int, logprob: float | None = -1.0, top: tuple[tuple[int, float], ...] = ()) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=None if logprob is None else 1, top=top)


def test_a_token_is_named_by_its_text_its_name_or_its_bytes(tokenizer: Tokenizer) -> None:
    assert token_name(tokenizer, ord("a")) == "a"
    assert token_name(tokenizer, tokenizer.special_tokens[EOS]) == EOS
    assert token_name(tokenizer, 0xF0) == "bytes:\\xf0"
    (smile_start, _) = tokenizer.encode("😀")
    assert token_name(tokenizer, smile_start) == "bytes:\\xf0\\x9f"


def test_the_token_itself_is_always_among_the_alternatives_with_the_identical_float(tokenizer: Tokenizer) -> None:
    written = LogprobWriter(tokenizer).write([entry(97, -2.5, ((98, -0.25), (99, -0.5))), entry(98, -0.1, ())])
    assert written.tokens == ["a", "b"]
    assert written.token_logprobs == [-2.5, -0.1]
    assert written.top_logprobs == [{"b": -0.25, "c": -0.5, "a": -2.5}, {"b": -0.1}]


def test_the_first_token_of_a_prompt_has_no_logprob_and_impossible_ones_a_number(tokenizer: Tokenizer) -> None:
    written = LogprobWriter(tokenizer).write([entry(97, None), entry(98, float("-inf"), ((99, float("-inf")),))])
    assert written.token_logprobs == [None, -9999.0]
    assert written.top_logprobs == [None, {"c": -9999.0, "b": -9999.0}]


def test_offsets_count_whole_characters(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("é😀"), ord("x")]
    written = LogprobWriter(tokenizer).write([entry(i) for i in ids])
    assert written.tokens == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "x"]
    assert written.text_offset == [0, 0, 1, 1, 2]


def test_an_unfinished_character_at_the_prompts_end_counts_as_one(tokenizer: Tokenizer) -> None:
    writer = LogprobWriter(tokenizer)
    assert writer.write([entry(97), entry(0xF0)]).text_offset == [0, 1]
    writer.end_prompt()
    assert writer.write([entry(97)]).text_offset == [2]
    assert prompt_text(tokenizer, [97, 0xF0]) == "a\ufffd"


@given(st.lists(st.integers(0, tiny_tokenizer().vocab_size - 1), max_size=30), st.integers(0, 30))
def test_offsets_point_into_the_text_however_it_is_cut(ids: list[int], cut: int) -> None:
    tokenizer = tiny_tokenizer()
    writer = LogprobWriter(tokenizer)
    pieces = [writer.write([entry(i) for i in part]) for part in (ids[:cut], ids[cut:])]
    offsets = [offset for piece in pieces for offset in piece.text_offset]
    text = prompt_text(tokenizer, ids)
    assert offsets == sorted(offsets)
    for position, (offset, name) in enumerate(zip(offsets, (n for p in pieces for n in p.tokens), strict=True)):
        if name.startswith("bytes:"):
            assert offset == len(StreamDecoder(tokenizer).push(ids[:position]))
        elif name != EOS:
            assert text[offset : offset + len(name)] == name


@pytest.mark.parametrize("text", ["once upon a time", "naïve 😀 — end", ""])
def test_a_prompts_text_is_the_text_it_was_made_of(tokenizer: Tokenizer, text: str) -> None:
    assert prompt_text(tokenizer, tokenizer.encode(text)) == text
