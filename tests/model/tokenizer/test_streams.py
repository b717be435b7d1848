"""Streams of all kinds of tokenizers: the streamed text is the text that the ids add to the prompt's text."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import StreamDecoder, Tokenizer
from tests.model.tokenizer import makers
from tests.model.tokenizer.texts import ADVERSARIAL, any_text, stories

MAKERS = makers.MAKERS


@cache
def tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(makers.write(Path(mkdtemp()), MAKERS[name]()))


def streamed(ours: Tokenizer, token_ids: list[int]) -> list[str]:
    decoder = StreamDecoder(ours)
    return [*(decoder.push([token_id]) for token_id in token_ids), decoder.flush()]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("text", [*ADVERSARIAL[1:], stories()[0]], ids=str.__len__)
def test_deltas_after_a_prompt_are_what_the_completion_adds(name: str, text: str) -> None:
    """The ids of a text are split into prompt and completion at every index that is not inside a character."""
    ours = tokenizer(name)
    token_ids = ours.encode(text)
    whole = ours.decode(token_ids)
    for cut in range(1, min(len(token_ids), 60)):
        prompt = ours.decode(token_ids[:cut])
        if not prompt.endswith("\ufffd"):
            assert prompt + "".join(streamed(ours, token_ids[cut:])) == whole


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
def test_any_ids_stream_to_their_bytes(name: str, data: st.DataObject) -> None:
    """The bytes may be invalid UTF-8: invalid bytes become U+FFFD, and text once returned never changes."""
    ours = tokenizer(name)
    token_ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=30))
    plain = b"".join(map(ours.token_bytes, token_ids))
    deltas = streamed(ours, token_ids)
    assert "".join(deltas) == plain.decode("utf-8", "replace")
    shown = "".join(deltas[:-1])
    assert not shown or plain.decode("utf-8", "replace").startswith(shown)


@pytest.mark.parametrize("name", ["llama2", "mistral", "gemma"])
@given(text=any_text())
def test_byte_fallback_encodes_and_decodes_any_text(name: str, text: str) -> None:
    """Decoding returns every encoded text, with three exceptions.

    The exceptions are lone surrogates, a ▁, and with Metaspace a leading space, which is removed like the space
    that encoding inserts.
    """
    ours = tokenizer(name)
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("▁", "_")
    assert ours.decode(ours.encode(clean)) == (clean.removeprefix(" ") if name == "mistral" else clean)


def test_bytes_of_an_incomplete_character_are_held_back() -> None:
    ours = tokenizer("llama2")
    smile = [ours.encode("a😀b", parse_special=False)][0]
    pieces = streamed(ours, smile)
    assert "".join(pieces).removeprefix(" ") == "a😀b"
    assert "\ufffd" not in "".join(pieces)
    byte_ids = [token_id for token_id in smile if ours.token_bytes(token_id)[0] >= 0x80]
    assert [ours.token_bytes(token_id) for token_id in byte_ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert streamed(ours, byte_ids) == ["", "", "", "😀", ""]
    assert streamed(ours, byte_ids[:2]) == ["", "", "\ufffd"]


def test_a_leading_space_is_kept_in_a_stream_and_stripped_in_a_whole_text() -> None:
    ours = tokenizer("llama2")
    ids = ours.encode("the cat")
    assert ours.decode(ids) == "the cat"
    assert "".join(streamed(ours, ids)) == " the cat"
    begun = [ours.special_tokens["<s>"], *ids]
    assert ours.decode(begun) == "<s> the cat"
    assert "".join(streamed(ours, begun)) == " the cat"


def test_a_character_tokenizer_decodes_the_encoded_text(tmp_path: Path) -> None:
    ours = load_tokenizer(makers.write(tmp_path, makers.characters()))
    text = stories()[0]
    ids = ours.encode(text)
    assert len(ids) == len(text)
    assert ours.decode(ids) == text == "".join(streamed(ours, ids))
    assert (ours.bos_token_id, ours.eos_token_ids, dict(ours.special_tokens)) == (None, (), {})
