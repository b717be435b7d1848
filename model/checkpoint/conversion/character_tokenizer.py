"""Conversion of nanoGPT's meta.pkl, a character vocabulary, to a tokenizer.json with a WordLevel model."""

from pathlib import Path
from typing import Any

from model.checkpoint.conversion.pickles import read_plain_pickle
from model.io.checkpoint_files import CheckpointError


def read_characters(path: Path) -> dict[str, int]:
    """Read the id of each character from `stoi` of a meta.pkl.

    Raises:
        CheckpointError: the file is damaged, would run code, or is not a table of characters.
    """
    values = read_plain_pickle(path)
    ids = values.get("stoi") if isinstance(values, dict) else None
    if not isinstance(ids, dict) or not ids:
        raise CheckpointError(f"{path}: no stoi, the table of characters; give the meta.pkl of the model's training")
    if not all(isinstance(character, str) and len(character) == 1 for character in ids):
        raise CheckpointError(f"{path}: stoi has tokens that are not one character; give a tokenizer.json instead")
    if sorted(ids.values()) != list(range(len(ids))):
        raise CheckpointError(
            f"{path}: the ids in stoi are not 0 to {len(ids) - 1}; give the file that nanoGPT's prepare.py wrote"
        )
    return ids


def tokenizer_json(ids: dict[str, int]) -> dict[str, Any]:
    """Return the object of a tokenizer.json with one token for each character; it rejects all other characters."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        # Every character, also a line break, is a separate piece.
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        # The unknown token is not in the vocabulary, so the library raises an error for an unknown character.
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "<unknown>"},
    }
