"""Kvasir's tokenizers give the same ids as the `tokenizers` library."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer
from model.tokenizer.tokenizer_json import TokenDecoder, to_characters
from tests.model.tokenizer import makers
from tests.model.tokenizer.texts import all_texts, any_text

ALL = makers.MAKERS


@cache
def pair(name: str) -> tuple[Tokenizer, Library]:
    """Return Kvasir's tokenizer and the `tokenizers` library's of the same tokenizer.json (cached)."""
    library = ALL[name]()
    return load_tokenizer(makers.write(Path(mkdtemp()), library)), library


def expected(library: Library, text: str, *, parse_special: bool = False) -> list[int]:
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    library.encode_special_tokens = not parse_special
    ids: list[int] = library.encode(clean, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("parse_special", [False, True])
def test_fixed_texts_have_the_ids_of_the_library(name: str, parse_special: bool) -> None:
    ours, library = pair(name)
    for text in all_texts():
        assert ours.encode(text, parse_special=parse_special) == expected(library, text, parse_special=parse_special)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40)
@given(text=any_text())
def test_generated_texts_have_the_ids_of_the_library(name: str, text: str) -> None:
    ours, library = pair(name)
    assert ours.encode(text) == expected(library, text)
    assert ours.encode(text, parse_special=True) == expected(library, text, parse_special=True)


@pytest.mark.parametrize("name", ["llama2", "qwen"])
def test_threads_can_share_a_tokenizer(name: str) -> None:
    """Four threads encode a text in parallel, with and without parsing of special tokens."""
    ours, _ = pair(name)
    text = f"{''.join(all_texts()[:40])}</s><|im_end|>"
    expected_ids = {parse_special: ours.encode(text, parse_special=parse_special) for parse_special in (False, True)}
    assert expected_ids[False] != expected_ids[True]

    def encode(number: int) -> bool:
        return ours.encode(text, parse_special=number % 2 == 0) == expected_ids[number % 2 == 0]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(encode, range(40)))


@pytest.mark.parametrize("name", ALL)
def test_special_tokens_in_text_are_text_unless_parse_special(name: str) -> None:
    ours, _ = pair(name)
    for name, token_id in ours.special_tokens.items():
        assert token_id not in ours.encode(f"a{name}b")
        assert token_id in ours.encode(f"a{name}b", parse_special=True)
        assert (ours.token_bytes(token_id), ours.format_token_name(token_id)) == (b"", name)


@pytest.mark.parametrize("name", ALL)
def test_decoded_texts_equal_those_of_the_library(name: str) -> None:
    """Ids of encoded texts, then each id alone. For invalid UTF-8, the library's number of U+FFFD differs."""
    ours, library = pair(name)
    for text in all_texts():
        ids = ours.encode(text)
        assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False)
    for token_id in range(ours.vocab_size):
        shown, theirs = ours.decode([token_id]), library.decode([token_id], skip_special_tokens=False)
        assert shown.replace("\ufffd", "") == theirs.replace("\ufffd", "")


@pytest.mark.parametrize("name", ALL)
def test_ids_outside_the_vocabulary_are_rejected_and_gaps_are_empty(name: str) -> None:
    ours, library = pair(name)
    assert ours.vocab_size == max(library.get_vocab().values()) + 1
    for unknown in (-1, ours.vocab_size):
        with pytest.raises(IndexError):
            ours.token_bytes(unknown)
        with pytest.raises(IndexError):
            ours.decode([unknown])
    for gap in set(range(ours.vocab_size)) - set(library.get_vocab().values()):
        assert (ours.token_bytes(gap), ours.format_token_name(gap), ours.decode([gap])) == (b"", "", "")


def test_characters_for_bytes_equal_those_of_the_library() -> None:
    every_byte = bytes(range(256))
    assert TokenDecoder(byte_level=True).token_bytes(to_characters(every_byte)) == every_byte
    assert set(to_characters(every_byte)) == set(pre_tokenizers.ByteLevel.alphabet())
