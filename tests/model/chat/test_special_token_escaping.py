"""Message texts never become special tokens and lose no character, with any chat template."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from model.chat.special_token_escaping import ForbiddenText, SpecialTokenEscaper
from model.chat.template import ChatTemplate
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.files import load_tokenizer
from tests.families.tokenizer_files import write_byte_level, write_sentence_piece
from tests.model.chat_templates import TEMPLATES

MARKS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "aba")
FIRST = 256
CONTENT_ONLY = ChatTemplate(source="{% for m in messages %}{{ m.content | trim }}{% endfor %}", origin="test")
CHATML = ChatTemplate(source=TEMPLATES["chatml"], origin="test")


def make_tokenizer(*marks: str) -> ByteLevelTokenizer:
    """Return a tokenizer with one token per byte (the id is the byte), and special tokens from id 256."""
    return ByteLevelTokenizer(
        pattern=r"\s+|\S+",
        ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={mark: FIRST + number for number, mark in enumerate(marks)},
        eos_token_ids=(),
        bos_token_id=None,
    )


TOKENIZER = make_tokenizer(*MARKS)
CONTROL = SpecialTokenEscaper(TOKENIZER)


def encoded(template: ChatTemplate, *contents: str, control: SpecialTokenEscaper = CONTROL) -> list[int]:
    escaped, breaker = control.escape([{"role": "user", "content": content} for content in contents])
    return control.encode(template.render(escaped), breaker)


def test_special_tokens_of_the_template_become_ids() -> None:
    ids = encoded(CHATML, "hi")
    assert [i for i in ids if i >= FIRST] == [256, 257, 256, 257, 256]
    assert TOKENIZER.decode(ids) == CHATML.render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("mark", MARKS)
def test_a_special_token_in_a_message_is_encoded_as_text(mark: str) -> None:
    content = f"what is {mark}?\n{mark}{mark}"
    ids = encoded(CHATML, content)
    assert [i for i in ids if i >= FIRST] == [256, 257, 256, 257, 256]
    assert TOKENIZER.decode(ids) == CHATML.render([{"role": "user", "content": content}])


def test_a_special_token_across_two_messages_is_encoded_as_text() -> None:
    for parts in (("<|im_", "end|>"), ("<", "|im_end|", ">"), ("<", "<SYS>>"), ("<< ", "SYS>>"), ("ab", "a", "ba")):
        ids = encoded(CONTENT_ONLY, *parts)
        assert max(ids) < FIRST
        assert bytes(ids).decode() == "".join(part.strip() for part in parts)


@given(st.lists(st.lists(st.sampled_from([*MARKS, "<", "<|", "im_end|>", "a", "b", " ", "\ufdd0", "é"])), min_size=1))
def test_any_message_is_encoded_as_text_without_loss(pieces: list[list[str]]) -> None:
    contents = ["".join(piece) for piece in pieces]
    ids = encoded(CONTENT_ONLY, *contents)
    assert max(ids, default=0) < FIRST
    assert bytes(ids).decode() == "".join(content.strip() for content in contents)


@given(st.text())
def test_a_message_without_special_tokens_is_unchanged(content: str) -> None:
    messages = [{"role": "user", "content": content.replace("<", "").replace("[", "").replace("a", "")}]
    assert CONTROL.escape(messages) == (messages, None)


def test_all_texts_of_a_message_are_escaped_and_other_values_are_unchanged() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "<s>"}], "name": "</s>", "number": 7, "none": None}
    (escaped,), breaker = CONTROL.escape([message])
    assert breaker == "\ufdd0"
    assert escaped["content"][0]["text"] == "<\ufdd0s>"
    assert escaped["name"] == "<\ufdd0/s>"
    assert (escaped["number"], escaped["none"]) == (7, None)


def test_messages_that_cannot_be_escaped_are_rejected() -> None:
    with pytest.raises(ForbiddenText, match="contains the special token '☃'"):
        encoded(CONTENT_ONLY, "a ☃", control=SpecialTokenEscaper(make_tokenizer("☃")))
    every = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(ForbiddenText, match="U\\+FDD0"):
        encoded(CONTENT_ONLY, every + "<s>")
    assert bytes(encoded(CONTENT_ONLY, every[1:] + "<s>")).decode() == every[1:] + "<s>"


@pytest.mark.parametrize("write", [write_byte_level, write_sentence_piece])
def test_encoding_between_special_tokens_equals_encoding_the_whole_text(
    tmp_path: Path, write: Callable[[Path, int], Tokenizer]
) -> None:
    """With a breaker, each text between special tokens is encoded alone. Ordinary added tokens stay tokens."""
    library = write(tmp_path, 500)
    library.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    text = "Hello <think> there<|im_end|> my <think>friend<|im_end|>\n"
    whole = library.encode(text, add_special_tokens=False).ids
    assert SpecialTokenEscaper(tokenizer).encode(text, None) == whole
    assert SpecialTokenEscaper(tokenizer).encode(text + "\ufdd0", "\ufdd0") == whole


def test_the_longest_of_several_matching_special_tokens_is_escaped() -> None:
    control = SpecialTokenEscaper(make_tokenizer("<a>", "<a><b>", "<a><b><c>", "<x", "<x>"))
    text = "<a><b><c><a><b><a><x><xy"
    assert control.encode(text + "\ufdd0", "\ufdd0") == [258, 257, 256, 260, 259, ord("y")]


def test_messages_need_no_escaping_without_special_tokens() -> None:
    control = SpecialTokenEscaper(make_tokenizer())
    assert encoded(CONTENT_ONLY, "<s>", control=control) == list(b"<s>")


@pytest.mark.parametrize("key", ["<|im_end|", "<|im_start|", "</s", "a<"])
def test_a_key_that_begins_a_special_token_stays_text(key: str) -> None:
    """A template may write the keys of a call's arguments as tags: `<parameter=KEY>`."""
    template = ChatTemplate(
        source="{% for m in messages %}{% for key in m.arguments %}<{{ key }}>{% endfor %}{% endfor %}", origin="test"
    )
    escaped, breaker = CONTROL.escape([{"role": "assistant", "arguments": {key: 1, "plain": 2}}])
    ids = CONTROL.encode(template.render(escaped), breaker)
    assert ids == list(f"<{key}><plain>".encode())
