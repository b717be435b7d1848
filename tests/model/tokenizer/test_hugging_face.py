"""Tokenizers that trigger bugs of the tokenizers library (panics, renumbered tokens, empty matches) are rejected."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from model.io.files import CheckpointError
from model.tokenizer.files import LateTokenizer, load_tokenizer
from model.tokenizer.interface import TokenizerError
from model.tokenizer.tokenizer_json import LibraryTokenizer
from tests.model.tokenizer import makers


def library(normalizer: Any, *added: AddedToken) -> Tokenizer:
    """Return a tokenizer of three characters and an unknown token, plus added tokens."""
    made = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "▁": 2, "?": 3}, merges=[], unk_token="?"))
    made.normalizer = normalizer
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.add_tokens(list(added))
    return made


def test_a_panic_of_the_library_becomes_an_error_and_the_next_text_is_encoded(tmp_path: Path) -> None:
    """Strip with a token of white space panics on non-ASCII text. Loading rejects this token; others may panic too."""
    ours = load_tokenizer(makers.write(tmp_path, library(normalizers.Strip())))
    assert isinstance(ours, LibraryTokenizer)
    ours._library = library(normalizers.Strip(), AddedToken("\n\n", normalized=True))
    with pytest.raises(TokenizerError, match="the tokenizers library reports an error: AddedVocabulary bad split"):
        ours.encode("é")
    assert ours.encode("ab") == [0, 1]


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Strip(),
        normalizers.Replace("\n", ""),
        normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]),
    ],
)
def test_an_added_token_that_normalizes_to_nothing_is_rejected(normalizer: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json: the added token '\\n\\n' is empty after normalization"):
        load_tokenizer(makers.write(tmp_path, library(normalizer, AddedToken("\n\n", normalized=True))))
    ours = load_tokenizer(makers.write(tmp_path, library(normalizer, AddedToken("\n\n", normalized=False))))
    assert ours.encode("a\n\nb") == [0, 4, 1]


def test_an_added_token_that_would_get_another_id_is_rejected(tmp_path: Path) -> None:
    directory = makers.write(tmp_path, library(None, AddedToken("<x>"), AddedToken("<y>")))
    assert load_tokenizer(directory).encode("<y>") == [5]
    values = json.loads((directory / "tokenizer.json").read_text())
    values["added_tokens"][1]["id"] = 7
    (directory / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="'<y>' has the id 7, but the tokenizers library assigns 5") as caught:
        load_tokenizer(directory)
    assert str(caught.value).startswith(f"{tmp_path}/tokenizer.json: ")


def test_a_normalized_added_token_decodes_to_its_normalized_text(tmp_path: Path) -> None:
    """With a Prepend normalizer, the added token starts with a space, and is found only after a space in the text."""
    made = library(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        AddedToken("éa", normalized=True),
        AddedToken("<x>", normalized=False),
    )
    ours = load_tokenizer(makers.write(tmp_path, made))
    for text in ("a éa", "éa", "b<x>b", "éa éa a"):
        token_ids = ours.encode(text)
        assert token_ids == made.encode(text).ids
        assert ours.decode(token_ids) == made.decode(token_ids)
        if "<x>" not in text:  # a space is also put before the text that follows <x>
            assert ours.decode(token_ids) == f" {text}"
    assert ours.token_bytes(4) == " éa".encode()


def test_continuing_subword_prefix_is_rejected(tmp_path: Path) -> None:
    """The tokenizers library would panic on a merge whose right part lacks the prefix."""
    values = json.loads(makers.gpt2().to_str())
    values["model"].update(continuing_subword_prefix="##", merges=[["a", "b"]])
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="the continuing_subword_prefix '##'"):
        load_tokenizer(tmp_path)


def test_a_late_tokenizer_decodes_without_its_files_and_encodes_with_them(tmp_path: Path) -> None:
    directory = makers.write(tmp_path, library(None, AddedToken("<x>")))
    loaded, path = load_tokenizer(directory), directory / "tokenizer.json"
    late: LateTokenizer = pickle.loads(pickle.dumps(LateTokenizer(loaded, directory)))
    path.rename(tmp_path / "away")
    assert [*map(late.token_bytes, range(5))] == [*map(loaded.token_bytes, range(5))]
    assert [*map(late.format_token_name, range(5))] == [*map(loaded.format_token_name, range(5))]
    assert (late.vocab_size, late.eos_token_ids) == (5, loaded.eos_token_ids)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        late.encode("ab")
    (tmp_path / "away").rename(path)
    assert late.encode("a<x>", parse_special=True) == [0, 4]
    assert (late.decode([0, 2, 4]), late.find_token("b")) == (loaded.decode([0, 2, 4]), 1)
