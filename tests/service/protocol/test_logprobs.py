"""Logprobs in OpenAI's and vLLM's formats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer.interface import StreamDecoder, Tokenizer
from service.ipc.messages import TokenLogprob
from service.protocol.logprobs import (
    LogprobFormat,
    LogprobWriter,
    chat_logprobs,
    format_token_name,
    prompt_logprobs,
    prompt_text,
)
from tests.tiny_model import EOS, tiny_tokenizer


def entry(token_id: int, logprob: float | None = -1.0, top: tuple[tuple[int, float], ...] = ()) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=None if logprob is None else 1, top=top)


def writer(tokenizer: Tokenizer, num_top: int = 20) -> LogprobWriter:
    return LogprobWriter(LogprobFormat(tokenizer=tokenizer, num_top=num_top))


def test_a_token_name_is_its_text_special_name_or_bytes(tokenizer: Tokenizer) -> None:
    assert format_token_name(tokenizer, ord("a")) == "a"
    assert format_token_name(tokenizer, tokenizer.special_tokens[EOS]) == EOS
    assert format_token_name(tokenizer, 0xF0) == "bytes:\\xf0"
    (smile_start, _) = tokenizer.encode("😀")
    assert format_token_name(tokenizer, smile_start) == "bytes:\\xf0\\x9f"


def test_top_logprobs_include_the_token_with_the_same_logprob(tokenizer: Tokenizer) -> None:
    written = writer(tokenizer).write([entry(97, -2.5, ((98, -0.25), (99, -0.5))), entry(98, -0.1, ())])
    assert written.tokens == ["a", "b"]
    assert written.token_logprobs == [-2.5, -0.1]
    assert written.top_logprobs == [{"b": -0.25, "c": -0.5, "a": -2.5}, {"b": -0.1}]


def test_logprobs_of_first_and_impossible_tokens_are_valid_json(tokenizer: Tokenizer) -> None:
    written = writer(tokenizer).write([entry(97, None), entry(98, float("-inf"), ((99, float("-inf")),))])
    assert written.token_logprobs == [None, -9999.0]
    assert written.top_logprobs == [None, {"c": -9999.0, "b": -9999.0}]


def test_text_offsets_count_whole_characters(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("é😀"), ord("x")]
    written = writer(tokenizer).write([entry(i) for i in ids])
    assert written.tokens == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "x"]
    assert written.text_offset == [0, 0, 1, 1, 2]


def test_an_incomplete_character_at_the_prompts_end_counts_as_one(tokenizer: Tokenizer) -> None:
    written = writer(tokenizer).write([entry(97)], prompt=[entry(97), entry(0xF0)])
    assert written.text_offset == [0, 1, 2]
    assert prompt_text(tokenizer, [97, 0xF0], num_hidden=0) == "a\ufffd"


@given(st.lists(st.integers(0, tiny_tokenizer().vocab_size - 1), max_size=30), st.integers(0, 30))
def test_text_offsets_do_not_depend_on_how_deltas_are_cut(ids: list[int], cut: int) -> None:
    tokenizer = tiny_tokenizer()
    one = writer(tokenizer)
    pieces = [one.write([entry(i) for i in part]) for part in (ids[:cut], ids[cut:])]
    offsets = [offset for piece in pieces for offset in piece.text_offset]
    text = prompt_text(tokenizer, ids, num_hidden=len(ids))
    assert offsets == sorted(offsets)
    for position, (offset, name) in enumerate(zip(offsets, (n for p in pieces for n in p.tokens), strict=True)):
        if name.startswith("bytes:"):
            assert offset == len(StreamDecoder(tokenizer).push(ids[:position]))
        elif name != EOS:
            assert text[offset : offset + len(name)] == name


@pytest.mark.parametrize("text", ["once upon a time", "naïve 😀 — end", ""])
def test_prompt_text_inverts_tokenization(tokenizer: Tokenizer, text: str) -> None:
    assert prompt_text(tokenizer, tokenizer.encode(text), num_hidden=0) == text


def test_only_the_requested_number_of_alternatives_is_written(tokenizer: Tokenizer) -> None:
    """With a greater `prompt_logprobs`, the engine returns more alternatives than `logprobs` requests."""
    scored = entry(97, -2.5, ((98, -0.25), (99, -0.5)))
    assert writer(tokenizer, 1).write([scored]).top_logprobs == [{"b": -0.25, "a": -2.5}]
    assert writer(tokenizer, 0).write([], prompt=[scored]).top_logprobs == [{"a": -2.5}]


def test_token_names_may_be_ids_and_offsets_still_count_characters(tokenizer: Tokenizer) -> None:
    format = LogprobFormat(tokenizer=tokenizer, num_top=2, names_are_ids=True)
    written = LogprobWriter(format).write([entry(97, -2.5, ((98, -0.25),)), entry(98)])
    assert written.tokens == ["token_id:97", "token_id:98"]
    assert written.top_logprobs == [{"token_id:98": -0.25, "token_id:97": -2.5}, {"token_id:98": -1.0}]
    assert written.text_offset == [0, 1]
    (told,) = chat_logprobs([entry(97, -2.5, ((98, -0.25),))], format).content
    assert (told.token, told.bytes, told.top_logprobs[0].token) == ("token_id:97", [97], "token_id:98")


def test_chat_logprobs_have_bytes_and_the_most_likely_tokens(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_tokens[EOS]
    entries = [entry(97, -2.5, ((98, -0.25), (99, float("-inf")))), entry(0xF0, -0.5, ((0xF0, -0.5),)), entry(end)]
    first, broken, mark = chat_logprobs(entries, LogprobFormat(tokenizer=tokenizer, num_top=2)).content
    assert (first.token, first.logprob, first.bytes) == ("a", -2.5, [97])
    assert [(top.token, top.logprob, top.bytes) for top in first.top_logprobs] == [
        ("b", -0.25, [98]),
        ("c", -9999.0, [99]),
    ]
    assert (broken.token, broken.bytes) == ("bytes:\\xf0", [0xF0])
    assert broken.top_logprobs[0].logprob == broken.logprob
    assert (mark.token, mark.bytes, mark.top_logprobs) == (EOS, None, [])


def test_prompt_logprobs_have_ids_and_ranks(tokenizer: Tokenizer) -> None:
    top = ((98, -0.25), (99, -0.5), (100, -0.5), (101, -0.75))
    scored = TokenLogprob(token_id=97, logprob=-5.0, rank=9, top=top)
    likely = TokenLogprob(token_id=100, logprob=-0.5, rank=2, top=top)
    nothing, own, among, few = prompt_logprobs(
        [entry(96, None), scored, likely, entry(97, float("-inf"))], LogprobFormat(tokenizer=tokenizer, num_top=4)
    )
    assert nothing is None
    assert own is not None
    assert [(i, told.rank, told.logprob, told.decoded_token) for i, told in own.items()] == [
        (97, 9, -5.0, "a"),
        (98, 1, -0.25, "b"),
        (99, 2, -0.5, "c"),
        (100, 2, -0.5, "d"),
        (101, 4, -0.75, "e"),
    ]
    assert among is not None
    assert list(among) == [100, 98, 99, 101]
    assert (among[100].rank, among[100].logprob) == (2, -0.5)
    assert few is not None
    assert few[97].logprob == -9999.0


@given(st.lists(st.integers(0, tiny_tokenizer().vocab_size - 1), max_size=30))
def test_the_bytes_of_chat_logprobs_join_to_the_text(ids: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    content = chat_logprobs([entry(i) for i in ids], LogprobFormat(tokenizer=tokenizer, num_top=0)).content
    joined = b"".join(bytes(token.bytes or ()) for token in content)
    assert joined.decode("utf-8", "replace") == prompt_text(tokenizer, ids, num_hidden=len(ids))


@given(st.lists(st.integers(0, tiny_tokenizer().vocab_size - 1), max_size=30), st.integers(0, 30), st.integers(0, 30))
def test_text_offsets_point_to_the_names_of_visible_special_tokens(ids: list[int], end: int, num_hidden: int) -> None:
    tokenizer = tiny_tokenizer()
    format = LogprobFormat(tokenizer=tokenizer, num_top=0, visible_token_ids=frozenset(tokenizer.eos_token_ids))
    prompt, completion = [entry(i) for i in ids[:end]], [entry(i) for i in ids[end:]]
    written = LogprobWriter(format).write(completion, prompt=prompt, num_hidden=num_hidden)
    text = prompt_text(tokenizer, ids[:end], num_hidden=num_hidden) + tokenizer.decode(ids[end:])
    hidden = range(min(num_hidden, end))
    for position, (offset, name) in enumerate(zip(written.text_offset, written.tokens, strict=True)):
        if not name.startswith("bytes:") and not (name == EOS and position in hidden):
            assert text[offset : offset + len(name)] == name
    joined = b"".join(bytes(token.bytes or ()) for token in chat_logprobs(completion, format).content)
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids[end:])
