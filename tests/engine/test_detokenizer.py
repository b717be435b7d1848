"""Streamed text with stop strings equals the whole text cut at the stop string, for any tokenization."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling.params import SamplingParams
from model.training.data.bpe import train_bpe
from service.engine.output_processor import Detokenizer
from tests.chatml_model import chatml_tokenizer

TOKENIZER = train_bpe(["abab abc cab bca aabbcc ä€😀"] * 4, 290)
ALPHABET = "abc ä€😀"


def stream(ids: list[int], params: SamplingParams) -> tuple[str, str | None, int]:
    """Detokenize tokens one by one. Return the text, the stop string or None, and the number of tokens read."""
    detokenizer = Detokenizer(TOKENIZER, params)
    shown = ""
    for number, token_id in enumerate(ids, start=1):
        _, text, stop = detokenizer.push([token_id])
        shown += text
        if stop is not None:
            return shown, stop, number
    text, stop = detokenizer.flush()
    num_read, whole, whole_stop = Detokenizer(TOKENIZER, params).push(ids, is_last=True)
    assert (whole, whole_stop, num_read) == (shown + text, stop, len(ids))
    return shown + text, stop, len(ids)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the text up to its first complete stop string, and the stop string: the longest of those that end there.

    `include`: return the text of the stop string too.
    """
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


texts = st.text(ALPHABET, max_size=30)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4, unique=True)


@settings(max_examples=400, deadline=None)
@given(texts, stop_lists, st.booleans(), st.booleans())
def test_streamed_text_equals_the_whole_text_cut_at_the_stop_string(
    text: str, stops: list[str], include: bool, bytewise: bool
) -> None:
    ids = list(text.encode()) if bytewise else TOKENIZER.encode(text)
    params = SamplingParams(max_tokens=100, stop=tuple(stops), include_stop_str_in_output=include)
    shown, stop, _ = stream(ids, params)
    assert (shown, stop) == naive(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(texts, stop_lists)
def test_streamed_text_is_never_taken_back(text: str, stops: list[str]) -> None:
    """Streamed text is always a prefix of the final text."""
    final, _ = naive(text, stops, include=False)
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(max_tokens=100, stop=tuple(stops)))
    shown = ""
    for token_id in text.encode():
        _, added, stop = detokenizer.push([token_id])
        shown += added
        assert final.startswith(shown)
        if stop is not None:
            break


@settings(max_examples=200, deadline=None)
@given(texts, stop_lists, st.integers(0, 8))
def test_stop_strings_before_min_tokens_are_text(text: str, stops: list[str], min_tokens: int) -> None:
    ids = TOKENIZER.encode(text)
    params = SamplingParams(max_tokens=100, stop=tuple(stops), min_tokens=min_tokens)
    shown, stop, num_tokens = stream(ids, params)
    if stop is not None and num_tokens < len(ids):
        assert num_tokens >= min_tokens
    free, rest = ids[: max(0, min_tokens - 1)], ids[max(0, min_tokens - 1) :]
    head = stream(free, SamplingParams(max_tokens=100))[0]
    if TOKENIZER.decode(free) + TOKENIZER.decode(rest) == text:  # the boundary splits no character
        assert shown == head + naive(TOKENIZER.decode(rest), stops, include=False)[0]


def test_a_stop_token_is_shown_only_with_include_stop_str_in_output() -> None:
    ids = list(b"ab")
    for include, text in ((False, "a"), (True, "ab")):
        params = SamplingParams(max_tokens=9, stop_token_ids=(98,), include_stop_str_in_output=include)
        assert stream(ids, params) == (text, None, 2)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(max_tokens=9, stop=("abc",)))
    assert [detokenizer.push([byte])[1] for byte in b"xababx"] == ["x", "", "", "ab", "", "abx"]


def test_invalid_bytes_at_the_end_become_one_replacement_character() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(max_tokens=9))
    assert [detokenizer.push([byte])[1] for byte in "é".encode()[:1]] == [""]
    assert detokenizer.flush()[0] == "\ufffd"


def test_visible_special_tokens_are_shown_by_name() -> None:
    """Names are searched for stop strings. A visible token within a character ends the character."""
    tokenizer = chatml_tokenizer()
    end_of_text, start, end = tokenizer.special_tokens.values()

    def shown(ids: list[int], **params: Any) -> str:
        detokenizer = Detokenizer(tokenizer, SamplingParams(max_tokens=9, **params))
        return detokenizer.push(ids, is_last=True)[1]

    ids = [start, 97, 0xF0, start, end_of_text, 98]
    assert shown(ids, ignore_eos=True) == "a\ufffdb"
    assert shown(ids, ignore_eos=True, visible_token_ids=(start,)) == "<|im_start|>a\ufffd<|im_start|>b"
    every = (end_of_text, start, end)
    assert shown(ids, ignore_eos=True, visible_token_ids=every) == tokenizer.decode(ids)
    assert shown(ids, visible_token_ids=every, stop=("a\ufffd<|im_st",)) == "<|im_start|>"


def test_the_name_of_the_token_that_ends_a_sequence_is_text_only_with_include_stop_str_in_output() -> None:
    tokenizer = chatml_tokenizer()
    _, start, end = every = tuple(tokenizer.special_tokens.values())
    for last, stop_token_ids in ((end, ()), (start, (start,))):
        for include, text in ((False, "a"), (True, "a" + tokenizer.format_token_name(last))):
            params = SamplingParams(
                max_tokens=9, stop_token_ids=stop_token_ids, include_stop_str_in_output=include, visible_token_ids=every
            )
            assert Detokenizer(tokenizer, params).push([97, last], is_last=True)[1] == text
