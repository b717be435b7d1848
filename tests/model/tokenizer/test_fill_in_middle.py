"""Formats to fill in the middle: their tokens, their order, and texts beside the gap."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from model.tokenizer.files import load_tokenizer
from model.tokenizer.fill_in_middle import describe_formats, encode_continuation, find_fill_in_middle
from tests.model.tokenizer import makers

PREFIX, SUFFIX = [1000, 1001], [2000]


def with_tokens(library: Tokenizer, *names: str, special: bool = True) -> Tokenizer:
    library.add_tokens([AddedToken(name, normalized=False, special=special) for name in names])
    return library


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        (["<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"], ["<|fim_pad|>", "<|file_sep|>"]),
        (["<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"], ["<|file_separator|>"]),
        (["<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"], ["<fim_pad>", "<file_sep>"]),
        (["▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"], ["▁<EOT>"]),
        (["<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"], ["<｜end▁of▁sentence｜>"]),
        (["[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX], ["[MIDDLE]"]),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_each_family_has_its_order_and_its_end_tokens(
    tmp_path: Path, order: list[str | list[int]], ends: list[str], special: bool
) -> None:
    names = [part for part in order if isinstance(part, str)]
    library = with_tokens(makers.characters(), *sorted(names), *ends, special=special)
    form = find_fill_in_middle(load_tokenizer(makers.write(tmp_path, library)))
    assert form is not None
    ids = {name: token_id for name, token_id in library.get_vocab().items() if name in (*names, *ends)}
    expected = [token_id for part in order for token_id in (part if isinstance(part, list) else [ids[part]])]
    assert form.join(PREFIX, SUFFIX) == expected
    assert set(form.end_ids) == set(ids.values())
    assert form.marker_ids == {ids[name]: name for name in names}
    assert " ".join(names) in describe_formats()


def test_a_tokenizer_without_a_complete_set_has_no_format(tmp_path: Path) -> None:
    library = with_tokens(makers.characters(), "<|fim_prefix|>", "<|fim_suffix|>", "<fim_middle>", "[PREFIX]")
    assert find_fill_in_middle(load_tokenizer(makers.write(tmp_path, library))) is None


@pytest.mark.parametrize("maker", ["llama2", "mistral", "gemma", "qwen"])
@pytest.mark.parametrize("text", ["the end", " the end", "\nthe", "é", ""])
def test_a_continuation_adds_exactly_its_text(tmp_path: Path, maker: str, text: str) -> None:
    """Llama 2 and Mistral put a space before a text on its own."""
    tokenizer = load_tokenizer(makers.write(tmp_path, makers.MAKERS[maker]()))
    token_ids = encode_continuation(tokenizer, text)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == text
