"""Lower bound on the tokens of a text: its bytes / `longest_token`. Without a bound, `longest_token` is None."""

import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from model.tokenizer.files import load_tokenizer
from model.tokenizer.tokenizer_json import NFC_SHRINKS
from tests.model.tokenizer import makers
from tests.model.tokenizer.texts import ADVERSARIAL, stories

RUNS = ["é" * 500, "x" * 500, " " * 500, "K" * 500, "e\u0301" * 500, "a" + " " * 500 + "<mask>"]


def _plain(**options: bool) -> Tokenizer:
    """Return a tokenizer of the letter a, the space and an unknown token."""
    made = Tokenizer(models.BPE(vocab={"a": 0, " ": 1, "?": 2}, merges=[], unk_token="?", **options))
    made.decoder = decoders.Fuse()
    return made


def _changed(change: Callable[[Tokenizer], object], made: Tokenizer | None = None) -> Tokenizer:
    made = _plain() if made is None else made
    change(made)
    return made


UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "unknown characters become one token": lambda: _plain(fuse_unk=True),
    "bytes are fallen back to, but there are none": lambda: _plain(fuse_unk=True, byte_fallback=True),
    "an added token swallows spaces": makers.trimmed_added_token,
    "a normalizer drops": lambda: _changed(lambda t: setattr(t, "normalizer", normalizers.Strip())),
    "a normalizer shortens": lambda: _changed(lambda t: setattr(t, "normalizer", normalizers.Replace("é", "a"))),
    "a pre-tokenizer drops": lambda: _changed(lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.WhitespaceSplit())),
    "an added token in a word": lambda: _changed(lambda t: t.add_tokens([AddedToken("<mask>", lstrip=True)])),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_longest_token_has_no_limit_if_a_token_can_cover_any_run(name: str, tmp_path: Path) -> None:
    assert load_tokenizer(makers.write(tmp_path, UNBOUNDED[name]())).longest_token is None


@pytest.mark.parametrize("name", [*sorted(set(makers.MAKERS) - {"trimmed_added_token"}), "_plain"])
def test_no_token_covers_more_bytes_than_longest_token(name: str, tmp_path: Path) -> None:
    maker = {**makers.MAKERS, "_plain": _plain}[name]
    ours = load_tokenizer(makers.write(tmp_path, maker()))
    assert ours.longest_token is not None
    for text in (*stories()[:5], *ADVERSARIAL, *RUNS):
        clean = text.encode("utf-8", "replace").decode()
        assert len(ours.encode(clean)) * ours.longest_token >= len(clean.encode())


def test_nfc_keeps_at_least_a_quarter_of_the_bytes() -> None:
    """Each part of a character's decomposition is counted with the bytes of its longest spelling."""
    spellings: dict[str, int] = {}
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        if len(parts) == 1:
            spellings[parts] = max(spellings.get(parts, 0), len(character.encode()))
    for character in characters:
        if unicodedata.is_normalized("NFC", character):
            longest = sum(spellings[part] for part in unicodedata.normalize("NFD", character))
            assert longest <= NFC_SHRINKS * len(character.encode()), hex(ord(character))
