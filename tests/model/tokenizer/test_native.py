"""Tokenizers in Kvasir's format: decoded texts, special tokens in a text, streams, saving and loading."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.io.files import CheckpointError
from model.tokenizer.byte_level import RANKS_FILE, SPEC_FILE, ByteLevelTokenizer, load_native, save_native
from model.tokenizer.interface import StreamDecoder, TokenizerError
from model.training.data.bpe import END_OF_TEXT, train_bpe

TEXTS = [
    "The dog did not cross the road as it was too tired. " * 3,
    "Größe, naïve café, 北京, こんにちは, 👩‍👩‍👧‍👦 🇩🇪, 12345 6\n\n  x\t\t",
]
TOKENIZER = train_bpe(TEXTS, 400)
(END,) = TOKENIZER.eos_token_ids


@given(st.text())
def test_decoding_returns_the_encoded_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()


@given(st.text(st.sampled_from("<|endoftxt> a")))
def test_special_tokens_in_text_are_text(text: str) -> None:
    assert END not in TOKENIZER.encode(text + END_OF_TEXT)
    assert TOKENIZER.decode(TOKENIZER.encode(text + END_OF_TEXT)) == text + END_OF_TEXT


@given(st.lists(st.lists(st.integers(0, TOKENIZER.vocab_size - 1))))
def test_stream_equals_decoding_at_once(pushes: list[list[int]]) -> None:
    """This holds for any ids, whose bytes may be invalid UTF-8, in pushes of any length."""
    decoder = StreamDecoder(TOKENIZER)
    streamed = "".join(decoder.push(ids) for ids in pushes) + decoder.flush()
    plain = b"".join(TOKENIZER.token_bytes(token) for ids in pushes for token in ids)
    assert streamed == plain.decode("utf-8", "replace")


@given(st.text())
def test_a_stream_never_shows_an_incomplete_character(text: str) -> None:
    decoder = StreamDecoder(TOKENIZER)
    shown = ""
    for byte in text.encode():
        shown += decoder.push([byte])  # ids 0 to 255 are the bytes
        assert text.startswith(shown)
    assert shown == text
    assert decoder.flush() == ""


def test_special_tokens_have_names_but_no_text() -> None:
    assert TOKENIZER.decode([END]) == TOKENIZER.format_token_name(END) == END_OF_TEXT
    assert TOKENIZER.token_bytes(END) == b""
    assert TOKENIZER.format_token_name(0xFF) == "\ufffd"
    for unknown in (-1, TOKENIZER.vocab_size):
        with pytest.raises(IndexError):
            TOKENIZER.token_bytes(unknown)


def test_lone_surrogates_become_replacement_characters() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"


def test_a_text_that_the_splitter_cannot_split_raises_tokenizer_error() -> None:
    with pytest.raises(TokenizerError, match="cannot be split"):
        TOKENIZER.encode(" " * 3_000_000 + "a")


def test_a_saved_tokenizer_gives_the_same_ids_when_loaded(tmp_path: Path) -> None:
    save_native(TOKENIZER, tmp_path)
    loaded = load_native(tmp_path)
    text = "".join(TEXTS)
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert (loaded.vocab_size, loaded.eos_token_ids) == (TOKENIZER.vocab_size, (END,))
    assert loaded.special_tokens == TOKENIZER.special_tokens


@pytest.mark.parametrize("ends", [(1, 2), (2, 0, 1), (0,)])
def test_eos_tokens_keep_their_order_when_saved(tmp_path: Path, ends: tuple[int, ...]) -> None:
    marks = {name: TOKENIZER.vocab_size - 1 + number for number, name in enumerate((END_OF_TEXT, "<|a|>", "<|b|>"))}
    ids = tuple(list(marks.values())[end] for end in ends)
    save_native(
        ByteLevelTokenizer(
            pattern=TOKENIZER.pattern,
            ranks=dict(TOKENIZER.ranks),
            special_tokens=marks,
            eos_token_ids=ids,
            bos_token_id=None,
        ),
        tmp_path,
    )
    assert json.loads((tmp_path / SPEC_FILE).read_text())["eos_token_id"] == (ids[0] if len(ids) == 1 else list(ids))
    loaded = load_native(tmp_path)
    assert loaded.eos_token_ids == ids
    assert loaded.special_tokens == marks


def test_a_tokenizer_without_eos_token_is_not_saved(tmp_path: Path) -> None:
    endless = ByteLevelTokenizer(
        pattern=TOKENIZER.pattern, ranks=dict(TOKENIZER.ranks), special_tokens={}, eos_token_ids=(), bos_token_id=None
    )
    with pytest.raises(ValueError, match="no EOS token"):
        save_native(endless, tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (RANKS_FILE, None, f"{RANKS_FILE}: missing"),
        (RANKS_FILE, "QQ== 0\nnot a line at all\n", f"{RANKS_FILE}, line 2"),
        (RANKS_FILE, "QQ== 0\nQg== 1\n", "without gaps"),
        (SPEC_FILE, None, f"{SPEC_FILE}: missing"),
        (SPEC_FILE, "{", f"{SPEC_FILE}: not JSON"),
        (SPEC_FILE, "[]", f"{SPEC_FILE}: a JSON object expected"),
        (SPEC_FILE, "{}", f"{SPEC_FILE}: Object missing required field `pattern`; copy the file again"),
        (SPEC_FILE, {"more": 1}, f"{SPEC_FILE}: Object contains unknown field `more`"),
        (SPEC_FILE, "[" * 200_000, f"{SPEC_FILE}: not JSON: nested too deeply"),
        (SPEC_FILE, {"pattern": 5}, r"Expected `str`, got `int` - at `\$.pattern`"),
        (SPEC_FILE, {"pattern": ""}, r"Expected `str` of length >= 1 - at `\$.pattern`"),
        (SPEC_FILE, {"special_tokens": []}, r"\$.special_tokens"),
        (SPEC_FILE, {"special_tokens": None}, r"\$.special_tokens"),
        (SPEC_FILE, {"special_tokens": {"a": [1]}}, r"\$.special_tokens"),
        (SPEC_FILE, {"special_tokens": {END_OF_TEXT: float(END)}}, r"\$.special_tokens"),
        (SPEC_FILE, {"special_tokens": {END_OF_TEXT: True}}, r"\$.special_tokens"),
        (SPEC_FILE, {"special_tokens": {"": END}}, r"\$.special_tokens"),
        (SPEC_FILE, {"eos_token_id": None}, r"\$.eos_token_id"),
        (SPEC_FILE, {"eos_token_id": []}, r"Expected `array` of length >= 1 - at `\$.eos_token_id`"),
        (SPEC_FILE, {"eos_token_id": [END, END]}, f"the BOS or EOS id {END} is not .*, or is listed twice"),
        (SPEC_FILE, {"eos_token_id": [END, "x"]}, r"\$.eos_token_id"),
        (SPEC_FILE, {"eos_token_id": True}, r"\$.eos_token_id"),
        (SPEC_FILE, {"eos_token_id": [END, 5]}, "the BOS or EOS id 5 is not a special token"),
        (SPEC_FILE, {"eos_token_id": 5}, "the BOS or EOS id 5 is not a special token"),
        (SPEC_FILE, {"bos_token_id": 5}, "the BOS or EOS id 5 is not a special token"),
        (SPEC_FILE, {"bos_token_id": "x"}, r"\$.bos_token_id"),
        (SPEC_FILE, {"pattern": "("}, f"{SPEC_FILE}: the split pattern \\(key pattern\\) cannot be used"),
        (SPEC_FILE, {"special_tokens": {END_OF_TEXT: 5}}, "without gaps"),
    ],
)
def test_an_error_names_the_damaged_file(
    tmp_path: Path, file: str, content: str | dict[str, object] | None, message: str
) -> None:
    save_native(TOKENIZER, tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    elif isinstance(content, dict):
        values = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps({**values, **content}))
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_native(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))
