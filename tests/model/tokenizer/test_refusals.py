"""Unsupported tokenizers are rejected in one line that names the file and the feature."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model.io.files import CheckpointError
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import TokenizerError
from tests.model.tokenizer import makers

Change = Callable[[dict[str, Any]], object]
REFUSED: dict[str, tuple[Change, str]] = {
    "no model": (lambda v: v.pop("model"), "malformed: KeyError"),
    "a model of words in pieces": (
        lambda v: v["model"].update(type="WordPiece"),
        "the model type 'WordPiece' is not supported",
    ),
    "no vocabulary": (lambda v: v["model"].update(vocab={}), "the vocabulary is empty"),
    "ids that are no numbers": (lambda v: v["model"]["vocab"].update(a="x"), "ids other than integers"),
    "an id for two tokens": (lambda v: v["model"]["vocab"].update(a=70), "unique, but several tokens have 70"),
    "an id of a billion": (lambda v: v["model"]["vocab"].update(a=10**9), "under 4,194,304; 1000000000 is not"),
    "merges that are none": (lambda v: v["model"].update(merges=["a b c"]), "the tokenizers library reports an error"),
    "a merge of what is no token": (
        lambda v: v.update(normalizer={"type": "Lowercase"}) or v["model"].update(merges=[["xx", "yy"]]),
        "the tokenizers library reports an error",
    ),
    "no decoder": (lambda v: v.update(decoder=None), r"the decoder \(none\) joins tokens with spaces"),
    "a decoder of word pieces": (lambda v: v.update(decoder={"type": "WordPiece"}), "WordPiece.* is not supported"),
    "a decoder that strips every token": (
        lambda v: v.update(decoder={"type": "Strip", "content": " ", "start": 1, "stop": 0}),
        "Strip.* is not supported",
    ),
    "a decoder beside ByteLevel": (
        lambda v: v.update(decoder={"type": "Sequence", "decoders": [v["decoder"], {"type": "ByteFallback"}]}),
        "steps besides ByteLevel",
    ),
    "a decoder that replaces by a pattern": (
        lambda v: v.update(decoder={"type": "Replace", "pattern": {"Regex": "x"}, "content": ""}),
        "Replace.* is not supported",
    ),
    "marks on both sides": (
        lambda v: v.update(post_processor={"type": "BertProcessing", "cls": ["a", 1], "sep": ["b", 2]}),
        "special tokens \\['a'\\] before and \\['b'\\] after every text",
    ),
    "an unknown post-processor": (lambda v: v.update(post_processor={"type": "New"}), "post_processor 'New'"),
    "an added token without a name": (lambda v: v.update(added_tokens=[{"id": 1}]), "needs an id and a content"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_tokenizer_json_gives_one_error_line(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    values = json.loads(makers.gpt2().to_str())
    change(values)
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/tokenizer.json: ")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer; expected one of tokenizer_spec.json, .*tokenizer.json, vocab.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json: not JSON"),
        ({"tokenizer.json": "[]"}, "tokenizer.json: a JSON object expected"),
        ({"tokenizer.json": "[" * 100_000}, "tokenizer.json: not JSON"),
        ({"vocab.json": "{}"}, "merges.txt: "),
        ({"vocab.json": "{}", "merges.txt": "#version: 0.2\na b c\n"}, "merges.txt: expected two tokens a line"),
        (
            {"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"tokenizer_class": "BartTokenizer"}'},
            "vocab.json: the split pattern of the tokenizer class BartTokenizer is unknown",
        ),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "3"}, "tokenizer_config.json: a JSON object expected"),
    ],
)
def test_unreadable_tokenizer_files_give_one_error_line(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


def test_a_character_without_a_token_is_rejected(tmp_path: Path) -> None:
    ours = load_tokenizer(makers.write(tmp_path, makers.characters()))
    with pytest.raises(TokenizerError, match="the tokenizer has no token for '€'; remove this character"):
        ours.encode("a€b")


@pytest.mark.parametrize("byte_level", [True, False])
def test_a_text_that_the_library_would_shorten_is_rejected(byte_level: bool, tmp_path: Path) -> None:
    """A vocabulary trained on few texts lacks bytes or letters. Here, one of the two bytes of é has a token."""
    library = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "Ã": 3}, merges=[("a", "b")]))
    if byte_level:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel() if byte_level else decoders.Fuse()
    ours = load_tokenizer(makers.write(tmp_path, library))
    assert ours.encode("abba") == [2, 1, 0]
    with pytest.raises(TokenizerError, match="no token for 'é'; remove this character"):
        ours.encode("abéba")
